"""What models take on the disk: pulled files, bundles made of them, and prompts; and their removal."""

import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgespec.loading.first_use import mark_of, name_of
from edgespec_export.recipe import RECIPES
from edgespec_models.bundles.bundle import HF_CONFIG
from edgespec_models.bundles.foreign import is_model
from edgespec_models.downloads.catalog import entries
from edgespec_models.downloads.download import model_path, record_of
from edgespec_models.downloads.hub import on_hub, pulled_hub
from edgespec_models.errors import RequestError, shell_word
from edgespec_models.files.gguf_parts import parts_of
from edgespec_models.storage import bundles_dir, bytes_at, prompts_dir, prompts_name, writing

_Kind = Literal["file", "bundle", "prompts"]
_BUNDLE = re.compile(
    r"(?P<name>.+?)(?P<marks>(?:-[0-9a-f]{8})+)-(?:target|drafter)-(?P<form>.+)-r(?P<recipe>\d+)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Holding:
    """A part of what a model takes.

    Attributes:
        kind: a pulled ``file``, a ``bundle`` that was made at first use, or kept ``prompts``.
        paths: files and folders.
        size_bytes: their size.
        shared_with: names of the catalogue that use the same file.
    """

    kind: _Kind
    paths: tuple[Path, ...]
    size_bytes: int
    shared_with: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: _Kind, *paths: Path, shared_with: tuple[str, ...] = ()) -> "Holding":
        """The holding at ``paths``."""
        return cls(kind, paths, bytes_at(*paths), shared_with)


def holdings(*names: str) -> list[Holding]:
    """The parts of models: of names of the catalogue or the hub, or of files or folders of the user's.

    The user's own files are no part: only what edgespec made of them is. A part of several names is listed
    once.

    Raises:
        RequestError: nothing on this machine belongs to a name.
    """
    parts: dict[tuple[Path, ...], Holding] = {}
    for name in names:
        own = [*_pulled(name), *_made_of(name)]
        if not own:
            raise RequestError(f"nothing on this machine belongs to {name!r}; 'edgespec models' lists names")
        parts |= {part.paths: part for part in own}
    return [*parts.values()]


def bundle_of(reference: str) -> Path:
    """The directory ``reference``, or else the newest bundle that today's recipes made of that model.

    Raises:
        RequestError: there is no such directory, and nothing was made of such a model.
    """
    path = Path(reference)
    if is_model(path) or (path.is_dir() and not (path / HF_CONFIG).is_file()):
        return path
    made = [part.paths[0] for part in _made_of(reference) if part.kind == "bundle"]
    current = [bundle for bundle in made if not _is_outdated(bundle)]
    if not current:
        raise RequestError(
            f"no bundle {reference!r} is here. Give a bundle's directory, or load or export the model first: "
            f"edgespec export {shell_word(reference)} -o DIR"
        )
    return max(current, key=lambda bundle: bundle.stat().st_mtime)


def removable(*names: str) -> list[Holding]:
    """The :func:`holdings` of ``names``, less files that other names with bundles use."""
    parts = holdings(*names)
    others = {*_bundles()} - {path for part in parts for path in part.paths}

    def is_used(name: str) -> bool:
        return any(_belongs(bundle, "", name) for bundle in others)

    return [part for part in parts if not any(map(is_used, part.shared_with))]


def outdated() -> list[Holding]:
    """All bundles that another version of edgespec made."""
    return [Holding.of("bundle", path) for path in _bundles() if _is_outdated(path)]


def remove(parts: Iterable[Holding]) -> None:
    """Delete the parts.

    Raises:
        StorageError: a file cannot be deleted, such as one that a program on Windows has open.
    """
    for path in (path for part in parts for path in part.paths):
        with writing(path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _pulled(name: str) -> Iterator[Holding]:
    entry, reference = entries().get(name), on_hub(name)
    if entry is not None and model_path(entry).is_file():
        users = (other for other in entries().values() if other.filename == entry.filename)
        shared = tuple(other.name for other in users if other != entry)
        file = model_path(entry)
        yield Holding.of("file", file, record_of(file), shared_with=shared)
    path = None if reference is None else pulled_hub(reference)
    if reference is not None and path is not None:
        files = [path] if path.is_dir() else parts_of(path)
        yield Holding.of("file", *files, reference.record)


def _made_of(name: str) -> Iterator[Holding]:
    """Bundles, then prompts of models with their names."""
    source, reference = Path(name), on_hub(name)
    mark, names = "", [name]
    if reference is not None:
        source = pulled_hub(reference) or source
    if source.exists():
        mark, names = mark_of(source), [name_of(source), name_of(source, source)]
    bundles = [path for path in _bundles() if _belongs(path, mark, *names)]
    yield from (Holding.of("bundle", path) for path in bundles)
    if bundles or not mark:
        folders = prompts_dir().glob("*-*")
        own = [*map(prompts_name, names)]
        yield from (Holding.of("prompts", path) for path in folders if path.name.rpartition("-")[0] in own)


def _bundles() -> list[Path]:
    return sorted(path for path in bundles_dir().glob("*") if _BUNDLE.fullmatch(path.name))


def _is_outdated(bundle: Path) -> bool:
    """Whether a bundle was made by a recipe that is not today's."""
    match = _BUNDLE.fullmatch(bundle.name)
    assert match is not None  # of _bundles
    devices = (device for device in RECIPES if device is not None and match["form"].startswith(device))
    return int(match["recipe"]) != RECIPES[next(devices, None)]


def _belongs(bundle: Path, mark: str, *names: str) -> bool:
    """Whether a bundle was made of a model of ``names``; of a source with ``mark``, if that is not empty."""
    match = _BUNDLE.fullmatch(bundle.name)
    return match is not None and match["name"] in names and match["marks"].startswith(f"-{mark}")
