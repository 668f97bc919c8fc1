"""What an export is made by: its recipe. Importing this module imports no exporter."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from edgespec_models.bundles.static_graphs import ExportDevice

RECIPES: Final[Mapping[ExportDevice | None, int]] = MappingProxyType(
    {None: 13, "cuda": 8, "npu-qnn": 6, "npu-openvino": 6}
)
"""Of what is exported for each device, the CPU being None. To be raised whenever the same source
and options come out as another bundle: other formats, another graph, other rounding. Bundles in the cache
that were made by another recipe are not used."""
