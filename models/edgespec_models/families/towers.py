"""Towers: what makes vectors of pictures, which a decoder reads as rows of its stream.

A tower is a graph of its own over a picture's patches. Sizes, patches, their order and rotary tables are
NumPy's work: in graphs they are awkward, and other runtimes do not export them either.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.config import Count
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.files.facts import Facts
from edgespec_models.schema import within

Pixels = npt.NDArray[np.uint8]
"""A picture: uint8 (height, width, 3), RGB."""
Token = Annotated[int, within(0, 2**31 - 1)]


class Operations(ABC):
    """What a tower's graph is made of. Parameters have the names of the hub's tensors, without ``model.``."""

    @abstractmethod
    def input(self, name: str, shape: Sequence[int | str], kind: Literal["float", "int"] = "float") -> Any:
        """An input, float32 or int64."""

    @abstractmethod
    def op(self, kind: str, *inputs: Any, domain: str = "", **attributes: Any) -> Any:
        """An operator of ONNX or ONNX Runtime with one output."""

    @abstractmethod
    def constant(self, values: Any, kind: Literal["float", "int"] = "int") -> Any:
        """A constant."""

    @abstractmethod
    def parameter(self, name: str, *shape: int) -> Any:
        """A weight in float32, which is not multiplied by as a matrix."""

    @abstractmethod
    def linear(self, x: Any, name: str, rows: int, columns: int, *, bias: bool = False) -> Any:
        """The product of ``x`` (1, n, columns) and a matrix, (1, n, rows), and perhaps a bias beside it.

        ``name`` is the matrix's; that of the bias ends with ``bias`` instead of ``weight``.
        """

    @abstractmethod
    def attention(self, query: Any, key: Any, value: Any, heads: int, scale: float) -> Any:
        """Attention among all rows, (1, n, width), of heads side by side; ``scale`` multiplies scores."""

    def reshape(self, x: Any, *shape: int) -> Any:
        """``x`` in another shape: 0 keeps a dimension, -1 is the rest."""
        return self.op("Reshape", x, self.constant(shape))

    def rms_norm(self, x: Any, width: int, name: str = "", *, epsilon: float) -> Any:
        """``x`` over the root of its mean square, times the gain ``name``."""
        gain = self.parameter(name, width) if name else self.constant(np.ones(width), "float")
        return self.op("SimplifiedLayerNormalization", x, gain, axis=-1, epsilon=epsilon, stash_type=1)

    def layer_norm(self, x: Any, width: int, name: str, *, epsilon: float) -> Any:
        """``x`` less its mean, over the root of its variance, times ``name.weight``, plus ``name.bias``."""
        gain, bias = (self.parameter(f"{name}.{kind}", width) for kind in ("weight", "bias"))
        return self.op("LayerNormalization", x, gain, bias, axis=-1, epsilon=epsilon)


class View(NamedTuple):
    """What a run of a tower's graph sees.

    Attributes:
        size: height and width to which the picture is resized.
        box: top, left, height and width of the part that is seen; None for all.
        before: tokens before the view's rows.
    """

    size: tuple[int, int]
    box: tuple[int, int, int, int] | None = None
    before: tuple[int, ...] = ()

    @property
    def extent(self) -> tuple[int, int]:
        """Height and width of what is seen."""
        return self.size if self.box is None else self.box[2:]


@dataclass(frozen=True, kw_only=True)
class Tower(ABC):
    """A tower, as bundles hold it.

    Attributes:
        architecture: the family's name.
        width: width of a vector, that of the decoder's stream.
        marker: the token in place of a picture in prompts. The chat template writes it once for a picture.
        around: tokens before and behind all markers of a picture, which the chat template does not write.
        axes: parts of a row's position: 1, or 3, which are time, row and column (M-RoPE, arXiv 2409.12191).
        whole: rows of a picture see each other in windowed layers of the decoder, so a pass reads all of
            them, or all that are not in the cache.
    """

    axes: ClassVar[int] = 1
    RESAMPLING: ClassVar[str] = "BICUBIC"
    """Pillow's name for the way in which pictures are resized."""

    architecture: str
    width: Count
    marker: Token
    around: tuple[Token, ...] = ()
    whole: bool = False

    @abstractmethod
    def budget(self, detail: str, image_tokens: int | None) -> int:
        """The most vectors of a picture, for ``image_tokens`` or else its ``detail``: low, high or auto."""

    @abstractmethod
    def size(self, shape: Sequence[int], budget: int) -> tuple[int, int]:
        """Height and width in pixels to which a picture, whose pixels have this shape, is resized."""

    def views(self, shape: Sequence[int], budget: int) -> Sequence[View]:
        """The views of a picture, whose vectors follow each other."""
        return [View(self.size(shape, budget))]

    @property
    @abstractmethod
    def side(self) -> int:
        """Side of the square of pixels that becomes a vector."""

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the vectors of a view of this size."""
        return size[0] // self.side, size[1] // self.side

    def count(self, size: tuple[int, int]) -> int:
        """The vectors of a view of this size."""
        return prod(self.grid(size))

    @abstractmethod
    def inputs(self, pixels: Pixels) -> Mapping[str, npt.NDArray[Any]]:
        """The graph's inputs for the pixels of a view."""

    @abstractmethod
    def build(self, b: Operations) -> Any:
        """The vectors (1, count, width) of one view."""

    def tokens(self, views: Sequence[View]) -> list[int]:
        """The tokens of a prompt in place of the one that the chat template writes."""
        rows = [(*view.before, *[self.marker] * self.count(view.extent)) for view in views]
        return [*self.around[:1], *chain.from_iterable(rows), *self.around[1:]]


class TowerFamily(NamedTuple):
    """A family of towers.

    Attributes:
        name: the family in manifests.
        hub: names of ``model_type`` of ``vision_config`` in a ``config.json``.
        gguf: the projector's type in GGUF files.
        models: architectures, as GGUF files call them, of the models that it sees for.
        tower: its facts and its graph.
        names: parts of parameters' names and those of GGUF files, which replace them one after the other.
        read: from a ``config.json`` and the ids of special tokens to the tower; None if edgespec runs the
            model as text alone.
        from_gguf: the same from the keys of a GGUF file's ``clip.vision``, the shapes of its tensors, the
            decoder, and the ids of its tokens.
    """

    name: str
    hub: tuple[str, ...]
    gguf: str
    models: tuple[str, ...]
    tower: type[Tower]
    names: Mapping[str, str]
    read: Callable[[Facts, Mapping[str, int]], Tower | None]
    from_gguf: Callable[[Facts, Mapping[str, tuple[int, ...]], Transformer, Mapping[str, int]], Tower | None]

    def gguf_name(self, name: str) -> str:
        """The name of a parameter in GGUF files."""
        for own, other in self.names.items():
            name = name.replace(own, other)
        return name


def patches(pixels: Pixels, side: int, merged: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Squares of ``side`` pixels, (n, side, side, 3), and their rows and columns (2, n).

    Those of a square of ``merged`` by ``merged``, which becomes a vector, follow each other.
    """
    high, wide = (length // (side * merged) for length in pixels.shape[:2])
    split = pixels.reshape(high, merged, side, wide, merged, side, 3).transpose(0, 3, 1, 4, 2, 5, 6)
    grid = np.mgrid[: high * merged, : wide * merged].reshape(2, high, merged, wide, merged)
    count = prod(split.shape[:4])
    return split.reshape(count, side, side, 3), grid.transpose(0, 1, 3, 2, 4).reshape(2, count)
