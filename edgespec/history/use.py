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
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final

from edgespec.decoding.draft import Remarks
from edgespec.drafting.pricing import Guard
from edgespec.history.database import connect_read_only, is_damage, reason, set_aside
from edgespec.history.drafter import HistoryDrafter
from edgespec.history.memory import Delta, DrafterKey, Memory, Snapshot, Tell
from edgespec.history.store import MAX_TOKENS, Scope, Store
from edgespec.learning.gains import Table
from edgespec.learning.trainer import Trainer
from edgespec.learning.tuning import Tuning
from edgespec_models.errors import StorageError
from edgespec_models.text.tokenizer import Tokenizer

FLUSH_S: Final = 2.0
"""Seconds until what was learned is in the file."""
_RETRY_S: Final = 30.0
_MOST_PENDING: Final = 4096  # passages that may wait for a disk with room
_TELL_S: Final = 60.0
"""Seconds between writings of a drafter's correction, half a megabyte each."""
_UNDONE: Final = "what the drafter learned: trained, it was right less often than before"
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

    def _begin_anew(self, delta: Delta, error: sqlite3.Error) -> bool:
        self._damage = error
        self._store.close()
        try:
            taught = self._store.taught
            self._store, problem = _begun_anew(self._path, error)
            self._store.taught |= taught  # which the new file lacks
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
        self._tell: Tell = (lambda note: None) if writer is None else writer.tell
        self.memory = Memory(snapshot, max_tokens=MAX_TOKENS, tell=self._tell)
        self._writer, self._problem = writer, problem
        self._tables = snapshot.corrections
        self._trainers: dict[DrafterKey, Trainer] = {}
        self._told_at = monotonic()
        self._undone = 0  # how often corrections had been put back when the last request began

    @property
    def problem(self) -> str | None:
        """Why the file cannot be read or written, or a drafter cannot learn; None without a problem."""
        of_file = (self._writer.problem if self._writer is not None else None) or self._problem
        return of_file or next((t.problem for t in self._trainers.values() if t.problem), None)

    def begin(self, guard: Guard | None = None, remarks: Remarks | None = None) -> HistoryDrafter:
        """The source for the next request, which also learns its answer. Other requests may run.

        ``guard`` watches whether proposals from earlier answers pay. ``remarks`` receive problems of the
        history, and what was put back.
        """
        remarks = remarks or Remarks()
        if monotonic() - self._told_at >= _TELL_S:
            self._tell_lessons()
        before, self._undone = self._undone, sum(trainer.undone for trainer in self._trainers.values())
        remarks.rolled_back = (_UNDONE,) if self._undone > before else ()
        return HistoryDrafter(self.memory, guard, remarks=remarks, problem=lambda: self.problem)

    def trainer(
        self, drafter: DrafterKey, begin: Callable[[Table | None], Tuning], *, share: float
    ) -> Trainer:
        """The trainer of a drafter, which begins with the stored correction.

        ``begin`` makes the tuning from that. ``share`` is the share of the time that training may take.
        """
        if drafter not in self._trainers:
            table = self._tables.get(drafter.digest)
            self._trainers[drafter] = trainer = Trainer(partial(begin, table), share=share)
            if table is not None:
                trainer.recall()
        return self._trainers[drafter]

    def warn(self, problem: str) -> None:
        """Report a problem of the history in the log and in every later answer."""
        self._problem = self._problem or problem
        _LOG.warning("%s", problem)

    def flush(self) -> None:
        """Store what was learned."""
        self._tell_lessons()
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Store what was learned and close the file."""
        for trainer in self._trainers.values():
            trainer.close()
        self._tell_lessons()
        if self._writer is not None:
            self._writer.close()

    def _tell_lessons(self) -> None:
        self._told_at = monotonic()
        for drafter, trainer in self._trainers.items():
            lesson = trainer.lesson()
            if lesson is not None:
                self._tell(partial(Delta.learned, drafter=drafter, lesson=lesson))


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
