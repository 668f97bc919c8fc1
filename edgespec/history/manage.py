"""Histories from outside: list, show, export, import, forget, delete."""

import json
import os
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from edgespec.history.changes import delete_changes
from edgespec.history.database import SUFFIX, companions, look, reason
from edgespec.history.exchange import exported, imported
from edgespec.history.passages import LEAD
from edgespec.history.store import Learned, Scope, Store, StoredTurn
from edgespec_models.errors import RequestError, StorageError
from edgespec_models.schema import checked, length, shown
from edgespec_models.storage import bytes_at, expanded, histories_dir, write_text

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_CHAINED: Final = 64  # passages that one text may run through
_Following = dict[tuple[Scope, tuple[int, ...]], list[Learned]]


@dataclass(frozen=True, slots=True)
class LearnedText:
    """A passage that was learned; it may begin or end within a word.

    Attributes:
        target: the name of the model that wrote it.
        worth: its recent uses, reduced by how often it misled. The least goes first.
        right: the remembered proposals from it that were right; ``wrong`` are the others.
        learned_on: when it was first written, in seconds since 1970.
    """

    target: str
    namespace: str
    text: str
    tokens: int
    worth: float
    right: int
    wrong: int
    learned_on: float


@dataclass(frozen=True, slots=True)
class LearnedTurn:
    """A request and its answer, kept because ``LoadOptions.keep_prompts`` asked for it.

    Attributes:
        target: the name of the model that answered.
        prompt: a text, or a conversation as :meth:`edgespec.Model.chat` takes it.
        written_on: when it was answered last, in seconds since 1970.
    """

    target: str
    namespace: str
    prompt: Any
    text: str
    written_on: float


