"""Histories made for tests."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, closing
from functools import cache
from pathlib import Path

from edgespec.history.memory import Delta, Snapshot
from edgespec.history.passages import Cutter, Passage
from edgespec.history.store import Scope, Store
from edgespec.history.use import HistoryUse, open_use
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import round_of

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


def cut(tokens: Iterable[int]) -> list[Passage]:
    """The passages of a whole answer."""
    cutter = Cutter()
    return [*cutter.push(tokens), *cutter.finish()]


def passage_of(number: int, length: int = 20) -> Passage:
    """One that begins with the token ``number``."""
    return Passage((), (number, *range(length - 1)))


@cache
def tokenizer() -> Tokenizer:
    """Of 404 tokens."""
    return Tokenizer.from_json(byte_level_json(), vocab_size=404)


def used(path: Path, scope: Scope = SCOPE) -> AbstractContextManager[HistoryUse]:
    """The history in use, closed with the context."""
    return closing(open_use(path, scope, tokenizer()))


def merge(path: Path, *deltas: Delta, scope: Scope = SCOPE) -> None:
    """Have the file hold ``deltas`` too."""
    with closing(Store.open(path)) as store:
        for delta in deltas:
            store.merge(scope, delta, text_of)


def stored(path: Path, scope: Scope = SCOPE) -> Snapshot:
    """What the file holds."""
    with closing(Store.open(path)) as store:
        return store.read(scope)


def learn(use: HistoryUse, tokens: Sequence[int]) -> None:
    """One request."""
    drafter = use.begin()
    drafter.observe(round_of(*tokens))
    drafter.close()
