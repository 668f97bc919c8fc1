"""Record a target's answers, for tools/replay.py: greedy ones, or sampled with --temperature and a seed each.

Usage: ``python -m tools.record_answers TARGET --prompts FILE.jsonl --out ANSWERS.jsonl``. Prompts answered in
ANSWERS already are passed over, so an interrupted run goes on where it ended.
"""

import json
from pathlib import Path

import edgespec
from edgespec.measuring.prompts import ask, load_prompts
from tools.arguments import arguments


def main() -> None:
    """Answer every prompt without drafts; a line each: id, the answer's tokens, and what was asked for."""
    args = arguments(__doc__, "target", prompts=Path, out=Path, max_new_tokens=128, temperature=0.0)
    prompts = load_prompts(args.prompts)
    known = set()
    if args.out.exists():
        known = {json.loads(line)["id"] for line in args.out.read_text(encoding="utf-8").splitlines()}
    # One of each category, then the next of each: what an interrupted run leaves is a fair sample too.
    order = sorted(
        range(len(prompts)), key=lambda i: [p.category for p in prompts[:i]].count(prompts[i].category)
    )
    options = edgespec.LoadOptions(prompt_cache_bytes=0)
    loaded = edgespec.load(args.target, drafter=None, options=options)
    with loaded as model, args.out.open("a", encoding="utf-8") as out:
        for number, index in enumerate(order, start=1):
            prompt = prompts[index]
            if prompt.id in known:
                continue
            request: edgespec.RequestOptions = {}
            if args.temperature:
                request = {"temperature": args.temperature, "seed": index}
            answer = ask(model, prompt, {"max_new_tokens": args.max_new_tokens, **request}).run()
            print(json.dumps({"id": prompt.id, "tokens": answer.tokens, **request}), file=out, flush=True)
            print(f"\r{number} of {len(prompts)}", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
