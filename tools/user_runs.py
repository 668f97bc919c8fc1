"""How much faster are a user's requests with a history, and with a drafter that was trained on it?

Usage: ``python -m tools.user_runs TARGET --prompts PROMPTS.jsonl --count 80 --history A.history`` teaches a
    history by prompts of tools/user_streams.py. ``edgespec align auto --target TARGET --history B.history``
    trains a copy, and ``... --first 80 --count 60 --history A.history --history B.history`` compares them.

Each prompt is asked without a history, and then with each, in turn, by a process for each; histories learn
from it and keep its turns. A row has tokens for a pass, and how many times as fast as without a history
decoding and whole requests are.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import edgespec
from edgespec.measuring.prompts import load_prompts
from tools.arguments import arguments


class Row:
    """A model in a process of its own, and what its answers took: seconds, tokens, passes."""

    def __init__(self, name: str, channel: Connection) -> None:
        self.name, self._channel = name, channel
        self.decode_s = self.whole_s = 0.0
        self.passes = self.tokens = 0

    def ask(self, prompt: str) -> list[int]:
        """The tokens of the answer."""
        began = perf_counter()
        self._channel.send(prompt)
        tokens, passes, decode_s = self._channel.recv()
        self.whole_s += perf_counter() - began
        self.decode_s, self.passes = self.decode_s + decode_s, self.passes + passes
        self.tokens += len(tokens)
        return list(tokens)


@contextmanager
def opened(target: str, history: Path | None, tokens: int) -> Iterator[Row]:
    """A row, whose process answers as long as the block runs."""
    spawn = get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=answer, args=(there, target, history, tokens))
    process.start()
    there.close()  # so that the end of the process ends a wait
    here.recv()
    try:
        yield Row("without" if history is None else history.stem, here)
    finally:
        here.send(None)
        process.join()


def answer(channel: Connection, target: str, history: Path | None, tokens: int) -> None:
    """Answer the prompts that come through ``channel``, until None does."""
    options = edgespec.LoadOptions(prompt_cache_bytes=0, cache_bytes=0, keep_prompts=history is not None)
    with edgespec.load(target, history=history, options=options, progress=None) as model:
        channel.send(None)
        for prompt in iter(channel.recv, None):
            result = model.chat([{"role": "user", "content": prompt}], max_new_tokens=tokens)
            stats = result.stats
            channel.send((result.tokens, stats.rounds, stats.decode_s))


def main() -> None:
    """Ask, and print the table."""
    args = arguments(__doc__, "target", prompts=Path, first=0, count=60, max_new_tokens=60, history=[Path])
    prompts = load_prompts(args.prompts)[args.first : args.first + args.count]
    with ExitStack() as stack:
        rows = [
            stack.enter_context(opened(args.target, history, args.max_new_tokens))
            for history in (None, *args.history)
        ]
        same = 0
        for number, prompt in enumerate(prompts, start=1):
            turn = number % len(rows)
            answers = [entry.ask(prompt.turns[0]) for entry in rows[turn:] + rows[:turn]]
            same += all(tokens == answers[0] for tokens in answers)
            print(f"\r{number} of {len(prompts)}", end="", flush=True)
    print(f"\n{same} answers are the same.")
    for entry in rows:
        print(
            f"{entry.name:12} {entry.tokens:6} tokens, {entry.tokens / entry.passes:.3f} a pass, decoding "
            f"{rows[0].decode_s / entry.decode_s:.3f}, whole requests {rows[0].whole_s / entry.whole_s:.3f}"
        )


if __name__ == "__main__":
    main()
