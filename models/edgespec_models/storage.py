"""The folders of edgespec's files. A file is written there whole or not at all.

Files lie below ``EDGESPEC_HOME``, or in the platform's folders. A file or a folder is written beside its
place, then renamed. Names of temporary files name their process, so that the leftovers of killed programs can
be deleted.
"""

import errno
import os
import platform
import re
import secrets
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import BinaryIO, Final

import platformdirs
import psutil

from edgespec_models.errors import RequestError, StorageError

_SNAPSHOT: Final = re.compile("/models--([^/]+)--([^/]+)/snapshots/([^/]+)(/.+)?$")
_TEMPORARY: Final = ".edgespec-"
_PROCESS: Final = re.compile(r"(\d+)@([0-9a-f]{8})-")
_LONG_S: Final = 86_400.0
_FULL: Final = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def home() -> Path:
    """The folder of all files; it need not exist yet."""
    override = os.environ.get("EDGESPEC_HOME")
    return expanded(override) if override else platformdirs.user_cache_path("edgespec", appauthor=False)


def models_dir() -> Path:
    """The folder of pulled checkpoints."""
    return home() / "models"


def bundles_dir() -> Path:
    """The folder of bundles that were exported on first use."""
    return home() / "bundles"


def measurements_dir() -> Path:
    """The folder of measured costs of models on this machine. It may be deleted at any time."""
    return home() / "measurements"


def prompts_dir() -> Path:
    """The folder of prompts' keys and values, which reveal the prompts. It may be deleted at any time."""
    return home() / "prompt-cache"


def histories_dir() -> Path:
    """The folder of histories. It is no cache, because no download brings them back."""
    override = os.environ.get("EDGESPEC_HOME")
    base = home() if override else platformdirs.user_data_path("edgespec", appauthor=False)
    return base / "histories"


def is_file(path: Path) -> bool:
    """Whether the file exists. Its name may be one that no system allows."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_bytes(path: Path, most: int = 256 << 20) -> bytes:
    """The content of an ordinary file of at most ``most`` bytes, for files that are read whole.

    Folders of strangers may have links to devices and pipes, which wait for ever or never end.

    Raises:
        OSError: it cannot be read, is larger, or is no ordinary file.
    """
    facts = path.stat()  # before it is opened, because opening a pipe waits
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
    if facts.st_size > most:
        raise OSError(errno.EFBIG, f"it is larger than {size(most)}", str(path))
    return path.read_bytes()


def read_text(path: Path, encoding: str = "utf-8", most: int = 64 << 20) -> str:
    """The text of such a file, whose lines end with ``\\n``; UnicodeDecodeError in another encoding."""
    return TextIOWrapper(BytesIO(read_bytes(path, most)), encoding).read()


def expanded(path: str | Path) -> Path:
    """``path``, with ``~`` or ``~name`` replaced by the user's folder; RequestError without that user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{path} begins with an unknown user; write the whole path") from error


def size(count: int) -> str:
    """``count`` bytes for messages, in decimal units: ``98.4 MB``."""
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
    unit = next((unit for unit, least in units.items() if count >= least), None)
    return f"{count} bytes" if unit is None else f"{count / units[unit]:.1f} {unit}"


def bytes_at(*paths: Path) -> int:
    """Bytes of files, and of all files below folders. What vanishes meanwhile does not count."""
    total = 0
    for path in paths:
        below = (Path(root, name) for root, _, names in os.walk(path) for name in names)
        for file in below if path.is_dir() else (path,):
            with suppress(FileNotFoundError):
                total += file.stat().st_size
    return total


def model_name(folder: Path) -> str:
    """The name of the model in a directory.

    In the hub's cache, ``models--OWNER--NAME/snapshots/COMMIT``, it is NAME; elsewhere the directory's own
    name.
    """
    resolved = folder.resolve()
    cached = next((part for part in resolved.parts if part.startswith("models--")), None)
    return resolved.name if cached is None else cached.rpartition("--")[2]


def source_name(path: Path) -> str:
    """The name of a checkpoint: in the hub's cache its reference, elsewhere its own name."""
    # Not resolved, because the hub's own cache links a file to one that has its digest as a name.
    match = _SNAPSHOT.search(path.absolute().as_posix())
    return f"hf:{match[1]}/{match[2]}{match[4] or ''}@{match[3]}" if match else path.resolve().name


