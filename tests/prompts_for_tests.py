"""A session whose keys and values show what they were computed from, and processes with it that are killed.

`python -m tests.prompts_for_tests FOLDER KILLS` kills as many as one likes.
"""

import errno
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.kept import BLOCK
from edgespec_runtimes.block_files import BlockFiles, stored
from edgespec_runtimes.kv_store import KvStore
from tests.models_for_tests import toy_session
from tests.toy import ToySession

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

    @property
    def read(self) -> int:
        return sum(self.passes)

    def values(self, start: int, end: int) -> npt.NDArray[np.int64]:
        last, every = 0, []
        for index, token in enumerate(self.cache[:end]):
            last = (31 * last + token + index) % 2**40
            every.append(last)
        return np.repeat(np.array(every[start:], np.int64), self.width).reshape(1, 1, -1, self.width)

    def view(self, start: int, end: int) -> list[npt.NDArray[Any]] | None:
        super().view(start, end)
        return [self.values(start, end)]

    def append(self, tokens: Sequence[int], arrays: Sequence[npt.NDArray[Any]]) -> None:
        start, count = len(self.cache), len(tokens)
        assert start % 16 == 0
        self.reserve(start + count)
        self.stretch.add(tokens)
        np.testing.assert_array_equal(arrays[0][:, :, :count], self.values(start, start + count))


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
    return sum(each.size for each in stored(folder))


def keyed(seed: int = 0) -> ToySession:
    session = toy_session(seed)
    session.model.prompt_key = f"toy{seed}-0123456789abcdef"
    return session


def disk_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def write_until_killed(folder: Path, seed: int) -> None:
    """Read and write texts, in a bound that keeps deleting, and forget all now and then."""
    rng = random.Random(seed)
    while True:
        request(
            folder, text(rng.randrange(12), rng.randrange(600)), Showing(WIDE), budget=20 * BLOCK * 8 * WIDE
        )
        if rng.random() < 0.05:
            BlockFiles(folder).forget(KEY)


def kill_writers(folder: Path, kills: int) -> str:
    """Kill ``kills`` processes, two at a time; how much was found since, and what they left."""
    rng, found = random.Random(0), 0
    for round_ in range(0, kills, 2):
        running = [_started(folder, round_), _started(folder, round_ + 1)]
        for process in running:
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for number in range(12):  # appending compares what was found with what it should be
            found += request(folder, text(number, 600), Showing(WIDE), budget=2**40) // BLOCK
    left = sum(each.path.name.startswith(".") for each in stored(folder))
    return f"{kills} kills, {found} blocks found since, {left} temporary files left"


def _started(folder: Path, seed: int) -> int:
    process = os.fork()
    if process == 0:
        try:
            write_until_killed(folder, seed)
        finally:
            os._exit(1)
    return process


if __name__ == "__main__":
    os.write(1, kill_writers(Path(sys.argv[1]), int(sys.argv[2])).encode())
