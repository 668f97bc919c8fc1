"""The decoder over edgespec's own operators (``runtimes/kernels``), for CPUs: five nodes a layer.

Besides the inputs of every graph (:mod:`.graph_decoder`) it takes ``sequences`` int64 (s, 2): ``input_ids``
are the next tokens of s sequences, one after the other. The numbers of a sequence are its tokens in the
cache and its new tokens. Last layers that read other layers' keys and values compute only rows with logits;
``wanted_sequences`` has the numbers for them. The cache is a pool of blocks of 32 tokens, float16 (blocks /
8, kv heads, 256, head_dim); a key cache holds 16 tokens channel by channel. ``blocks`` int64 (b,) has the
numbers of each sequence's blocks, as many as all its tokens take. Sequences may share blocks that the pass
only reads. With states, ``places`` int64 (s, 2) has the slot of each sequence's states, and the number of
tokens that they have read (:mod:`edgespec_models.bundles.kept`).

A row's bits depend neither on the other rows of a pass nor on the processor, except in the columns of
``context_tokens``: ONNX Runtime computes these. The residual stream that enters a layer, or leaves the last,
is the value that :func:`stream_name` says.

A head (:attr:`~edgespec_models.bundles.config.DecoderShape.is_head`) also takes ``features`` float32 (1, m,
width), the target's residual streams of the first m tokens side by side, and ``states`` float32 (1, k,
hidden), its own of the other k. It returns ``new_states`` float32 (1, r, hidden) of the rows with logits. An
assistant (:class:`~edgespec_models.bundles.config.Assistant`) attends to keys and values of two layers of its
target, which are inputs. Its states are as wide as the target.

A head that drafts blocks (:class:`~edgespec_models.bundles.config.Block`) takes ``features`` and
``injected_rows`` int64 (s). It reads only the features of that many first tokens of each sequence;
``input_ids`` are the tokens behind them. It has no states.

Where layers have experts, ``experts_read`` int64 (layers with some) says how many of each a pass used.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from edgespec_models.bundles.config import Block, ModelConfig
from edgespec_models.bundles.graph_contract import BLOCKS, EXPERTS_READ, NEW_STATES, stream_name
from edgespec_models.bundles.kept import KeptType
from edgespec_models.bundles.layers import Layer, graph_name, read_by
from edgespec_models.bundles.weight_format import WeightFormat, tile_bytes
from edgespec_models.graphs.graph_decoder import FLOAT, INT64, GraphDecoder
from edgespec_models.graphs.plan import DecoderPlan

DOMAIN: Final = "edgespec"
_OPSET = 23
_Product = partial[ir.Value]
"""A call of :meth:`_NativeDecoder.linear` that lacks the operator's further work yet."""


