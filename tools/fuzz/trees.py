"""Changes to values as JSON has them: the structure-aware half of the fuzzers' mutations.

A value is found by walking down from the top, so that a list of thousands is changed no more often than what
stands beside it.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Final

__all__ = ["Changer", "Plain", "Tree"]

Tree = Any
"""None, a bool, a number, a text, a list of trees or a dictionary of them."""
Plain = Callable[[bytes], bytes]
"""Changes bytes, whatever they mean."""
Way = Callable[[Tree, Random, Plain], Tree]
_STOPS: Final = 0.2  # share of walks that end at a list or table, and not at something in it
_MOST_SPARE: Final = 4000  # parts of the seeds
_LONGEST: Final = 1 << 16
_NUMBERS: Final = (
    0,
    1,
    -1,
    7,
    8,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
)
_STRANGE: Final[tuple[Tree, ...]] = (
    *(None, True, False, *_NUMBERS, 10**30, 10**400, 0.5, -0.0, 1e-320, 1e308),
    *(float("nan"), float("inf"), "", "\0", "\ud800", "\udc80", "é", "日本語", "😀", "\u2581", " ", "a b"),
    *(
        "NaN",
        "1e999",
        "null",
        "..",
        "../x",
        "/",
        "a/b",
        "%d",
        "%s",
        "{",
        "[",
        "<|im_end|>",
        "<0x41>",
        "a" * 5000,
    ),
    *([], {}, [[]], {"": ""}, [0] * 300, ["a"] * 300),
)


class Changer:
    """Changes trees, with parts of other trees at hand.

    Args:
        seeds: trees whose parts may be put into others.
        words: texts that mean something to what is tested.
    """

    def __init__(self, seeds: Sequence[Tree], words: Sequence[str] = ()) -> None:
        found = [part for seed in seeds for part in _parts(seed)]
        self._spare = [*Random(0).sample(found, min(len(found), _MOST_SPARE)), *words] or [""]
        self._words = words
        self._ways: tuple[tuple[type, Way], ...] = (
            (dict, self._table),
            (list, self._list),
            (str, self._text),
        )
        self._keys = sorted({key for part in found if isinstance(part, dict) for key in part}) or [""]

    def changed(self, tree: Tree, random: Random, plain: Plain) -> Tree:
        """A copy with one to four changes."""
        holder = [copy.deepcopy(tree)]
        for _ in range(random.choice((1, 1, 2, 4))):
            parent, key = _walk(holder, random)
            own = next((way for kind, way in self._ways if isinstance(parent[key], kind)), self._number)
            if random.random() < 0.6:
                parent[key] = own(parent[key], random, plain)
            else:
                self._replace(holder, parent, key, random)
        return holder[0]

    def _replace(self, holder: Tree, parent: Tree, key: Any, random: Random) -> None:
        """Something else in its place, or nothing."""
        way = random.randrange(6)
        if way == 0 and parent is not holder:
            del parent[key]
        elif way <= 2:
            parent[key] = copy.deepcopy(random.choice(_STRANGE))
        elif way == 3:
            parent[key] = _nested(parent[key], random)
        elif way == 4:
            other, at = _walk(holder, random)
            parent[key] = copy.deepcopy(other[at])
        else:
            parent[key] = copy.deepcopy(random.choice(self._spare))

    def _table(self, value: dict[str, Tree], random: Random, _: Plain) -> Tree:
        key = random.choice(self._keys) if random.random() < 0.8 else random.choice(("", "\ud800", "a", "0"))
        if value and random.random() < 0.3:
            old = random.choice(list(value))
            return {key if name == old else name: each for name, each in value.items()}
        return value | {key: copy.deepcopy(random.choice((*self._spare[:200], *_STRANGE)))}

    def _list(self, value: list[Tree], random: Random, _: Plain) -> Tree:
        way = random.randrange(5)
        if way == 0:
            return random.sample(value, len(value))
        if way == 1:
            return value[: random.randrange(len(value) + 1)]
        if way == 2:
            return (value * random.choice((2, 3, 50)))[: max(len(value), 3000)]
        item = random.choice(value) if value and way == 3 else random.choice(self._spare)
        at = random.randrange(len(value) + 1)
        return [*value[:at], copy.deepcopy(item), *value[at:]]

    def _text(self, value: str, random: Random, plain: Plain) -> str:
        way = random.randrange(4)
        if way == 0 and self._words:
            at = random.randrange(len(value) + 1)
            return value[:at] + random.choice(self._words) + value[at + random.randrange(3) :]
        if way == 1:
            start, stop = sorted(random.randrange(len(value) + 1) for _ in range(2))
            return (value[:start] + value[start:stop] * random.choice((0, 2, 2, 40)) + value[stop:])[
                :_LONGEST
            ]
        if way == 2:
            words = [each for each in self._spare[:400] if isinstance(each, str)] or [""]
            return value + random.choice(words)
        return plain(value.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogateescape")

    def _number(self, value: Tree, random: Random, _: Plain) -> Tree:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return random.choice(_STRANGE)
        near = (value + 1, value - 1, -value, value * 2, value / 2 if abs(value) < 1e300 else 0, str(value))
        return random.choice((*near, *_NUMBERS))


def _walk(holder: list[Tree], random: Random) -> tuple[Tree, Any]:
    """A random place: what it is in, and where there."""
    parent: Tree = holder
    key: Any = 0
    while True:
        value: Tree = parent[key]
        if (
            not isinstance(value, dict | list)
            or not value
            or (value is not holder[0] and random.random() < _STOPS)
        ):
            return parent, key
        parent, key = (
            value,
            random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value)),
        )


def _nested(value: Tree, random: Random) -> Tree:
    for _ in range(random.choice((1, 1, 2, 70, 300))):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


def _parts(tree: Tree) -> Iterator[Tree]:
    """The tree, and all in it that is not too much to be copied often."""
    left = [tree]
    while left:
        each = left.pop()
        inner = list(each.values()) if isinstance(each, dict) else each if isinstance(each, list) else []
        if len(inner) < 30:
            yield each
        left += inner
