"""Directories in NVFP4, as modelopt and compressed-tensors write them: codes, scales and a factor apart."""

from collections.abc import Mapping

from edgespec_export.sources.safetensors_file import Raw, SafetensorsFile
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.files.tensors import MOST_SCALE, GGMLType, SplitScaledBlocks, Tensor

_AGAIN = "download or convert it again"
_OF_ACTIVATIONS = ("input_scale", "input_global_scale", "k_proj.k_scale", "v_proj.v_scale")


def nvfp4_tensors(stored: Mapping[str, SafetensorsFile]) -> tuple[dict[str, Tensor], set[str]]:
    """Matrices by the names that they would have in floats, and the names of all that they are made of.

    Scales of activations, which are not rounded to this format here, are among these.

    Raises:
        ModelFileError: a tensor lacks another one, or has a wrong shape or factor.
        UnsupportedModelError: rows without whole blocks.
    """
    named, taken = dict[str, Tensor](), set[str]()
    for scales, file in stored.items():
        stem = scales.removesuffix(".weight_scale")
        if stem == scales or file.kind(scales) != "F8_E4M3" or len(file.raw(scales)[0]) != 2:
            continue
        packed = f"{stem}.weight_packed" in stored
        codes = f"{stem}.weight{'_packed' * packed}"
        factor = f"{stem}.weight_{'global_scale' if packed else 'scale_2'}"
        for name in (codes, factor):
            if name not in stored:
                raise ModelFileError(f"{file.path.name} has {scales!r} without {name!r}; {_AGAIN}")
        named[f"{stem}.weight"] = _matrix(
            codes, stored[codes], file.raw(scales), stored[factor].number(factor)
        )
        taken |= {scales, codes, factor}
    taken |= {name for name in stored if name.endswith(_OF_ACTIVATIONS)} if named else set()
    return named, taken


def _matrix(name: str, file: SafetensorsFile, scales: Raw, number: float) -> Tensor:
    shape, place, offset = file.raw(name)
    of_scales = scales[0]
    if len(shape) != 2 or (shape[0], 2 * shape[1]) != (of_scales[0], 16 * of_scales[1]):
        raise ModelFileError(
            f"tensor {name!r} has shape {shape} and its scales {of_scales}, which do not fit; {_AGAIN}"
        )
    rows, columns = shape[0], 2 * shape[1]
    if columns % GGMLType.NVFP4.block:
        raise UnsupportedModelError(
            f"tensor {name!r} has {columns} columns; allowed in NVFP4: multiples of "
            f"{GGMLType.NVFP4.block}. Use the model's unquantized checkpoint"
        )
    factor = 1 / number if name.endswith("_packed") and number else number
    if not 0 < factor < MOST_SCALE:
        raise ModelFileError(
            f"tensor {name!r} has the factor {factor:.3g}; allowed: above 0, below {MOST_SCALE:g}"
        )
    return SplitScaledBlocks(
        name, (rows, columns), GGMLType.NVFP4, place, offset, scales=scales[1:], factor=factor
    )
