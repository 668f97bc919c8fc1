"""What an export is made by: its recipe. Importing this module imports no exporter."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from edgespec_models.bundles.static_graphs import ExportDevice

RECIPES: Final[Mapping[ExportDevice | None, int]] = MappingProxyType(
    {None: 11, "cuda": 7, "npu-qnn": 5, "npu-openvino": 5}
)
"""Of what is exported for each device, the CPU being None. To be raised whenever the same source
and options come out as another bundle: other formats, another graph, other rounding. Bundles in the cache
that were made by another recipe are not used."""
