"""Small weights of a bundle as NumPy arrays, for what is computed beside the graph."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import BundleError
from edgespec_models.files.onnx_header import read_header


def stored_vector(bundle: Bundle, name: str) -> npt.NDArray[np.float32]:
    """A tensor of floats of a graph's file of weights, float32 of any shape; a view of the mapped file.

    ``name`` is the graph's, such as ``final_norm.weight``.

    Raises:
        BundleError: the graph or its weights cannot be read.
    """
    tensor = read_header(bundle.graph).weights.get(name)
    if tensor is None or not tensor.location:
        raise BundleError(f"{bundle.path} has no stored weights {name}; export the model again")
    path = bundle.path / tensor.location
    if tensor.location != Path(tensor.location).name:
        raise BundleError(f"{bundle.path} names a file outside the bundle: {tensor.location!r}")
    try:
        data = np.memmap(path, np.uint8, mode="r")[tensor.offset : tensor.offset + tensor.size_bytes]
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot read {path}: {error}") from error
    if tensor.offset < 0 or len(data) != tensor.size_bytes:
        raise BundleError(f"{path} ends within {name}; export the model again")
    return data.view(np.float32).reshape([int(dim) for dim in tensor.dims])
