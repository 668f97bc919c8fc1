"""Where an export is built, and how it comes to its place: complete, or not at all."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from stat import S_IMODE

from edgespec_models.errors import ModelFileError, RequestError
from edgespec_models.storage import leftovers, move, own_name

_OLD = "-old"


def check_place(source: Path, out: Path, *, overwrite: bool, replaceable: Callable[[], bool]) -> None:
    """Refuse what could not be written at the end.

    ``replaceable`` says whether what is there is of a kind that may be replaced.

    Raises:
        ModelFileError: the source does not exist.
        RequestError: ``out`` exists and is not to be replaced, or holds the source; or no bundle could be
            opened there.
    """
    try:
        str(out.absolute()).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{out} is not UTF-8, which ONNX Runtime needs; name another directory") from error
    if not source.exists():
        raise ModelFileError(
            f"{source} does not exist; give a GGUF file, a Hugging Face directory or a catalogue name"
        )
    if not out.exists():
        return
    if not overwrite:
        raise RequestError(f"{out} exists; choose another directory or ask to overwrite it")
    if not out.is_dir() or (any(out.iterdir()) and not replaceable()):
        raise RequestError(f"{out} is not a bundle; it will not be overwritten")
    if out.resolve() in (source.resolve(), *source.resolve().parents):
        raise RequestError(f"{out} holds the source {source.name}, which overwriting would delete")


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` to build in, which nobody else may enter. At the end it comes to its place.

    A directory that is there is replaced. After an error nothing is left, nor are the parents of ``out`` that
    had to be made, unless something came into them.
    """
    with _parents(out):
        prefix = f".{out.name}.partial-"
        for stale in leftovers(out.parent, prefix):
            if stale.name.endswith(_OLD) and not out.exists():
                move(stale, out)  # what a killed export had only begun to replace
            else:
                shutil.rmtree(stale, ignore_errors=True)
        folder = out.with_name(f"{own_name(prefix)}{token_hex(4)}")
        try:
            folder.mkdir(mode=0o755)
            narrowed = S_IMODE(folder.stat().st_mode)  # by the umask
            folder.chmod(narrowed & 0o700)
            yield folder
            folder.chmod(narrowed)
            _place(folder, out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _parents(out: Path) -> Iterator[None]:
    missing = [parent for parent in out.parents if not parent.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for parent in missing:
            with suppress(OSError):  # not empty
                parent.rmdir()


def _place(folder: Path, out: Path) -> None:
    if out.exists():
        old = folder.with_name(folder.name + _OLD)
        move(out, old)
        try:
            move(folder, out)
        except BaseException:
            move(old, out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        move(folder, out)
