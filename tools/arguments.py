"""A tool's command line, in a line: ``arguments(__doc__, "bundle", rows=32, prompts=Path, fast=False)``."""

import argparse
from collections.abc import Sequence
from typing import Any


def arguments(
    usage: str | None, *names: str, words: Sequence[str] | None = None, **options: Any
) -> argparse.Namespace:
    """Read the command line; ``--help`` shows ``usage``.

    Args:
        usage: the tool's docstring.
        names: of the arguments, which are texts; ``NAME...`` takes one or more, ``NAME*`` any number.
        words: instead of the program's own.
        options: by name, what each is: a type, if it has to be words; ``[type]``, if it may be repeated;
            ``(type,)``, if it may be left out; False, for a switch; else its default.
    """
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in names:
        many = "+" if name.endswith("...") else "*" if name.endswith("*") else None
        parser.add_argument(name.rstrip(".*"), nargs=many)
    for name, kind in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(kind, type):
            parser.add_argument(option, type=kind, required=True)
        elif isinstance(kind, list):
            parser.add_argument(option, type=kind[0], action="append", default=[])
        elif isinstance(kind, tuple):
            parser.add_argument(option, type=kind[0])
        elif kind is False:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=type(kind), default=kind)
    return parser.parse_args(words)
