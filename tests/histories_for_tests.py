"""Histories made for tests."""

from collections.abc import Sequence
from pathlib import Path

from edgespec.history.memory import Delta, Snapshot
from edgespec.history.passages import Passage
from edgespec.history.store import Scope, Store
from edgespec.history.use import HistoryUse
from tests.toy import round_of

SCOPE = Scope("target", "digest", "mail")
OTHERS = (Scope("other", "digest", "mail"), Scope("target", "other", "mail"), Scope("target", "digest"))


def text_of(tokens: Sequence[int]) -> bytes:
    """A byte for every token."""
    return b"x" * len(tokens)


def delta_of(*passages: Passage) -> Delta:
    """Of ``passages`` written."""
    delta = Delta()
    for passage in passages:
        delta.wrote(passage)
    return delta


def passage_of(number: int, length: int = 20) -> Passage:
    """One that begins with the token ``number``."""
    return Passage((), (number, *range(length - 1)))


def stored(path: Path, scope: Scope = SCOPE) -> Snapshot:
    """What the file holds."""
    store = Store.open(path)
    snapshot = store.read(scope)
    store.close()
    return snapshot


def learn(use: HistoryUse, tokens: Sequence[int]) -> None:
    """One request."""
    drafter = use.begin()
    drafter.observe(round_of(*tokens))
    drafter.close()
