"""Facts of architectures: what a graph has to compute, from whatever file it came."""

from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

from edgespec_models.errors import UnsupportedModelError
from edgespec_models.schema import check_fields, length, within

FloatType = Literal["float32", "float16"]
"""The number types that a graph of any shape computes in."""
Mixer = Literal["attention", "windowed_attention", "short_conv", "delta_net"]
"""The part of a layer in which tokens see each other."""
_ATTENTION: Final = ("attention", "windowed_attention")
MLP = Literal["gated_mlp", "experts"]
"""The part of a layer behind the mixer."""
Count = Annotated[int, within(1, 2**31 - 1)]
Layers = Annotated[int, within(1, 4096)]
"""Layers of a model: tables have a row for each, and the deepest models have some hundreds."""
Context = Annotated[int, within(8, 2**21)]
"""Positions: enough for the self-test of a session, and the rotary tables have a row for each."""
AGAIN = "The file is damaged or of another version; export the model again"
_Factor = Annotated[float, within(above=0)]
MTP_ROWS: Final = 32_768
"""Default number of rows that a head takes from its target's LM head: rows of the most frequent tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """How a head drafts a block of tokens in one pass (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147).

    A block is the last known token and masks. Its rows see each other.

    Attributes:
        size: tokens of the longest block that the head was trained for.
        mask: the token that stands for an unknown one.
        anchored: the known token's row drafts the next token, and each mask's row the one behind it. Else
            rows draft the tokens that their masks stand for.
        causal: rows see only those before them.
        causal_windows: so it is in layers with a sliding window, whatever ``causal`` says of others.
        rank: of the bias by which a drafted token changes the next one's logits; 0 without.
        confident: the head also says how probable it is that a token is accepted.
    """

    size: Annotated[int, within(2, 256)]
    mask: Annotated[int, within(0, 2**31 - 1)]
    anchored: bool = False
    causal: bool = False
    causal_windows: bool = False
    rank: Annotated[int, within(0, 65_536)] = 0
    confident: bool = False

    def __post_init__(self) -> None:
        check_fields(self, UnsupportedModelError)

    @property
    def longest(self) -> int:
        """Tokens that a block drafts at most."""
        return self.size if self.anchored else self.size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The shape of a decoder, as sessions need it, of any exporter's graph.

    Attributes:
        architecture: the family.
        vocab_size: rows of the LM head.
        num_layers: how many layers there are.
        context_length: positions the model was made for.
        feature_layers: layers of the target whose input a head reads.
        feature_width: width of that input.
        block: the blocks of a head that drafts several tokens in one pass.
    """

    architecture: Annotated[str, length(1)]
    vocab_size: Count
    num_layers: Layers
    context_length: Context
    feature_layers: tuple[Annotated[int, within(0, 4095)], ...] = ()
    feature_width: Annotated[int, within(0, 2**31 - 1)] = 0
    block: Block | None = None

    @property
    def is_head(self) -> bool:
        """Whether the model drafts from states of its target.

        EAGLE-3's and DFlash's heads do (arXiv 2503.01840, 2602.06036), MTP layers (arXiv 2412.19437), and the
        assistants of Gemma 4.
        """
        return bool(self.feature_layers)

    @property
    def reads_cache(self) -> bool:
        """Whether it attends to keys and values of its target, and has none of its own."""
        return False

    def attended(self, tokens: int) -> float:
        """Tokens that a layer attends to with ``tokens`` in the KV cache, the mean of all layers."""
        return float(tokens)


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
    scale: _Factor = 1.0
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
        if self.selection_bias and self.gating != "sigmoid":
            raise UnsupportedModelError(
                f"experts are chosen with a bias and weighed by {self.gating}; allowed with a bias: sigmoid"
            )
        if self.shared_gate and not self.shared_width:
            raise UnsupportedModelError(
                "shared_gate is true and shared_width is 0; the first needs the second"
            )
        if self.beside_mlp and self.shared_width:
            raise UnsupportedModelError(
                f"experts lie beside an MLP and shared_width is {self.shared_width}; edgespec has either"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assistant:
    """A head whose layers attend to keys and values of its target, and have none of their own.

    Attributes:
        windowed: the layer of the target whose keys and values its windowed layers attend to.
        whole: the same of its layers that see the whole context.
        clusters: the clusters of the rows of its LM head, which have as many tokens each; 0 without them.
        clusters_read: the clusters whose logits are computed for a token: those with the highest scores.
    """

    windowed: Annotated[int, within(0, 4095)]
    whole: Annotated[int, within(0, 4095)]
    clusters: Annotated[int, within(0, 2**20)] = 0
    clusters_read: Annotated[int, within(0, 2**20)] = 0

    def __post_init__(self) -> None:
        check_fields(self, UnsupportedModelError)
        if not min(1, self.clusters) <= self.clusters_read <= self.clusters:
            raise UnsupportedModelError(
                f"{self.clusters_read} of {self.clusters} clusters of tokens are read; allowed: one to all"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderShape):
    """A decoder-only transformer for which edgespec can build a graph.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        local_kv_heads: key and value heads in sliding-window layers; None for ``num_kv_heads``.
        local_head_dim: width of a head there; None for ``head_dim``.
        shared_layers: the number of last layers that attend to keys and values of an earlier layer: the last
            one before them with the same window, or like them without one.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        mlp_widths: width of each layer's MLP; empty if all are ``intermediate_size``.
        layer_inputs: numbers of each token that every layer reads besides the stream (Gemma 3n's per-layer
            embeddings); 0 for none.
        norm_epsilon: epsilon of every RMSNorm.
        rope_theta: base of the rotary embedding.
        rope_interleaved: rotate neighbouring elements rather than the two halves of a head.
        rope_factors: ``rotary_width / 2`` divisors of the frequencies of ``rope_theta``, where a model's
            context was extended; empty otherwise.
        rope_magnitude: factor on the rotary cosines and sines of ``rope_theta``.
        rotary_dim: leading elements of a head that are rotated; None for all.
        rotary_pairs: the number of their first pairs that turn by ``rope_theta``; None for all.
        unrotated_layers: layers without a rotary embedding (Yang et al. 2025, "RoPE to NoPE and Back Again").
        rope_local_theta: base in sliding-window layers; None for ``rope_theta``.
        sliding_window: tokens that a sliding-window layer sees, the token itself included; None without such
            layers.
        global_every: with a sliding window, every n-th layer sees all; 0 where none does. Of no effect where
            ``mixers`` name windowed layers.
        qk_norm: RMSNorm on each query and key head before the rotary embedding.
        wide_qk_norm: RMSNorm on all heads of a token at once instead.
        normed_values: RMSNorm without a gain on each value head.
        tied_values: layers that see the whole context have no product of values, but use the product of their
            keys.
        pre_norms: RMSNorm on the inputs of attention and the MLP.
        post_norms: RMSNorm on their outputs.
        scaled_layers: the output of a layer is multiplied by a number of the layer.
        mixers: the mixer of each layer; empty if all are attention.
        conv_taps: tokens that a short convolution or the one of a delta net sees, the token itself included;
            None without one.
        delta: the heads of delta nets; None without one.
        gated_attention: the outputs of heads are multiplied by the sigmoids of gates beside their queries.
        sinks: each head has a score besides the tokens' scores, and its share is lost (Xiao et al. 2024,
            arXiv 2309.17453), and the product behind them has a bias.
        experts: the experts that layers have instead of an MLP; None without them.
        activation: activation of the gate.
        embedding_scale: factor on the token embeddings.
        attention_scale: factor on the query-key products.
        attention_cap: these then become ``attention_cap * tanh(product / attention_cap)``; None where they
            stay as they are.
        query_growth: queries at position p are multiplied by ``1 + query_growth * ln(1 + p // query_step)``.
        query_step: positions up to which they do not grow; 0 if they never do.
        logit_cap: logits z become ``logit_cap * tanh(z / logit_cap)``; None without a cap.
        normed_features: RMSNorm on the features that a head reads from the target.
        normed_residual: in a head attention adds to the normalized state.
        assistant: facts of a head that attends to its target's keys and values; None for other models.
    """

    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    hidden_size: Count
    intermediate_size: Count
    norm_epsilon: _Factor
    rope_theta: _Factor
    attention_scale: _Factor
    rope_interleaved: bool = False
    rope_factors: tuple[_Factor, ...] = ()
    rope_magnitude: _Factor = 1.0
    rotary_dim: Count | None = None
    rotary_pairs: Count | None = None
    unrotated_layers: tuple[int, ...] = ()
    rope_local_theta: _Factor | None = None
    sliding_window: Count | None = None
    global_every: Annotated[int, within(0, 2**31 - 1)] = 1
    local_kv_heads: Count | None = None
    local_head_dim: Count | None = None
    shared_layers: Annotated[int, within(0, 4095)] = 0
    mlp_widths: tuple[Count, ...] = ()
    layer_inputs: Annotated[int, within(0, 2**31 - 1)] = 0
    qk_norm: bool = False
    wide_qk_norm: bool = False
    normed_values: bool = False
    tied_values: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    scaled_layers: bool = False
    mixers: tuple[Mixer, ...] = ()
    conv_taps: Annotated[int, within(2, 16)] | None = None
    delta: DeltaNet | None = None
    gated_attention: bool = False
    sinks: bool = False
    experts: Experts | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: _Factor = 1.0
    attention_cap: _Factor | None = None
    query_growth: Annotated[float, within(0)] = 0.0
    query_step: Annotated[int, within(0, 2**21)] = 0
    logit_cap: _Factor | None = None
    normed_features: bool = False
    normed_residual: bool = False
    assistant: Assistant | None = None

    def __post_init__(self) -> None:
        check_fields(self, UnsupportedModelError)
        for width in (self.head_dim, self.local_head_dim or 2):
            if width % 2:
                raise UnsupportedModelError(f"head_dim is {width}; a rotary embedding needs an even one")
        # ONNX Runtime's GroupQueryAttention takes rotary tables whose width is a multiple of 8.
        if self.rotary_dim is not None and (self.rotary_dim % 16 or self.rotary_dim > self.head_dim):
            raise UnsupportedModelError(
                f"rotary_dim is {self.rotary_dim}; it must be a multiple of 16 up to {self.head_dim}"
            )
        if self.rotary_pairs is not None and self.rotary_pairs > self.rotary_width // 2:
            raise UnsupportedModelError(
                f"rotary_pairs is {self.rotary_pairs}; a head has {self.rotary_width // 2}"
            )
        if self.rope_factors and len(self.rope_factors) != self.turning_pairs:
            raise UnsupportedModelError(
                f"there are {len(self.rope_factors)} rope_factors for {self.turning_pairs} frequencies"
            )
        if self.wide_qk_norm and not self.qk_norm:
            raise UnsupportedModelError("wide_qk_norm is true and qk_norm is not; the first needs the second")
        self._check_head()
        if self.mixers and len(self.mixers) != self.num_layers:
            raise UnsupportedModelError(f"there are {len(self.mixers)} mixers for {self.num_layers} layers")
        stateful = [mixer for mixer in self.mixers if mixer not in _ATTENTION]
        nets, both = stateful.count("delta_net"), "there are both, or none"
        if bool(stateful) != (self.conv_taps is not None):
            kinds = " and ".join(sorted({*stateful})) or "other than attention"
            raise UnsupportedModelError(
                f"conv_taps is {self.conv_taps} and {len(stateful)} layers are {kinds}; {both}"
            )
        if bool(nets) != (self.delta is not None):
            raise UnsupportedModelError(f"delta is {self.delta} and {nets} layers are delta_net; {both}")
        if "windowed_attention" in self.mixers and self.sliding_window is None:
            raise UnsupportedModelError("mixers are windowed_attention; they need a sliding_window")
        if self.sinks and self.experts is None:
            raise UnsupportedModelError("heads have sinks and layers no experts; allowed: both, or none")
        for count in (self.num_kv_heads, self.local_kv_heads or 1):
            if self.num_heads % count:
                raise UnsupportedModelError(
                    f"{self.num_heads} query heads cannot share {count} key-value heads evenly"
                )
        if len(self.mlp_widths) not in (0, self.num_layers):
            raise UnsupportedModelError(
                f"there are {len(self.mlp_widths)} mlp_widths for {self.num_layers} layers"
            )
        if self.shared_layers >= self.num_layers:
            raise UnsupportedModelError(
                f"shared_layers is {self.shared_layers} of {self.num_layers} layers; allowed: fewer than all"
            )
        for layer in range(self.num_layers):
            if self.kv_layer(layer) is None:
                kind = "the whole context" if self.is_global(layer) else "a window"
                raise UnsupportedModelError(
                    f"layer {layer} reads the keys and values of an earlier layer that sees {kind}; there is "
                    f"none before the last {self.shared_layers} layers (shared_layers)"
                )

    def _check_head(self) -> None:
        reads, norms = (self.feature_layers, self.feature_width), (self.normed_features, self.normed_residual)
        plain = self.pre_norms and not (self.post_norms or self.mixers)
        single = self.num_layers == 1 and plain and self.block is None
        as_wide = self.feature_width == self.hidden_size and not any(norms)
        right = {
            "eagle3": all(reads) and single and not (self.qk_norm or self.gated_attention or self.experts),
            "mtp": all(reads) and single and as_wide,
            "dflash": all((*reads, plain, as_wide, self.block, not self.experts, not self.gated_attention)),
            "assistant": all(reads) and self.qk_norm and not any((*norms, self.shared_layers, self.mixers)),
        }
        if (self.architecture == "assistant") != (self.assistant is not None):
            raise UnsupportedModelError(
                f"assistant is {self.assistant} of {self.architecture}; only an assistant has it, and must"
            )
        if self.assistant is not None and self.vocab_size % (16 * max(self.assistant.clusters, 1)):
            raise UnsupportedModelError(
                f"{self.vocab_size} tokens lie in {self.assistant.clusters} clusters; allowed: clusters of a "
                "multiple of 16 tokens"
            )
        if not right.get(self.architecture, not any((*reads, *norms, self.block))):
            raise UnsupportedModelError(
                f"{self.num_layers} layers of {self.architecture}, feature_layers {self.feature_layers}, "
                f"feature_width {self.feature_width} and block {self.block}; a head is one plain layer of "
                "eagle3 or mtp, with the first two, or plain layers of dflash, with all"
            )
        if self.block is not None and self.block.mask >= self.vocab_size:
            raise UnsupportedModelError(
                f"the mask of a block is token {self.block.mask}; allowed: 0 to {self.vocab_size - 1}"
            )

    @property
    def mtp_layer(self) -> "ModelConfig":
        """The config of the layer that drafts for this model, with attention as in its own layers.

        It reads the output of the last layer (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).
        """
        return replace(
            self,
            architecture="mtp",
            num_layers=1,
            mixers=(),
            conv_taps=None,
            delta=None,
            feature_layers=(self.num_layers,),
            feature_width=self.hidden_size,
        )

    @property
    def reads_cache(self) -> bool:
        """As an assistant does."""
        return self.assistant is not None

    @property
    def whole_layers(self) -> int:
        """The number of first layers that compute every row of a pass, because they write keys and values.

        Later layers read these, and compute only rows whose logits are wanted.
        """
        return self.num_layers - self.shared_layers

    @property
    def late_streams(self) -> range:
        """The streams that have only rows with logits; stream i enters layer i, or leaves the last layer."""
        return range(self.whole_layers, self.num_layers + 1) if self.shared_layers else range(0)

    @property
    def query_width(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.num_kv_heads * self.head_dim

    @property
    def rotary_width(self) -> int:
        """Elements of a head that are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def turning_pairs(self) -> int:
        """Pairs of a head's elements that ``rope_theta`` turns."""
        return self.rotary_pairs or self.rotary_width // 2

    def kv_layer(self, layer: int) -> int | None:
        """The layer whose keys and values ``layer`` attends to; None if it is missing.

        For an assistant it is a layer of the target.
        """
        if self.assistant is not None:
            return self.assistant.whole if self.is_global(layer) else self.assistant.windowed
        if layer < self.whole_layers:
            return layer
        kind = self.is_global(layer)
        return next((n for n in reversed(range(self.whole_layers)) if self.is_global(n) == kind), None)

    def attended(self, tokens: int) -> float:
        """As in any decoder, but windows bound the tokens, and only attention counts."""
        if self.sliding_window is None and not self.mixers:
            return float(tokens)
        window = tokens if self.sliding_window is None else min(tokens, self.sliding_window)
        seen = (
            (tokens if self.is_global(n) else window) * (self.mixer(n) in _ATTENTION)
            for n in range(self.num_layers)
        )
        return sum(seen) / self.num_layers

    def mixer(self, layer: int) -> Mixer:
        """The mixer of ``layer``."""
        return self.mixers[layer] if self.mixers else "attention"

    def mlp(self, layer: int) -> MLP:
        """The part of ``layer`` behind the mixer."""
        routed = self.experts is not None and layer >= self.experts.dense_layers
        return "experts" if routed else "gated_mlp"

    def is_global(self, layer: int) -> bool:
        """Whether ``layer`` sees the whole context."""
        if self.sliding_window is None:
            return True
        if "windowed_attention" in self.mixers:
            return self.mixers[layer] != "windowed_attention"
        return self.global_every > 0 and (layer + 1) % self.global_every == 0
