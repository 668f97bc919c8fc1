"""What is exported where nobody asks for anything in particular. Needs no extra."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from edgespec_models.bundle import Role

__all__ = ["DEFAULT_WEIGHTS", "RECIPE"]

RECIPE: Final = 1
"""To be raised whenever the same source and options come out as another bundle: other formats, another
graph, other rounding. Bundles in the cache that were made by another recipe are not used."""

DEFAULT_WEIGHTS: Final[Mapping[Role, str]] = MappingProxyType({"target": "close", "drafter": "quick"})
"""The policy a role gets, but for targets in floating point; docs/benchmarks.md has the figures."""
