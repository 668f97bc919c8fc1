"""A model on a device that compiles graphs of fixed shapes: an NPU, a GPU, or, for comparison, the CPU."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.static_graphs import Contexts, StaticGraphs
from edgespec_models.errors import BundleError, DeviceError
from edgespec_runtimes.cpu import CpuOptions, session_settings
from edgespec_runtimes.devices.discovery import open_whole
from edgespec_runtimes.devices.kinds import CPU, Device
from edgespec_runtimes.graph_session import GraphSession
from edgespec_runtimes.static.io import StaticIO

__all__ = ["StaticSession", "open_on"]


class StaticSession(GraphSession[StaticIO]):
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
        """Open the graphs of the smallest bucket and prove that the session can roll back.

        Context binaries are opened where they fit; else the device's compiler takes the graphs.

        Args:
            bundle: with graphs of fixed shapes that ``device`` runs.
            device: where every operator of them runs, or it is an error.
            options: threads, on the CPU.
            row_exact: what an earlier self-test found; None tests now.

        Raises:
            BundleError: the bundle has other graphs, or they cannot roll back; a context binary is damaged.
            DeviceError: the device cannot run all of a graph.
        """
        static = bundle.manifest.static
        if static is None:
            raise BundleError(f"{bundle.path} has no graphs of fixed shapes; open it with edgespec.load")
        self._static = static
        options = options or CpuOptions()
        self._opener = _Opener(bundle, device, options)
        io = StaticIO(bundle, self._opener.open)
        super().__init__(io, bundle.config, chunk=static.prefill, row_exact=row_exact)

    @property
    def compiled(self) -> str:
        """Whether context binaries are used and, if not, why; empty where there are none for the device."""
        return self._opener.compiled

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


class _Opener:
    """Opens a bundle's graphs on a device: from context binaries where those fit, else compiled now."""

    def __init__(self, bundle: Bundle, device: Device, options: CpuOptions) -> None:
        self._bundle, self._device, self._options = bundle, device, options
        static = bundle.manifest.static
        fits = static is not None and static.device == device.kind.export
        self._contexts = static.contexts if static is not None and fits else None
        self._refusal = None if self._contexts is None else _misfit(self._contexts, device)

    @property
    def compiled(self) -> str:
        """See :attr:`StaticSession.compiled`."""
        if self._contexts is None:
            return ""
        chip = self._contexts.chip.name
        if self._refusal is None:
            return f"from context binaries for {chip}"
        return f"compiled at load, not from the context binaries for {chip}: {self._refusal}"

    def open(self, graphs: Sequence[Path]) -> list[Any]:
        """ONNX Runtime's sessions over ``graphs``, or over what was compiled from them: all or none."""
        if self._contexts is not None and self._refusal is None:
            try:
                return self._open_compiled(graphs)
            except DeviceError as error:
                self._refusal = str(error)
        try:
            return [open_on(self._device, graph, self._options) for graph in graphs]
        except DeviceError as error:
            if self._refusal is None:
                raise
            raise DeviceError(f"{error}; {self.compiled}") from error

    def _open_compiled(self, graphs: Sequence[Path]) -> list[Any]:
        files = [StaticGraphs.context_files(graph.name) for graph in graphs]
        for name in chain.from_iterable(files):
            self._bundle.verify(name)  # the provider's library is given whole files only
        return [open_on(self._device, self._bundle.path / name, self._options) for name, _ in files]


def _misfit(contexts: Contexts, device: Device) -> str | None:
    """What is known to keep context binaries from being used, before the provider is asked.

    The chip is not: a provider knows its own and refuses binaries for others.
    """
    if contexts.version.partition(".")[0] == device.version.partition(".")[0]:
        return None
    return f"version {contexts.version} of the provider compiled them, this is {device.version or 'unknown'}"


def open_on(device: Device, graph: Path, options: CpuOptions) -> Any:
    """ONNX Runtime's session over ``graph`` on ``device``, and nowhere else.

    Raises:
        DeviceError: the device cannot run all of the graph.
    """
    settings, providers = session_settings(options), None
    if device.kind is CPU:
        providers = [CPU.provider]
    elif device.handle is not None:
        settings.add_provider_for_devices([device.handle], dict(device.options))
    else:
        settings.add_provider(device.kind.provider, dict(device.options))
    return open_whole(device, graph, settings, providers)
