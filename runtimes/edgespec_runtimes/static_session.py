"""A model on a device that compiles graphs of fixed shapes: an NPU, a GPU, or, for comparison, the CPU."""

from pathlib import Path
from typing import Any

import onnxruntime as ort

from edgespec_models.bundle import Bundle
from edgespec_models.errors import BundleError, DeviceError
from edgespec_runtimes.cpu import CpuOptions, session_settings
from edgespec_runtimes.devices import CPU
from edgespec_runtimes.discovery import Device
from edgespec_runtimes.graph_session import GraphSession
from edgespec_runtimes.static_io import StaticIO

__all__ = ["StaticSession", "open_on"]


class StaticSession(GraphSession):
    """One model reading one sequence in passes of a few fixed sizes; see :class:`GraphSession`.

    Of the sizes a pass may have, those that take least time together are chosen; rows too many are masked.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: Device,
        options: CpuOptions | None = None,
        *,
        row_exact: bool | None = None,
    ) -> None:
        """Compile the graphs of the smallest bucket and prove that the session can roll back.

        Args:
            bundle: with graphs of fixed shapes that ``device`` runs.
            device: where every operator of them runs, or it is an error.
            options: threads, on the CPU.
            row_exact: what an earlier self-test found; None tests now.

        Raises:
            BundleError: the bundle has other graphs, or they cannot roll back.
            DeviceError: the device cannot run all of a graph.
        """
        static = bundle.manifest.static
        if static is None:
            raise BundleError(f"{bundle.path} has no graphs of fixed shapes; open it with edgespec.load")
        self._static = static
        options = options or CpuOptions()
        io = StaticIO(bundle, lambda graph: open_on(device, graph, options))
        super().__init__(io, bundle.config, chunk=static.prefill, row_exact=row_exact)

    @property
    def longest(self) -> int:
        """Tokens the largest bucket holds."""
        return self._static.longest

    def _rounded(self, capacity: int) -> int:
        return self._static.bucket_for(capacity)

    def _too_long(self, tokens: int) -> str:
        if tokens > self._config.context_length:
            return super()._too_long(tokens)
        return (
            f"{tokens:,} tokens do not fit the largest bucket of this bundle, {self.longest:,}; shorten the "
            f"prompt, ask for fewer new tokens, or export the model with --buckets up to {tokens:,}"
        )


def open_on(device: Device, graph: Path, options: CpuOptions) -> Any:
    """ONNX Runtime's session over ``graph`` on ``device``, and nowhere else.

    Raises:
        DeviceError: the device cannot run all of the graph.
    """
    settings, providers = session_settings(options), None
    if device.profile is CPU:
        providers = [CPU.provider]
    else:
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if device.handle is not None:
            settings.add_provider_for_devices([device.handle], dict(device.options))
        else:
            settings.add_provider(device.profile.provider, dict(device.options))
    try:
        return ort.InferenceSession(str(graph), settings, providers=providers, enable_fallback=0)
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        raise DeviceError(f"{device.name} cannot run all of {graph}: {error}") from error
