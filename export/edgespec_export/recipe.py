"""The recipes of exports. Importing this module imports no exporter."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from edgespec_models.bundles.static_graphs import ExportDevice

RECIPES: Final[Mapping[ExportDevice | None, int]] = MappingProxyType(
    {None: 25, "cuda": 13, "npu-qnn": 9, "npu-openvino": 9}
)
"""The recipe of exports for each device; None is the CPU.

Raise it whenever the same source and options give another bundle: other formats, another graph, other
rounding. Bundles of another recipe in the cache are not used. ``python -m tools.recipes`` says when.
"""
