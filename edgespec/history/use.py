"""A history in use by a loaded model: what it knows in memory, what it learns on its way to the file.

The file is written in the background, and whatever happens to it, decoding goes on.
"""

import atexit
import logging
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
"""Seconds after which what was learned is in the file."""
_RETRY_S: Final = 30.0
_MOST_PENDING: Final = 4096  # passages that wait for a disk with room
_TELL_S: Final = 60.0
"""Seconds after which what a drafter learned is on its way to the file: half a megabyte each time."""
_UNDONE: Final = "what the drafter learned: trained, it was right less often than before"
_LOG = logging.getLogger("edgespec")
_Opened = tuple[Store | None, bool, str | None]
"""A file as far as it could be opened, whether it can be written, and what keeps it from being used."""


class Writer:
    """Collects what happens and merges it into the store, in a thread of its own.

    A file that cannot be written is reported once, in :attr:`problem` and in the log of ``edgespec``, and
    tried again every 30 seconds and at the end. A damaged one is set aside and begun anew, unless nothing in
    it says any more that it is edgespec's.

    ``store`` is taken over, and closed by :meth:`close`. ``text_of``, the bytes of tokens, is called in the
    thread. ``flush_s`` are seconds from the first thing that happens to the transaction that holds it.
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
        self._pending, self._late = Delta(), deque[Delta]()  # late: what could not be written yet
        self._changed = threading.Condition()  # guards the pending delta and the end
        self._writing = threading.Lock()  # guards the store
        self._closing = self._closed = False
        self._damage: sqlite3.Error | None = None  # until the file is replaced
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="edgespec-history", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def tell(self, note: Callable[[Delta], None]) -> None:
        """Have ``note`` write down what happened; it is stored soon."""
        with self._changed:
            sleeping = not self._pending
            note(self._pending)
            if sleeping:  # else the thread knows, and waits for more
                self._changed.notify()

    def flush(self) -> None:
        """Store what happened so far, now."""
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
        """Store the rest and end the thread. May be called again, after an interrupt too."""
        if self._closed:
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
        """Whether it could be stored."""
        if self._damage is not None:
            return self._begin_anew(delta, self._damage)
        try:
            self._store.merge(self._scope, delta, self._text_of)
        except sqlite3.Error as error:
            if is_damage(error):
                return self._begin_anew(delta, error)
            why = reason(self._path, error)
            self._report(f"the history {self._path} cannot be written ({why}); decoding goes on")
            return False
        return True

    def _begin_anew(self, delta: Delta, error: sqlite3.Error) -> bool:
        self._damage = error
        self._store.close()
        try:
            self._store, problem = _begun_anew(self._path, error)
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
    """What one model uses of one history. One thread at a time.

    ``writer`` is None where nothing can be written; ``problem`` is why not, or what happened to the file.
    """

    def __init__(self, snapshot: Snapshot, writer: Writer | None, problem: str | None) -> None:
        self._tell: Tell = (lambda note: None) if writer is None else writer.tell
        self.memory = Memory(snapshot, max_tokens=MAX_TOKENS, tell=self._tell)
        self._writer, self._problem = writer, problem
        self._tables = snapshot.corrections
        self._trainers: dict[DrafterKey, Trainer] = {}
        self._told_at = monotonic()
        self._undone = 0  # times that what drafters learned was put back, when the last request began

    @property
    def problem(self) -> str | None:
        """What keeps the file from being read or written, or a drafter from learning; None if nothing."""
        of_file = (self._writer.problem if self._writer is not None else None) or self._problem
        return of_file or next((t.problem for t in self._trainers.values() if t.problem), None)

    def begin(self, guard: Guard | None = None, remarks: Remarks | None = None) -> HistoryDrafter:
        """What the next request drafts with and tells its answer to; others may be under way.

        ``guard`` watches whether proposals from earlier answers pay; ``remarks`` are told what keeps the
        history from being used, and what of it was put back.
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
        """What trains a drafter on the target's answers; what it was taught before is recalled.

        ``begin`` makes the tuning from what is known; ``share`` is that of the time that training may take.
        """
        if drafter not in self._trainers:
            table = self._tables.get(drafter.digest)
            self._trainers[drafter] = trainer = Trainer(partial(begin, table), share=share)
            if table is not None:
                trainer.recall()
        return self._trainers[drafter]

    def warn(self, problem: str) -> None:
        """Tell the log, and every answer from now on, that something of the history cannot be used."""
        self._problem = self._problem or problem
        _LOG.warning("%s", problem)

    def flush(self) -> None:
        """Store what was learned so far."""
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
    """Open a history, making it if need be; without fail.

    A damaged file is set aside and a new one begun; one that cannot be written is read; what is not
    edgespec's is left alone; where nothing is to be had the model learns until it is closed.
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
    """A new file in place of a damaged one, and what to say of it; StorageError where that cannot be."""
    try:
        aside = set_aside(path)
        return Store.open(path), f"the history {path} was damaged ({error}); it is {aside or 'replaced'} now"
    except (sqlite3.Error, OSError, StorageError) as again:
        problem = f"the history {path} is damaged ({error}) and cannot be replaced ({again})"
        raise StorageError(problem) from again


def _open_unwritable(path: Path, error: Exception) -> _Opened:
    why = reason(path, error)
    problem = f"the history {path} cannot be written ({why}); what is learned now is lost at the end"
    try:
        return Store(connect_read_only(path)) if path.is_file() else None, False, problem
    except (OSError, sqlite3.Error, StorageError):
        return None, False, problem
