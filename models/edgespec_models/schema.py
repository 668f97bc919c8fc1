"""Checks of values by their annotations, for options, arguments, manifests and other files.

    threads: Annotated[int, within(0, 64)] = 0

A dataclass of options checks itself as it is made (:class:`Checked`), a function its arguments before it
runs (:func:`checked`), and :func:`read` makes dataclasses of JSON and TOML. Numbers are never True or False,
and finite. Messages say what was given and what is allowed.
"""

import inspect
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

from edgespec_models import storage
from edgespec_models.errors import EdgespecError, RequestError

T = TypeVar("T")
P = ParamSpec("P")


class Limit(NamedTuple):
    """A condition on a value besides its type: a test, and the same in words; of numbers the ends."""

    fits: Callable[[Any], bool]
    words: str
    low: float | None = None
    high: float | None = None


def within(
    low: float | None = None, high: float | None = None, note: str = "", *, above: float = -math.inf
) -> Limit:
    """A number from ``low``, or ``above`` it, to ``high``."""
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    limits = {"from": low, "above": None if above == -math.inf else above, "to": high}
    words = [f"{word} {limit}" for word, limit in limits.items() if limit is not None]
    return Limit(lambda value: least <= value <= most and value > above, " ".join(words) + note, low, high)


def length(least: int, most: int = 2**31) -> Limit:
    """A number of items of a list, or of characters of a text or path."""
    words = f"of length {least} to {most}" if most < 2**31 else f"of length {least} or more"
    return Limit(lambda value: least <= len(value if isinstance(value, tuple) else str(value)) <= most, words)


def matching(pattern: str, words: str = "") -> Limit:
    """A text that matches ``pattern``."""
    return Limit(lambda value: re.fullmatch(pattern, value) is not None, words or f"of the form {pattern}")


def one_of(names: Sequence[str]) -> Limit:
    """One of these texts."""
    return Limit(lambda value: value in names, f"out of {', '.join(map(repr, names))}")


def shown(value: object) -> str:
    """``value`` for messages: never long, and without an error of its own."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    try:
        return short.repr(value)[:200]
    except Exception:  # noqa: BLE001 - whatever a foreign __repr__ raises, and numbers of 4,300 digits
        return f"a {type(value).__name__} that cannot be shown"


def lone_surrogate(text: str) -> str:
    """The reason why tokenizers cannot read ``text``, to stand behind its name; empty if they can."""
    half = re.search("[\ud800-\udfff]", text)
    if half is None:
        return ""
    return (
        f" has a lone surrogate, U+{ord(half[0]):04X}, at position {half.start()}: half of a character; "
        "remove it, or replace it (in Python text.encode('utf-8', 'replace').decode() does)"
    )


def allowed(cls: type) -> dict[str, str]:
    """The allowed values of each field of the dataclass, in words."""
    return {name: kind.allowed for name, kind in _fields(cls, False).items()}


def described(cls: type) -> dict[str, str]:
    """What the dataclass's docstring says of each attribute."""
    _, _, listed = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    listed = re.split(r"\n\n(?=\S)", listed)[0]
    items = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", listed, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in items}


def read(cls: type[T], value: object, where: str, error: type[EdgespecError], remedy: str) -> T:
    """The dataclass ``cls`` from a JSON or TOML value; unknown and missing keys are refused.

    Raises:
        EdgespecError: of the class ``error``. It has ``where``, the place in it, the fault, and ``remedy``.
    """
    kind: Any = cls
    try:
        taken: T = _kind(kind, True).take(value, "")
    except _WrongError as wrong:
        refusal = error(f"{where}: {wrong}. {remedy}.")
        refusal.field = wrong.place
        raise refusal from wrong
    return taken


def read_text(path: Path, error: type[EdgespecError], remedy: str, *, encoding: str = "utf-8") -> str:
    """The text of an ordinary file of at most 256 MiB. Raises ``error`` if it cannot be read."""
    try:
        return storage.read_text(path, encoding, 256 << 20)
    except (OSError, UnicodeDecodeError) as failed:
        raise error(f"cannot read {path}: {failed}. {remedy}.") from failed


