"""A session whose keys and values show what they were computed from, and processes with it that are killed.

`python -m tests.kit.prompts FOLDER KILLS KIND` kills as many as one likes; with the kind ``states``
they write states at the ends of prompts, too.
"""

import errno
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.kept import BLOCK
from edgespec_runtimes.block_files import BlockFiles, stored
from edgespec_runtimes.kv_cache import Saved
from edgespec_runtimes.kv_store import KvStore
from tests.kit.models import toy_session
from tests.kit.states import DELTA, VOCAB, StatesModel
from tests.kit.toy import ToySession

KEY: Final = "toy-0123456789abcdef"
WIDE: Final = 512
SIZE: Final = 48 + 8 * BLOCK  # of a block of the toy

LONG: Final = "A long document, of which much is asked. " * 30


class Showing(ToySession):
    """The values of a token are a function of all tokens up to it: a wrong block shows at once.

    Attributes:
        width: values of a token.
        read: tokens that passes computed.
    """

    def __init__(self, width: int = 1) -> None:
        nothing = np.zeros(404, np.float32)
        super().__init__(lambda tokens: nothing, 404)
        self.width, self.model.prompt_key = width, KEY
        self.model.width = width

    @property
    def read(self) -> int:
        return sum(self.passes)

    def values(self, start: int, end: int) -> npt.NDArray[np.int64]:
        last, every = 0, []
        for index, token in enumerate(self.cache[:end]):
            last = (31 * last + token + index) % 2**40
            every.append(last)
        return np.repeat(np.array(every[start:], np.int64), self.width).reshape(-1, self.width)

    def save(self, at: int) -> Saved | None:
        super().save(at)
        return memoryview(self.values(at * BLOCK, (at + 1) * BLOCK).tobytes())

    def append(self, tokens: Sequence[int], saved: Saved) -> None:
        start, count = len(self.cache), len(tokens)
        assert start % BLOCK == 0
        self.reserve(start + count)
        self.stretch.add(tokens)
        values = np.frombuffer(bytes(saved), np.int64).reshape(-1, self.width)
        np.testing.assert_array_equal(values[:count], self.values(start, start + count))


def text(number: int, length: int) -> list[int]:
    """Texts that share their beginnings in pairs, half as far."""
    return [(7 * i + (number // 2 if i < length // 2 else number)) % 400 for i in range(length)]


def request(folder: Path, tokens: Sequence[int], session: Showing | None = None, **budget: int) -> int:
    """Read ``tokens`` in a new process, as it were, and write them; how many were there."""
    session = session or Showing()
    store = KvStore(0, BlockFiles(folder, **budget))
    store.fetch(session, tokens)
    held = session.shared_prefix(tokens)
    session.prefill(tokens)
    store.write_behind()
    return held


def sizes(folder: Path) -> int:
    return sum(block.size for block in stored(folder))


def keyed(seed: int = 0) -> ToySession:
    session = toy_session(seed)
    session.model.prompt_key = f"toy{seed}-0123456789abcdef"
    return session


def disk_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def request_states(folder: Path, tokens: Sequence[int], budget: int | None = None) -> int:
    """Of a model with states, the same: what it says behind the text is what it says without any cache."""
    text, session = [token % VOCAB for token in tokens], StatesModel(DELTA).session()
    store = KvStore(1 << 20, BlockFiles(folder, budget))
    lengths = store.fetch(session, text, starts=(len(text) // 2,))
    held = session.shared_prefix(text)
    for length in lengths:
        session.prefill(text[:length])
        store.checkpoint(session)
    alone = StatesModel(DELTA).session().predict_next(text)
    np.testing.assert_array_equal(session.predict_next(text).logits, alone.logits)
    store.checkpoint(session)
    store.write_behind()
    return held


def request_wide(folder: Path, tokens: Sequence[int], budget: int | None = None) -> int:
    """Of large blocks; appending compares what was found with what it should be."""
    session, store = Showing(WIDE), KvStore(0, BlockFiles(folder, budget))
    store.fetch(session, tokens)
    held = session.length
    session.prefill(tokens)
    store.write_behind()
    return held


REQUESTS: Final = {"blocks": (request_wide, 20 * BLOCK * 8 * WIDE), "states": (request_states, 6000)}


def write_until_killed(folder: Path, kind: str, seed: int) -> None:
    """Read and write texts, in a bound that keeps deleting, and forget all now and then."""
    rng, (read, budget) = random.Random(seed), REQUESTS[kind]
    while True:
        read(folder, text(rng.randrange(12), rng.randrange(1, 600)), budget)
        if rng.random() < 0.05:
            BlockFiles(folder).forget(KEY if kind == "blocks" else "states")


def kill_writers(folder: Path, kills: int, kind: str) -> str:
    """Kill ``kills`` processes, two at a time; how much was found since, and what they left."""
    rng, hits = random.Random(0), 0
    for round_ in range(0, kills, 2):
        running = [_started(folder, kind, round_), _started(folder, kind, round_ + 1)]
        for process in running:
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for number in range(12):
            hits += REQUESTS[kind][0](folder, text(number, 600), 2**40) // BLOCK
    left = sum(block.path.name.startswith(".") for block in stored(folder))
    return f"{kills} kills, {hits} blocks found since, {left} temporary files left"


def _started(folder: Path, kind: str, seed: int) -> int:
    process = os.fork()
    if process == 0:
        try:
            write_until_killed(folder, kind, seed)
        finally:
            os._exit(1)
    return process


if __name__ == "__main__":
    os.write(1, kill_writers(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]).encode())
