"""Keys and values of prompts on disk, in blocks of tokens: what was read stays read, also after a restart.

A block is a file. Its name is a chain of digests: over what the bits depend on besides tokens
(:attr:`edgespec_runtimes.session.LoadedModel.prompt_key`), then over all tokens up to the block's end. So
texts share the blocks of what they begin with alike, and nothing has to be looked up. Blocks of one key lie
in a folder of their own.

Any file may be damaged, foreign, or gone at any moment, since other processes use the folder too. What a
block holds is compared with its digest whenever it is read, so that nothing needs to be synchronized, and
what does not fit is deleted and computed anew. Blocks are read and not mapped: a mapped file that somebody
cuts short would end the process.
"""

import hashlib
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, takewhile
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.kept import BLOCK
from edgespec_models.errors import StorageError
from edgespec_models.storage import is_file, replacing
from edgespec_runtimes.kv_cache import SavedCache
from edgespec_runtimes.session import Session

_MAGIC: Final = b"edgespec block 1"
_HEADER: Final = len(_MAGIC) + hashlib.sha256().digest_size
_NAME: Final = re.compile(r"[0-9a-f]{64}|\.edgespec-.*")
_MOST: Final = 2_000_000_000
_SHARE: Final = 10  # of the disk's free space, one part
_AT_ONCE: Final = 32  # of the bound, the part that is made room for at once: looking at all files takes time
_STEP_NS: Final = 1_000_000
_LOG = logging.getLogger("edgespec")
_Array = npt.NDArray[Any]


class Stored(NamedTuple):
    """A block on the disk."""

    used_ns: int
    size: int
    path: Path