def parse(text: str, where: str, error: type[EdgespecError], remedy: str) -> Any:
    """The value of a JSON text. Raises ``error`` if the text is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as failed:
        raise error(f"{where} is not JSON ({failed}). {remedy}.") from failed


def no_number(name: str) -> None:
    """Refuse Infinity and NaN, as ``parse_constant`` of :func:`json.loads`."""
    raise ValueError(f"{name} is no JSON number")


def read_lines(cls: type[T], path: Path, remedy: str) -> list[T]:
    """Dataclasses of a file of JSON Lines, whose lines may have further keys.

    Raises RequestError for a wrong line.
    """
    kind: Any = cls
    # Not splitlines(): JSON texts may hold U+2028, which is a line break there and not here.
    lines = enumerate(read_text(path, RequestError, remedy, encoding="utf-8-sig").split("\n"), start=1)
    places = {f"{path}, line {number}": line for number, line in lines if line.strip()}
    items = []
    for where, line in places.items():
        value = parse(line, where, RequestError, remedy)
        if isinstance(value, dict):
            value = {field.name: value[field.name] for field in fields(kind) if field.name in value}
        items.append(read(cls, value, where, RequestError, remedy))
    return items


def check_fields(instance: object, error: type[EdgespecError] = RequestError) -> None:
    """Check a dataclass's own fields, from ``__post_init__``: lists become tuples, numpy's numbers Python's.

    Raises:
        EdgespecError: of the class ``error``, naming the field.
    """
    cls: Any = type(instance)
    kinds = _fields(cls, False)
    for name, value in _named(kinds, {name: getattr(instance, name) for name in kinds}, error).items():
        object.__setattr__(instance, name, value)  # the dataclass may be frozen


class Checked:
    """A dataclass that checks its fields when it is made; RequestError names the wrong field."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Check a function's annotated arguments before it runs.

    Too many arguments, or unknown names, raise TypeError, as everywhere in Python.

    Raises:
        RequestError: an argument is not what its annotation says.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checking(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(*args, **kwargs)
        kinds = _parameters(function)
        arguments = {name: value for name, value in bound.arguments.items() if name in kinds}
        bound.arguments |= _named(kinds, arguments, RequestError)
        return function(*bound.args, **bound.kwargs)

    return checking


class _WrongError(Exception):
    """A value does not fit its annotation; ``place`` is its place in lists and tables."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place} {problem}".lstrip())
        self.place, self.problem = place, problem


class _Kind(NamedTuple):
    """An annotation: the allowed values in words, and a function that reads a value at a place."""

    allowed: str
    take: Callable[[Any, str], Any]

    def wrong(self, value: object, place: str) -> _WrongError:
        """The error, with the allowed values."""
        return _WrongError(place, f"is {shown(value)}; allowed: {self.allowed}")


def _simple(allowed: str, fits: Callable[[Any], bool], convert: Callable[[Any], Any] | None = None) -> _Kind:
    def take(value: Any, place: str) -> Any:
        if not fits(value):
            raise kind.wrong(value, place)
        return convert(value) if convert else value

    kind = _Kind(allowed, take)
    return kind


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


_PLAIN: Mapping[object, _Kind] = {
    type(None): _simple("None", lambda value: value is None),
    bool: _simple("True or False", lambda value: isinstance(value, bool)),
    int: _simple("a whole number", _is_whole, int),
    float: _simple("a number", _is_finite, float),
    str: _simple("a text", lambda value: isinstance(value, str)),
    Callable: _simple("a function", callable),
    Any: _simple("anything", lambda _: True),
}


@cache
def _kind(annotation: Any, reading: bool) -> _Kind:
    """``reading`` makes dataclasses of tables; otherwise they must be there already."""
    origin, args = get_origin(annotation), get_args(annotation)
    plain = annotation if origin is None else origin
    if plain in _PLAIN:
        return _PLAIN[plain]
    if origin is Annotated:
        return _limited(_kind(args[0], reading), args[1])
    if origin in (Union, UnionType):
        return _either([_kind(arg, reading) for arg in args])
    if origin is Literal:
        known = {(type(arg), arg) for arg in args}
        return _simple(" or ".join(map(repr, args)), lambda v: v.__hash__ and (type(v), v) in known)
    if origin in (tuple, Sequence):
        return _list_of(_kind(args[0], reading))
    if origin is Mapping:  # the keys of JSON and TOML are texts, whatever they stand for
        return _table_of(_kind(str if reading else args[0], reading), _kind(args[1], reading))
    if reading and is_dataclass(plain):
        return _object_of(plain)
    return _simple(f"a {plain.__name__}", lambda value: isinstance(value, plain))


def _limited(inner: _Kind, limit: Limit) -> _Kind:
    def take(value: Any, place: str) -> Any:
        try:
            taken = inner.take(value, place)
        except _WrongError as error:
            raise error if error.place != place else kind.wrong(value, place) from None
        if not limit.fits(taken):
            raise kind.wrong(value, place)
        return taken

    kind = _Kind(f"{inner.allowed} {limit.words}", take)
    return kind


def _either(kinds: Sequence[_Kind]) -> _Kind:
    def take(value: Any, place: str) -> Any:
        within: _WrongError | None = None
        for member in kinds:
            try:
                return member.take(value, place)
            except _WrongError as error:
                within = error if error.place != place and within is None else within
        raise within or kind.wrong(value, place)

    kind = _Kind(" or ".join(member.allowed for member in kinds), take)
    return kind


def _list_of(item: _Kind) -> _Kind:
    is_list = _simple(f"a list, each item {item.allowed}", lambda value: isinstance(value, list | tuple))

    def take(value: Any, place: str) -> tuple[Any, ...]:
        return tuple(item.take(part, f"{place}[{at}]") for at, part in enumerate(is_list.take(value, place)))

    return _Kind(is_list.allowed, take)


def _table_of(key: _Kind, item: _Kind) -> _Kind:
    allowed = f"a table, each key {key.allowed}, each value {item.allowed}"
    is_table = _simple(allowed, lambda value: isinstance(value, Mapping))

    def take(value: Any, place: str) -> dict[Any, Any]:
        return {
            key.take(name, f"{place}[key {shown(name)}]"): item.take(part, f"{place}[{shown(name)}]")
            for name, part in is_table.take(value, place).items()
        }

    return _Kind(allowed, take)


def _object_of(cls: Any) -> _Kind:
    required = {field.name for field in fields(cls) if field.default is field.default_factory}
    allowed = f"a table with {', '.join(sorted(required))}"
    is_table = _simple(allowed, lambda value: isinstance(value, cls | Mapping))

    def take(value: Any, place: str) -> Any:
        if isinstance(is_table.take(value, place), cls):
            return value
        kinds, within = _fields(cls, True), f"{place}." if place else ""
        for name in value.keys() - kinds.keys():
            raise _WrongError(f"{within}{shown(name)}", f"is not known; allowed: {', '.join(kinds)}")
        for name in sorted(required - value.keys()):
            raise _WrongError(f"{within}{name}", f"is missing; allowed: {kinds[name].allowed}")
        taken = {name: kinds[name].take(item, f"{within}{name}") for name, item in value.items()}
        try:
            return cls(**taken)
        except EdgespecError as error:  # of what its fields say together
            raise _WrongError(f"{within}{error.field}" if error.field else place, error.problem) from error

    return _Kind(allowed, take)


def _named(
    kinds: Mapping[str, _Kind], values: Mapping[str, object], error: type[EdgespecError]
) -> dict[str, Any]:
    try:
        return {name: kinds[name].take(value, name) for name, value in values.items()}
    except _WrongError as wrong:
        raise error(wrong.problem, wrong.place) from None


@cache
def _fields(cls: Any, reading: bool) -> Mapping[str, _Kind]:
    hints = hints_of(cls, include_extras=True)
    return {field.name: _kind(hints[field.name], reading) for field in fields(cls) if field.init}


@cache
def _parameters(function: Callable[..., object]) -> Mapping[str, _Kind]:
    single = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    hints = hints_of(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: _kind(hints[p.name], False) for p in parameters if p.kind in single and p.name in hints}
