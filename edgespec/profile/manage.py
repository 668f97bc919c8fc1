"""A profile from outside: which there are, what one holds, and the ways to take it along or get rid of it."""

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.files import write_private_text
from edgespec.profile.entries import Entry
from edgespec.profile.forget import containing, readable
from edgespec.profile.passages import LEAD, LONGEST, Passage
from edgespec.profile.schema import SUFFIX
from edgespec.profile.store import Learned, Scope, Store
from edgespec_models.errors import RequestError, StorageError
from edgespec_models.paths import profiles_dir

__all__ = ["LearnedText", "Profile", "profiles"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FORMAT = "edgespec profile 1"
_YEAR_3000 = 32_503_680_000.0  # beyond it Windows has no dates


@dataclass(frozen=True, slots=True)
class LearnedText:
    """Something that was learned.

    Attributes:
        target: name of the model that wrote it.
        namespace: where the application put it.
        text: what it says; a passage may begin or end within a word.
        tokens: how many it has.
        worth: recent uses, less the more it misled; what is worth least goes first.
        right: verdicts on proposals taken from it that were right, as far as they are remembered.
        wrong: the same, wrong.
        learned_on: when it was first written, seconds since 1970.
    """

    target: str
    namespace: str
    text: str
    tokens: int
    worth: float
    right: int
    wrong: int
    learned_on: float

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


class Profile:
    """A profile's file, to look at, export, import, and forget from. It may be in use meanwhile.

    A program that has it in use keeps what it has read until it is closed.

    Args:
        profile: a name (letters, digits, ``.``, ``_``, ``-``), which stands for a file below
            :func:`edgespec_models.paths.profiles_dir`; or the path of a file.

    Raises:
        RequestError: a name with other characters, or a folder.
    """

    def __init__(self, profile: str | Path) -> None:
        self.path = _path(profile)

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.name.removesuffix(SUFFIX)

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, the log included; 0 if it does not exist."""
        return sum(file.stat().st_size for file in self._files() if file.is_file())

    def namespaces(self) -> dict[tuple[str, str], int]:
        """Tokens kept, by target's name and namespace.

        Raises:
            RequestError: there is no such profile.
            StorageError: it cannot be read. So with all methods.
        """
        with self._store() as store:
            kept: dict[tuple[str, str], int] = {}
            for scope, tokens in store.scopes().items():
                key = (scope.target, scope.namespace)
                kept[key] = kept.get(key, 0) + tokens
            return kept

    def show(self, namespace: str | None = None) -> list[LearnedText]:
        """All that was learned, what is worth most first; of one namespace, or of all."""
        with self._store() as store:
            texts = [_text(each) for each in _within(store, namespace)]
        return sorted(texts, key=lambda each: (-each.worth, each.text))

    def forget(self, text: str) -> int:
        """Delete all passages in which ``text`` occurs (upper and lower case are the same).

        They are overwritten in the file. Returns how many there were.

        Raises:
            RequestError: ``text`` is empty.
        """
        if not text.strip():
            raise RequestError("there is no text to forget; to forget everything, delete the profile")
        with self._store() as store:
            found = containing(text, list(store.learned()))
            store.remove(found)
            return len(found)

    def delete(self, namespace: str | None = None) -> None:
        """Delete the file, or all that was learned in one namespace.

        Raises:
            RequestError: there is no such profile or namespace.
        """
        if namespace is None:
            self._check_exists()
            try:
                for file in self._files():
                    file.unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(f"cannot delete {self.path}: {error}") from error
            return
        with self._store() as store:
            if not any(scope.namespace == namespace for scope in store.scopes()):
                raise RequestError(f"the profile {self.name} has no namespace {namespace!r}")
            store.remove_namespace(namespace)

    def export(self, file: Path) -> int:
        """Write all that was learned to ``file`` as JSON (mode 0600); returns how many passages."""
        with self._store() as store:
            passages = [_to_json(each) for each in store.learned()]
        # Bytes that are no UTF-8 become lone surrogates, which JSON can spell.
        write_private_text(file, json.dumps({"format": _FORMAT, "passages": passages}, indent=1) + "\n")
        return len(passages)

    def load(self, file: Path) -> int:
        """Add what :meth:`export` wrote, all or nothing; the profile is made if it does not exist.

        Returns:
            How many passages of it the profile holds then: it is bounded.

        Raises:
            RequestError: ``file`` cannot be read, or something else wrote it.
        """
        learned = _parse(file)
        with self._opened() as store:
            return store.put(learned)

    def _files(self) -> list[Path]:
        return [self.path.with_name(self.path.name + ending) for ending in ("-wal", "-shm", "")]

    def _check_exists(self) -> None:
        if not self.path.is_file():
            raise RequestError(
                f"there is no profile {self.path}; 'edgespec learned list' shows those there are"
            )

    @contextmanager
    def _store(self) -> Iterator[Store]:
        self._check_exists()
        with self._opened() as store:
            yield store

    @contextmanager
    def _opened(self) -> Iterator[Store]:
        store = None
        try:
            store = Store.open(self.path)
            yield store
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"the profile {self.path} cannot be used: {error}") from error
        finally:
            if store is not None:
                store.close()


def profiles() -> list[Profile]:
    """The profiles that have a name, in alphabetical order."""
    return [Profile(file) for file in sorted(profiles_dir().glob(f"*{SUFFIX}")) if file.is_file()]


def _path(profile: str | Path) -> Path:
    if isinstance(profile, str) and not ("/" in profile or "\\" in profile or profile.endswith(SUFFIX)):
        if not _NAME.fullmatch(profile):
            raise RequestError(
                f"{profile!r} is no name of a profile: letters, digits, '.', '_' and '-', at most 64"
            )
        return profiles_dir() / f"{profile}{SUFFIX}"
    path = Path(profile).expanduser()
    if path.is_dir():
        raise RequestError(f"the profile {path} is a folder; name a file in it")
    return path


def _within(store: Store, namespace: str | None) -> Iterator[Learned]:
    return (each for each in store.learned() if namespace is None or each.scope.namespace == namespace)


def _text(learned: Learned) -> LearnedText:
    entry = learned.entry
    return LearnedText(
        target=learned.scope.target,
        namespace=learned.scope.namespace,
        text=readable(learned.text),
        tokens=len(entry.passage.body),
        worth=learned.worth,
        right=sum(entry.right),
        wrong=sum(entry.wrong),
        learned_on=learned.learned_on,
    )


def _to_json(learned: Learned) -> dict[str, Any]:
    entry = learned.entry
    return {
        "scope": asdict(learned.scope),
        "before": learned.before.decode("utf-8", errors="surrogateescape"),
        "text": learned.text.decode("utf-8", errors="surrogateescape"),
        "lead": list(entry.passage.lead),
        "body": list(entry.passage.body),
        "worth": learned.worth,
        "right": list(entry.right),
        "wrong": list(entry.wrong),
        "learned_on": learned.learned_on,
    }


def _parse(file: Path) -> list[Learned]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot import {file}: {error}") from error
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise RequestError(f"cannot import {file}: it is no export of a profile ({_FORMAT!r})")
    learned: list[Learned] = []
    with suppress(KeyError, TypeError, ValueError, OverflowError, AttributeError):
        learned = [_from_json(each) for each in value["passages"]]
        return learned
    raise RequestError(f"cannot import {file}: a passage in it is not as an export writes it")


def _from_json(value: Any) -> Learned:
    passage = Passage(_tokens(value["lead"], LEAD), _tokens(value["body"], LONGEST))
    right, wrong = bytearray(iter(value["right"])), bytearray(iter(value["wrong"]))
    worth, learned_on = float(value["worth"]), float(value["learned_on"])
    texts = [value[key].encode("utf-8", errors="surrogateescape") for key in ("before", "text")]
    names = [str(value["scope"][key]) for key in ("target", "tokenizer", "namespace")]
    "".join(names).encode()  # SQLite takes no lone surrogates
    whole = passage.body and len(right) == len(wrong) == len(passage.body)
    if not whole or not 0 <= worth < 1e9 or not 0 <= learned_on < _YEAR_3000:
        raise ValueError(passage)
    return Learned(
        Scope(*names), Entry(passage, worth, 0, right, wrong), texts[0], texts[1], learned_on, worth
    )


def _tokens(values: Any, most: int) -> tuple[int, ...]:
    tokens = tuple(values)
    if len(tokens) > most or not all(type(token) is int and 0 <= token < 2**31 - 1 for token in tokens):
        raise ValueError(values)
    return tokens
