"""A model on an NVIDIA GPU: float16, its KV cache in the GPU's memory, logits of the wanted rows on the host.

The session runs on the CPU too, where the same kernels' float16 versions are slow: for checks and tests.
"""

from edgespec_models.bundle import Bundle
from edgespec_models.errors import BundleError
from edgespec_runtimes.cpu import CpuOptions, session_settings
from edgespec_runtimes.device_graph import open_whole
from edgespec_runtimes.discovery import Device
from edgespec_runtimes.graph_io import DynamicIO
from edgespec_runtimes.graph_session import DynamicSession
from edgespec_runtimes.tensor_memory import DeviceMemory

__all__ = ["CudaSession"]

_PREFILL_CHUNK = 512  # passes of many rows unpack all weights first, so there should be few


class CudaSession(DynamicSession):
    """One model reading one sequence on a GPU; see :class:`edgespec_runtimes.session.Session`.

    Whether a row's bits depend on the number of rows is up to the kernels, which are chosen by that number
    (``row_exact``); no token is run twice.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: Device,
        options: CpuOptions | None = None,
        *,
        row_exact: bool | None = None,
    ) -> None:
        """Load the graph and prove that the session can roll back.

        Args:
            bundle: with a float16 graph of any shape.
            device: where every operator of it runs, or it is an error.
            options: threads, and the least size of a prefill pass.
            row_exact: what an earlier self-test found; None tests now.

        Raises:
            BundleError: the bundle has another graph, or one that cannot roll back.
            DeviceError: the device cannot run all of the graph, or has too little memory.
        """
        if bundle.manifest.form != "dynamic-float16":
            raise BundleError(f"{bundle.path} has no float16 graph of any shape; open it with edgespec.load")
        options = options or CpuOptions()
        providers = [(device.kind.provider, dict(device.options))]
        session = open_whole(device, bundle.graph, session_settings(options), providers)
        io = DynamicIO(session, bundle, exact_rows=False, memory=DeviceMemory(device.kind.memory))
        chunk = max(options.prefill_chunk, _PREFILL_CHUNK)
        super().__init__(io, bundle.config, chunk=chunk, row_exact=row_exact)
