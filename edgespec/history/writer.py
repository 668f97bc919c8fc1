"""Writing to the history's file in the background; whatever happens to the file, decoding goes on."""

import atexit
import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from edgespec.history.memory import Delta
from edgespec.history.ownership import is_damage, reason
from edgespec.history.schema import set_aside
from edgespec.history.store import Scope, Store
from edgespec_models.errors import StorageError

__all__ = ["FLUSH_S", "Writer"]

FLUSH_S: Final = 2.0
"""Seconds after which what was learned is in the file."""
_RETRY_S: Final = 30.0
_MOST_PENDING: Final = 4096  # passages that wait for a disk with room
_LOG = logging.getLogger("edgespec")


class Writer:
    """Collects what happens and merges it into the store, in a thread of its own.

    A file that cannot be written is reported once, in :attr:`problem` and in the log of ``edgespec``, and
    tried again every 30 seconds and at the end. A damaged one is set aside and begun anew, unless nothing in
    it says any more that it is edgespec's.

    Args:
        store: taken over, and closed by :meth:`close`.
        path: the store's file.
        scope: where to.
        text_of: the bytes of tokens; called in the thread.
        flush_s: seconds from the first thing that happens to the transaction that holds it.
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
        self._pending = Delta()
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
                delta, self._pending = self._pending, Delta()
            try:
                if delta:
                    self._merge(delta)
            except BaseException:  # Ctrl-C
                self._put_back(delta)
                raise

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
                self._changed.wait_for(lambda: self._closing or bool(self._pending))
                self._changed.wait_for(lambda: self._closing, self._wait_s())
                if self._closing:
                    return
            self.flush()

    def _wait_s(self) -> float:
        return self._flush_s if self.problem is None else _RETRY_S

    def _merge(self, delta: Delta) -> None:
        if self._damage is not None:
            self._begin_anew(delta, self._damage)
            return
        try:
            self._store.merge(self._scope, delta, self._text_of)
        except sqlite3.Error as error:
            if is_damage(error):
                self._begin_anew(delta, error)
            else:
                why = reason(self._path, error)
                self._postpone(delta, f"the history {self._path} cannot be written ({why}); decoding goes on")
        else:
            self.problem = None

    def _begin_anew(self, delta: Delta, error: sqlite3.Error) -> None:
        self._damage = error
        try:
            self._store.close()
            aside = set_aside(self._path)
            self._store = Store.open(self._path)
            self._store.merge(self._scope, delta, self._text_of)
        except (sqlite3.Error, OSError, StorageError) as again:
            self._postpone(
                delta, f"the history {self._path} is damaged ({error}) and cannot be replaced ({again})"
            )
        else:
            self._damage = None
            self._report(f"the history {self._path} was damaged ({error}); it is {aside or 'replaced'} now")

    def _postpone(self, delta: Delta, problem: str) -> None:
        self._put_back(delta)
        self._report(problem)

    def _put_back(self, delta: Delta) -> None:
        """Have it stored with what comes."""
        with self._changed:
            if len(delta.changes) + len(self._pending.changes) <= _MOST_PENDING:
                delta.add(self._pending)
                self._pending = delta

    def _report(self, problem: str) -> None:
        if self.problem is None:
            _LOG.warning("%s", problem)
        self.problem = problem
