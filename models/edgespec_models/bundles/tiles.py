"""Matrices as the kernels read them: the blocks of a GGUF file in tiles (``runtimes/kernels/layout.h``).

A tile is 16 rows of a matrix by 32 or 256 inputs, the block of its format; tiles follow each other along the
inputs, then down the rows. The last rows of a matrix are filled up with zeros.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from edgespec_models.errors import UnsupportedModelError

__all__ = ["FORMATS", "LANES", "TileFormat", "tile_bytes"]

LANES: Final = 16
"""Rows of a tile."""


class TileFormat(NamedTuple):
    """What a tile of a format holds: inputs, and bytes."""

    inputs: int
    n_bytes: int


FORMATS: Final[Mapping[str, TileFormat]] = MappingProxyType(
    {
        "Q4_0": TileFormat(32, 288),
        "Q4_1": TileFormat(32, 320),
        "Q5_0": TileFormat(32, 352),
        "Q5_1": TileFormat(32, 384),
        "Q8_0": TileFormat(32, 544),
        "Q2_K": TileFormat(256, 1344),
        "Q3_K": TileFormat(256, 1824),
        "Q4_K": TileFormat(256, 2368),
        "Q5_K": TileFormat(256, 2880),
        "Q6_K": TileFormat(256, 3360),
    }
)
"""The formats that the kernels multiply by."""


def tile_bytes(name: str, rows: int, columns: int) -> int:
    """Bytes of a matrix of ``rows`` by ``columns``.

    Raises:
        UnsupportedModelError: the format has no whole blocks of this width.
    """
    form = FORMATS[name]
    if columns % form.inputs:
        raise UnsupportedModelError(
            f"a matrix of {columns} columns has no whole blocks of {name}, which are {form.inputs} wide; "
            "export with --weights portable"
        )
    return -(-rows // LANES) * (columns // form.inputs) * form.n_bytes
