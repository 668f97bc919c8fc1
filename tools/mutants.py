"""Mutants of a Python file: its text with one small fault each, made by mutmut's operators and two more."""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from types import CodeType
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import (
    mutation_operators,
    operator_arg_removal,
    operator_assignment,
    operator_string,
)

__all__ = ["Mutant", "changed_functions", "mutants"]


@dataclass(frozen=True)
class Mutant:
    """A fault: the lines that it changes, and the text of the file that has it."""

    file: str
    line: int
    statement: range
    before: str
    after: str
    text: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is called: by source text, so that it keeps its name when lines move."""
        return (self.file, self.before, self.after)


def mutants(file: str, text: str, order: Random | None = None) -> Iterator[Mutant]:
    """Mutants of a file that compile and differ from it, once each; shuffled, if ``order`` is given.

    Left alone are annotations, decorators, ``Literal[...]``, ``__all__`` and the wording of errors. Nothing
    is replaced by None, since code that falls over is noticed by any test.
    """
    wrapper = MetadataWrapper(cst.parse_module(text))
    positions = wrapper.resolve(PositionProvider)
    seen, faults = {ast.dump(ast.parse(text))}, list(_faults(wrapper.module, wrapper.module))
    if order is not None:
        order.shuffle(faults)
    for node, other, statement in faults:
        changed = wrapper.module.deep_replace(node, other).code
        try:
            meaning = ast.dump(ast.parse(changed))
        except SyntaxError:
            continue
        if meaning not in seen:
            seen.add(meaning)
            where = positions[statement if isinstance(statement, cst.SimpleStatementLine) else node]
            line, before, after = _difference(text.splitlines(), changed.splitlines())
            statement_lines = range(where.start.line, where.end.line + 1)
            yield Mutant(file, line, statement_lines, before, after, changed)


def _faults(node: Any, statement: Any, in_raise: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """Nodes with what may stand in their place, and the statement around them."""
    if isinstance(node, cst.Annotation | cst.Decorator) or _is_for_types(node):
        return
    statement = node if isinstance(node, cst.BaseCompoundStatement | cst.SimpleStatementLine) else statement
    in_raise = in_raise or isinstance(node, cst.Raise)
    for kind, operator in _OPERATORS:
        if isinstance(node, kind) and not (in_raise and operator is operator_string):
            for other in operator(node):
                yield node, other, statement
    for child in node.children:
        yield from _faults(child, statement, in_raise)


def _is_for_types(node: Any) -> bool:
    named = node.value if isinstance(node, cst.Subscript) else None
    if isinstance(node, cst.Assign):
        named = node.targets[0].target
    elif isinstance(node, cst.If):
        named = node.test
    return isinstance(named, cst.Name) and named.value in ("Literal", "TYPE_CHECKING", "__all__")


def _fewer_arguments(node: Any) -> Iterator[Any]:
    others: Iterable[Any] = operator_arg_removal(node)
    fewer = [other for other in others if len(other.args) < len(node.args)]
    for left_out, other in zip(node.args, fewer, strict=False):
        if left_out.keyword is None or left_out.keyword.value != "strict":  # of zip, which is not unless told
            yield other


def _without_call(node: Any) -> Iterator[Any]:
    if isinstance(node.value, cst.Call | cst.Await):
        yield cst.Pass()


def _other_branch(node: Any) -> Iterator[Any]:
    inner = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield node.with_changes(
        test=cst.UnaryOperation(cst.Not(), inner), whitespace_before_test=cst.SimpleWhitespace(" ")
    )


_NOT_AS_THEY_ARE = (operator_arg_removal, operator_assignment)
_OPERATORS: list[tuple[type, Callable[[Any], Iterable[Any]]]] = [
    *((kind, operator) for kind, operator in mutation_operators if operator not in _NOT_AS_THEY_ARE),
    (cst.Call, _fewer_arguments),
    (cst.Expr, _without_call),
    (cst.If, _other_branch),
    (cst.CompIf, _other_branch),
]


def _difference(old: list[str], new: list[str]) -> tuple[int, str, str]:
    """The number of the first line that differs, and the lines that do, of both."""
    start = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    parts = (lines[start : len(lines) - end] for lines in (old, new))
    before, after = (" ".join(line.strip() for line in part) for part in parts)
    return start + 1, before, after


def changed_functions(old: str, new: str) -> dict[CodeType, CodeType] | None:
    """The code of functions before and after; None if what runs at import differs."""
    pairs = dict[CodeType, CodeType]()
    bodies = [(compile(old, "", "exec"), compile(new, "", "exec"))]
    while bodies:
        before, after = bodies.pop()
        if _own(before) != _own(after):
            return None
        for inner, other in zip(_codes(before), _codes(after), strict=True):
            if inner.co_flags & _FUNCTION and not inner.co_name.startswith("<"):
                if inner != other:
                    pairs[inner] = other
            elif inner != other:
                bodies.append((inner, other))
    same_variables = all(a.co_freevars == b.co_freevars for a, b in pairs.items())
    return pairs if same_variables else None


_FUNCTION = 0x2
"""inspect.CO_NEWLOCALS: functions have it, bodies of modules and classes do not."""


def _codes(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _own(code: CodeType) -> tuple[object, ...]:
    values = [each for each in code.co_consts if not isinstance(each, CodeType)]
    return code.co_code, repr(values), code.co_names
