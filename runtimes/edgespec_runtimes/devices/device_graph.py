"""A graph on one device, whole: what the devices' sessions share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec_models.errors import DeviceError
from edgespec_runtimes.devices.discovery import Device
from edgespec_runtimes.devices.kinds import CPU
from edgespec_runtimes.ort import ort

__all__ = ["open_whole"]


def open_whole(device: Device, graph: Path, settings: Any, providers: Sequence[Any] | None) -> Any:
    """ONNX Runtime's session over ``graph`` on ``device``, and nowhere else.

    Args:
        device: where every operator is to run.
        graph: an ONNX file.
        settings: ONNX Runtime's options.
        providers: as ``InferenceSession`` takes them; None where ``settings`` name the device.

    Raises:
        DeviceError: the device cannot run all of the graph.
    """
    if device.kind is not CPU:
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        return ort.InferenceSession(str(graph), settings, providers=providers, enable_fallback=0)
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        raise DeviceError(f"{device.name} cannot run all of {graph}: {error}") from error