class History:
    """A history's file: show, export, import, forget. Other programs may use it at the same time.

    A program that uses it keeps what it has read until it is closed.

    Args:
        history: a name (letters, digits, ``.``, ``_``, ``-``), which stands for a file below
            :func:`edgespec_models.storage.histories_dir`; or the path of a file.

    Raises:
        RequestError: a name with other characters, or a folder.
    """

    @checked
    def __init__(self, history: Annotated[str | Path, length(1, 4096)]) -> None:
        self.path = _path(history)

    def __repr__(self) -> str:
        return f"History({self.name!r})" if self.path.parent == histories_dir() else f"History({self.path!r})"

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.name.removesuffix(SUFFIX)

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, with the log; 0 if it does not exist."""
        return bytes_at(*self._on_disk())

    def check(self) -> None:
        """Refuse a file of another program, reading it only. All methods do this.

        Raises:
            StorageError: another program made the file. A missing or unreadable file is no error here.
        """
        with suppress(OSError, sqlite3.Error):
            look(self.path)

    def namespaces(self) -> dict[tuple[str, str], int]:
        """The number of tokens by target's name and namespace.

        Raises:
            RequestError: there is no such history.
            StorageError: it cannot be read, or another program made it. All methods raise this.
        """
        with self._store() as store:
            kept: dict[tuple[str, str], int] = defaultdict(int)
            for scope, tokens in store.scopes().items():
                kept[scope.target, scope.namespace] += tokens
            return dict(kept)

    @checked
    def show(self, namespace: str | None = None) -> list[LearnedText]:
        """The learned passages of one namespace, or of all, the most useful first."""
        with self._store() as store:
            kept = [learned for learned in store.learned() if namespace in (None, learned.scope.namespace)]
            texts = list(map(_text, kept))
        return sorted(texts, key=lambda text: (-text.worth, text.text))

    @checked
    def turns(self, namespace: str | None = None) -> list[LearnedTurn]:
        """The kept turns of one namespace, or of all, the latest first."""
        with self._store() as store:
            stored = [turn for turn in store.turns() if namespace in (None, turn.scope.namespace)]
        turns = [
            LearnedTurn(
                turn.scope.target,
                turn.scope.namespace,
                json.loads(turn.turn.prompt),
                _readable(turn.turn.answer),
                turn.written_on,
            )
            for turn in stored
        ]
        return sorted(turns, key=lambda turn: -turn.written_on)

    @checked
    def forget(self, text: str) -> int:
        """Delete all passages and turns in which ``text`` occurs, in upper or lower case.

        They are overwritten in the file. All that drafters have learned is deleted too, because weights
        cannot be searched, and may be of texts that the history no longer has. Returns the number of passages
        and turns.

        Raises:
            RequestError: ``text`` is empty.
        """
        if not text.strip():
            raise RequestError("there is no text to forget; to forget everything, delete the history")
        with self._store() as store:
            passages = containing(text, list(store.learned()))
            turns = [turn for turn in store.turns() if _occurs(text.casefold(), turn)]
            store.remove(passages, turns)
        delete_changes(self.path)
        return len(passages) + len(turns)

    @checked
    def delete(self, namespace: str | None = None) -> None:
        """Delete the file, or one namespace.

        Raises:
            RequestError: there is no such history or namespace.
        """
        if namespace is None:
            self._check_exists()
            try:
                look(self.path)
                for file in (*self._on_disk(), self.path):  # the path may be a link
                    file.unlink(missing_ok=True)
                delete_changes(self.path)
            except (OSError, sqlite3.Error) as error:
                raise StorageError(f"cannot delete {self.path}: {error}") from error
            return
        with self._store() as store:
            scopes = {scope for scope in store.scopes() if scope.namespace == namespace}
            if not scopes:
                raise RequestError(f"the history {self.name} has no namespace {namespace!r}")
            store.remove_namespace(namespace)
        delete_changes(self.path, scopes)

    @checked
    def export(self, file: Path) -> int:
        """Write all passages and turns to ``file`` as JSON (mode 0600), and return the number of passages."""
        with self._store() as store:
            passages, turns = list(store.learned()), list(store.turns())
        write_text(file, exported(passages, turns), 0o600)
        return len(passages)

    @checked
    def load(self, file: Path) -> int:
        """Add an export, all or nothing. Make the history if it does not exist.

        Returns:
            How many passages of the export the history holds then, because it is bounded.

        Raises:
            RequestError: ``file`` cannot be read, or something else wrote it.
        """
        passages, turns = imported(file)
        with self._opened() as store:
            return store.put(passages, turns)

    def _on_disk(self) -> list[Path]:
        return [*companions(self.path), Path(os.path.realpath(self.path))]

    def _check_exists(self) -> None:
        if not self.path.is_file():
            raise RequestError(f"there is no history {self.path}; 'edgespec history list' shows all")

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
            why = reason(self.path, error)
            raise StorageError(f"the history {self.path} cannot be used: {why}") from error
        finally:
            if store is not None:
                store.close()


def histories() -> list[History]:
    """The histories with names, in alphabetical order."""
    return [History(file) for file in sorted(histories_dir().glob(f"*{SUFFIX}")) if file.is_file()]


def _path(history: str | Path) -> Path:
    if isinstance(history, str) and not ("/" in history or "\\" in history or history.endswith(SUFFIX)):
        if not _NAME.fullmatch(history):
            raise RequestError(
                f"{shown(history)} is no name of a history; allowed: at most 64 letters, digits, '.', '_' "
                "and '-'"
            )
        return histories_dir() / f"{history}{SUFFIX}"
    path = expanded(history)
    try:
        if path.is_dir():
            raise RequestError(f"the history {path} is a folder; name a file in it")
    except OSError as error:  # a name too long, a folder that cannot be entered
        raise RequestError(f"the history {shown(str(path))} cannot be opened: {error.strerror}") from error
    return path


def _text(learned: Learned) -> LearnedText:
    entry = learned.entry
    return LearnedText(
        target=learned.scope.target,
        namespace=learned.scope.namespace,
        text=_readable(learned.text),
        tokens=len(entry.passage.body),
        worth=learned.worth,
        right=sum(entry.right),
        wrong=sum(entry.wrong),
        learned_on=learned.learned_on,
    )


def containing(text: str, learned: Sequence[Learned]) -> list[Learned]:
    """The passages in which ``text`` occurs, wholly or in part, the tokens before them included.

    Upper and lower case are the same.
    """
    wanted = text.casefold()
    following: _Following = defaultdict(list)
    for member in learned:
        if member.entry.passage.lead:
            following[member.scope, member.entry.passage.lead].append(member)
    holding: dict[int, Learned] = {}
    for passage in learned:
        for chain in _chains([passage], wanted, following):
            holding.update((id(member), member) for member in chain)
    return list(holding.values())


def _chains(chain: list[Learned], wanted: str, following: _Following) -> Iterable[list[Learned]]:
    """Runs of passages that begin with ``chain`` and contain ``wanted`` from their first passage on."""
    joined = _folded(chain[0].before + b"".join(member.text for member in chain))
    if wanted in joined:
        return [chain]
    passage = chain[-1].entry.passage
    appended = len(_folded(b"".join(member.text for member in chain[1:])))
    longest = min(len(wanted) - 1, len(joined))
    begun = any(joined.endswith(wanted[:length]) for length in range(appended + 1, longest + 1))
    if not begun or len(chain) == _MOST_CHAINED:
        return []
    tail = (*passage.lead, *passage.body)[-LEAD:]
    return [
        run
        for behind in following.get((chain[0].scope, tail), ())
        for run in _chains([*chain, behind], wanted, following)
    ]


def _occurs(wanted: str, stored: StoredTurn) -> bool:
    """Whether a text without upper case occurs in a turn."""
    return wanted in _folded(stored.turn.answer) or any(
        wanted in text.casefold() for text in _texts(json.loads(stored.turn.prompt))
    )


def _texts(value: Any) -> Iterator[str]:
    """The texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _texts(part)
            if name == "arguments":  # of a call, as a table, which has names and numbers too
                yield json.dumps(part, ensure_ascii=False)


def _folded(data: bytes) -> str:
    return _readable(data).casefold()


def _readable(data: bytes) -> str:
    """Bytes of tokens as text, without what is no UTF-8."""
    return data.decode("utf-8", errors="ignore")
