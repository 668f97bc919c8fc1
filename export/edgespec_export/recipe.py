"""What can be asked of an export, and what is made where nobody asks. Needs no extra."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from edgespec_models.bundle import Role
from edgespec_models.static_graphs import ExportDevice

__all__ = ["DEFAULT_WEIGHTS", "RECIPES", "WEIGHTS"]

RECIPES: Final[Mapping[tuple[Role, ExportDevice | None], int]] = MappingProxyType(
    {
        ("target", None): 4,
        ("drafter", None): 4,
        ("target", "cuda"): 3,
        ("drafter", "cuda"): 3,
        ("target", "npu-qnn"): 2,
        ("drafter", "npu-qnn"): 2,
        ("target", "npu-openvino"): 2,
        ("drafter", "npu-openvino"): 2,
    }
)
"""Of what is exported in each role for each device, the CPU being None. To be raised whenever the same source
and options come out as another bundle: other formats, another graph, other rounding. Bundles in the cache
that were made by another recipe are not used."""

WEIGHTS: Final = ("exact", "close", "balanced", "int8", "quick", "fast")
"""Names of :data:`edgespec_export.plan.POLICIES`."""

DEFAULT_WEIGHTS: Final[Mapping[Role, str]] = MappingProxyType({"target": "exact", "drafter": "exact"})
"""The policy a role gets, but for targets in floating point; docs/benchmarks.md has the figures."""
