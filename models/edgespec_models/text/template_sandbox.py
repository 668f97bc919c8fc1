"""Jinja's sandbox with limits: a chat template ends soon, and takes little memory, whatever it says.

Templates are rewritten before they are compiled, so that Python of our own runs wherever time or memory could
be spent: once in every round of a loop, at every call and filter, for every list, slice and text that is made
and for every value that is printed. There the value's size is compared with what one value may have, added to
what the whole template may make, and the clock is asked. Nothing between two such places is more than linear
in values that were measured, except operations whose result can be far larger than what they take
(``*``, ``**``, ``%``, ``format``, ``join``, ``replace``, ``indent``): their results are estimated before they
are computed. Filters and methods that would need more than an estimate are left out. So it holds in every
thread and on every platform, which signals, trace functions and limits of processes do not.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from time import thread_time
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from edgespec_models.text.marked_text import STAND_INS, marked

LONGEST_SOURCE: Final = 1 << 17
_LARGEST: Final = 1 << 18  # of one value, in characters and items, and four times the conversation's
_ALL: Final = 64  # so many of the largest, all values together
_SECONDS: Final = 4.0  # of this thread, in which memory may be collected too, and one a million characters
_LEFT_OUT: Final = ("batch", "center", "pprint", "slice", "striptags", "urlize", "wordwrap")
_UNSAFE: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset(("center", "encode", "expandtabs", "ljust", "rjust", "translate", "zfill")),
    int: frozenset(("from_bytes", "to_bytes")),
}
_BITS: Final = 4096  # of a whole number
_WIDE: Final = re.compile(r"%[^a-zA-Z%(]*(\d{4}|\*)|%\(.*(\d{4}|\*)", re.DOTALL)
_FOREIGN: Final = re.compile(f"[^\\x00-\\x7f{STAND_INS}]+")  # all that is not ASCII, but for stand-ins
_LONG: Final = 64  # items of a list whose size is remembered: templates ask for its length in loops


class _Budget:
    """What one rendering may still take."""

    def __init__(self, source: str, texts: Collection[Mapping[str, object]], share: float) -> None:
        self._known: dict[int, int] = {}
        self._kept = deque[object](maxlen=8)  # long lists, which no template can change
        self._largest = 1 << 62
        self._known = {id(each): self.size(each) for each in texts}
        given = sum(self._known.values())
        self._largest = _LARGEST + len(source) + 4 * given
        self._left = _ALL * self._largest
        self._ends = thread_time() + (_SECONDS + given / 1e6) * share
        self._turn = 0

    def step(self, cost: int) -> None:
        """Something costs so many characters; a call of any kind counts as 8."""
        self._left -= cost + 8
        self._turn += 1 + cost // 64
        if self._left < 0:
            raise SecurityError(f"the template makes more than {_ALL * self._largest:,} characters in all")
        if self._turn >= 8:  # asking the clock at every step would cost more than most steps
            self._turn = 0
            if thread_time() > self._ends:
                raise SecurityError("the template takes too long")

    def allow(self, size: int) -> None:
        """A value of this size is about to be made."""
        if size > self._largest:
            raise SecurityError(f"the template makes a value of more than {self._largest:,} parts")

    def take(self, value: Any) -> Any:
        """A value that was made; a list costs its items, but is as large as all that is in it."""
        self.allow(self.size(value))
        self.step(len(value) if isinstance(value, Collection) else 0)
        return marked(value) if type(value) is str else value

    def size(self, value: object) -> int:
        """Characters and items of a value with all that is in it; of what is too large, only that it is."""
        total, left, changes = 0, [value], False
        while left and total <= self._largest:
            each = left.pop()
            total += 1
            if isinstance(each, str):
                total += len(each)
            elif id(each) in self._known:
                total += self._known[id(each)]
            elif isinstance(each, int):
                total += each.bit_length() // 8
            elif isinstance(each, Mapping):
                left += (*each.keys(), *each.values())
            elif isinstance(each, Namespace):  # it changes, so a list may grow or hold itself
                changes = True
                left.append(each._Namespace__attrs)
            elif isinstance(each, Collection) and not isinstance(each, range):
                left += each
        is_long = isinstance(value, list | tuple) and len(value) >= _LONG and id(value) not in self._known
        if is_long and not changes:
            if len(self._kept) == self._kept.maxlen:
                del self._known[id(self._kept[0])]
            self._kept.append(value)
            self._known[id(value)] = total
        return total


_BUDGET: ContextVar[_Budget] = ContextVar("_BUDGET")


@contextmanager
def limited(source: str, texts: Collection[Mapping[str, object]], share: float = 1.0) -> Iterator[None]:
    """Within, templates of a :class:`Sandbox` may be rendered, in a ``share`` of the time."""
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
        self.filters["tojson"] = _to_json
        self.filters = {
            name: _guarded(name, each) for name, each in self.filters.items() if name not in _LEFT_OUT
        }
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Guards().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Methods that make much of little are not."""
        unsafe = any(isinstance(obj, kind) and attr in names for kind, names in _UNSAFE.items())
        return not unsafe and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        """Raise: Jinja's own prints nothing, which would hide the attempt."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result may be large."""
        budget = _BUDGET.get()
        if operator == "*":
            many, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(many, Collection):
                budget.allow(budget.size(many) * times)
            _check_bits(_bits(left) + _bits(right))
        elif operator == "**":
            _check_bits(_bits(left) * right if isinstance(right, int) else 0)
        elif operator == "%" and isinstance(left, str):
            _check_format(budget, left, right)
        return budget.take(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Whatever the template calls."""
        if obj is Sandbox.step:
            return obj(*args)
        budget = _BUDGET.get()
        budget.allow(sum(map(budget.size, (*args, kwargs))))
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "join":
            args = _check_join(budget, args[0] if args else "", owner)[:1]
        elif isinstance(owner, str) and name == "replace":
            _check_replace(budget, owner, *args)
        return budget.take(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` by a formatter with limits."""
        if super().wrap_str_format(value) is None:
            return None
        if value.__name__ != "format":
            raise SecurityError("format_map is unsafe; use format")
        formatter, text = _Formatter(self), value.__self__
        return lambda *args, **kwargs: formatter.vformat(text, args, kwargs)

    @staticmethod
    def step(cost: int) -> bool:
        """A round of a loop, or another run of a block, that writes ``cost`` characters of the source."""
        _BUDGET.get().step(cost)
        return True

    @staticmethod
    def same(value: object) -> object:
        """What a literal or a slice made; :meth:`call` measures it."""
        return value

    @staticmethod
    def concat_all(*parts: object) -> str:
        """The operator ``~``."""
        return "".join(map(str, parts))


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if re.search(r"\d{4}", format_spec):
            raise SecurityError(f"a format's width is too large: {format_spec!r:.20}")
        text: str = super().format_field(value, format_spec)
        _BUDGET.get().step(len(text))
        return text


class _Guards(NodeTransformer):
    """Puts calls of the sandbox's functions where templates spend time and memory."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self._with_step(node)
        if node.test is not None:  # a loop whose test always fails has no rounds
            node.test = nodes.And(_call("step", nodes.Const(0)), node.test)
        return node

    def _with_step(self, node: Any) -> nodes.Node:
        constants = sum(len(each.data) for part in node.body for each in _constants(part))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step", nodes.Const(constants), lineno=node.lineno)))
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_CallBlock = visit_Block = _with_step  # noqa: N815

    def _measured(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        stores = getattr(node, "ctx", "load") != "load"
        plain = isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice)
        return node if stores or plain else _call("same", node, lineno=node.lineno)

    visit_List = visit_Tuple = visit_Dict = visit_Getitem = _measured  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("concat_all", *node.nodes, lineno=node.lineno)


def _constants(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def _call(name: str, *args: nodes.Expr, lineno: int = 1) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(function, list(args), [], None, None, lineno=lineno)


@pass_context
def _print(_: Context, value: Any) -> Any:
    """What is printed, to the end or into a block."""
    budget = _BUDGET.get()
    size = budget.size(value)
    budget.allow(size)
    budget.step(size)
    return value


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passes = hasattr(function, "jinja_pass_arg")
    check = _CHECKS.get(name)

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.allow(sum(map(budget.size, (*args[passes:], kwargs))))
        own = None if check is None else check(budget, *args[passes:], **kwargs)
        if own is not None:
            args, kwargs = (*args[:passes], *own), {}
        return budget.take(function(*args, **kwargs))

    return guarded


def _check_format_of(budget: _Budget, value: object, *args: object, **kwargs: object) -> None:
    _check_format(budget, str(value), (*args, *kwargs.values()))


def _check_format(budget: _Budget, text: str, args: object) -> None:
    if _WIDE.search(text):
        raise SecurityError("a width in a format is too large, or another value's")
    budget.allow(len(text) + text.count("%") * (1000 + budget.size(args)))


def _check_indent(budget: _Budget, s: object, width: int | str = 4, *_: object, **__: object) -> None:
    text = str(s)
    budget.allow(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))


def _check_join(budget: _Budget, value: Any, d: object = "", attribute: Any = None) -> tuple[Any, ...]:
    items = list(value)  # what is drawn from an iterator is gone
    budget.allow(budget.size(items) + len(items) * len(str(d)))
    return items, d, attribute


def _check_replace(budget: _Budget, s: object, old: object, new: object, *_: object, **__: object) -> None:
    text = str(s)
    budget.allow(len(text) + text.count(str(old)) * len(str(new)))


def _check_round(_: _Budget, value: object, precision: int = 0, *__: object, **___: object) -> None:
    if abs(precision) > 100:
        raise SecurityError(f"a precision of {precision} digits is too large")


def _check_sum(_: _Budget, value: object, attribute: object = None, start: object = 0) -> None:
    if not isinstance(start, int | float):  # lists would be copied again for each that is added
        raise SecurityError("sum is for numbers")


_CHECKS: Final[Mapping[str, Callable[..., Any]]] = {
    "format": _check_format_of,
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "round": _check_round,
    "sum": _check_sum,
}


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > _BITS:
        raise SecurityError(f"the template computes a number of more than {_BITS} bits")


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
    # ASCII is made below: what marks text that must stay ordinary has to stay as it is.
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    budget, pieces = _BUDGET.get(), []
    for piece in encoder.iterencode(value):
        text = _FOREIGN.sub(lambda found: json.dumps(found[0])[1:-1], piece) if ensure_ascii else piece
        budget.step(len(text))
        pieces.append(text)
    return "".join(pieces)
