"""What the prompt cache brings and costs: `python -m tools.prompt_cache_time TARGET [--tokens 2000]`.

A system prompt and a document of so many tokens (this project's own pages), asked about in one new process
after the other: first with nothing on disk, then with the blocks that the first wrote, then with these read
from the disk itself (Linux). Printed are seconds to the first token, seconds of the whole request, tokens
found, seconds of writing, and bytes a token. `--drafter none` leaves the drafter out.
"""

import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import edgespec
from edgespec.running import runner
from edgespec_models.decoders.kept import BLOCK
from edgespec_runtimes.block_files import BlockFiles, stored
from tools.arguments import arguments

DOCS = Path(__file__).parents[1] / "docs"
SYSTEM = "You answer questions about a document in one sentence, and say so where it has no answer."


def document(model: edgespec.Model, tokens: int) -> str:
    """The beginning of the project's pages, of about so many tokens."""
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md")))
    return model.detokenize(model.tokenize(text[: 8 * tokens])[:tokens])


def ask(target: str, drafter: str, tokens: int, folder: Path) -> dict[str, Any]:
    """One question to a model that is loaded for it, with its prompt cache in ``folder``."""
    seconds = 0.0

    class Timed(BlockFiles):
        def write(self, *arguments: Any) -> bool:
            nonlocal seconds
            started = perf_counter()
            done = super().write(*arguments)
            seconds += perf_counter() - started
            return done

    vars(runner).update(BlockFiles=Timed, prompts_dir=lambda: folder)
    with edgespec.load(target, None if drafter == "none" else drafter) as model:
        text = f"{document(model, tokens)}\n\nWhat is this about?"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        answer = model.chat(messages, max_new_tokens=64)
    stats = answer.stats
    return {
        "text": answer.text,
        "prompt": stats.prompt_tokens,
        "found": stats.cached_tokens,
        "first_s": stats.ttft_s,
        "request_s": stats.ttft_s + stats.decode_s,
        "write_s": seconds,
    }


def leave_memory(folder: Path) -> None:
    """Have the system drop its copies of the files."""
    os.sync()
    for block in stored(folder):
        with block.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, "target", drafter="auto", tokens=2000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "prompt-cache"
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
            texts = set[str]()
            for way in ("nothing on disk", "blocks", "blocks, not in memory"):
                if way.endswith("memory"):
                    leave_memory(folder)
                took = pool.submit(ask, options.target, options.drafter, options.tokens, folder).result()
                texts.add(took.pop("text"))
                print(f"{way}: " + ", ".join(f"{name} {value:.4g}" for name, value in took.items()))
        print("the same answers" if len(texts) == 1 else f"other answers: {texts}")
        sizes: dict[str, list[int]] = {}
        for block in stored(folder):
            sizes.setdefault(block.path.parent.name, []).append(block.size)
        for model, own in sizes.items():
            print(f"{model}: {len(own)} blocks, {sum(own) / len(own) / BLOCK:,.0f} bytes a token")


if __name__ == "__main__":
    main()
