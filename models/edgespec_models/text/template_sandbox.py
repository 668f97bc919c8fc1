"""Jinja's sandbox with limits: every chat template ends soon and takes little memory.

Jinja's own sandbox keeps templates from Python's objects and bounds ``range``. This one compiles templates to
Python that counts its steps: each block, comparison, operator, subscript, test, filter and call, and each
list, table, slice and joined text is one. At steps the clock is read, and the new value counts against a
limit for one value and a limit for all. So a single step has to be short: its time is at most about linear in
the sizes of its operands. Operations with results far larger than their inputs (``*``, ``**``, ``%``,
``format``, ``join``, ``replace``, ``indent``) are estimated before they run. Operations that can take the
product of two sizes get short arguments (``strip``, ``rsplit``) or keys that cannot share a hash (tables,
``unique``). The few other filters, and the other methods, are left out. So the limits hold in every thread
and on every platform, unlike signals, trace functions and limits of processes.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from string import Formatter
from time import thread_time
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.filters import do_unique, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context, pass_environment

from edgespec_models.errors import Closed
from edgespec_models.text.marked_text import STAND_INS, marked

LONGEST_SOURCE: Final = 1 << 17
_LARGEST: Final = 1 << 18  # of one value, in characters and items, and four times the conversation's
_ALL: Final = 64  # so many of the largest, all values together
_SECONDS: Final = 4.0  # of this thread, in which memory may be collected too
_SECONDS_OF_PAIR: Final = 20e-6  # Gemma 4's template compares each message with all behind it
_MOST_SECONDS: Final = 60.0
_LEFT_OUT: Final = ("batch", "center", "pprint", "slice", "striptags", "urlize", "wordwrap")
_METHODS: Final = frozenset(
    re.findall(
        r"\w+",
        "capitalize casefold copy count endswith find format format_map get index isalnum isalpha isascii "
        "isdecimal isdigit islower isnumeric isspace istitle isupper items join keys lower lstrip partition "
        "removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith "
        "strip swapcase title upper values",
    )
)
"""Attributes of Python's own values that templates may read."""
_PRODUCTS: Final = frozenset(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit", "trim"))
"""Methods and a filter that may compare each character of a text with each of their argument."""
_SHORT: Final = 64  # characters of such an argument
_KEY_BITS: Final = 60  # Python's hash of a larger number is that of a smaller one
_BITS: Final = 4096  # of a whole number
_OF_JINJA: Final = ("_loop_vars", "_block_vars")  # variables around a call, which it is not given
_WIDE_PERCENT: Final = re.compile(r"%[^a-zA-Z%(]*(\d{4}|\*)|%\(.*(\d{4}|\*)", re.DOTALL)
_WIDE_FIELD: Final = re.compile(r"\d{4}|\{")
_FOREIGN: Final = re.compile(f"[^\\x00-\\x7f{STAND_INS}]+")  # all that is not ASCII, but for stand-ins


class _Budget:
    """The remaining budget of a rendering."""

    def __init__(self, source: str, texts: Collection[Mapping[str, object]], share: float) -> None:
        self._known: dict[int, int] = {}
        self._largest = 1 << 62
        self._known = {id(text): self.size(text) for text in texts}
        total = sum(self._known.values())
        self._largest = _LARGEST + len(source) + 4 * total
        self._left = _ALL * self._largest
        seconds = _SECONDS + total / 1e6 + _SECONDS_OF_PAIR * len(texts) ** 2
        self._seconds = min(seconds, _MOST_SECONDS) * share
        self._ends = thread_time() + self._seconds
        self._turn = 0

    def step(self, cost: int = 0) -> bool:
        """Count a step that keeps so many characters, an item of a list as 8."""
        if cost:
            self._left -= cost + 8
            if self._left < 0:
                raise SecurityError(
                    f"it makes more than {_ALL * self._largest:,} characters, the most it may"
                )
        self._turn += 1 + cost // 64
        if self._turn >= 8:  # reading the clock at every step would cost more than most steps
            self._turn = 0
            if thread_time() > self._ends:
                raise SecurityError(f"it takes more than {self._seconds:.1f} s, the most it may")
        return True

    def allow(self, size: int) -> None:
        """Check a size before its value is made."""
        if size > self._largest:
            raise SecurityError(f"a value has more than {self._largest:,} characters or items, the limit")

    def take(self, value: Any) -> Any:
        """Count a new value. A list costs its items, but has the size of its whole content."""
        self.allow(self.size(value))
        if isinstance(value, str):
            self.step(len(value))
            return marked(value) if type(value) is str else value
        self.step(8 * len(value) if isinstance(value, list | tuple | dict) else 0)
        return value

    def size(self, value: object) -> int:
        """Characters and items of a value with its content; above the limit any number above it."""
        total, left = 0, [value]
        while left and total <= self._largest:
            item = left.pop()
            total += 1
            if isinstance(item, str):
                total += len(item)
            elif id(item) in self._known:
                total += self._known[id(item)]
            elif isinstance(item, int):
                _check_bits(item.bit_length())
                total += item.bit_length() // 4
            elif isinstance(item, Mapping):
                left += (*item.keys(), *item.values())
            elif isinstance(item, Namespace):
                if item is not value:  # it is mutable, so its container could grow after it was measured
                    raise SecurityError("it puts a namespace into another value; allowed: into a variable")
                left.append(item._Namespace__attrs)
            elif isinstance(item, Collection):
                left += () if isinstance(item, range) else item
            elif item is not None and not isinstance(item, float):
                total += len(repr(item))  # a macro's has its name
        return total


_BUDGET: ContextVar[_Budget] = ContextVar("_BUDGET")


@contextmanager
def limited(source: str, texts: Collection[Mapping[str, object]], share: float = 1.0) -> Iterator[None]:
    """Allow rendering of templates of a :class:`Sandbox` within, in a ``share`` of the time."""
    token = _BUDGET.set(_Budget(source, texts, share))
    try:
        yield
    finally:
        _BUDGET.reset(token)


class Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose templates are rendered within :func:`limited`, until ``is_closed`` is set."""

    is_closed = False
    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        # Jinja's optimizer computes constants while it compiles, such as "a" * 3000000000; what is
        # printed it computes all the same, unless `finalize` wants the context.
        super().__init__(**options, optimized=False, finalize=_print)
        self.code_generator_class = _Counting
        for name in _LEFT_OUT:
            del self.filters[name]
        self.filters |= {"tojson": _to_json, "unique": _unique}
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}
        self.tests = {name: _counted(function) for name, function in self.tests.items()}
        del self.globals["lipsum"]

    # Compiled templates call these four. No template can name them.
    def step(self, cost: int = 0) -> bool:
        """Count a step that prints so many characters; True."""
        if self.is_closed:
            raise Closed("the model was closed while its chat template ran")
        return _BUDGET.get().step(cost)

    def take(self, value: Any) -> Any:
        """Count a value that an expression has made, and return it."""
        return _BUDGET.get().take(value)

    def joined(self, *parts: Any) -> Any:
        """The joined texts of ``parts``."""
        return self.take("".join(map(str, self.take(parts))))

    def table(self, *pairs: tuple[Any, Any]) -> Any:
        """The table of keys and values."""
        return self.take(dict(_with_keys(pairs)))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Subscript an object for the template; a filter's ``attribute`` may be a path of many subscripts."""
        self.step()
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read it; of Python's own values it reads a few methods."""
        is_jinjas = type(obj).__module__.partition(".")[0] == "jinja2"
        return (is_jinjas or attr in _METHODS) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        """Raise an error; Jinja's own method prints nothing, which would hide the attempt."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result may be large."""
        budget = _BUDGET.get()
        if operator == "*":
            items, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(items, Collection) and isinstance(times, int):
                budget.allow(budget.size(items) * times)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * right)
        elif operator == "-" and isinstance(left, Collection):  # of a table's items it makes a set
            raise SecurityError(f"it subtracts from {left!r:.40}; allowed: from numbers")
        elif operator == "%" and isinstance(left, str):
            budget.allow(_size_of_format(left, right))
        return budget.take(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an object for the template, and count its result."""
        budget = _BUDGET.get()
        named = (value for name, value in kwargs.items() if name not in _OF_JINJA)
        budget.allow(sum(map(budget.size, (*args, *named))))
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            if name == "join":
                args = _estimated(name, (*args, owner), kwargs)[:-1]
            else:
                args = _estimated(name, (owner, *args), kwargs)[1:]
        elif obj is dict or obj is Namespace:
            args = tuple(map(_with_keys, args))
        return budget.take(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` with limits."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            _BUDGET.get().allow(_size_of_format(value.__self__, (args, kwargs), "{"))
            return wrapped(*args, **kwargs)

        return formatted


class _Counting(CodeGenerator):
    """Writes templates as Python that counts its steps."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        """The body of a loop, condition, macro or template."""
        body = list(nodes)
        self.writeline(f"environment.step({sum(map(_constant, body))})")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        """A loop; one whose test always fails has no rounds, so its tests are counted."""
        if node.test is not None:
            node.test = nodes.And(nodes.EnvironmentAttribute("step()"), node.test)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Texts that are joined by ``~``."""
        self._write("environment.joined(", node.nodes, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """A table."""
        self.write("environment.table(")
        for pair in node.items:
            self._write("(", (pair.key, pair.value), frame)
            self.write(", ")
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """A comparison; with a constant it is short."""
        first, *others = node.ops
        is_short = not others and first.op not in ("in", "notin")
        if is_short and nodes.Const in (type(node.expr), type(first.expr)):
            super().visit_Compare(node, frame)
        else:
            self.write("(environment.step() and ")
            super().visit_Compare(node, frame)
            self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """A subscript or slice."""
        self._take(super().visit_Getitem, node, frame, is_new=isinstance(node.arg, nodes.Slice))

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        """A list."""
        self._take(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        """A tuple, or the targets of an assignment."""
        self._take(super().visit_Tuple, node, frame, is_new=node.ctx == "load")

    def _take(
        self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame, *, is_new: bool = True
    ) -> None:
        self.write("environment.take(" * is_new)
        visit(node, frame)
        self.write(")" * is_new)

    def _write(self, before: str, values: Iterable[nodes.Expr], frame: Frame) -> None:
        self.write(before)
        for value in values:
            self.visit(value, frame)
            self.write(", ")
        self.write(")")


def _constant(node: nodes.Node) -> int:
    """The characters that a node prints in any case."""
    parts = node.nodes if isinstance(node, nodes.Output) else ()
    return sum(len(part.data) for part in parts if isinstance(part, nodes.TemplateData))


@pass_context
def _print(_: Context, value: Any) -> Any:
    """The printed text, of the whole template or of a block."""
    budget = _BUDGET.get()
    size = budget.size(value)
    budget.allow(size)
    budget.step(size)
    return value


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with a measured result, which is estimated before if it can be large."""
    passes = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget, own = _BUDGET.get(), _estimated(name, args[passes:], kwargs)
        if isinstance(own[0], Namespace):  # all else was measured when it was made
            budget.allow(budget.size(own[0]))
        return budget.take(function(*args[:passes], *own, **kwargs))

    return guarded


def _counted(function: Any) -> Callable[..., Any]:
    """A test that is a step."""

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        return _BUDGET.get().step() and function(*args, **kwargs)

    return counted


@pass_environment
def _unique(environment: Any, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
    items = list(value)
    for key in map(make_attrgetter(environment, attribute), items):
        _check_key(key)
    return do_unique(environment, items, case_sensitive, attribute)


def _with_keys(pairs: Any) -> Any:
    """Pairs for a table, or a table, with checked keys."""
    if isinstance(pairs, Mapping):
        return pairs
    pairs = [tuple(pair) for pair in pairs]
    for key, *_ in pairs:
        _check_key(key)
    return pairs


def _check_key(key: object) -> None:
    """Refuse a key whose hash many others can have, because each such key is compared with all before."""
    if not isinstance(key, str | int | float | None) or (
        isinstance(key, int) and key.bit_length() > _KEY_BITS
    ):
        raise SecurityError(f"a key is {key!r:.40}; allowed: texts, and numbers of at most {_KEY_BITS} bits")


def _check_bits(count: int) -> None:
    if count > _BITS:
        raise SecurityError(f"it computes a number of {count:,} bits; allowed: at most {_BITS}")


def _estimated(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a filter or method, with iterators drawn, if it may be called with them."""
    if name in _SIZES:
        args = tuple(map(_drawn, args))
        _BUDGET.get().allow(_SIZES[name](*args, **kwargs))
    for value in (*args[1:], *kwargs.values()) if name in _PRODUCTS else ():
        if isinstance(value, str) and len(value) > _SHORT:
            raise SecurityError(f"it seeks or strips {len(value):,} characters; allowed: at most {_SHORT}")
    return args


def _drawn(value: Any) -> Any:
    """The items of an iterator, which can be drawn once."""
    return list(value) if isinstance(value, Iterator) else value


def _size_of_format(text: str, args: object, sign: str = "%") -> int:
    fields = (form or "" for _, _, form, _ in Formatter().parse(text)) if sign == "{" else ()
    if any(map(_WIDE_FIELD.search, fields)) or (sign == "%" and _WIDE_PERCENT.search(text)):
        raise SecurityError(f"the format {text!r:.40} has a width that is no number below 1,000")
    return len(text) + text.count(sign) * (1000 + _BUDGET.get().size(args))


def _size_of_indent(s: object, width: int | str = 4, *_: object, **__: object) -> int:
    text = str(s)
    return len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width))


def _size_of_join(value: Any, d: object = "", *_: object, **__: object) -> int:
    return _BUDGET.get().size(value) + len(value) * len(str(d))


def _size_of_replace(s: object, old: object, new: object, *_: object, **__: object) -> int:
    text = str(s)
    return len(text) + text.count(str(old)) * len(str(new))


def _size_of_round(value: object, precision: int = 0, *_: object, **__: object) -> int:
    return abs(precision) ** 2  # of the power of ten that is computed


def _size_of_sum(value: object, attribute: object = None, start: object = 0) -> int:
    if not isinstance(start, int | float):  # lists would be copied again for each that is added
        raise SecurityError(f"sum starts at {start!r:.40}; allowed: a number")
    return 0


_SIZES: Final[Mapping[str, Callable[..., int]]] = {
    "format": lambda value, *args, **kwargs: _size_of_format(str(value), (args, kwargs)),
    "indent": _size_of_indent,
    "join": _size_of_join,
    "replace": _size_of_replace,
    "round": _size_of_round,
    "sum": _size_of_sum,
}
"""Filters whose results can be far larger than their inputs, with estimates of the size."""


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models are not trained on.
    if not isinstance(indent, int | None) or (indent or 0) > 100:
        raise SecurityError(f"tojson has the indent {indent!r:.20}; allowed: none, or at most 100")
    # ASCII is made below, because stand-ins have to stay unchanged.
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    budget, pieces = _BUDGET.get(), []
    for piece in encoder.iterencode(value):  # spaces of deep lists are many
        budget.step(len(piece))
        pieces.append(piece)
    text = "".join(pieces)
    return _FOREIGN.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text
