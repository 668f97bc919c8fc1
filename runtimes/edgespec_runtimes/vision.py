"""A tower on the CPU: pictures become vectors."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.bundle import VISION, Bundle
from edgespec_models.errors import BundleError, DeviceError, require
from edgespec_models.families.towers import Pixels
from edgespec_runtimes.cpu import CpuOptions, open_graph
from edgespec_runtimes.ort import RUN_ERRORS, lacks_memory, ort


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
        self._session = open_graph(self._path, quiet, native=True, both=True)
        self._freeing = ort.RunOptions()  # hundreds of megabytes of activations after each picture
        self._freeing.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def vectors(self, pixels: Pixels, budget: int) -> npt.NDArray[np.float32]:
        """The vectors of a picture, float32 ``(n, width)``, at most ``budget``.

        Raises:
            BundleError: ONNX Runtime cannot run the graph.
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
                inputs = dict(self._tower.inputs(seen))
                rows.append(self._session.run(["vectors"], inputs, self._freeing)[0][0])
        except (MemoryError, *RUN_ERRORS) as error:
            if lacks_memory(error):
                raise DeviceError(f"not enough memory for a picture of {budget} tokens; use fewer") from error
            raise BundleError(f"{self._path} cannot be run ({error}); export the model again") from error
        return np.concatenate(rows)
