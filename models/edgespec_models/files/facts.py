"""Facts from a model's JSON files, read with care: every value is checked before it is used."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from edgespec_models.errors import ModelFileError

__all__ = ["Facts"]

_LARGEST = 1 << 53  # every whole number below is a float too


class Facts:
    """A JSON object. A key whose value is null counts as missing, as transformers sees it.

    Every reader returns ``default`` for a missing key and raises ModelFileError where there is none, and
    where the value is of another kind.

    Attributes:
        where: names the object in messages, such as the file's path.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values, self.where = values, where

    @classmethod
    def read(cls, path: Path) -> Self:
        """The object in the file ``path``, empty where there is no such file.

        Raises:
            ModelFileError: unreadable, or not a JSON object.
        """
        where = str(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls({}, where)
        except (OSError, ValueError, RecursionError) as error:
            raise ModelFileError(f"cannot read {path}: {error}. Download or copy it again.") from error
        if not isinstance(values, dict):
            raise ModelFileError(f"{path} is no JSON object. Download or copy it again.")
        return cls(values, where)

    @property
    def keys(self) -> tuple[str, ...]:
        """The object's keys."""
        return tuple(self._values)

    def value(self, key: str) -> object:
        """Whatever is there, or None."""
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _LARGEST:
            raise self._wrong(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number that is finite and no larger than models have."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
            raise self._wrong(key, "a number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self._wrong(key, "positive")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def section(self, key: str) -> "Facts":
        """An object within; empty where it is missing."""
        value = self._present(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return Facts(value, f"{self.where}, {key}")

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """``count`` numbers; empty where the key is missing."""
        value = self._present(key, [])
        kinds = isinstance(value, list) and all(
            type(number) in (int, float) and abs(number) < _LARGEST for number in value
        )
        if not isinstance(value, list) or not kinds or len(value) not in (0, count):
            raise self._wrong(key, f"a list of {count} numbers")
        return tuple(float(number) for number in value)

    def _present(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(f"{self.where} lacks {key!r}")
        return value

    def _wrong(self, key: str, expected: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {key} is {self._values.get(key)!r:.80}, not {expected}")
