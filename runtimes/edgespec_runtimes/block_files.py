"""Blocks on disk: bytes under names, in a folder that other processes use too.

Blocks of a key lie in a folder of their own. Any file may be damaged, foreign, or gone at any moment. A block
is compared with its digest whenever it is read, so nothing needs to be synchronized, and a block that does
not fit is deleted. Files are read and not mapped: a mapped file that another process cuts short would end
this one.
"""

import errno
import hashlib
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from edgespec_models.errors import StorageError
from edgespec_models.storage import is_file, replacing

_MAGIC: Final = b"edgespec block 1"
_HEADER: Final = len(_MAGIC) + hashlib.sha256().digest_size
_NAME: Final = re.compile(r"[0-9a-f]{64}|\.edgespec-.*")
_MOST: Final = 2_000_000_000
_SHARE: Final = 10  # of the disk's free space, one part
_AT_ONCE: Final = 32  # the part of the bound that is freed at once: looking at all files takes time
_STEP_NS: Final = 1_000_000
_LACK: Final = errno.EMFILE, errno.ENFILE, errno.ENOMEM
_LOG = logging.getLogger("edgespec")


class Stored(NamedTuple):
    """A block on the disk."""

    used_ns: int
    size: int
    path: Path


class BlockFiles:
    """Blocks in ``folder``, of all models: at most ``budget`` bytes, the least recently used go first.

    Without a budget it is 2 GB, or a tenth of the disk's free space without blocks if that is less. One
    thread at a time uses an object; other processes may use the folder.

    ``problem`` is the reason why blocks cannot be written; None if they can.
    """

    def __init__(self, folder: Path, budget: int | None = None) -> None:
        self._folder, self._budget = folder, budget
        self.problem: str | None = None
        self._room = 0  # bytes that may be written before the next look

    def has(self, key: str, name: str) -> bool:
        """Whether there is such a file, with any content."""
        return is_file(self._folder / key / name)

    def read(self, key: str, name: str, size: int) -> memoryview | None:
        """A block of ``size`` bytes; None if the file holds another one. Such a file is deleted."""
        path = self._folder / key / name
        try:
            if path.stat().st_size == _HEADER + size:
                raw = memoryview(path.read_bytes())
                if raw[:_HEADER] == _header(name, raw[_HEADER:]):
                    return raw[_HEADER:]
        except MemoryError:
            return None
        except OSError as error:
            if error.errno in _LACK:  # the file may be sound
                return None
        with suppress(OSError):
            path.unlink()
        return None

    def write(
        self, key: str, names: Sequence[str], content: Callable[[int], bytes | None], stop: Callable[[], bool]
    ) -> bool:
        """Write the missing blocks of a text, and count all of them as used now.

        ``content`` returns the bytes of the block of a number; None if it and all behind it are lost.

        Returns:
            False if ``stop``, which is called before each block, returned True; else True, also if writing
            fails.
        """
        paths = dict.fromkeys(self._folder / key / name for name in names)
        now = time.time_ns()
        try:
            for at, path in enumerate(paths):
                if stop():
                    return False
                with suppress(FileNotFoundError):  # another process may delete at the same time
                    if not is_file(path) and not self._write(path, content(at), paths):
                        break
                    used = now - at * _STEP_NS  # ends are deleted before their beginnings
                    os.utime(path, ns=(used, used))
        except (OSError, MemoryError) as error:
            problem = f"prompts are not kept on disk: {self._folder} cannot be written ({error})"
            if self.problem is None:
                _LOG.warning("%s", problem)
            self.problem = problem
        else:
            self.problem = None
        return True

    def forget(self, key: str) -> None:
        """Delete all blocks of one key; raises as :func:`delete` does."""
        delete(block for block in stored(self._folder) if block.path.parent.name == key)

    def _write(self, path: Path, block: bytes | None, mine: Collection[Path]) -> bool:
        """Write a block if there is room for it; return whether it exists now."""
        if block is None:
            return False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)  # fails for a folder of another user
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not self._has_room(_HEADER + len(block), mine):
            return False
        with replacing(path, 0o600, synced=False) as file:
            file.write(_header(path.name, block))
            file.write(block)
        return True

    def _has_room(self, size: int, mine: Collection[Path]) -> bool:
        """Whether this many bytes may be written, after deleting other blocks than ``mine``."""
        if size > self._room:
            blocks = sorted(stored(self._folder))
            total, bound = sum(block.size for block in blocks), self._budget
            if bound is None:
                bound = min(_MOST, (shutil.disk_usage(self._folder).free + total) // _SHARE)
            wanted = max(size, bound // _AT_ONCE)
            for block in blocks:
                if total + wanted <= bound:
                    break
                if block.path not in mine:
                    block.path.unlink(missing_ok=True)
                    total -= block.size
            self._room = min(wanted, bound - total)
        has_room = size <= self._room
        self._room -= size * has_room
        return has_room


def stored(folder: Path) -> Iterator[Stored]:
    """All blocks in ``folder``, and leftovers of killed programs."""
    for entry in (entry for of_key in _entries(folder) for entry in _entries(of_key)):
        if _NAME.fullmatch(entry.name):
            with suppress(OSError):  # it is gone
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode):
                    yield Stored(facts.st_mtime_ns, facts.st_size, Path(entry.path))


def _entries(folder: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """The entries of a folder; empty if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def delete(blocks: Iterable[Stored]) -> None:
    """Delete blocks; StorageError if a block cannot be deleted."""
    for block in blocks:
        try:
            block.path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot delete {block.path}: {error.strerror or error}") from error


def _header(name: str, content: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(_MAGIC + name.encode())
    digest.update(content)
    return _MAGIC + digest.digest()
