"""ONNX Runtime without telemetry: the one place that imports it (ruff refuses any other).

Since 1.29 its official builds upload usage data on every system, and keep an identifier of the device in the
user's cache folder, unless this variable is set before the library starts (its Privacy.md). So this module
acts when it is imported, which modules should not do. If an application imported onnxruntime before edgespec,
the call ends the uploads; older Windows builds listen to the call alone.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import MappingProxyType
from typing import Any, Final

import numpy as np

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

ort.disable_telemetry_events()

from edgespec_models.forks import kept_in_forks

__all__ = ["ort", "ort_state"]

TYPES: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {"tensor(float)": np.dtype("float32")}
    | {f"tensor({n})": np.dtype(n) for n in ("float16", "int8", "uint8", "uint16", "int32", "int64")}
)
"""NumPy's types by ONNX Runtime's names."""

# Its own exceptions share no base class; binding memory raises Python's.
RUN_ERRORS = (
    RuntimeError,
    ort_state.Fail,
    ort_state.InvalidArgument,
    ort_state.RuntimeException,
    ort_state.EPFail,
)
"""ONNX Runtime's exceptions when a pass, or memory on a device, fails."""

_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino")
_NO_MEMORY = ("bad_alloc", "bad allocation", "Cannot allocate memory", "failed to map segment")


def warn_of_mix(installed: Sequence[str] | None = None) -> None:
    """Warn of several packages of ONNX Runtime; without ``installed`` of those in this environment."""
    if installed is None:
        installed = [name for name in _PACKAGES if [*metadata.Distribution.discover(name=name)]]
    if len(installed) > 1:
        names, last = " ".join(installed), installed[-1]
        extra = "[cuda,cudnn]" if last == "onnxruntime-gpu" else ""
        logging.getLogger("edgespec").warning(
            "%s are installed, and each overwrites files of the other, as upgrades do. Run: pip uninstall "
            '--yes %s, then: pip install "%s%s"',
            *(" and ".join(installed), names, last, extra),
        )


def open_session(model: str | bytes, settings: Any, providers: Sequence[Any] | None = None) -> Any:
    """ONNX Runtime's session over a graph's file or bytes."""
    # The fallback would try the same provider again, and print.
    return kept_in_forks(ort.InferenceSession(model, settings, providers=providers, enable_fallback=0))


def lacks_memory(error: Exception) -> bool:
    """Whether memory was lacking, in the words of the system and of C++ that ONNX Runtime quotes."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY)


warn_of_mix()
