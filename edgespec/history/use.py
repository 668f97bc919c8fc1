"""A history that a loaded model uses: its memory, and a thread that writes what it learns to the file.

Decoding goes on, whatever happens to the file.
"""

import atexit
import logging
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from edgespec.decoding.draft import Remarks
from edgespec.drafting.pricing import Guard
from edgespec.history.database import connect_read_only, is_damage, reason, set_aside
from edgespec.history.drafter import HistoryFinder, TurnContext
from edgespec.history.memory import Delta, Memory, Snapshot
from edgespec.history.store import MAX_TOKENS, Scope, Store
from edgespec_models.errors import StorageError
from edgespec_models.text.tokenizer import Tokenizer

FLUSH_S: Final = 2.0
"""Seconds until what was learned is in the file."""
_RETRY_S: Final = 30.0
_MOST_PENDING: Final = 4096  # passages that may wait for a disk with room
_LOG = logging.getLogger("edgespec")
_Opened = tuple[Store | None, bool, str | None]
"""An opened file or None, whether it can be written, and the problem with it or None."""


class Writer:
    """Collects changes and merges them into the store, in a thread of its own.

    A file that cannot be written is reported once, in :attr:`problem` and in the log of ``edgespec``, and is
    tried again every 30 seconds and at the end. A damaged file is set aside and begun anew, unless it can no
    longer be told from another program's.

    The writer owns ``store``; :meth:`close` closes it. ``text_of`` returns the bytes of tokens and is called
    in the thread. ``flush_s`` are the seconds from the first change to its transaction.
    """

    def __init__(
        self,
        store: Store,
        path: Path,
        *,
        scope: Scope,
        text_of: Callable[[Sequence[int]], bytes],
        flush_s: float = FLUSH_S,
    ) -> None:
        self._store, self._path, self._scope, self._text_of = store, path, scope, text_of
        self._file = _status(path)
        self._flush_s = flush_s
        self._pending, self._late = Delta(), deque[Delta]()  # late changes could not be written yet
        self._changed = threading.Condition()  # guards the pending delta and the end
        self._writing = threading.Lock()  # guards the store
        self._closing = self._closed = False
        self._process = os.getpid()
        self._damage: sqlite3.Error | None = None  # until the file is replaced
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="edgespec-history", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def tell(self, note: Callable[[Delta], None]) -> None:
        """Let ``note`` add a change, which is stored soon."""
        with self._changed:
            sleeping = not self._pending
            note(self._pending)
            if sleeping:  # otherwise the thread is awake and waits for more
                self._changed.notify()

    def flush(self) -> None:
        """Store all changes now."""
        with self._writing:
            with self._changed:
                if self._pending:
                    self._late.append(self._pending)
                    self._pending = Delta()
            before, stored = self.problem, False
            while self._late and self._merge(self._late[0]):
                self._late.popleft()
                stored = True
            if stored and not self._late and self.problem == before:
                self.problem = None
            while sum(len(delta.changes) for delta in self._late) > _MOST_PENDING:
                self._late.popleft()

    def close(self) -> None:
        """Store the rest and end the thread. It may be called again, also after an interrupt."""
        if self._closed or self._process != os.getpid():  # SQLite's files are the parent's
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self.flush()
        self._store.close()
        self._closed = True
        atexit.unregister(self.close)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or bool(self._pending or self._late))
                pause_s = self._flush_s if self.problem is None else _RETRY_S
                self._changed.wait_for(lambda: self._closing, pause_s)
                if self._closing:
                    return
            self.flush()

    def _merge(self, delta: Delta) -> bool:
        """Store a change, and return whether it is done with."""
        try:
            if self._damage is not None:
                return self._begin_anew(delta, self._damage)
            if self._is_gone():
                self._report(
                    f"the history {self._path} was deleted or replaced; what is learned now lasts until the "
                    "model is closed"
                )
                return False
            try:
                self._store.merge(self._scope, delta, self._text_of)
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                return self._begin_anew(delta, error)
        except Exception as error:  # noqa: BLE001 - the thread goes on
            why = reason(self._path, error) or type(error).__name__
            self._report(f"the history {self._path} cannot be written ({why}); decoding goes on")
            # Another error lies in the change, and would come again.
            return not isinstance(error, sqlite3.Error | OSError | MemoryError)
        return True

    def _is_gone(self) -> bool:
        """Whether the file is no longer there, so that changes would go where nobody finds them."""
        status = _status(self._path)
        return status is None or self._file is None or not os.path.samestat(status, self._file)

    def _begin_anew(self, delta: Delta, error: sqlite3.Error) -> bool:
        self._damage = error
        self._store.close()
        try:
            self._store, problem = _begun_anew(self._path, error)
            self._file = _status(self._path)
            self._store.merge(self._scope, delta, self._text_of)
        except StorageError as again:
            self._report(str(again))
            return False
        except sqlite3.Error as again:
            self._report(f"the history {self._path} was damaged ({error}) and cannot be written ({again})")
            return False
        self._damage = None
        self._report(problem)
        return True

    def _report(self, problem: str) -> None:
        if self.problem is None:
            _LOG.warning("%s", problem)
        self.problem = problem


