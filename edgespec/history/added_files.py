"""Which files a history drafts from: those below what its user added, indexed anew when they change."""

import glob
import hashlib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from edgespec.history.file_index import AddedFile, Asked, DamagedIndexError, FileIndex, asked_of, write_index
from edgespec_models.errors import RequestError, StorageError
from edgespec_models.paths import expanded
from edgespec_models.progress import ProgressCallback

__all__ = ["AddedFiles", "added_to", "existing", "index_path", "locked", "stored_for"]

_JUNK: Final = ("node_modules", "__pycache__")
_MARKS: Final = frozenset({"CACHEDIR.TAG", "pyvenv.cfg"})  # in folders of what can be made or fetched again
_NEW: Final = ".new"  # at the end of an index's name while it is written

_Named = Mapping[str, bool]


class AddedFiles:
    """The files of one namespace of a history.

    Its methods raise OSError where something cannot be read or written, and StorageError where something else
    made what is in the index's place. What changes it is called within :func:`locked`.

    Args:
        path: the index.
        namespace: whose it is.

    Attributes:
        namespace: whose it is.
    """

    def __init__(self, path: Path, namespace: str) -> None:
        self.namespace, self._path = namespace, path
        self._left = path.with_name(f"{path.name}{_NEW}")

    def files(self, holding: str = "") -> list[AddedFile]:
        """The files; with ``holding``, those in which this text occurs, in upper or lower case."""
        with closing(FileIndex(self._path)) as index:
            return list(index.holding(holding)) if holding else index.files

    def add(self, paths: Sequence[str], progress: ProgressCallback) -> list[AddedFile]:
        """Take in files and folders, which :func:`existing` names, and look at all that were added before.

        Raises:
            RequestError: there are none.
        """
        return self._update(partial(_with, paths=paths), progress)

    def remove(self, paths: Sequence[str | Path], progress: ProgressCallback) -> list[AddedFile]:
        """Forget files and folders, and look at the others; without ``paths`` forget all.

        Raises:
            RequestError: one was never added.
        """
        if paths:
            return self._update(partial(_without, paths=[_real(path) for path in paths]), progress)
        with suppress(FileNotFoundError, DamagedIndexError):
            asked_of(self._path)  # is it ours?
        for file in (self._path, self._left):
            file.unlink(missing_ok=True)
        return []

    def _update(self, change: Callable[[_Named], _Named], progress: ProgressCallback) -> list[AddedFile]:
        self._left.unlink(missing_ok=True)  # by a program that was killed
        before, stamps = self._known()
        named = change(before)
        found = [replace(each, namespace=self.namespace) for each in _found(named)]
        if named != before or _stamps(found) != stamps:
            write_index(self._path, Asked(self.namespace, named), found, progress)
        return self.files() if any(named.values()) else self.remove([], progress)

    def _known(self) -> tuple[_Named, list[tuple[str, int, float]]]:
        """What was asked for, and what was found the last time; of a damaged index what can be read."""
        try:
            named = asked_of(self._path).named
            with closing(FileIndex(self._path)) as index:
                return named, _stamps(index.files)
        except FileNotFoundError:
            return {}, []
        except DamagedIndexError:
            with suppress(DamagedIndexError):
                return asked_of(self._path).named, []
            return {}, []


def index_path(history: Path, namespace: str) -> Path:
    """Where the index of a history's namespace is: beside the history, as SQLite's own companions are."""
    real = Path(os.path.realpath(history))
    mark = f"-{hashlib.blake2b(namespace.encode(), digest_size=8).hexdigest()}" if namespace else ""
    return real.with_name(f"{real.name}-files{mark}")


@contextmanager
def locked(history: Path) -> Iterator[None]:
    """While files are added to a history, or what was added or the history itself is deleted.

    Raises:
        OSError: nothing can be written beside the history.
        StorageError: another program is at it, or on Windows has open what is to go.
    """
    from filelock import FileLock, Timeout  # takes as long to import as all of this package

    index = index_path(history, "")
    path = index.with_name(f"{index.name}.lock")
    lock = FileLock(path, timeout=0, mode=0o600)
    try:
        lock.acquire()
    except Timeout as error:
        raise StorageError(f"another program adds files to {history} or removes some; try again") from error
    try:
        yield
    except PermissionError as error:
        if sys.platform != "win32":
            raise
        which = error.filename2 or error.filename or history
        raise StorageError(
            f"Windows neither replaces nor deletes {which} while a program has it open: "
            f"close the programs that use this history, then try again ({error})"
        ) from error
    finally:
        with suppress(OSError):  # on Windows its release does it
            path.unlink()
        lock.release()


