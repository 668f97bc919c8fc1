"""What an export is made by: its recipe. Importing this module imports no exporter."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from edgespec_models.bundles.bundle import Role
from edgespec_models.bundles.static_graphs import ExportDevice

RECIPES: Final[Mapping[tuple[Role, ExportDevice | None], int]] = MappingProxyType(
    {
        ("target", None): 9,
        ("drafter", None): 9,
        ("target", "cuda"): 5,
        ("drafter", "cuda"): 5,
        ("target", "npu-qnn"): 3,
        ("drafter", "npu-qnn"): 3,
        ("target", "npu-openvino"): 3,
        ("drafter", "npu-openvino"): 3,
    }
)
"""Of what is exported in each role for each device, the CPU being None. To be raised whenever the same source
and options come out as another bundle: other formats, another graph, other rounding. Bundles in the cache
that were made by another recipe are not used."""
