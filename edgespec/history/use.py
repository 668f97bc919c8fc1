"""A history in use by a loaded model: what it knows in memory, what it learns on its way to the file."""

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final

from edgespec.decoding.draft import Remarks
from edgespec.drafting.experience import Experience, Outcome
from edgespec.drafting.pricing import Guard
from edgespec.history.corrections import DrafterKey
from edgespec.history.drafter import HistoryDrafter
from edgespec.history.entries import Entry
from edgespec.history.memory import Delta, Memory, Snapshot
from edgespec.history.ownership import is_damage, reason
from edgespec.history.schema import connect_read_only, set_aside
from edgespec.history.store import MAX_TOKENS, Scope, Store
from edgespec.history.writer import Writer
from edgespec.learning.lesson import Table
from edgespec.learning.trainer import Trainer
from edgespec.learning.tuning import Tuning
from edgespec_models.errors import StorageError
from edgespec_models.text.tokenizer import Tokenizer

__all__ = ["HistoryUse", "open_use"]

_TELL_S: Final = 60.0
"""Seconds after which what a drafter learned is on its way to the file: half a megabyte each time."""
_UNDONE: Final = "what the drafter learned: trained, it was right less often than before"
_LOG = logging.getLogger("edgespec")


@dataclass(slots=True)
class _File:
    """A file, as far as it could be opened."""

    store: Store | None = None
    writable: bool = False
    problem: str | None = None


class HistoryUse:
    """What one model uses of one history. One request at a time.

    Args:
        snapshot: what is known.
        writer: None where nothing can be written.
        problem: why not, or what happened to the file.
    """

    def __init__(self, snapshot: Snapshot, writer: Writer | None, problem: str | None) -> None:
        if writer is None:
            self.memory = Memory(snapshot, max_tokens=MAX_TOKENS)
        else:
            self.memory = Memory(snapshot, max_tokens=MAX_TOKENS, tell=writer.tell)
        self._writer, self._problem = writer, problem
        self._records = snapshot.records
        self._experiences: dict[str, Experience] = {}
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
        """What the next request drafts with and tells its answer to; the one before has ended.

        Args:
            guard: watches whether proposals from earlier answers pay; None watches nothing.
            remarks: where it is written what keeps the history from being used, and what of it was put back.
        """
        remarks = remarks or Remarks()
        if monotonic() - self._told_at >= _TELL_S:
            self._tell_lessons()
        before, self._undone = self._undone, sum(trainer.undone for trainer in self._trainers.values())
        remarks.rolled_back = (_UNDONE,) if self._undone > before else ()
        return HistoryDrafter(self.memory, guard, remarks=remarks, problem=lambda: self.problem)

    def experience(self, drafter: str) -> Experience:
        """What reading prompts gained a drafter, named by its digest, and goes on gaining."""
        if drafter not in self._experiences:
            tell = partial(self._tell, drafter)
            self._experiences[drafter] = Experience(self._records.get(drafter), tell=tell)
        return self._experiences[drafter]

    def trainer(
        self, drafter: DrafterKey, begin: Callable[[Table | None], Tuning], *, share: float
    ) -> Trainer:
        """What trains a drafter on the target's answers; what it was taught before is recalled.

        Args:
            drafter: who is trained.
            begin: makes the tuning from what is known.
            share: of the time that training may take; above 0.
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
            if lesson is not None and self._writer is not None:
                self._writer.tell(partial(Delta.learned, drafter=drafter, lesson=lesson))

    def _tell(self, drafter: str, outcome: Outcome) -> None:
        if self._writer is not None:
            self._writer.tell(partial(Delta.gained, drafter=drafter, outcome=outcome))


def open_use(path: Path, scope: Scope, tokenizer: Tokenizer) -> HistoryUse:
    """Open a history, making it if need be; without fail.

    A damaged file is set aside and a new one begun; one that cannot be written is read; what is not
    edgespec's is left alone; where nothing is to be had the model learns until it is closed.
    :attr:`HistoryUse.problem` and the log say so.
    """
    opened = _open(path)
    snapshot = Snapshot()
    if opened.store is not None:
        try:
            snapshot = opened.store.read(scope)
        except sqlite3.Error as error:
            opened.problem = f"the history {path} cannot be read ({error}); it is not used"
            opened.writable = False
    # An import may hold what this model cannot read.
    snapshot.entries = [e for e in snapshot.entries if _spells(e, tokenizer.vocab_size)]
    if opened.problem is not None:
        _LOG.warning("%s", opened.problem)
    writer = None
    if opened.store is not None and opened.writable:
        writer = Writer(opened.store, path, scope=scope, text_of=tokenizer.bytes_of)
    elif opened.store is not None:
        opened.store.close()
    return HistoryUse(snapshot, writer, opened.problem)


def _spells(entry: Entry, vocab_size: int) -> bool:
    return max((*entry.passage.lead, *entry.passage.body)) < vocab_size


def _open(path: Path) -> _File:
    try:
        return _File(Store.open(path), writable=True)
    except StorageError as error:
        return _File(problem=f"{error}. The history is not used")
    except (OSError, sqlite3.Error) as error:
        if is_damage(error):
            return _begin_anew(path, error)
        return _open_unwritable(path, error)


def _begin_anew(path: Path, error: BaseException) -> _File:
    try:
        aside = set_aside(path)
        problem = f"the history {path} was damaged ({error}); it is {aside or 'replaced'} now"
        return _File(Store.open(path), writable=True, problem=problem)
    except (OSError, sqlite3.Error, StorageError) as again:
        return _File(problem=f"the history {path} is damaged ({error}) and cannot be replaced ({again})")


def _open_unwritable(path: Path, error: Exception) -> _File:
    why = reason(path, error)
    problem = f"the history {path} cannot be written ({why}); what is learned now is lost at the end"
    if not path.is_file():
        return _File(problem=problem)
    try:
        return _File(Store(connect_read_only(path)), problem=problem)
    except (OSError, sqlite3.Error, StorageError):
        return _File(problem=problem)
