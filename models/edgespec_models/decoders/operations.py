"""The operations that decoders are made of, and what a backend has to do to compute them.

``x`` is a residual stream or the input of a sublayer, ``y`` the output of a sublayer, both in the backend's
medium. Names are those of tensors, without the layer's prefix: within :meth:`Backend.layer` ``attn_norm`` is
``layers.3.attn_norm``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.config import Block, Count, Factor
from edgespec_models.errors import UnsupportedModelError
from edgespec_models.schema import check_fields, within

Activation = Literal["silu", "gelu_tanh", "relu2"]
"""``relu2`` is the square of what is positive, and has no gate."""
UNUSUAL: Final = frozenset(
    {f"attention.{fact}" for fact in ("normed_values", "cap", "sinks", "gates", "growth", "known_rows")}
    | {f"attention.{fact}" for fact in ("keys_of_another_layer", "values_from_keys", "unturned_pairs")}
    | {f"attention.{fact}" for fact in ("norms_behind_rotation", "tensors_of_another_layer")}
    | {"gated.squares", "gated.xielu", "logits.cap", "post_norm.epsilon"}
)
"""Facts of operations that few families have, for backends that compute none of these."""


class XIELU(NamedTuple):
    """``above x^2 + slope x`` where x is positive, else ``below (e^x - 1 - x) + slope x``.

    Source: Huang and Schlag 2024, arXiv 2411.13010.
    """

    above: float
    below: float
    slope: float


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

    name: Literal["rope", "rope_local"] = "rope"
    theta: Factor
    width: Count
    pairs: Count
    factors: tuple[Factor, ...] = ()
    magnitude: Factor = 1.0
    interleaved: bool = False
    first: Annotated[int, within(0, 1)] = 0

    def __post_init__(self) -> None:
        check_fields(self, UnsupportedModelError)
        if self.pairs > self.width // 2:
            raise UnsupportedModelError(f"pairs of {self.name} is {self.pairs}; a head has {self.width // 2}")
        if self.factors and len(self.factors) != self.pairs:
            raise UnsupportedModelError(
                f"there are {len(self.factors)} rope_factors for {self.pairs} frequencies"
            )

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
class DeltaNet:
    """The heads of a gated delta net (Yang et al. 2024, arXiv 2412.06464).

    Attributes:
        key_heads: heads of queries and of keys.
        value_heads: heads of values, with a state each; the same number for each key head.
        key_width: width of a head of keys; ``value_width`` is the width of a head of values.
        tiled: value head h goes with key head ``h % key_heads``; else the value heads of a key head follow
            each other.
    """

    key_heads: Count
    value_heads: Count
    key_width: Annotated[int, within(16, 4096)]
    value_width: Annotated[int, within(16, 4096)]
    tiled: bool = False

    def __post_init__(self) -> None:
        check_fields(self, UnsupportedModelError)
        if self.value_heads % self.key_heads:
            raise UnsupportedModelError(
                f"{self.value_heads} value heads of a delta net cannot share {self.key_heads} key heads"
            )
        if self.key_width % 16 or self.value_width % 16:
            raise UnsupportedModelError(
                f"heads of a delta net are {self.key_width} and {self.value_width} wide; allowed: "
                "multiples of 16"
            )

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all heads of queries."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Width of all value heads."""
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """The convolved channels: queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """The heads of a layer of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060).

    Attributes:
        heads: heads of values, with a state each.
        width: width of a head.
        groups: groups of heads that share keys (B) and queries (C); the same number of heads each.
        key_width: width of a group's keys, and of its queries.
    """

    heads: Count
    width: Annotated[int, within(16, 4096)]
    groups: Count
    key_width: Annotated[int, within(16, 4096)]

    def __post_init__(self) -> None:
        check_fields(self, UnsupportedModelError)
        if self.heads % self.groups:
            raise UnsupportedModelError(f"{self.heads} heads of Mamba-2 cannot share {self.groups} groups")
        if self.width % 16 or self.key_width % 16:
            raise UnsupportedModelError(
                f"heads of Mamba-2 are {self.width} wide and their keys {self.key_width}; allowed: multiples "
                "of 16"
            )

    @property
    def values(self) -> int:
        """Width of all heads."""
        return self.heads * self.width

    @property
    def keys(self) -> int:
        """Width of the keys of all groups, and of their queries."""
        return self.groups * self.key_width

    @property
    def channels(self) -> int:
        """The convolved channels: values, keys and queries."""
        return self.values + 2 * self.keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts; each token uses a few (Shazeer et al. 2017, arXiv 1701.06538).

    A router gives each expert a score. The experts with the highest scores are used, of equal ones the first.
    Their outputs are added up, times their weights.

    Attributes:
        count: experts of a layer.
        used: experts that each token uses.
        width: width of an expert.
        dense_layers: the number of first layers that have an MLP instead.
        gating: the function from scores to weights, over all experts; if ``normalized``, over the used ones.
        normalized: the weights of a token add up to one.
        scale: factor on the weights after that.
        selection_bias: whether numbers are added to the weights for the choice alone.
        biases: whether router and experts have biases.
        clamped: whether gates end at 7 and their factors at 7 and -7, as in gpt-oss.
        shared_width: width of an expert that every token uses besides; 0 without one.
        shared_gate: whether its output is multiplied by the sigmoid of a score of its own.
        beside_mlp: whether a layer has an MLP too. MLP, experts and router then normalize the stream each for
            themselves, weights have factors by expert, and results are normalized before they are added
            (Gemma 4).
    """

    count: Annotated[int, within(1, 4096)]
    used: Annotated[int, within(1, 4096)]
    width: Count
    dense_layers: Annotated[int, within(0, 4096)] = 0
    gating: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scale: Factor = 1.0
    selection_bias: bool = False
    biases: bool = False
    clamped: bool = False
    shared_width: Annotated[int, within(0, 2**31 - 1)] = 0
    shared_gate: bool = False
    beside_mlp: bool = False

    def __post_init__(self) -> None:
        check_fields(self, UnsupportedModelError)
        if self.used > self.count:
            raise UnsupportedModelError(f"a token uses {self.used} experts; there are {self.count}")
        if self.shared_gate and not self.shared_width:
            raise UnsupportedModelError(
                "shared_gate is true and shared_width is 0; the first needs the second"
            )
        if self.beside_mlp and self.shared_width:
            raise UnsupportedModelError(
                f"experts lie beside an MLP and shared_width is {self.shared_width}; edgespec has either"
            )


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
        normed_last: each head is normalized behind its rotation instead.
        normed_values: RMSNorm without a gain on each head of values.
        cap: scores become ``cap * tanh(score / cap)``; None where they stay as they are.
        sinks: each head has a score besides the tokens' scores, and its share is lost (Xiao et al. 2024,
            arXiv 2309.17453).
        gated: the outputs of heads are multiplied by the sigmoids of gates beside their queries.
        growth: queries at position p are multiplied by ``1 + growth * ln(1 + p // growth_step)``.
        growth_step: positions up to which they do not grow; 0 if they never do.
        bidirectional: the tokens of a block see each other.
        latent: width of the values of latent attention (DeepSeek-AI 2024, arXiv 2405.04434): they are the
            first elements of the keys, which alone are kept and normalized; the others rotate. 0 in other
            attention.
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
    normed_last: bool = False
    normed_values: bool = False
    cap: float | None = None
    sinks: bool = False
    gated: bool = False
    growth: float = 0.0
    growth_step: int = 0
    bidirectional: bool = False
    latent: int = 0

    @property
    def products(self) -> dict[str, int]:
        """The rows of the matrices for ``projections``."""
        kv = self.kv_heads * self.width
        rows = {"q": self.heads * self.width * (1 + self.gated), "k": kv, "v": kv}
        return {name: rows[name] for name in self.projections}

    @property
    def outputs(self) -> int:
        """Width of all heads' outputs."""
        return self.heads * (self.latent or self.width)


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

    def reuse_layer(self, index: int) -> None:
        """Name the tensors of layer ``index`` within another layer, which computes the same."""
        self.prefix = f"layers.{index}."

    def embed(self, rows: int, width: int, scale: float = 1.0) -> Any:
        """The rows of the pass's tokens in the table ``embed``, times ``scale``: the residual stream."""
        raise NotImplementedError

    def norm(self, x: Any, name: str) -> Any:
        """RMSNorm of the stream, for products to read."""
        raise NotImplementedError

    def post_norm(self, y: Any, name: str, epsilon: float | None = None) -> Any:
        """RMSNorm of the output of a sublayer, perhaps with an ``epsilon`` of its own."""
        raise NotImplementedError

    def linear(self, x: Any, name: str, rows: Rows, *, biases: bool | None = False, part: str = "") -> Any:
        """The product ``name``, with a matrix of so many rows, or of several stacked ones, by their names.

        ``biases``: whether there are some; None leaves it to the file. ``part`` of the decoder that it
        belongs to: ``attention``, ``mixer``, ``mlp``; empty outside of these.
        """
        raise NotImplementedError

    def gated(
        self, x: Any, name: str, names: tuple[str, ...], rows: int, activation: Activation | XIELU
    ) -> Any:
        """``activation(gate(x)) * up(x)``; ``names`` are the two matrices of the product ``name``.

        With ``relu2`` and xIELU there is one matrix: ``activation(up(x))``.
        """
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
        ``wide``; of latent attention it is queries and keys. Rows of ``known`` have keys and values, but no
        queries.
        """
        raise NotImplementedError

    def head_linear(self, x: Any, name: str, heads: int, inputs: int, rows: int) -> Any:
        """The product of the first ``inputs`` elements of each head with a matrix of its own.

        The matrices, of so many ``rows`` each, lie one below the other in ``name``. A head's other elements
        follow its product.
        """
        raise NotImplementedError

    def head_gate(self, y: Any, gates: Any, *, softplus: bool = False) -> Any:
        """The outputs of heads, side by side, times the sigmoids or softplus of ``gates``.

        There is one for each head, or for each output.
        """
        raise NotImplementedError

    def short_conv(self, x: Any, channels: int, taps: int) -> Any:
        """A gated convolution over tokens (LFM2): ``x`` is three times as wide as ``channels``."""
        raise NotImplementedError

    def delta_net(self, x: Any, net: DeltaNet, taps: int) -> Any:
        """A gated delta net (Yang et al. 2024, arXiv 2412.06464), behind a convolution of ``taps``."""
        raise NotImplementedError

    def mamba(self, x: Any, mamba: Mamba, taps: int) -> Any:
        """A layer of Mamba-2 (arXiv 2405.21060), behind a convolution of ``taps``.

        ``x`` has gates, values, keys, queries and steps side by side.
        """
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
        """RMSNorm as a value, which several operations read; without a gain if ``name`` is empty."""
        raise NotImplementedError

    def joined(self, first: Any, second: Any) -> Any:
        """The rows of two streams, one after the other."""
        raise NotImplementedError

    def write_states(self, x: Any, width: int) -> None:
        """Return states of the wanted rows, which the head reads in the next pass."""
        raise NotImplementedError

    def chain(self, logits: Any, x: Any, rows: int, block: Block, candidates: int = 0) -> Any:
        """The choices of a block's rows, one after the other (DSpark, arXiv 2607.05147).

        With ``candidates`` each is one of that many tokens with the highest logits, and the bias also depends
        on ``x`` (DFlash 2).
        """
        raise NotImplementedError

    def block_taps(self, x: Any, name: str, taps: int, group: int) -> Any:
        """The weights of two convolutions over a block's rows (DFlash 2), each row's its own.

        They are those in ``NAME_base``, and a product ``NAME`` that gives ``group`` channels the same.
        """
        raise NotImplementedError

    def block_conv(self, y: Any, weights: Any, side: int) -> Any:
        """The convolution with the first or the second of these weights; before a block there are zeros."""
        raise NotImplementedError

    def clusters(self, x: Any, rows: int, clusters: int, read: int) -> Any:
        """Logits of the tokens of a few clusters; others have the lowest possible logit."""
        raise NotImplementedError
