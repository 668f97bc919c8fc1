"""Read a ``pytorch_model.bin``, in which some heads are published only.

torch reads it as tensors and nothing else (``weights_only``), so no code of the file's runs.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_export.sources.blocks import GGMLType, Tensor
from edgespec_models.errors import EdgespecError, ModelFileError

_FLOATS = {"float32": GGMLType.F32, "float16": GGMLType.F16, "bfloat16": GGMLType.BF16}


def read_torch(path: Path) -> dict[str, Tensor | npt.NDArray[Any]]:
    """The file's tensors by name, those of whole numbers as arrays. All of it is in memory.

    Raises:
        EdgespecError: torch is not installed.
        ModelFileError: the file cannot be read, or holds something else than tensors by name.
    """
    try:
        import torch
    except ImportError as error:
        raise EdgespecError(
            f"{path} needs torch, which is not installed: pip install 'edgespec[align]', or take safetensors"
        ) from error

    def taken(name: str, value: Any) -> Tensor | npt.NDArray[Any]:
        kind = _FLOATS.get(str(value.dtype).removeprefix("torch."))
        if kind is None:
            return np.array(value.numpy())
        data = BytesIO(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return Tensor(name, tuple(value.shape), kind, data, 0)

    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {str(name): taken(str(name), value) for name, value in found.items()}
    except Exception as error:  # those of zip files, of pickles and torch's own share no base class
        raise ModelFileError(f"cannot read {path}: {error!r:.200}. Download or copy it again.") from error