class HistoryUse:
    """One model's use of one history. Use it in one thread at a time.

    ``writer`` is None if nothing can be written; ``problem`` is the reason, or what happened to the file.
    """

    def __init__(self, snapshot: Snapshot, writer: Writer | None, problem: str | None) -> None:
        tell = (lambda note: None) if writer is None else writer.tell
        self.memory = Memory(snapshot, max_tokens=MAX_TOKENS, tell=tell)
        self._writer, self._problem = writer, problem

    @property
    def problem(self) -> str | None:
        """Why the file cannot be read or written; None without a problem."""
        return (self._writer.problem if self._writer is not None else None) or self._problem

    def begin(
        self,
        guard: Guard | None = None,
        remarks: Remarks | None = None,
        context: TurnContext | None = None,
    ) -> HistoryFinder:
        """The source for the next request, which also learns its answer. Other requests may run.

        ``guard`` watches whether proposals from earlier answers pay. ``remarks`` receive problems of the
        history, and why trust was taken back. With ``context`` the turn is kept whole.
        """
        return HistoryFinder(
            self.memory, guard, remarks=remarks, problem=lambda: self.problem, context=context
        )

    def flush(self) -> None:
        """Store what was learned."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Store what was learned and close the file."""
        if self._writer is not None:
            self._writer.close()


def _status(path: Path) -> os.stat_result | None:
    """What the system says of the file; None without one."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def open_use(path: Path, scope: Scope, tokenizer: Tokenizer) -> HistoryUse:
    """Open a history, and make it if it does not exist. This never fails.

    A damaged file is set aside and a new one begins. A file that cannot be written is only read. Files of
    other programs are left alone. If no file can be used, the model learns until it is closed.
    :attr:`HistoryUse.problem` and the log say so.
    """
    store, writable, problem = _open(path)
    snapshot = Snapshot()
    if store is not None:
        try:
            snapshot = store.read(scope)
        except sqlite3.Error as error:
            problem, writable = f"the history {path} cannot be read ({error}); it is not used", False
    # An import may hold what this model cannot read.
    known = range(tokenizer.vocab_size)
    snapshot.entries = [e for e in snapshot.entries if max((*e.passage.lead, *e.passage.body)) in known]
    if problem is not None:
        _LOG.warning("%s", problem)
    writer = None
    if store is not None and writable:
        writer = Writer(store, path, scope=scope, text_of=tokenizer.bytes_of)
    elif store is not None:
        store.close()
    return HistoryUse(snapshot, writer, problem)


def _open(path: Path) -> _Opened:
    try:
        return Store.open(path), True, None
    except StorageError as error:
        return None, False, f"{error}. The history is not used"
    except (OSError, sqlite3.Error) as error:
        if not is_damage(error):
            return _open_unwritable(path, error)
        try:
            store, problem = _begun_anew(path, error)
        except StorageError as again:
            return None, False, str(again)
        return store, True, problem


def _begun_anew(path: Path, error: BaseException) -> tuple[Store, str]:
    """A new file in place of a damaged one, and the message about it. StorageError if that fails."""
    try:
        aside = set_aside(path)
        return Store.open(path), f"the history {path} was damaged ({error}); it is {aside or 'replaced'} now"
    except (sqlite3.Error, OSError, StorageError) as again:
        problem = f"the history {path} is damaged ({error}) and cannot be replaced ({again})"
        raise StorageError(problem) from again


def _open_unwritable(path: Path, error: Exception) -> _Opened:
    why = reason(path, error)
    problem = (
        f"the history {path} cannot be written ({why}); what is learned now lasts until the model is closed"
    )
    try:
        return Store(connect_read_only(path)) if path.is_file() else None, False, problem
    except (OSError, sqlite3.Error, StorageError):
        return None, False, problem
