"""The storage of each weight of a decoder's graph."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edgespec_models.bundles.weight_format import WeightFormat
from edgespec_models.decoders.config import FloatType


@dataclass(frozen=True, slots=True)
class LinearPart:
    """Rows of a projection that share a format: the tensors ``sources``, stacked.

    ``biases`` names the bias vectors of the same tensors, or is empty.
    """

    sources: tuple[str, ...]
    out_features: int
    format: WeightFormat
    biases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A projection of ``in_features``, called ``path`` in graphs: its parts' outputs, concatenated."""

    in_features: int
    parts: tuple[LinearPart, ...]
    path: str

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return sum(part.out_features for part in self.parts)


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """A token embedding: floats, or blocks of 4 or 8 bits, with or without a float offset each.

    The code of zero is the middle one. ``zero_points`` writes it into the graph: without that, CUDA's kernel
    takes 0 in some versions of ONNX Runtime (issue microsoft/onnxruntime#31692).
    """

    format: WeightFormat
    offsets: bool = False
    zero_points: bool = False


@dataclass(frozen=True, slots=True)
class Precision:
    """The number types that a graph computes in.

    Attributes:
        activations: type of projections, attention and the KV cache.
        residual: type of the embedding, the residual stream, and the normalizations that read it or add to
            it. Its sums grow from layer to layer, in some models (Gemma 3) beyond what float16 holds.
    """

    activations: FloatType
    residual: FloatType

    @property
    def mixed(self) -> bool:
        """Whether values change their type on the way into a layer and out of it."""
        return self.activations != self.residual


FULL = Precision("float32", "float32")
"""The number types of graphs for the CPU."""


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """How each weight is stored.

    ``linears`` has the products of every layer, such as ``layers.3.qkv``, and ``lm_head``.
    ``head_tokens`` names the tokens, ascending, whose rows a trimmed LM head keeps; None keeps all.
    ``context`` gives such a graph the input ``context_tokens``: further tokens that it can write, with the
    token embedding as LM head. ``columns`` are the tokens of an LM head that has not all in its file.
    With ``pictures`` some rows of the pass are vectors, of pictures; with ``whole_pictures`` those of a
    picture see each other in windowed layers. With three ``axes`` a row's position is a time, a row and a
    column.
    """

    embedding: EmbeddingSpec
    linears: Mapping[str, LinearSpec]
    head_tokens: tuple[int, ...] | None = None
    context: bool = False
    columns: tuple[int, ...] | None = None
    precision: Precision = FULL
    pictures: bool = False
    axes: int = 1
    whole_pictures: bool = False

    @property
    def native(self) -> bool:
        """Whether the graph consists of edgespec's own operators."""
        return bool(self.embedding.format.tiles)

    @property
    def biases(self) -> bool:
        """Whether queries, keys and values have biases."""
        return any(part.biases for spec in self.linears.values() for part in spec.parts)

    @property
    def tied(self) -> bool:
        """Whether the LM head is the embedding's matrix, stored once."""
        (part,) = self.linears["lm_head"].parts
        whole = self.head_tokens is None and part.format == self.embedding.format
        return self.native and whole and part.sources == ("embed",)

    def parts(self) -> Iterator[tuple[str, LinearPart]]:
        """Every stored part, by the prefix of its parameters' names."""
        for name, spec in self.linears.items():
            if name != "lm_head" or not self.tied:
                for index, part in enumerate(spec.parts):
                    yield f"{spec.path}.parts.{index}", part

    @property
    def choices(self) -> bool:
        """Whether the graph returns the most likely columns: edgespec's graphs and graphs for GPUs do."""
        return self.native or self.precision.activations != "float32"
