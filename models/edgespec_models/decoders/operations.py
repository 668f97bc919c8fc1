"""The operations that decoders are made of, and what a backend has to do to compute them.

``x`` is a residual stream or the input of a sublayer, ``y`` the output of a sublayer, both in the backend's
medium. Names are those of tensors, without the layer's prefix: within :meth:`Backend.layer` ``attn_norm`` is
``layers.3.attn_norm``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.config import Block, DeltaNet, Experts

Activation = Literal["silu", "gelu_tanh"]
Rows = int | Mapping[str, int]
"""Of the matrix that a product is called after, or of several, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary embedding (Su et al. 2021, arXiv 2104.09864, section 3.4.2).

    Attributes:
        name: prefix of its tables, ``rope`` or ``rope_local``.
        theta: base of the frequencies.
        width: leading elements of a head that are rotated.
        pairs: the number of their first pairs that turn; the others stay as they are.
        factors: a divisor for each frequency, where a model's context was extended; empty otherwise.
        magnitude: factor on cosines and sines.
        interleaved: rotates neighbouring elements rather than the two halves of ``width``.
        first: position of the first row of the tables.
    """

    name: str
    theta: float
    width: int
    pairs: int
    factors: tuple[float, ...] = ()
    magnitude: float = 1.0
    interleaved: bool = False
    first: int = 0

    def tables(self, positions: int, *, whole: bool = False) -> dict[str, npt.NDArray[np.float32]]:
        """``NAME_cos`` and ``NAME_sin``, float32 ``(positions, pairs)``.

        ``whole`` adds the pairs that stay as they are.
        """
        frequencies = self.theta ** (-np.arange(0, self.width, 2, dtype=np.float64) / self.width)
        frequencies = frequencies[: self.pairs] / (self.factors or 1.0)
        if whole:
            frequencies = np.append(frequencies, np.zeros(self.width // 2 - self.pairs))
        rows = np.arange(self.first, self.first + positions, dtype=np.float64)
        angles = np.outer(rows, frequencies)
        return {
            f"{self.name}_{part}": (function(angles) * self.magnitude).astype(np.float32)
            for part, function in (("cos", np.cos), ("sin", np.sin))
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The facts of a layer's attention.

    Attributes:
        layer: the layer whose keys and values it attends to: its own, an earlier one, or one of the target.
        heads: query heads.
        kv_heads: heads of keys, and of values.
        width: width of a head.
        scale: factor on the products of queries and keys.
        projections: what the layer has products for: ``qkv``; ``qk`` if values are keys before their
            normalization; ``q`` if keys and values belong to another layer.
        rope: the rotary embedding of queries and keys; None where nothing rotates.
        window: tokens that a token sees, itself included; None for all before it.
        norms: RMSNorm on queries and keys before they are rotated: on each head, or on all heads of a token
            at once, whose products then stand alone.
        normed_values: RMSNorm without a gain on each head of values.
        cap: scores become ``cap * tanh(score / cap)``; None where they stay as they are.
        sinks: each head has a score besides the tokens' scores, and its share is lost (Xiao et al. 2024,
            arXiv 2309.17453).
        gated: the outputs of heads are multiplied by the sigmoids of gates beside their queries.
        growth: queries at position p are multiplied by ``1 + growth * ln(1 + p // growth_step)``.
        growth_step: positions up to which they do not grow; 0 if they never do.
        bidirectional: the tokens of a block see each other.
    """

    layer: int
    heads: int
    kv_heads: int
    width: int
    scale: float
    projections: Literal["qkv", "qk", "q"] = "qkv"
    rope: Rope | None = None
    window: int | None = None
    norms: Literal["", "head", "wide"] = ""
    normed_values: bool = False
    cap: float | None = None
    sinks: bool = False
    gated: bool = False
    growth: float = 0.0
    growth_step: int = 0
    bidirectional: bool = False

    @property
    def products(self) -> dict[str, int]:
        """The rows of the matrices for ``projections``."""
        kv = self.kv_heads * self.width
        rows = {"q": self.heads * self.width * (1 + self.gated), "k": kv, "v": kv}
        return {name: rows[name] for name in self.projections}

    @property
    def outputs(self) -> int:
        """Width of all heads' outputs."""
        return self.heads * self.width


