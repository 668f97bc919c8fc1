"""The matrices of heads of latent attention in files, brought one below the other.

Directories and old GGUF files hold a head's matrices for keys and for values in one tensor; new GGUF files
hold tensors of three dimensions, that for keys turned.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec_export.sources.experts import check_shape
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import ModelFileError
from edgespec_models.families.glm4_moe_lite import Latent
from edgespec_models.files.blocks import unpack, values_of
from edgespec_models.files.tensors import U8, GGMLType, Stack, Tensor


@dataclass(frozen=True, slots=True)
class _Turned(Tensor):
    """A matrix in float32 whose rows are the columns of ``source``."""

    source: Tensor = field(kw_only=True)

    def read(self, start: int = 0, stop: int | None = None) -> U8:
        """Like :meth:`Tensor.read`. The whole matrix is read."""
        values = values_of(unpack(self.source.type, self.source.read()))
        rows = np.ascontiguousarray(values.reshape(self.source.shape).T[start:stop], np.float32)
        return rows.view(np.uint8).reshape(len(rows), -1, 4)


def matrices_of_heads(tensors: Mapping[str, Tensor], config: Transformer, where: str) -> dict[str, Tensor]:
    """``tensors`` with the matrices of heads for keys, ``k_b``, and for values, ``v_b``, two tensors a layer.

    Raises:
        ModelFileError: a tensor has another shape, or is there twice.
    """
    made = dict(tensors)
    if not isinstance(config, Latent):
        return made
    heads, keys, values = config.num_heads, config.key_width, config.value_width
    shapes = record(config).tensors
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind in ("k_b", "v_b") and name in shapes:
            rows, columns = shapes[name]
            check_shape(tensor, (heads, rows // heads, columns), where)
            made[name] = replace(tensor, shape=shapes[name])
        elif kind == "kv_b":
            names = f"{layer}.k_b", f"{layer}.v_b"
            for twice in sorted(tensors.keys() & {*names}):
                raise ModelFileError(
                    f"{where} has the rows of {tensor.name!r} in {tensors[twice].name!r} too; download or "
                    "convert it again"
                )
            check_shape(made.pop(name), (heads * (keys + values), config.rank), where)
            starts = range(0, heads * (keys + values), keys + values)
            parts = [tensor.rows(start, start + keys) for start in starts]
            turned = [
                _Turned(tensor.name, part.shape[::-1], GGMLType.F32, part.file, part.offset, source=part)
                for part in parts
            ]
            below = [tensor.rows(start + keys, start + keys + values) for start in starts]
            made |= dict(zip(names, (Stack.of(turned), Stack.of(below)), strict=True))
    return made