class _NativeDecoder(GraphDecoder):
    """An operator normalizes its input and adds the residual stream to its product. So a normalized stream is
    a product that lacks its matrix, and the output of a sublayer one that lacks the stream.
    """

    medium, lacks, reads_blocks = "edgespec's kernels", (), True

    def __init__(self, config: ModelConfig, plan: DecoderPlan) -> None:
        super().__init__(config, {"": _OPSET, DOMAIN: 1})
        self.plan, self.epsilon = plan, float(config.norm_epsilon)
        self.gate = "silu" if config.activation == "silu" else "gelu"
        self.experts_read = list[ir.Value]()  # experts, of each layer with some
        self.caches = dict[int, list[ir.Value]]()  # keys and values behind the pass, by layer

    def build(self) -> ir.Model:
        ids = self.input("input_ids", INT64, [1, "n"])
        self.sequences = self.input("sequences", INT64, ["s", 2])
        self.blocks = self.input(BLOCKS, INT64, ["b"])
        if self.config.mixers:
            self.places = self.input("places", INT64, ["s", 2])
        self.rows = self.input("logits_rows", INT64, ["r"])
        self.read_cache("float16")
        x = self.through_layers(self.stream(ids))
        x.name = stream_name(self.config.num_layers)
        if not self.config.shared_layers:
            x = self.op("Gather", x, self.rows, axis=1)
        logits, columns = self.lm_head(x)
        if self.config.logit_cap is not None:
            (logits,) = self.node("Cap", logits, most=float(self.config.logit_cap))
        self.write_outputs(logits, columns, self.choices(logits, x, ids))
        if self.experts_read:
            self.output(
                self.op("Concat", *self.experts_read, axis=0), EXPERTS_READ, INT64, [len(self.experts_read)]
            )
        if self.config.is_head and self.config.block is None:
            states, width = self.new_states(x)
            self.output(states, NEW_STATES, FLOAT, [1, "r", width])
        return self.model()

    def new_states(self, x: ir.Value) -> tuple[ir.Value, int]:
        """What a head reads behind its own drafts, of rows of its last stream; and how wide it is."""
        return x, self.config.hidden_size

    def choices(self, logits: ir.Value, x: ir.Value, ids: ir.Value) -> Sequence[ir.Value]:
        """The best column of each row, and its probability; ``x`` is their stream."""
        return self.node("Choose", logits, outputs=2)

    def stream(self, ids: ir.Value) -> ir.Value:
        """The residual stream that enters the first layer."""
        config, x = self.config, self.embed(ids, float(self.config.embedding_scale))
        if config.layer_inputs:
            self.inputs = self.layer_inputs(ids, x)
        return x

    def layer_inputs(self, ids: ir.Value, x: ir.Value) -> ir.Value:
        """The inputs of layers from the tokens: rows of a table, and a product of the first layer's input."""
        config, path = self.config, graph_name("inputs")
        (table,), width = self.plan.linears["inputs"].parts, self.shapes["inputs"][1]
        return self.node(
            "LayerInputs",
            ids,
            self.matrix(f"{path}.parts.0.weight", table.format, table.out_features, width),
            self.linear(x, "inputs_in"),
            self.gain("inputs_norm"),
            format=table.format.tiles,
            rows=table.out_features,
            width=width,
            part=config.layer_inputs,
            factor=config.layer_inputs**0.5,
            epsilon=self.epsilon * config.hidden_size,  # of the product over the root of its inputs
        )[0]

    def layer(self, layer: Layer, x: ir.Value) -> ir.Value:
        if layer.index == self.config.whole_layers:  # nothing reads the other rows behind here
            x = self.op("Gather", x, self.rows, axis=1)
            if self.config.layer_inputs:
                self.inputs = self.op("Gather", self.inputs, self.rows, axis=1)
            self.sequences = self.input("wanted_sequences", INT64, ["s", 2])
        x.name = stream_name(layer.index)
        return super().layer(layer, x)

    def node(
        self, kind: str, *inputs: ir.Value | None, outputs: int = 1, domain: str = DOMAIN, **attributes: Any
    ) -> tuple[ir.Value, ...]:
        node = ir.node(kind, list(inputs), attributes=attributes, domain=domain, num_outputs=outputs)
        self.graph.append(node)
        return tuple(node.outputs)

    def op(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """A standard operator with one output."""
        return self.node(kind, *inputs, domain="", **attributes)[0]

    def matrix(self, name: str, form: WeightFormat, rows: int, columns: int) -> ir.Value:
        return self.parameter(name, [tile_bytes(form.tiles, rows, columns)], ir.DataType.UINT8)

    def matrices(self, name: str) -> list[ir.Value]:
        """The matrices of a product, part by part."""
        spec, tied = self.plan.linears[name], name == "lm_head" and self.plan.tied
        return [
            self.matrix(
                "embedding.weight" if tied else f"{graph_name(name)}.parts.{index}.weight",
                part.format,
                part.out_features,
                spec.in_features,
            )
            for index, part in enumerate(spec.parts)
        ]

    def embed(self, ids: ir.Value, factor: float) -> ir.Value:
        form, (rows, width) = self.plan.embedding.format, self.shapes["embed"]
        return self.rows_of("embedding.weight", form, (rows, width), ids, factor)

    def rows_of(
        self, name: str, form: WeightFormat, shape: tuple[int, ...], ids: ir.Value, factor: float
    ) -> ir.Value:
        """Rows of a table with one for each token."""
        table = self.matrix(name, form, *shape)
        facts: dict[str, Any] = {"rows": shape[0], "width": shape[1], "factor": factor}
        return self.node("Embedding", ids, table, format=form.tiles, **facts)[0]

    def constant(self, values: Sequence[Any]) -> ir.Value:
        """Whole numbers, int64."""
        return self.op("Constant", value=ir.tensor(np.array(values, np.int64)))

    def norm(self, x: ir.Value, name: str) -> _Product:
        return partial(self.linear, x, gain=name)

    def bare(self, x: ir.Value, name: str) -> _Product:
        return partial(self.linear, x)

    def post_norm(self, y: _Product, name: str) -> _Product:
        return partial(y, post_gain=name)

    def add(self, x: ir.Value, y: _Product, name: str) -> ir.Value:
        return y(residual=x)

    def product(self, name: str, x: ir.Value) -> _Product:
        return partial(self.linear, x, name)

    def attended(self, layer: Layer, x: _Product) -> ir.Value:
        config, packed = self.config, self.packed(layer, x)
        tables: list[ir.Value | None] = [None, None]
        if layer.rope is not None:
            pairs = config.turning_pairs if layer.rope == "rope" else layer.head_dim // 2
            shape = [config.context_length, pairs]
            tables = [self.parameter(f"{layer.rope}_{part}", shape) for part in ("cos", "sin")]
        gains: list[ir.Value | None] = [None, None]
        if config.qk_norm and not config.wide_qk_norm:
            of_keys = "k_norm" if "k" in layer.projections else "q_norm"  # no keys, no matter
            gains = [self.gain(f"{layer.name}.{norm}") for norm in ("q_norm", of_keys)]
        own, sinks = layer.projections != "q", f"{layer.name}.sinks"
        more: list[ir.Value | None] = [
            self.parameter(graph_name(sinks), self.shapes[sinks]) if config.sinks else None,
            *self.injected(layer),
        ]
        while more and more[-1] is None:
            more.pop()
        y, *new = self.node(
            "Attention",
            packed,
            *self.caches.get(layer.kv_layer, self.past[layer.kv_layer]),
            self.sequences,
            self.blocks,
            *tables,
            *gains,
            *more,
            outputs=3 if own else 1,
            heads=config.num_heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            window=layer.window or 0,
            interleaved=int(config.rope_interleaved),
            scale=float(config.attention_scale),
            epsilon=self.epsilon,
            **self.more_of_attention(layer),
        )
        self.caches |= {layer.index: new} if own else {}
        self.present += new
        return y

    def injected(self, layer: Layer) -> Sequence[ir.Value]:
        """Keys and values of rows without queries, and how many of each sequence."""
        return ()

    def more_of_attention(self, layer: Layer) -> dict[str, Any]:
        """Attributes that most graphs do not need."""
        config = self.config
        more: dict[str, Any] = {"normed_values": 1} if config.normed_values else {}
        if config.attention_cap is not None:
            more |= {"cap": float(config.attention_cap)}
        if config.query_step:
            more |= {"growth": float(config.query_growth), "growth_step": config.query_step}
        apart = layer.rope == "rope" and config.rotary_pairs is not None
        return more | ({"pair_distance": config.rotary_width // 2} if apart else {})

    def delta_net(self, layer: Layer, x: _Product) -> _Product:
        """The output of a gated delta net, which is added to the stream."""
        net, name, shapes = self.config.delta, layer.name, self.shapes
        assert net is not None  # which a config with such a layer has
        conv, a, bias = (f"{name}.{kind}" for kind in ("conv", "delta_a", "delta_bias"))
        y, *new = self.node(
            "Delta",
            x(f"{name}.delta_in"),
            *self.past[layer.index],
            self.sequences,
            self.places,
            self.parameter(graph_name(conv), shapes[conv][::-1]),
            *(self.parameter(graph_name(name), shapes[name]) for name in (a, bias)),
            self.gain(f"{name}.delta_norm"),
            outputs=4,
            key_heads=net.key_heads,
            value_heads=net.value_heads,
            key_width=net.key_width,
            value_width=net.value_width,
            tiled=int(net.tiled),
            epsilon=self.epsilon,
        )
        self.present += new
        return self.product(f"{name}.delta_out", y)

    def short_conv(self, layer: Layer, x: _Product) -> _Product:
        """The output of a short convolution, which is added to the stream."""
        taps, width = self.shapes[f"{layer.name}.conv"][1], self.config.hidden_size
        y, *new = self.node(
            "ShortConv",
            x(f"{layer.name}.conv_in"),
            *self.past[layer.index],
            self.sequences,
            self.blocks,
            self.places,
            self.parameter(graph_name(f"{layer.name}.conv"), [taps, width]),
            outputs=3,
            channels=width,
            taps=taps,
        )
        self.present += new
        return self.product(f"{layer.name}.conv_out", y)

    def experts(self, layer: Layer, x: _Product) -> _Product:
        """The output of a mixture of experts, which is added to the stream."""
        experts, name, shared = self.config.experts, layer.name, None
        assert experts is not None  # which a config with such a layer has
        if experts.beside_mlp:
            shared = self.post_norm(self.gated_mlp(layer, x), f"{name}.post_dense_norm")()
            x = self.norm(x.args[0], f"{name}.pre_experts_norm")
        elif experts.shared_width:
            shared = self.linear(x(f"{name}.shared_gate_up", gate=self.gate), f"{name}.shared_down")
        return partial(self.mixture, x, name, shared)

    def mixture(
        self,
        x: _Product,
        name: str,
        shared: ir.Value | None,
        *,
        residual: ir.Value,
        post_gain: str | None = None,
    ) -> ir.Value:
        """``residual`` plus the outputs of the experts and ``shared``, an output that all tokens have."""
        experts, gain = self.config.experts, x.keywords.get("gain")
        assert experts is not None  # which a config with such a layer has
        count, width, path = experts.count, self.config.hidden_size, graph_name(f"{name}.router")
        names = [f"{name}.experts_gate_up", f"{name}.experts_down"]
        biases: list[ir.Value | None] = [None, None, None]
        if experts.biases:
            paths, shapes = map(graph_name, names), ([2, count, experts.width], [count, width])
            biases = [self.parameter(f"{path}.bias", [count])]
            biases += [self.parameter(f"{path}.bias", s) for path, s in zip(paths, shapes, strict=True)]
        chosen, scale = (graph_name(f"{name}.{kind}") for kind in ("selection_bias", "expert_scale"))
        behind: list[ir.Value | None] = [] if post_gain is None else [None, None, None, self.gain(post_gain)]
        if experts.beside_mlp:
            own = [self.gain(f"{name}.{kind}") for kind in ("router_norm", "post_experts_norm")]
            behind[:3] = own[0], self.parameter(scale, [count]), own[1]
        y, different = self.node(
            "Experts",
            *x.args,
            None if gain is None else self.gain(gain),
            residual,
            shared,
            self.parameter(f"{path}.weight", [count + experts.shared_gate, width]),
            *biases,
            self.parameter(chosen, [count]) if experts.selection_bias else None,
            *(weights for product in names for weights in self.matrices(product)),
            *behind,
            outputs=2,
            inputs=width,
            width=experts.width,
            experts=count,
            used=experts.used,
            gating=experts.gating,
            normalized=int(experts.normalized),
            scale=float(experts.scale),
            epsilon=self.epsilon,
            gate="clamped" if experts.clamped else self.gate,
            formats=",".join(
                part.format.tiles for product in names for part in self.plan.linears[product].parts
            ),
        )
        self.experts_read.append(different)
        return y

    def packed(self, layer: Layer, x: _Product) -> ir.Value:
        """Queries, keys and values; a product that is normalized as a whole is one of its own."""
        name = layer.name
        if not self.config.wide_qk_norm:
            return x(f"{name}.qkv")
        normed = [x(f"{name}.{which}", post_gain=f"{name}.{which}_norm") for which in "qk"]
        return self.op("Concat", *normed, x(f"{name}.v"), axis=-1)

    def layer_input(self, layer: Layer, x: ir.Value) -> _Product:
        y = self.linear(x, f"{layer.name}.input_gate")
        (y,) = self.node("InputGate", y, self.inputs, layer=layer.index, gate=self.gate)
        return self.product(f"{layer.name}.input_out", y)

    def scaled(self, x: ir.Value, name: str) -> ir.Value:
        """The stream times a number of the layer."""
        return self.op("Mul", x, self.parameter(graph_name(name), self.shapes[name]))

    def gated(self, layer: Layer, x: _Product) -> ir.Value:
        return x(f"{layer.name}.gate_up", gate=self.gate)

    def linear(
        self,
        x: ir.Value,
        name: str,
        *,
        gain: str | None = None,
        post_gain: str | None = None,
        residual: ir.Value | None = None,
        gate: str = "",
        first: int = 0,
    ) -> ir.Value:
        """``[residual +] [norm of] gate(norm(x) W + bias)``; ``first``: of the parts to multiply by."""
        spec, bias = self.plan.linears[name], None
        if spec.parts[0].biases:
            bias = self.parameter(f"{graph_name(name)}.bias", [spec.out_features])
        weights = self.matrices(name)[first:]
        gains = [None if name is None else self.gain(name) for name in (gain, post_gain)]
        return self.node(
            "Linear",
            *(x, gains[0], bias, gains[1], residual, *weights),
            inputs=spec.in_features,
            epsilon=self.epsilon,
            gate=gate,
            parts=",".join(f"{part.format.tiles}:{part.out_features}" for part in spec.parts[first:]),
        )[0]

    def normalized(self, x: ir.Value, name: str) -> ir.Value:
        """The normalized stream as a value."""
        facts = {"axis": -1, "epsilon": self.epsilon, "stash_type": 1}
        return self.op("SimplifiedLayerNormalization", x, self.gain(name), **facts)

    def lm_head(self, x: ir.Value) -> tuple[ir.Value, int | str]:
        """Logits, and how many columns they have."""
        if not self.plan.context:
            return self.linear(x, "lm_head", gain="final_norm"), self.plan.linears["lm_head"].out_features
        normed = self.normalized(x, "final_norm")
        offered = self.embed(self.input("context_tokens", INT64, ["m"]), 1.0)
        products = self.op("MatMul", normed, self.op("Transpose", offered))
        return self.op("Concat", self.linear(normed, "lm_head"), products, axis=-1), "columns"


class _NativeHead(_NativeDecoder):
    """An EAGLE-3 head (arXiv 2503.01840). Its product of embedding and state side by side is a sum of two."""

    def stream(self, ids: ir.Value) -> ir.Value:
        config, fuse_norm = self.config, "fuse_norm" if self.config.normed_features else None
        features = self.input("features", FLOAT, [1, "m", self.shapes["fuse"][1]])
        states = self.input("states", FLOAT, [1, "k", config.hidden_size])
        self.embedding = self.embed(ids, 1.0)
        x = self.op("Concat", self.linear(features, "fuse", gain=fuse_norm), states, axis=1)
        return self.normalized(x, "layers.0.attn_norm") if config.normed_residual else x

    def norm(self, x: ir.Value, name: str) -> _Product:
        done = self.config.normed_residual and name.endswith("attn_norm")
        return self.bare(x, name) if done else super().norm(x, name)

    def packed(self, layer: Layer, x: _Product) -> ir.Value:
        gain = f"{layer.name}.embed_norm"
        embedded = self.linear(self.embedding, f"{layer.name}.embed_qkv", gain=gain)
        return x(f"{layer.name}.qkv", residual=embedded)


class _NativeMTP(_NativeDecoder):
    """An MTP layer (arXiv 2412.19437); its product of embedding and state side by side is a sum of two.

    The state of the token before is normalized as for an LM head: the target's stream by the target's norm,
    the layer's own by its own.
    """

    def stream(self, ids: ir.Value) -> ir.Value:
        width = self.config.hidden_size
        features = self.input("features", FLOAT, [1, "m", width])
        states = self.input("states", FLOAT, [1, "k", width])
        normed = self.normalized(features, "target_norm"), self.normalized(states, "final_norm")
        embedded = self.linear(super().stream(ids), "embed_fuse", gain="embed_norm")
        known = self.op("Concat", *normed, axis=1)
        return self.linear(known, "fuse", gain="fuse_norm", residual=embedded)


class _NativeAssistant(_NativeDecoder):
    """One of Gemma 4's assistants, whose layers have queries alone.

    Its product of embedding and state side by side is a sum of two, as in an MTP layer. The target's stream
    is normalized as for the target's LM head; the states that it writes are as such a one.
    """

    def read_cache(self, kind: KeptType) -> None:
        """Read the target's."""
        super().read_cache(kind)
        for tensor in read_by(self.config, kind):
            value = self.input(tensor.input, *self.type_of(tensor))
            self.past.setdefault(tensor.layer, []).append(value)

    def stream(self, ids: ir.Value) -> ir.Value:
        width = self.config.feature_width
        features = self.input("features", FLOAT, [1, "m", width])
        states = self.input("states", FLOAT, [1, "k", width])
        known = self.op("Concat", self.normalized(features, "target_norm"), states, axis=1)
        return self.linear(known, "fuse", residual=self.linear(super().stream(ids), "embed_fuse"))

    def new_states(self, x: ir.Value) -> tuple[ir.Value, int]:
        return self.linear(x, "next_state", gain="final_norm"), self.config.feature_width

    def lm_head(self, x: ir.Value) -> tuple[ir.Value, int | str]:
        """Logits of the tokens of a few clusters. Other tokens have the lowest possible logit."""
        config, (part,) = self.config, self.plan.linears["lm_head"].parts
        assistant = config.assistant
        if assistant is None or not assistant.clusters:
            return super().lm_head(x)
        logits = self.node(
            "Clusters",
            self.normalized(x, "final_norm"),
            self.linear(x, "centroids", gain="final_norm"),
            self.parameter("lm_head.tokens", [config.vocab_size], INT64),
            *self.matrices("lm_head"),
            inputs=config.hidden_size,
            clusters=assistant.clusters,
            read=assistant.clusters_read,
            format=part.format.tiles,
        )
        return logits[0], config.vocab_size


class _NativeBlocks(_NativeDecoder):
    """DFlash's head (arXiv 2602.06036): its layers see what features of the target give them, and a block."""

    def stream(self, ids: ir.Value) -> ir.Value:
        features = self.input("features", FLOAT, [1, "m", self.shapes["fuse"][1]])
        self.counts = self.input("injected_rows", INT64, ["s"])
        self.known = self.linear(features, "fuse", post_gain="fuse_norm")
        return super().stream(ids)

    def injected(self, layer: Layer) -> Sequence[ir.Value]:
        return self.linear(self.known, f"{layer.name}.qkv", first=1), self.counts

    def more_of_attention(self, layer: Layer) -> dict[str, Any]:
        windowed = self.block.causal_windows and not self.config.is_global(layer.index)
        sees_itself = {} if self.block.causal or windowed else {"bidirectional": 1}
        return super().more_of_attention(layer) | sees_itself

    @property
    def block(self) -> Block:
        assert self.config.block is not None  # which a config of this architecture has
        return self.config.block

    def choices(self, logits: ir.Value, x: ir.Value, ids: ir.Value) -> Sequence[ir.Value]:
        """With a chain (DSpark, arXiv 2607.05147) a bias that follows from the token before changes them.

        Where that is a mask, it is the token that the row before chose. So rows are chosen one by one. With
        confidences these stand for the probabilities.
        """
        if not self.block.rank:
            return super().choices(logits, x, ids)
        single = self.constant([1])
        places = self.rows if self.block.anchored else self.op("Sub", self.rows, single)
        before = self.op("Gather", ids, places, axis=1)
        scores = self.scores(x) if self.block.confident else None
        outer, self.graph = self.graph, ir.Graph([], [], nodes=[], name="chain")
        step = self.input("step", INT64, [])
        goes_on, last = self.input("goes_on", ir.DataType.BOOL, []), self.input("last", INT64, [1, 1])
        row = self.op("Reshape", step, single)
        token = self.op("Gather", before, row, axis=1)
        token = self.op("Where", self.op("Equal", token, self.constant([self.block.mask])), last, token)
        (table,) = self.plan.linears["chain_in"].parts
        chained = self.rows_of("chain_in.parts.0.weight", table.format, self.shapes["chain_in"], token, 1.0)
        biased = self.linear(chained, "chain_out", residual=self.op("Gather", logits, row, axis=1))
        best, probability = self.node("Choose", biased, outputs=2)
        if scores is not None:
            of_state, weights = self.op("Gather", scores, row, axis=1), self.confidence(end=True)
            probability = self.op("Sigmoid", self.op("Add", of_state, self.op("MatMul", chained, weights)))
        kept = self.plan.head_tokens or self.plan.columns
        written = best if kept is None else self.op("Gather", self.constant(kept), best)
        choice = [self.op("Reshape", value, single) for value in (best, probability)]
        self.graph.outputs.extend([self.op("Identity", goes_on), written, *choice])
        for at, node in enumerate(self.graph):  # names are of both graphs
            for value in node.outputs:
                value.name = f"chain.{at}.{value.name}"
        chain, self.graph = self.graph, outer
        count, first = self.op("Squeeze", self.op("Shape", self.rows)), self.constant([[self.block.mask]])
        _, *chosen = self.node("Loop", count, None, first, outputs=3, domain="", body=chain)
        return [self.op("Reshape", value, self.constant([1, -1])) for value in chosen]

    def scores(self, x: ir.Value) -> ir.Value:
        """The part of the confidences' scores that follows from the stream."""
        of_state = self.op("MatMul", self.normalized(x, "final_norm"), self.confidence(end=False))
        return self.op("Add", of_state, self.parameter("confidence_bias", [1]))

    def confidence(self, *, end: bool) -> ir.Value:
        """The weights of scores, of the stream or, at their end, of the chain."""
        shape, width = self.shapes["confidence"], self.config.hidden_size
        begin, stop = (width, shape[1]) if end else (0, width)
        whole = self.op("Transpose", self.parameter("confidence", shape))
        return self.op("Slice", whole, self.constant([begin]), self.constant([stop]))


def build_native(config: ModelConfig, plan: DecoderPlan) -> ir.Model:
    """Build the graph; matrices are tiles (:mod:`edgespec_models.bundles.weight_format`), uint8.

    Parameters are named as :meth:`DecoderPlan.parts` says.
    """
    kinds = {"eagle3": _NativeHead, "mtp": _NativeMTP}
    kinds |= {"assistant": _NativeAssistant, "dflash": _NativeBlocks}
    return kinds.get(config.architecture, _NativeDecoder)(config, plan).build()
