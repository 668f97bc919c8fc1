"""Which recipe bundles in the cache were made by. Needs no extra."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from edgespec_models.bundles.bundle import Role
from edgespec_models.bundles.static_graphs import ExportDevice

__all__ = ["RECIPES"]

RECIPES: Final[Mapping[tuple[Role, ExportDevice | None], int]] = MappingProxyType(
    {
        ("target", None): 6,
        ("drafter", None): 6,
        ("target", "cuda"): 4,
        ("drafter", "cuda"): 4,
        ("target", "npu-qnn"): 2,
        ("drafter", "npu-qnn"): 2,
        ("target", "npu-openvino"): 2,
        ("drafter", "npu-openvino"): 2,
    }
)
"""Of what is exported in each role for each device, the CPU being None. To be raised whenever the same source
and options come out as another bundle: other formats, another graph, other rounding. Bundles in the cache
that were made by another recipe are not used."""
