"""What long texts cost at once and in turn: `python -m tools.long_requests TARGET [--tokens 3000]`.

`--at-once 4` asks so many questions at the same time about documents of so many tokens (this project's own
pages), of which `--shared` begin alike. Without it two conversations about such documents go on in turn.
Printed are seconds from each question to the first token, and what the process had in memory at most.
Nothing is read from disk, unless `--folder` names one where an earlier run left blocks.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import edgespec
from edgespec.running import runner
from tools.arguments import arguments
from tools.prompt_cache_time import DOCS


def documents(model: edgespec.Model, count: int, tokens: int, shared: int) -> list[str]:
    """So many texts of so many tokens, which share their beginnings."""
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md")))
    ids = model.tokenize(text[: 8 * (shared + count * tokens)])
    own = tokens - shared
    starts = range(shared, shared + count * own, own)
    return [model.detokenize([*ids[:shared], *ids[start : start + own]]) for start in starts]


def first_token(model: edgespec.Model, messages: list[dict[str, str]]) -> tuple[float, str]:
    """Seconds to it, and the answer."""
    started = perf_counter()
    with model.stream_chat(messages, max_new_tokens=16) as stream:
        next(stream)
        seconds = perf_counter() - started
    return seconds, stream.result.text


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, "target", tokens=3000, shared=0, at_once=0, folder=(Path,))
    limit = 0 if options.folder is None else None
    vars(runner).update(prompts_dir=lambda: options.folder)
    loading = edgespec.LoadOptions(prompt_cache_bytes=limit)
    with edgespec.load(options.target, None, options=loading) as model:
        count = options.at_once or 2
        texts = documents(model, count, options.tokens, options.shared)
        talks = [[{"role": "user", "content": f"{text}\n\nWhat is this about?"}] for text in texts]
        if options.at_once:
            with ThreadPoolExecutor(count) as pool:
                took = [*pool.map(lambda talk: first_token(model, talk), talks)]
            print("seconds to the first tokens:", *(f"{seconds:.2f}" for seconds, _ in took))
        else:
            for turn in range(3):
                for at, talk in enumerate(talks):
                    for again in range(2):
                        seconds, answer = first_token(model, talk)
                        print(f"turn {turn}, {'ab'[at]}, question {again}: {seconds:.3f} s")
                        talk += [{"role": "assistant", "content": answer}]
                        talk += [{"role": "user", "content": "And what else does it say?"}]
        status = Path("/proc/self/status").read_text()
        print("most memory:", next(line for line in status.splitlines() if line.startswith("VmHWM")))


if __name__ == "__main__":
    main()
