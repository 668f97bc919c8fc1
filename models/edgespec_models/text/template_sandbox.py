"""Jinja's sandbox with limits: every chat template ends soon and takes little memory.

Jinja's own sandbox keeps templates from Python's objects and bounds ``range``. This one rewrites templates
before they are compiled. Rounds of loops, and the values of literals, slices, calls, filters and operators,
count against a limit for one value and a limit for all, and the clock is read. Operations with results far
larger than their inputs (``*``, ``**``, ``%``, ``format``, ``join``, ``replace``, ``indent``) are estimated
before they run; the few other filters and methods of that kind are left out. So the limits hold in every
thread and on every platform, unlike signals, trace functions and limits of processes.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from string import Formatter
from time import thread_time
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from edgespec_models.text.marked_text import STAND_INS, marked

LONGEST_SOURCE: Final = 1 << 17
_LARGEST: Final = 1 << 18  # of one value, in characters and items, and four times the conversation's
_ALL: Final = 64  # so many of the largest, all values together
_SECONDS: Final = 4.0  # of this thread, in which memory may be collected too, and one a million characters
_LEFT_OUT: Final = ("batch", "center", "pprint", "slice", "striptags", "urlize", "wordwrap")
_UNSAFE: Final = frozenset(
    ("center", "encode", "expandtabs", "from_bytes", "ljust", "rjust", "to_bytes", "translate", "zfill")
)
"""Methods of texts and numbers."""
_BITS: Final = 4096  # of a whole number
_OF_JINJA: Final = ("_loop_vars", "_block_vars")  # variables around a call, which it is not given
_WIDE_PERCENT: Final = re.compile(r"%[^a-zA-Z%(]*(\d{4}|\*)|%\(.*(\d{4}|\*)", re.DOTALL)
_WIDE_FIELD: Final = re.compile(r"\d{4}|\{")
_FOREIGN: Final = re.compile(f"[^\\x00-\\x7f{STAND_INS}]+")  # all that is not ASCII, but for stand-ins
_STEP, _MADE, _JOINED = (
    "one step",
    "made value",
    "joined texts",
)  # filters, by names that no template can write


class _Budget:
    """The remaining budget of a rendering."""

    def __init__(self, source: str, texts: Collection[Mapping[str, object]], share: float) -> None:
        self._known: dict[int, int] = {}
        self._largest = 1 << 62
        self._known = {id(text): self.size(text) for text in texts}
        total = sum(self._known.values())
        self._largest = _LARGEST + len(source) + 4 * total
        self._left = _ALL * self._largest
        self._ends = thread_time() + (_SECONDS + total / 1e6) * share
        self._turn = 0

    def step(self, cost: int) -> bool:
        """Count this many characters; a call of any kind counts as 8."""
        self._left -= cost + 8
        self._turn += 1 + cost // 64
        if self._left < 0:
            raise SecurityError(f"the template makes more than {_ALL * self._largest:,} characters in all")
        if self._turn >= 8:  # reading the clock at every step would cost more than most steps
            self._turn = 0
            if thread_time() > self._ends:
                raise SecurityError("the template takes too long")
        return True

    def allow(self, size: int) -> None:
        """Check a size before its value is made."""
        if size > self._largest:
            raise SecurityError(f"the template makes a value of more than {self._largest:,} parts")

    def take(self, value: Any) -> Any:
        """Count a new value. A list costs its items, but has the size of its whole content."""
        self.allow(self.size(value))
        self.step(len(value) if isinstance(value, Collection) else 0)
        return marked(value) if type(value) is str else value

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
                if item.bit_length() > _BITS:
                    raise SecurityError(f"the template computes a number of more than {_BITS} bits")
            elif isinstance(item, Mapping):
                left += (*item.keys(), *item.values())
            elif isinstance(item, Namespace):
                if item is not value:  # it is mutable, so its container could grow after it was measured
                    raise SecurityError("the template puts a namespace into another value")
                left.append(item._Namespace__attrs)
            elif isinstance(item, Collection) and not isinstance(item, range):
                left += item
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
    """A sandbox whose templates are rendered within :func:`limited`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        # Jinja's optimizer computes constants while it compiles, such as "a" * 3000000000; what is
        # printed it computes all the same, unless `finalize` wants the context.
        super().__init__(**options, optimized=False, finalize=_print)
        for name in _LEFT_OUT:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}
        self.filters[_STEP] = lambda cost: _BUDGET.get().step(cost)
        self.filters[_MADE] = lambda value: _BUDGET.get().take(value)
        self.filters[_JOINED] = lambda parts: _BUDGET.get().take("".join(map(str, parts)))
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Guards().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read it; methods with large results from small inputs are refused."""
        unsafe = isinstance(obj, str | int) and attr in _UNSAFE
        return not unsafe and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        """Raise an error; Jinja's own method prints nothing, which would hide the attempt."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result may be large."""
        budget = _BUDGET.get()
        if operator == "*":
            items, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(items, Collection):
                budget.allow(budget.size(items) * times)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _BITS:
                raise SecurityError(f"the template computes a number of more than {_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            budget.allow(_size_of_format(left, right))
        return budget.take(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an object for the template, and count its result."""
        budget = _BUDGET.get()
        named = (value for name, value in kwargs.items() if name not in _OF_JINJA)
        budget.allow(sum(map(budget.size, (*args, *named))))
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name in ("join", "replace"):
            args = tuple(map(_drawn, args))
            budget.allow(_SIZES[name](*((*args, owner) if name == "join" else (owner, *args)), **kwargs))
        return budget.take(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` with limits."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            text, budget = value.__self__, _BUDGET.get()
            if any(_WIDE_FIELD.search(form or "") for _, _, form, _ in Formatter().parse(text)):
                raise SecurityError("a width in a format is too large, or another value's")
            budget.allow(len(text) + text.count("{") * (1000 + budget.size((args, kwargs))))
            return wrapped(*args, **kwargs)

        return formatted


class _Guards(NodeTransformer):
    """Adds filters of the sandbox where templates spend time and memory."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        constants = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_filtered(_STEP, nodes.Const(constants), node)))
        if node.test is not None:  # a loop whose test always fails has no rounds
            node.test = nodes.And(_filtered(_STEP, nodes.Const(0), node), node.test)
        return node

    def _measured(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        stores = getattr(node, "ctx", "load") != "load"
        is_plain = isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice)
        return node if stores or is_plain else _filtered(_MADE, node, node)

    visit_List = visit_Tuple = visit_Dict = visit_Getitem = _measured

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return _filtered(_JOINED, _filtered(_MADE, parts, node), node)


def _filtered(name: str, value: nodes.Expr, place: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=place.lineno)


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
    size_of = _SIZES.get(name)

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        if size_of is not None:
            args = tuple(map(_drawn, args))
            budget.allow(size_of(*args[passes:], **kwargs))
        if isinstance(args[passes], Namespace):  # all else was measured when it was made
            budget.allow(budget.size(args[passes]))
        return budget.take(function(*args, **kwargs))

    return guarded


def _drawn(value: Any) -> Any:
    """The items of an iterator, which can be drawn once."""
    return list(value) if isinstance(value, Iterator) else value


def _size_of_format(text: str, args: object) -> int:
    if _WIDE_PERCENT.search(text):
        raise SecurityError("a width in a format is too large, or another value's")
    return len(text) + text.count("%") * (1000 + _BUDGET.get().size(args))


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
        raise SecurityError("sum is for numbers")
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
        raise SecurityError(f"tojson with an indent of {indent!r:.20}")
    # ASCII is made below, because stand-ins have to stay unchanged.
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    budget, pieces = _BUDGET.get(), []
    for piece in encoder.iterencode(value):  # spaces of deep lists are many
        budget.step(len(piece))
        pieces.append(piece)
    text = "".join(pieces)
    return _FOREIGN.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text
