"""Does a task get faster when it comes again? Plain decoding against a history that starts empty.

Usage: ``python -m tools.repeated_tasks TARGET ... --drafter D --prompts tools/workloads/repeated.jsonl``. The
file's categories are times: every task comes a first time, then every task a second time with small changes,
and so on, each answered plainly and then with what the history has learned so far. Several targets take turns
with one history.
"""

import argparse
import tempfile
from pathlib import Path

import edgespec
from edgespec.prompts import Prompt, load_prompts
from edgespec.trial import ask

_COLUMNS = (
    "plain, tokens/s",
    "with history",
    "ratio",
    "tokens a pass",
    "history's drafted, accepted",
    "same",
)


def compare(model: edgespec.Model, prompts: list[Prompt], tokens: int) -> list[str]:
    """Answer some prompts both ways; the cells of a line."""
    pairs = []
    for prompt in prompts:
        plain = ask(model, prompt, {"max_new_tokens": tokens, "speculate": False})
        pairs.append((plain, ask(model, prompt, {"max_new_tokens": tokens})))
    speeds = [
        sum(answer.stats.decode_tokens for answer in answers) / sum(a.stats.decode_s for a in answers)
        for answers in zip(*pairs, strict=True)
    ]
    stats = [answer.stats for _, answer in pairs]
    found = [s.by_source["history"] for s in stats if "history" in s.by_source]
    tau = sum(s.new_tokens for s in stats) / sum(s.rounds for s in stats)
    same = sum(plain.tokens == answer.tokens for plain, answer in pairs)
    return [
        *(f"{speed:.1f}" for speed in speeds),
        f"{speeds[1] / speeds[0]:.2f}",
        f"{tau:.2f}",
        f"{sum(s.drafted for s in found)}, {sum(s.accepted for s in found)}",
        f"{same} of {len(pairs)}",
    ]


def main() -> None:
    """Run all times and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    args = parser.parse_args()
    prompts = load_prompts(args.prompts)
    print("", *_COLUMNS, sep=" | ")
    with tempfile.TemporaryDirectory() as folder:
        for target in args.targets:
            with edgespec.load(target, args.drafter, history=Path(folder) / "repeated.history") as model:
                for time in dict.fromkeys(prompt.category for prompt in prompts):
                    chosen = [prompt for prompt in prompts if prompt.category == time]
                    cells = compare(model, chosen, args.max_new_tokens)
                    print(f"{model.name}, {time}", *cells, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