def prompts_name(model: str) -> str:
    """The beginning of the name of each folder in :func:`prompts_dir` that is the model's."""
    return re.sub("[^A-Za-z0-9._-]", "_", model)[:80]


@contextmanager
def replacing(path: Path, mode: int = 0o666, *, synced: bool = True) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` when all is written and on the disk.

    Without ``synced`` neither need be on the disk yet, so a machine that fails may leave anything there.
    Leftovers of killed programs in the folder are deleted.

    Raises:
        OSError: it cannot be written; the old file is untouched.
    """
    # Not tempfile: its files are private, and to make one public the umask would have to be read, which sets
    # it for a moment, for all threads. The system narrows the mode of a file that is opened here.
    folder = path.absolute().parent
    for stale in leftovers(folder, _TEMPORARY):
        with suppress(OSError):  # another user's
            stale.unlink()
    temporary = folder / f"{own_name(_TEMPORARY)}{secrets.token_hex(8)}"
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if synced:
                os.fsync(file.fileno())
        move(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if synced:
        sync_names(folder)


def check_writable(path: Path) -> None:
    """Raise RequestError before hours of work if a file cannot be written there."""
    if path.is_dir():
        raise RequestError(f"cannot write {path}: it is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"cannot write {path}: the directory {path.absolute().parent} does not exist")


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write ``text`` to ``path`` as UTF-8; the mode 0600 lets only the user read it.

    Raises:
        RequestError: it cannot be written; the old file is untouched.
    """
    check_writable(path)
    try:
        with replacing(path, mode) as file:
            file.write(text.encode())
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into StorageError."""
    try:
        yield
    except OSError as error:
        full = f"the disk is full; free space and run the command again ({error.strerror})"
        why = full if error.errno in _FULL else str(error)
        raise StorageError(f"cannot write {path}: {why}") from error


def move(source: Path, to: Path) -> None:
    """Rename a file, replacing another one, or a folder to a free name.

    Windows renames no file, and no folder with a file, that a program has open. Scanners and indexers open
    new files for moments, so a refusal counts only after three seconds.
    """
    for pause in _PAUSES_S if sys.platform == "win32" else ():
        try:
            source.replace(to)
            return
        except PermissionError:
            time.sleep(pause)
    source.replace(to)


def sync(folder: Path) -> None:
    """Wait until all files below ``folder``, and their names, are on the disk."""
    mode = "r+b" if sys.platform == "win32" else "rb"  # Windows syncs no file that is open for reading
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_names(path)
        else:
            with path.open(mode) as file:
                os.fsync(file.fileno())
    sync_names(folder)


def sync_names(folder: Path) -> None:
    """Wait until the names in a folder are on the disk. Windows and some file systems cannot do this."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def alone(lock: Path, doing: str, notify: Callable[[str], None]) -> Iterator[None]:
    """Hold the file ``lock``, and tell of another process that is ``doing`` the same while waiting for it."""
    import filelock

    held = filelock.FileLock(lock)
    try:
        held.acquire(timeout=0)
    except filelock.Timeout:
        notify(f"another process is {doing}; waiting for it")
        held.acquire()
    try:
        yield
    finally:
        held.release()


def own_name(prefix: str, pid: int | None = None) -> str:
    """The beginning of names of temporary files of this process, or of another one of this machine."""
    return f"{prefix}{os.getpid() if pid is None else pid}@{_machine()}-"


def leftovers(folder: Path, prefix: str) -> Iterator[Path]:
    """Files in ``folder`` with names of :func:`own_name` whose processes have ended.

    Processes of another machine or container cannot be seen: after a day they count as ended.
    """
    for path in folder.glob(f"{escape(prefix)}*"):
        process = _PROCESS.match(path.name.removeprefix(prefix))
        if process is None:
            continue  # somebody else's
        try:
            old = time.time() - path.stat().st_mtime > _LONG_S
        except OSError:
            continue  # gone already
        if old if process[2] != _machine() else not psutil.pid_exists(int(process[1])):
            yield path


def _machine() -> str:
    """A mark of the machine within which numbers name processes.

    Containers may have their host's name and numbers of their own, by which Linux tells them apart.
    """
    try:
        numbers = Path("/proc/self/ns/pid").readlink()
    except OSError:  # of another system
        numbers = Path()
    return f"{zlib.crc32(f'{platform.node()}{numbers}'.encode()):08x}"
