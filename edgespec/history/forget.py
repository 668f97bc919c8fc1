"""Finding a text in what was learned, also where it runs on from one passage into the next."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from edgespec.history.passages import LEAD
from edgespec.history.store import Learned, Scope

__all__ = ["containing", "readable"]

_Tail = tuple[Scope, tuple[int, ...]]
_MOST_CHAINED: Final = 64  # passages that one text may run through


def readable(data: bytes) -> str:
    """Bytes of tokens as text; what is no UTF-8 is left out."""
    return data.decode("utf-8", errors="ignore")


def containing(text: str, learned: Sequence[Learned]) -> list[Learned]:
    """The passages that hold ``text``, with what stands before them, or a part of an occurrence.

    Upper and lower case are the same.
    """
    wanted = text.casefold()
    following = _following(learned)
    found: dict[int, Learned] = {}
    for passage in learned:
        for chain in _chains([passage], wanted, following):
            found.update((id(each), each) for each in chain)
    return list(found.values())


def _following(learned: Iterable[Learned]) -> dict[_Tail, list[Learned]]:
    following: dict[_Tail, list[Learned]] = defaultdict(list)
    for each in learned:
        if each.entry.passage.lead:
            following[each.scope, each.entry.passage.lead].append(each)
    return following


def _chains(
    chain: list[Learned], wanted: str, following: dict[_Tail, list[Learned]]
) -> Iterable[list[Learned]]:
    """Runs of passages, beginning with ``chain``, that hold ``wanted`` from their first on."""
    joined = _folded(chain[0].before + b"".join(each.text for each in chain))
    if wanted in joined:
        return [chain]
    passage = chain[-1].entry.passage
    appended = len(_folded(b"".join(each.text for each in chain[1:])))
    longest = min(len(wanted) - 1, len(joined))
    begun = any(joined.endswith(wanted[:length]) for length in range(appended + 1, longest + 1))
    if not begun or len(chain) == _MOST_CHAINED:
        return []
    tail = (*passage.lead, *passage.body)[-LEAD:]
    return [
        found
        for each in following.get((chain[0].scope, tail), ())
        for found in _chains([*chain, each], wanted, following)
    ]


def _folded(data: bytes) -> str:
    return readable(data).casefold()
