"""The folder in which an export is built, and the move to its place, complete or not at all."""

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex
from stat import S_IMODE, S_ISDIR

from edgespec_export.journal import DATA_FILE, JOURNAL
from edgespec_models.errors import EdgespecError, ModelFileError, RequestError, StorageError
from edgespec_models.storage import leftovers, move, own_name, sync, sync_names

_OLD = "-old"
_LOG = logging.getLogger("edgespec")


def check_place(
    source: Path,
    out: Path,
    *,
    overwrite: bool,
    replaceable: Callable[[], bool],
    others: Sequence[Path] = (),
) -> None:
    """Raise early if the bundle could not be put in its place.

    ``replaceable`` says whether the present content of ``out`` may be replaced. ``others`` are further files
    that the export reads.

    Raises:
        ModelFileError: the source does not exist.
        RequestError: ``out`` exists and may not be replaced, or holds a file that the export reads, or no
            bundle could be opened there.
    """
    if out.name in ("", ".."):
        raise RequestError(f"{out} does not name a new directory; give one, such as {out / 'bundle'}")
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
        raise RequestError(f"{out} exists; choose another directory, or overwrite it (--overwrite)")
    if not out.is_dir() or (any(out.iterdir()) and not replaceable()):
        raise RequestError(f"{out} is not a bundle and is not overwritten; choose another directory")
    for file in (source, *others):
        if out.resolve() in (file.resolve(), *file.resolve().parents):
            raise RequestError(
                f"{out} holds {file.name}, which the export reads and overwriting would delete; choose "
                "another directory"
            )


@contextmanager
def staging(out: Path, check: Callable[[], None]) -> Iterator[Path]:
    """A private folder beside ``out`` to build in, which moves to ``out`` at the end.

    ``check`` raises RequestError if ``out`` may not be made or replaced. It is called again at the end,
    because an export takes minutes. If ``out`` may not or cannot be replaced then, the complete folder stays
    beside it, and the error names it. After another error nothing is left, nor are new parents of ``out``,
    unless other files came into them. A stopped or killed export leaves its weights, if they have a
    :class:`Journal`, to the next one for ``out``.
    """
    check()
    with _parents(out):
        prefix = f".{out.name}.partial-"
        folder = out.with_name(f"{own_name(prefix)}{token_hex(4)}")
        stopped = f"{prefix}stopped-"
        stale = [*leftovers(out.parent, prefix), *out.parent.glob(f"{escape(stopped)}*")]
        try:
            folder.mkdir(mode=0o755)
            narrowed = S_IMODE(folder.stat().st_mode)  # by the umask
            folder.chmod(narrowed & 0o700)
            for left in stale:
                if left.name.endswith(_OLD) and not out.exists():
                    move(left, out)  # the old bundle of an export that was killed while it replaced it
                else:
                    _take_over(left, folder)
            yield folder
            (folder / JOURNAL).unlink(missing_ok=True)
            folder.chmod(narrowed)
            sync(folder)
            _place(folder, out, check)
            sync_names(out.parent)
        except (KeyboardInterrupt, SystemExit):
            if (folder / JOURNAL).is_file():
                left = out.with_name(f"{stopped}{token_hex(4)}")
                move(folder, left)
                _LOG.warning("converted weights stay in %s; the same export goes on there", left)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _take_over(stale: Path, folder: Path) -> None:
    """Move weights with which an export can go on to ``folder``, and delete the rest.

    If two processes do this at once, one of them begins anew.
    """
    with suppress(OSError):
        facts = stale.lstat()
        ours = S_ISDIR(facts.st_mode) and facts.st_uid == folder.stat().st_uid  # others could plant weights
        for name in (JOURNAL, DATA_FILE) if ours and not (folder / DATA_FILE).exists() else ():
            move(stale / name, folder / name)
    shutil.rmtree(stale, ignore_errors=True)


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


def _place(folder: Path, out: Path, check: Callable[[], None]) -> None:
    is_free = not out.exists()
    try:
        check()
        if is_free:  # what appears now is not checked; a folder moves to no place with content
            move(folder, out)
            return
        old = folder.with_name(folder.name + _OLD)
        move(out, old)
        try:
            move(folder, out)
        except BaseException:
            move(old, out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except (EdgespecError, OSError) as error:  # Windows replaces nothing that a program has open
        beside = out.with_name(f"{out.name}-{token_hex(4)}")
        move(folder, beside)
        is_refused = isinstance(error, EdgespecError)
        why = error if is_refused else f"cannot replace {out}: {error}; end the programs that use it"
        text = f"{why}. The new export is complete in {beside}: use it there, or rename it"
        raise (RequestError if is_refused else StorageError)(text) from error
