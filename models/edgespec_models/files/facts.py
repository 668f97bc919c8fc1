"""Facts from a model's JSON files, read with care: every value is checked before it is used."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

from edgespec_models.errors import ModelFileError
from edgespec_models.files.impostors import refuse_impostor
from edgespec_models.storage import read_text

T = TypeVar("T")
_LARGEST = 1 << 53  # every whole number below is a float too


class Facts:
    """A JSON object. A key whose value is null counts as missing, as in transformers.

    Every reader returns ``default`` for a missing key. It raises ModelFileError without a default, and for a
    value of another kind.

    ``where`` names the object in messages, such as the file's path. ``names`` are the keys of facts that have
    another name in this object.
    """

    def __init__(
        self, values: Mapping[str, object], where: str, names: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._values, self.where, self._names = values, where, names

    @classmethod
    def read(cls, path: Path) -> Self:
        """The object in a file, empty without the file; ModelFileError if it is no JSON object."""
        where = str(path)
        try:
            values = json.loads(read_text(path, "utf-8-sig"))
        except FileNotFoundError:
            return cls({}, where)
        except (OSError, ValueError, RecursionError) as error:
            refuse_impostor(path)
            raise ModelFileError(f"cannot read {path}: {error}. Download or copy it again.") from error
        if not isinstance(values, dict):
            raise ModelFileError(f"{path} is no JSON object. Download or copy it again.")
        return cls(values, where)

    @property
    def keys(self) -> tuple[str, ...]:
        """The object's keys."""
        return tuple(self._values)

    def value(self, key: str) -> object:
        """The value as it is, or None."""
        return self._values.get(self._names.get(key, key))

    def over(self, others: Mapping[str, object]) -> Self:
        """These facts, and ``others`` for missing keys."""
        stated = {key: value for key, value in self._values.items() if value is not None}
        return type(self)({**others, **stated}, self.where, self._names)

    def changed(self, others: Mapping[str, object]) -> Self:
        """These facts with the values of ``others`` in place of their own."""
        return type(self)({**self._values, **others}, self.where, self._names)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        return self._taken(key, default, int, "a whole number", _is_small)

    def number(self, key: str, default: float | None = None) -> float:
        """A number that is finite and of a size that models have."""
        return float(self._taken(key, default, float, "a number", _is_small))

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        return float(self._taken(key, default, float, "positive", lambda value: 0 < value < _LARGEST))

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        return self._taken(key, default, str, "a text")

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false."""
        return self._taken(key, default, bool, "true or false")

    def section(self, key: str) -> "Facts":
        """An object within; empty where it is missing."""
        empty: dict[str, object] = {}
        return Facts(self._taken(key, empty, dict, "an object"), f"{self.where}, {key}")

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """``count`` numbers; empty where the key is missing."""

        def fits(values: list[object]) -> bool:
            plain = all(type(value) in (int, float) and _is_small(value) for value in values)
            return plain and len(values) in (0, count)

        empty: list[float] = []
        return tuple(map(float, self._taken(key, empty, list, f"a list of {count} numbers", fits)))

    def _taken(
        self,
        key: str,
        default: T | None,
        kind: type[T],
        expected: str,
        fits: Callable[[Any], bool] = lambda value: True,
    ) -> T:
        value: Any = self.value(key)
        value, key = default if value is None else value, self._names.get(key, key)
        if value is None:
            raise ModelFileError(f"{self.where} lacks {key!r}")
        kinds: Any = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool) or not fits(value):
            raise ModelFileError(f"{self.where}: {key} is {value!r:.80}, not {expected}")
        taken: T = value
        return taken


def _is_small(value: Any) -> bool:
    return bool(abs(value) < _LARGEST)
