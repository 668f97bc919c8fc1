"""A tower's graph on disk, with its weights in a file beside it."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgespec_export.formats.plan import Stored
from edgespec_export.graphs.writer import allocate, row_writer
from edgespec_models.bundles.bundle import VISION, VISION_DATA
from edgespec_models.errors import ModelFileError
from edgespec_models.families.towers import Tower
from edgespec_models.files.blocks import Blocks, unpack
from edgespec_models.files.tensors import FLOATS, GGMLType, Tensor
from edgespec_models.graphs.tower import TILES, build_tower, padded


def tower_bytes(tower: Tower) -> int:
    """Bytes of a tower's weights on disk."""
    return allocate(build_tower(tower)[0], None, VISION_DATA)[1]


def write_tower(
    tower: Tower, tensors: Mapping[str, Tensor], folder: Path, *, exact: bool = False
) -> ir.Model:
    """Write the graph and its weights to ``folder``; with ``exact`` in float32, else matrices in 8 bits.

    Raises:
        ModelFileError: a tensor is missing, has another shape, or holds no numbers.
    """
    model, shapes = build_tower(tower, exact=exact)
    parameters, size = allocate(model, folder, VISION_DATA)
    with (folder / VISION_DATA).open("wb") as file:
        write = row_writer(file, parameters)
        for name, value in parameters.items():
            tensor, shape = tensors.get(name), shapes[name]
            fits = tensor is not None and prod(tensor.shape) == prod(shape)
            if tensor is None or not fits or (tensor.type not in FLOATS and tensor.shape != shape):
                stated = "is missing" if tensor is None else f"has the shape {tensor.shape}, not {shape}"
                raise ModelFileError(f"the tower's tensor {name!r} {stated}; download or convert it again")
            tensor = replace(tensor, shape=shape or (1,))  # files have more dimensions
            raw = tensor.read()
            values = unpack(tensor.type, raw)
            numbers = values.values() if isinstance(values, Blocks) else values
            if np.isnan(numbers).any():
                raise ModelFileError(
                    f"the tower's tensor {name!r} holds no numbers; download or convert it again"
                )
            if value.dtype == ir.DataType.UINT8:
                kind, more = tensor.type, padded(shape[1]) - shape[1]
                if more:
                    kind, values = GGMLType.F32, np.pad(numbers, ((0, 0), (0, more)))
                numbers = Stored(name, (name,), TILES).encode(kind, raw, values)["weight"]
            write(name, numbers)
        file.truncate(size)
    ir.save(model, folder / VISION)
    return model
