"""Experts in files: their matrices, brought one below the other.

GGUF files hold a tensor of three dimensions for a layer's experts, gates and their factors apart or fused.
Directories hold the same, or a tensor for each expert, or gpt-oss's codes and exponents.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from typing import Final

from edgespec_export.sources.safetensors_file import Raw, SafetensorsFile
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import ModelFileError
from edgespec_models.files.blocks import Blocks, unpack
from edgespec_models.files.tensors import Columns, GGMLType, SplitBlocks, Stack, Tensor

_ALTERNATING: Final = re.compile(
    r"model\.(layers\.\d+\.)mlp\.experts\.(gate_up|down)_proj(?:_(blocks|scales|bias))?"
)
_ONE: Final = re.compile(r"(layers\.\d+\.experts_\w+)\.(\d+)")
_AGAIN: Final = "download or convert it again"


def one_below_the_other(tensors: Mapping[str, Tensor], config: Transformer, where: str) -> dict[str, Tensor]:
    """``tensors`` with each kind of a layer's expert matrices in one tensor of two dimensions.

    Raises:
        ModelFileError: experts are missing or too many, a tensor has another shape, or is there twice.
        UnsupportedModelError: experts of a layer have different formats.
    """
    experts = config.experts
    if experts is None:
        return dict(tensors)
    shapes = record(config).tensors
    joined, apart = dict[str, Tensor](), dict[str, dict[int, Tensor]]()

    def add(name: str, tensor: Tensor) -> None:
        if name in joined:
            raise ModelFileError(
                f"{where} has {name} in {joined[name].name!r} and in {tensor.name!r}; {_AGAIN}"
            )
        joined[name] = tensor

    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if match := _ONE.fullmatch(name):
            apart.setdefault(match[1], {})[int(match[2])] = tensor
        elif kind == "experts_gate_up":
            check_shape(tensor, (experts.count, 2 * experts.width, config.hidden_size), where)
            for part, start in (("gate", 0), ("up", experts.width)):
                rows = [matrix.rows(start, start + experts.width) for matrix in tensor.matrices()]
                add(f"{layer}.experts_{part}", Stack.of(rows))
        elif kind.startswith("experts_") and name in shapes:
            shape = shapes[name]
            check_shape(tensor, (experts.count, shape[0] // experts.count, *shape[1:]), where)
            add(name, replace(tensor, shape=shapes[name]))
        elif kind == "shared_router":
            add(name, replace(tensor, shape=(1, *tensor.shape[-1:])))  # a vector in GGUF files
        else:
            add(name, tensor)
    for name, matrices in apart.items():
        missing = [str(number) for number in range(experts.count) if number not in matrices]
        if missing or len(matrices) > experts.count:
            raise ModelFileError(
                f"{where} has {len(matrices)} of the {experts.count} experts of {name}"
                f"{f', and lacks number {missing[0]}' if missing else ''}; {_AGAIN}"
            )
        below, *columns = shapes.get(name, (0,))  # tensors of no layer fit nothing
        for tensor in matrices.values():
            check_shape(tensor, (below // experts.count, *columns), where)
        add(name, Stack.of([matrices[number] for number in range(experts.count)]))
    return joined


def check_shape(tensor: Tensor, shape: tuple[int, ...], where: str) -> None:
    """Raise ModelFileError if a tensor of the file ``where`` has another shape."""
    if tensor.shape != shape:
        raise ModelFileError(
            f"tensor {tensor.name!r} of {where} has shape {tensor.shape}; its metadata ask for {shape}. "
            "Download or convert it again."
        )


def alternating_tensors(stored: Mapping[str, SafetensorsFile]) -> tuple[dict[str, Tensor], set[str]]:
    """The experts of gpt-oss's directories by edgespec's names, and the names of the files' tensors.

    Weights are MXFP4 in two tensors, or floats whose rows are columns; gates and their factors alternate, as
    rows and in biases.

    Raises:
        ModelFileError: a tensor lacks the other one, has a wrong shape, or is there twice.
    """
    named, taken = dict[str, Tensor](), set[str]()
    for name, file in stored.items():
        parts = _ALTERNATING.fullmatch(name)
        if parts is None:
            continue
        layer, product, kind = parts.groups()
        names = [f"{layer}experts_{part}" for part in ("gate", "up") if product == "gate_up"]
        names = names or [f"{layer}experts_down"]
        if kind is None:
            if f"{name}_blocks" in stored:
                raise ModelFileError(f"{file.path.name} has {name!r} and {name + '_blocks'!r}; {_AGAIN}")
            named |= _columns(file.tensor(name), names)
        elif kind == "bias":
            named |= _biases(file.tensor(name), [f"{name}_bias" for name in names])
        elif kind == "blocks":
            scales = f"{name.removesuffix('blocks')}scales"
            if scales not in stored:
                raise ModelFileError(f"{file.path.name} has {name!r} without {scales!r}; {_AGAIN}")
            whole = _mxfp4(name, file.raw(name), stored[scales].raw(scales))
            named |= {name: whole.every(len(names), place) for place, name in enumerate(names)}
            taken.add(scales)
        elif name.replace("_scales", "_blocks") not in stored:
            raise ModelFileError(f"{file.path.name} has {name!r} without its codes; {_AGAIN}")
        taken.add(name)
    return named, taken


def _mxfp4(name: str, codes: Raw, exponents: Raw) -> SplitBlocks:
    (shape, file, offset), scaled = codes, exponents[0]
    if len(shape) != 4 or shape[3] != 16 or scaled != shape[:3]:
        raise ModelFileError(
            f"tensor {name!r} has shape {shape} and its scales {scaled}, which do not fit; {_AGAIN}"
        )
    kind = GGMLType.MXFP4
    whole = *shape[:2], shape[2] * kind.block
    return SplitBlocks(name, whole, kind, file, offset, exponents=exponents[1:])


def _columns(tensor: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Columns of matrices that alternate, as the rows of one tensor each."""
    if len(tensor.shape) != 3 or tensor.shape[2] % len(names):
        raise ModelFileError(f"tensor {tensor.name!r} has shape {tensor.shape}; {_AGAIN}")
    count, inputs, columns = tensor.shape
    place, shape = (tensor.type, tensor.file, tensor.offset), (count, columns // len(names), inputs)
    return {
        name: Columns(tensor.name, shape, *place, before=first, step=len(names), file_columns=columns)
        for first, name in enumerate(names)
    }


def _biases(tensor: Tensor, names: list[str]) -> dict[str, Tensor]:
    """The alternating columns of a small tensor, each kind in memory."""
    values = unpack(tensor.type, tensor.read())
    assert not isinstance(values, Blocks)  # safetensors are floats
    apart = {name: values[:, place :: len(names)] for place, name in enumerate(names)}
    return {
        name: Tensor(tensor.name, part.shape, GGMLType.F32, BytesIO(part.tobytes()), 0)
        for name, part in apart.items()
    }
