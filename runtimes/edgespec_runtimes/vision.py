"""A tower on the CPU: pictures become vectors."""

from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.bundle import VISION, Bundle
from edgespec_models.errors import BundleError, Cancelled, DeviceError, require
from edgespec_models.families.towers import Pixels
from edgespec_runtimes.cpu import CpuOptions, open_graph
from edgespec_runtimes.ort import RUN_ERRORS, lacks_memory, ort
from edgespec_runtimes.own_thread import OwnThread

_LOOK_S: Final = 0.2  # between two questions whether a run shall stop


class VisionSession:
    """The tower of a bundle, loaded.

    Raises:
        BundleError: ONNX Runtime cannot load the graph.
        DeviceError: not enough memory.
    """

    def __init__(self, bundle: Bundle, options: CpuOptions) -> None:
        assert bundle.manifest.vision is not None  # of bundles that read pictures
        self._tower, self._path = bundle.manifest.vision, bundle.path / VISION
        # Its operators and ONNX Runtime's take turns on the same cores, so neither may wait busily.
        quiet = replace(options, spinning=False, huge_pages=False)
        opened = partial(open_graph, self._path, quiet, native=True, both=True)
        self._session = OwnThread(opened, "edgespec-tower")

    def vectors(
        self, pixels: Pixels, budget: int, stop: Callable[[], bool] = lambda: False
    ) -> npt.NDArray[np.float32]:
        """The vectors of a picture, float32 ``(n, width)``, at most ``budget``.

        Raises:
            BundleError: ONNX Runtime cannot run the graph.
            Cancelled: ``stop``, which is called a few times a second, was true.
            DeviceError: not enough memory.
        """
        require("a prompt with pictures", "images", "PIL.Image")
        from PIL import Image

        resized, way = {pixels.shape[:2]: pixels}, Image.Resampling[self._tower.RESAMPLING]
        rows = list[npt.NDArray[np.float32]]()
        try:
            for view in self._tower.views(pixels.shape, budget):
                if view.size not in resized:
                    high, wide = view.size
                    resized[view.size] = np.asarray(Image.fromarray(pixels).resize((wide, high), way))
                top, left, high, wide = view.box or (0, 0, *view.size)
                seen = resized[view.size][top : top + high, left : left + wide]
                rows.append(self._run(self._tower.inputs(seen), stop))
        except (MemoryError, *RUN_ERRORS) as error:
            if lacks_memory(error):
                raise DeviceError(f"not enough memory for a picture of {budget} tokens; use fewer") from error
            raise BundleError(f"{self._path} cannot be run ({error}); export the model again") from error
        return np.concatenate(rows)

    def _run(
        self, inputs: Mapping[str, npt.NDArray[Any]], stop: Callable[[], bool]
    ) -> npt.NDArray[np.float32]:
        options = ort.RunOptions()  # to free hundreds of megabytes of activations
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        run = self._session.begin_run(["vectors"], dict(inputs), options)
        try:
            while not run.done() and not stop():
                wait([run], _LOOK_S)
            is_whole = run.done()
        finally:  # Ctrl-C too
            options.terminate = True  # ends the run behind its present operator
        if not is_whole:
            wait([run])
            raise Cancelled("the picture is no longer wanted")
        vectors: npt.NDArray[np.float32] = run.result()[0][0]
        return vectors