class PromptCache:
    """Blocks in ``folder``, of all models: at most ``budget`` bytes, the least recently used go first.

    Without a budget that is 2 GB, or a tenth of what the disk would have free without blocks, whichever is
    less. One thread at a time; other processes may use the folder too.

    ``problem`` is what keeps blocks from being written; None if nothing.
    """

    def __init__(self, folder: Path, budget: int | None = None) -> None:
        self._folder, self._budget = folder, budget
        self.problem: str | None = None
        self._room = 0  # bytes that may be written before the next look

    def read(self, session: Session, tokens: Sequence[int]) -> None:
        """Let ``session`` hold what is known of ``tokens`` beyond what it holds of them.

        Raises:
            DeviceError: no memory; the session's cache is empty then.
        """
        first, names = session.shared_prefix(tokens) // BLOCK, _names(session.model.prompt_key, tokens)
        paths = [self._folder / session.model.prompt_key / name for name in names[first:]]
        found = list(takewhile(is_file, paths))
        if not found:
            return
        if session.rewind(first * BLOCK) != first * BLOCK:
            return
        session.reserve((first + len(found)) * BLOCK)
        like = session.view(0, 0)
        for start, path in enumerate(found, first):
            arrays = None if like is None else _read(path, like.arrays)
            if arrays is None:
                with suppress(OSError):
                    path.unlink()
                return
            text = tuple(tokens[start * BLOCK : (start + 1) * BLOCK])
            session.append(SavedCache(text, arrays), BLOCK)

    def write(self, key: str, text: SavedCache, stop: Callable[[], bool]) -> bool:
        """Keep the blocks of ``text`` that are not there, and count all of them as used now.

        Whether that is done, or cannot be; False if ``stop``, which is asked before each block, said so.
        """
        try:
            done = self._write(key, text, stop)
        except (OSError, MemoryError) as error:
            problem = f"prompts are not kept on disk: {self._folder} cannot be written ({error})"
            if self.problem is None:
                _LOG.warning("%s", problem)
            self.problem = problem
            return True
        self.problem = None
        return done

    def forget(self, key: str) -> None:
        """Delete all blocks of one key; raises as :func:`delete` does."""
        delete(each for each in stored(self._folder) if each.path.parent.name == key)

    def _write(self, key: str, text: SavedCache, stop: Callable[[], bool]) -> bool:
        names, now = _names(key, text.tokens), time.time_ns()
        if not names:
            return True
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)  # whose it is not, fails here
        (self._folder / key).mkdir(mode=0o700, exist_ok=True)
        paths = [self._folder / key / name for name in names]
        size = _HEADER + text.part(0, BLOCK).nbytes
        wanted = size * sum(not is_file(path) for path in paths)
        if wanted > self._room:
            self._room = self._made_room(wanted, set(paths))
        for index, path in enumerate(paths):
            if stop():
                return False
            used = now - index * _STEP_NS  # a text's end goes before its beginning, without which it is lost
            with suppress(FileNotFoundError):  # another process deletes at the same time
                if not is_file(path):
                    if size > self._room:
                        return True
                    self._room -= size
                    _write(path, text.part(index * BLOCK, (index + 1) * BLOCK))
                os.utime(path, ns=(used, used))
        return True

    def _made_room(self, wanted: int, mine: Collection[Path]) -> int:
        """Bytes that may be written, after deleting others than ``mine`` for those that are wanted."""
        every = sorted(stored(self._folder))
        total, bound = sum(each.size for each in every), self._budget
        if bound is None:
            bound = min(_MOST, (shutil.disk_usage(self._folder).free + total) // _SHARE)
        wanted = max(wanted, bound // _AT_ONCE)
        for each in every:
            if total + wanted <= bound:
                break
            if each.path not in mine:
                each.path.unlink(missing_ok=True)
                total -= each.size
        return min(wanted, bound - total)


def stored(folder: Path) -> Iterator[Stored]:
    """All blocks in ``folder``, and what killed programs left of some."""
    for entry in (entry for of_key in _entries(folder) for entry in _entries(of_key)):
        if _NAME.fullmatch(entry.name):
            with suppress(OSError):  # it is gone
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode):
                    yield Stored(facts.st_mtime_ns, facts.st_size, Path(entry.path))


def _entries(folder: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """What is there; of a folder of which nothing can be known, nothing."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def delete(blocks: Iterable[Stored]) -> None:
    """Delete blocks; StorageError where one cannot be."""
    for each in blocks:
        try:
            each.path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot delete {each.path}: {error.strerror or error}") from error


def _names(key: str, tokens: Sequence[int]) -> list[str]:
    """What the whole blocks of ``tokens`` are called."""
    blocks = (tokens[end - BLOCK : end] for end in range(BLOCK, len(tokens) + 1, BLOCK))
    return list(accumulate(blocks, _name, initial=key))[1:]


def _name(before: str, tokens: Sequence[int]) -> str:
    return hashlib.sha256(before.encode() + np.array(tokens, "<i8").tobytes()).hexdigest()


def _header(name: str, content: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(_MAGIC + name.encode())
    digest.update(content)
    return _MAGIC + digest.digest()


def _write(path: Path, block: SavedCache) -> None:
    content = b"".join(array.tobytes() for array in block.arrays)
    with replacing(path, 0o600, synced=False) as file:
        file.write(_header(path.name, content))
        file.write(content)


def _read(path: Path, like: Sequence[_Array]) -> tuple[_Array, ...] | None:
    """Keys and values of a block in arrays like these; None where the file is not that block."""
    shapes = [(*each.shape[:2], BLOCK, *each.shape[3:]) for each in like]
    sizes = [prod(shape) * each.itemsize for shape, each in zip(shapes, like, strict=True)]
    try:
        if path.stat().st_size != _HEADER + sum(sizes):
            return None
        raw = path.read_bytes()
    except (OSError, MemoryError):
        return None
    if raw[:_HEADER] != _header(path.name, memoryview(raw)[_HEADER:]):
        return None
    starts = accumulate(sizes, initial=_HEADER)
    return tuple(
        np.frombuffer(raw, each.dtype, prod(shape), start).reshape(shape)
        for each, shape, start in zip(like, shapes, starts, strict=False)
    )
