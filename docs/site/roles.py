"""Docstrings name classes and methods in roles, such as ``:class:`edgespec.Model```: Markdown has none."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|attr|mod|data):`~?([^`]+)`")
_PUBLIC = re.compile(r"edgespec\.[A-Za-z]+")


def _named(role: re.Match[str]) -> str:
    """The name as code; a link where the reference has it."""
    name = role[1]
    return f"[`{name}`][{name}]" if _PUBLIC.fullmatch(name) else f"`{name}`"


class Roles(griffe.Extension):
    """Makes Markdown of them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Each docstring, as it is read."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_named, obj.docstring.value)