class Backend:
    """A medium in which decoders are computed. It refuses an operation by not having it.

    ``medium`` is its name, for messages. ``lacks`` are facts of operations that it has otherwise, by
    ``OPERATION.FACT``, such as ``attention.sinks``.
    """

    medium: ClassVar[str]
    lacks: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.prefix = ""

    def name(self, name: str) -> str:
        """The whole name of a tensor of the layer that is being computed."""
        return f"{self.prefix}{name}"

    @contextmanager
    def layer(self, index: int, x: Any) -> Iterator[Any]:
        """Layer ``index``, which the stream ``x`` enters."""
        self.prefix = f"layers.{index}."
        yield x
        self.prefix = ""

    def computed(self, layer: Callable[[Any], Any], x: Any) -> Any:
        """The stream behind a layer that the stream ``x`` enters; a backend may compute it again later."""
        return layer(x)

    def embed(self, rows: int, width: int, scale: float = 1.0) -> Any:
        """The rows of the pass's tokens in the table ``embed``, times ``scale``: the residual stream."""
        raise NotImplementedError

    def norm(self, x: Any, name: str) -> Any:
        """RMSNorm of the stream, for products to read."""
        raise NotImplementedError

    def post_norm(self, y: Any, name: str) -> Any:
        """RMSNorm of the output of a sublayer."""
        raise NotImplementedError

    def linear(self, x: Any, name: str, rows: Rows, *, biases: bool | None = False, part: str = "") -> Any:
        """The product ``name``, with a matrix of so many rows, or of several stacked ones, by their names.

        ``biases``: whether there are some; None leaves it to the file. ``part`` of the decoder that it
        belongs to: ``attention``, ``mixer``, ``mlp``; empty outside of these.
        """
        raise NotImplementedError

    def gated(self, x: Any, name: str, names: tuple[str, str], rows: int, activation: Activation) -> Any:
        """``activation(gate(x)) * up(x)``; ``names`` are the two matrices of the product ``name``."""
        raise NotImplementedError

    def add(self, x: Any, y: Any, name: str = "") -> Any:
        """The stream plus the output of a sublayer; ``name`` is the name of the sum."""
        raise NotImplementedError

    def scale(self, x: Any, name: str) -> Any:
        """The stream times the number ``name``."""
        raise NotImplementedError

    def attention(self, qkv: Any, facts: Attention, known: Any = None) -> Any:
        """The outputs of the heads, side by side.

        ``qkv`` is the product of queries, keys and values, or three, one by one, where ``facts.norms`` is
        ``wide``. Rows of ``known`` have keys and values, but no queries.
        """
        raise NotImplementedError

    def head_gate(self, y: Any, gates: Any) -> Any:
        """The outputs of heads, side by side, times the sigmoids of ``gates``, one for each head (LFM3)."""
        raise NotImplementedError

    def short_conv(self, x: Any, channels: int, taps: int) -> Any:
        """A gated convolution over tokens (LFM2): ``x`` is three times as wide as ``channels``."""
        raise NotImplementedError

    def delta_net(self, x: Any, net: DeltaNet, taps: int) -> Any:
        """A gated delta net (Yang et al. 2024, arXiv 2412.06464), behind a convolution of ``taps``."""
        raise NotImplementedError

    def experts(self, x: Any, experts: Experts, activation: Activation, *, shared: Any = None) -> Any:
        """A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538), and the output ``shared`` besides."""
        raise NotImplementedError

    def layer_inputs(self, x: Any, rows: int, layers: int, width: int) -> Any:
        """The inputs of layers from the tokens: rows of a table, and a product of the first layer's input."""
        raise NotImplementedError

    def input_gate(self, y: Any, inputs: Any, activation: Activation) -> Any:
        """``activation(y)`` times the layer's part of ``inputs``."""
        raise NotImplementedError

    def wanted(self, x: Any) -> Any:
        """The rows of a stream whose logits are wanted."""
        raise NotImplementedError

    def alone(self, *streams: Any) -> Sequence[Any]:
        """The same rows, for layers that compute no others because they write no keys and values."""
        raise NotImplementedError

    def logits(self, x: Any, rows: int, cap: float | None = None) -> Any:
        """The logits of the wanted rows ``x``, normalized by ``final_norm``; ``cap`` as in attention."""
        raise NotImplementedError

    def write(self, logits: Any, choices: Any = None) -> None:
        """End the pass: return logits, choices, and what sequences keep."""
        raise NotImplementedError

    # ---- Heads -------------------------------------------------------------------------------------------

    def features(self, width: int) -> Any:
        """The target's streams at the first tokens of a pass."""
        raise NotImplementedError

    def states(self, width: int) -> Any:
        """What the head wrote for the other tokens."""
        raise NotImplementedError

    def normalized(self, x: Any, name: str) -> Any:
        """RMSNorm as a value, which several operations read."""
        raise NotImplementedError

    def joined(self, first: Any, second: Any) -> Any:
        """The rows of two streams, one after the other."""
        raise NotImplementedError

    def write_states(self, x: Any, width: int) -> None:
        """Return states of the wanted rows, which the head reads in the next pass."""
        raise NotImplementedError

    def chain(self, logits: Any, x: Any, rows: int, block: Block) -> Any:
        """The choices of a block's rows, one after the other (DSpark, arXiv 2607.05147)."""
        raise NotImplementedError

    def clusters(self, x: Any, rows: int, clusters: int, read: int) -> Any:
        """Logits of the tokens of a few clusters; others have the lowest possible logit."""
        raise NotImplementedError