def added_to(history: Path) -> list[AddedFiles]:
    """What was added to a history, by namespace; files that something else made are left out."""
    return [AddedFiles(path, _namespace_of(path)) for path in stored_for(history) if path.suffix != _NEW]


def stored_for(history: Path, namespace: str | None = None) -> list[Path]:
    """The indexes of a history, or of one namespace, and what programs that were killed have left of some."""
    first = index_path(history, "")
    own = None if namespace is None else index_path(history, namespace).name
    found = []
    for path in sorted(first.parent.glob(f"{glob.escape(first.name)}*")):
        index = path.name.removesuffix(_NEW)
        is_one = re.fullmatch("(-[0-9a-f]{16})?", index.removeprefix(first.name)) and own in (None, index)
        if is_one and (path.suffix == _NEW or _is_ours(path)):
            found.append(path)
    return found


def existing(paths: Sequence[str | Path]) -> list[str]:
    """The real paths of files and folders.

    Raises:
        RequestError: one is not there.
    """
    found = [_real(path) for path in paths]
    for path in found:
        try:
            Path(path).stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RequestError(f"cannot add {path}: it is not there") from error
        except OSError as error:
            raise RequestError(f"cannot add {path}: {error.strerror}") from error
    return found


def _is_ours(index: Path) -> bool:
    try:
        asked_of(index)
    except DamagedIndexError:
        return True
    except (OSError, StorageError):
        return False
    return True


def _namespace_of(path: Path) -> str:
    try:
        return asked_of(path).namespace
    except DamagedIndexError:
        return ""


def _real(path: str | Path) -> str:
    return os.path.realpath(expanded(path))


def _with(named: _Named, paths: Sequence[str]) -> _Named:
    """What is asked for when ``paths`` are added too; what was removed within them stays so."""
    named = {**named, **dict.fromkeys(paths, True)}
    if not named:
        raise RequestError("no files were added yet: name files or folders")
    return named


def _without(named: _Named, paths: Sequence[str]) -> _Named:
    """What is asked for when ``paths`` are removed."""
    for path in paths:
        left = _apart(named, path)
        around = [each for each in left if Path(path).is_relative_to(each)]
        is_within = bool(around) and left[max(around, key=len)]
        if left == named and not is_within:
            raise RequestError(f"cannot remove {path}: it was not added")
        named = {**left, path: False} if is_within else left
    return named


def _apart(named: _Named, path: str) -> dict[str, bool]:
    """What does not lie in ``path``."""
    return {each: wanted for each, wanted in named.items() if not Path(each).is_relative_to(path)}


def _stamps(files: Iterable[AddedFile]) -> list[tuple[str, int, float]]:
    return [(each.path, each.size_bytes, each.changed_on) for each in files]


def _found(named: _Named) -> list[AddedFile]:
    """All files, those changed last first; what is not to be read says why."""
    below = [each for path, wanted in named.items() if wanted for each in _below(path, named)]
    unique = {each.path: each for each in below}
    return sorted(unique.values(), key=lambda each: (-each.changed_on, each.path))


def _below(path: str, named: _Named) -> Iterator[AddedFile]:
    """A file, or a folder's files, without hidden ones, junk and what was removed; no link is followed."""
    if not Path(path).is_dir():
        yield _looked_at(path)
        return
    faults: list[OSError] = []
    for folder, folders, files in os.walk(path, onerror=faults.append):
        if folder != path and _MARKS.intersection(files):
            folders.clear()
            continue
        for names in (folders, files):
            names[:] = [name for name in names if name[0] != "." and name not in _JUNK]
            names[:] = [name for name in names if named.get(str(Path(folder, name)), True)]
        yield from (_looked_at(str(Path(folder, name))) for name in files)
    yield from (AddedFile(str(fault.filename), "", skipped=fault.strerror) for fault in faults)


def _looked_at(path: str) -> AddedFile:
    try:
        info = Path(path).lstat()
    except OSError as error:
        return AddedFile(path, "", skipped=error.strerror)
    kind = "a link" if stat.S_ISLNK(info.st_mode) else "no regular file"
    skipped = None if stat.S_ISREG(info.st_mode) else kind
    return AddedFile(path, "", info.st_size, info.st_mtime, skipped)
