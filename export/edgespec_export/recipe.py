"""What an export is made by: its recipe, and the packages that it needs and that running a bundle does not.

Importing this module needs none of them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from edgespec_models.bundles.bundle import Role
from edgespec_models.bundles.static_graphs import ExportDevice
from edgespec_models.errors import require

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


def require_extra() -> None:
    """Find out that the ``export`` extra is missing, before anything is downloaded for an export.

    Raises:
        EdgespecError: it is not installed.
    """
    require("exporting", "export", "onnx_ir", "onnxscript")
