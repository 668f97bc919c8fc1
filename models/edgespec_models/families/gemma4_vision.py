"""The towers of Gemma 4, with vectors of 3 x 3 patches. That of the 12B is two products and a few norms.

In E2B and E4B products' inputs and results are clamped. In the larger models rows of a picture see each other
in windowed layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, sqrt
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.config import Count
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.families.gemma4 import GEMMA4, Gemma4
from edgespec_models.families.towers import Operations, Pixels, Tower, TowerFamily, patches
from edgespec_models.files.facts import Facts

_BUDGETS: Final = (70, 140, 280, 560, 1120)
_OF_DETAIL: Final = {"low": 70, "high": 1120}
_USUAL: Final = 280
_TOWER, _OUT = "vision_tower.", "embed_vision.embedding_projection.weight"
_EMBEDDER: Final = "vision_embedder."
_EPSILON: Final = 1e-5  # of PyTorch's norms, which no file states


@dataclass(frozen=True, kw_only=True)
class _Gemma4Pictures(Tower):
    """What the towers share.

    Attributes:
        hidden_size: width of its stream.
        patch: side of a patch in pixels.
        pool: side of the square of patches that becomes a vector.
        positions: positions of a side in the table.
        in_gguf: whether weights are for patches whose values lie colour by colour, as in GGUF files. There
            the embedder's two tables lie one behind the other.
        epsilon: epsilon of RMS norms.
    """

    hidden_size: Count
    patch: Count
    pool: Count
    positions: Count
    in_gguf: bool = False
    epsilon: float

    def budget(self, detail: str, image_tokens: int | None) -> int:
        if image_tokens is None:
            return _OF_DETAIL.get(detail, _USUAL)
        return max([budget for budget in _BUDGETS if budget <= image_tokens], default=_BUDGETS[0])

    def size(self, shape: Sequence[int], budget: int) -> tuple[int, int]:
        (height, width), side = shape[:2], self.side
        factor = sqrt(budget * side**2 / (height * width))
        high, wide = floor(factor * height / side), floor(factor * width / side)
        if not high:
            high, wide = 1, min(width // height, budget)
        elif not wide:
            high, wide = min(height // width, budget), 1
        return high * side, wide * side

    @property
    def side(self) -> int:
        return self.patch * self.pool

    def values(self, squares: Pixels) -> npt.NDArray[np.float32]:
        """The values of squares (n, side, side, 3), from 0 to 1: (1, n, 3 * side * side)."""
        if self.in_gguf:
            squares = squares.transpose(0, 3, 1, 2)
        values: npt.NDArray[np.float32] = squares.reshape(1, len(squares), -1) * (1 / 255)
        return values.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Gemma4Tower(_Gemma4Pictures):
    """The tower of most.

    Attributes:
        num_layers: its layers.
        mlp_width: width of its MLPs.
        heads: heads of attention.
        head_dim: width of a head.
        clipped: whether each product has limits of its inputs and results.
        standardized: whether vectors have a bias and a scale.
        theta: base of the rotation.
    """

    num_layers: Count
    mlp_width: Count
    heads: Count
    head_dim: Count
    clipped: bool
    standardized: bool
    theta: float

    def inputs(self, pixels: Pixels) -> Mapping[str, npt.NDArray[Any]]:
        squares, (rows, columns) = patches(pixels, self.patch, self.pool)
        quarter = self.head_dim // 4
        places = np.stack([columns, rows], axis=-1).astype(np.float32)
        powers = np.arange(0, 2 * quarter, 2, dtype=np.float32) / np.float32(2 * quarter)
        angles = places[:, None, :, None, None] * (1 / np.float32(self.theta) ** powers)
        return {
            "patches": 2 * (self.values(squares) - np.float32(0.5)),
            "places": np.stack([columns, self.positions + rows]).astype(np.int64),
            "cos": np.cos(angles),
            "sin": np.sin(angles),
        }

    def build(self, b: Operations) -> Any:
        area, quarter = 3 * self.patch**2, self.head_dim // 4
        values, places = b.input("patches", [1, "n", area]), b.input("places", [2, "n"], "int")
        tables = [b.input(name, ["n", 1, 2, 1, quarter]) for name in ("cos", "sin")]
        x = b.linear(values, f"{_TOWER}patch_embedder.input_proj.weight", self.hidden_size, area)
        name = f"{_TOWER}patch_embedder.position_embedding_table"
        rows = b.op("Gather", b.parameter(name, 2 * self.positions, self.hidden_size), places)
        x = b.op("Add", x, b.op("ReduceSum", rows, b.constant([0]), keepdims=1))
        for index in range(self.num_layers):
            x = self._layer(b, f"{_TOWER}encoder.layers.{index}.", x, tables)
        x = b.op("ReduceMean", b.reshape(x, -1, self.pool**2, self.hidden_size), b.constant([1]), keepdims=0)
        x = b.op("Mul", x, b.constant(sqrt(self.hidden_size), "float"))
        if self.standardized:
            bias, scale = (b.parameter(f"{_TOWER}std_{kind}", self.hidden_size) for kind in ("bias", "scale"))
            x = b.op("Mul", b.op("Sub", x, bias), scale)
        x = b.rms_norm(b.reshape(x, 1, -1, self.hidden_size), self.hidden_size, epsilon=self.epsilon)
        return b.linear(x, _OUT, self.width, self.hidden_size)

    def _layer(self, b: Operations, prefix: str, x: Any, tables: list[Any]) -> Any:
        def norm(x: Any, name: str) -> Any:
            return b.rms_norm(x, self.hidden_size, f"{prefix}{name}.weight", epsilon=self.epsilon)

        def product(x: Any, name: str, rows: int, columns: int) -> Any:
            name = f"{prefix}{name}"
            x = self._clamped(b, x, f"{name}.input")
            return self._clamped(b, b.linear(x, f"{name}.linear.weight", rows, columns), f"{name}.output")

        inner = self.heads * self.head_dim
        y, heads = norm(x, "input_layernorm"), list[Any]()
        for kind in "qkv":
            made = product(y, f"self_attn.{kind}_proj", inner, self.hidden_size)
            gain = "" if kind == "v" else f"{prefix}self_attn.{kind}_norm.weight"
            made = b.reshape(made, 0, 0, self.heads, self.head_dim)
            made = b.rms_norm(made, self.head_dim, gain, epsilon=self.epsilon)
            made = made if kind == "v" else self._rotated(b, made, tables)
            heads.append(b.reshape(made, 1, -1, inner))
        query, key, value = heads
        y = b.attention(query, key, value, self.heads, 1.0)
        y = product(y, "self_attn.o_proj", self.hidden_size, inner)
        x = b.op("Add", x, norm(y, "post_attention_layernorm"))
        y = norm(x, "pre_feedforward_layernorm")
        gate, up = (product(y, f"mlp.{k}_proj", self.mlp_width, self.hidden_size) for k in ("gate", "up"))
        y = b.op("Mul", b.op("Gelu", gate, approximate="tanh"), up)
        y = product(y, "mlp.down_proj", self.hidden_size, self.mlp_width)
        return b.op("Add", x, norm(y, "post_feedforward_layernorm"))

    def _clamped(self, b: Operations, x: Any, name: str) -> Any:
        if not self.clipped:
            return x
        return b.op("Clip", x, b.parameter(f"{name}_min"), b.parameter(f"{name}_max"))

    def _rotated(self, b: Operations, x: Any, tables: list[Any]) -> Any:
        """The first half of each head turned by the column, the second by the row."""
        cos, sin = tables
        x = b.reshape(x, -1, self.heads, 2, 2, self.head_dim // 4)
        first, second = (b.op("Slice", x, *(b.constant([n]) for n in (at, at + 1, 3))) for at in (0, 1))
        turned = b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin))
        other = b.op("Add", b.op("Mul", second, cos), b.op("Mul", first, sin))
        return b.op("Concat", turned, other, axis=3)


@dataclass(frozen=True, kw_only=True)
class Gemma4Embedder(_Gemma4Pictures):
    """The tower of the 12B: each vector is made of its own pixels."""

    def inputs(self, pixels: Pixels) -> Mapping[str, npt.NDArray[Any]]:
        squares, (rows, columns) = patches(pixels, self.side, 1)
        return {
            "patches": self.values(squares),
            "places": self._places(columns, rows).astype(np.int64),
        }

    def _places(self, columns: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows of the tables for patches, (2, n)."""
        if self.in_gguf:
            return np.stack([columns, self.positions + rows])
        return np.stack([2 * columns, 2 * rows + 1])

    def build(self, b: Operations) -> Any:
        area, width = 3 * self.side**2, self.hidden_size
        values, places = b.input("patches", [1, "n", area]), b.input("places", [2, "n"], "int")
        x = b.layer_norm(values, area, f"{_EMBEDDER}patch_ln1", epsilon=_EPSILON)
        x = b.linear(x, f"{_EMBEDDER}patch_dense.weight", width, area)
        x = b.op("Add", x, b.parameter(f"{_EMBEDDER}patch_dense.bias", width))
        x = b.layer_norm(x, width, f"{_EMBEDDER}patch_ln2", epsilon=_EPSILON)
        table = b.parameter(f"{_EMBEDDER}pos_embedding", 2 * self.positions, width)
        x = b.op("Add", x, b.op("ReduceSum", b.op("Gather", table, places), b.constant([0]), keepdims=1))
        x = b.layer_norm(x, width, f"{_EMBEDDER}pos_norm", epsilon=_EPSILON)
        x = b.rms_norm(x, width, epsilon=self.epsilon)
        return b.linear(x, _OUT, self.width, width)


def _read(facts: Facts, ids: Mapping[str, int]) -> Tower | None:
    text, vision = facts.section("text_config"), facts.section("vision_config")
    heads, rope = vision.integer("num_attention_heads", 12), vision.section("rope_parameters")
    others = (
        text.integer("pad_token_id", 0) != 0,  # whose inputs of layers those of pictures' rows are
        vision.text("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh",
        vision.integer("num_key_value_heads", heads) != heads,
        rope.text("rope_type", "axial") != "axial",
        vision.boolean("attention_bias", default=False),
    )
    if any(others):
        return None
    return Gemma4Tower(
        architecture=GEMMA4_VISION.name,
        **_shared(facts),
        whole=text.value("use_bidirectional_attention") == "vision",
        num_layers=vision.integer("num_hidden_layers", 16),
        hidden_size=vision.integer("hidden_size", 768),
        mlp_width=vision.integer("intermediate_size", 3072),
        heads=heads,
        head_dim=vision.integer("head_dim", 64),
        positions=vision.integer("position_embedding_size", 10_240),
        clipped=vision.boolean("use_clipped_linears", default=False),
        standardized=vision.boolean("standardize", default=False),
        theta=rope.positive("rope_theta", 100.0),
    )


def _read_embedder(facts: Facts, ids: Mapping[str, int]) -> Tower | None:
    text, vision = facts.section("text_config"), facts.section("vision_config")
    causal = "use_bidirectional_attention" in text.keys  # and not "vision"
    return Gemma4Embedder(
        architecture=GEMMA4_EMBEDDER.name,
        **_shared(facts),
        whole=text.value("use_bidirectional_attention") == "vision" or not causal,
        hidden_size=vision.integer("mm_embed_dim", 3840),
        positions=vision.integer("mm_posemb_size", 1120),
    )


def _shared(facts: Facts) -> dict[str, Any]:
    """Fields of both kinds, from a ``config.json``."""
    vision = facts.section("vision_config")
    return {
        "width": facts.section("text_config").integer("hidden_size"),
        "marker": facts.integer("image_token_id", 258_880),
        "around": (facts.integer("boi_token_id", 255_999), facts.integer("eoi_token_id", 258_882)),
        "patch": vision.integer("patch_size", 16),
        "pool": vision.integer("pooling_kernel_size", 3),
        "epsilon": vision.positive("rms_norm_eps", 1e-6),
    }


def _from_gguf(
    keys: Facts, shapes: Mapping[str, tuple[int, ...]], config: Transformer, ids: Mapping[str, int]
) -> Tower | None:
    shared, norm = _shared_in_gguf(keys, shapes, config, ids), shapes.get("v.blk.0.attn_q_norm.weight")
    if shared is None or not norm:
        return None
    return Gemma4Tower(
        architecture=GEMMA4_VISION.name,
        **shared,
        num_layers=keys.integer("block_count"),
        mlp_width=keys.integer("feed_forward_length"),
        heads=keys.integer("attention.head_count"),
        head_dim=norm[0],
        clipped="v.blk.0.attn_q.input_min" in shapes,
        standardized="v.std_bias" in shapes,
        theta=100.0,
    )


def _embedder_from_gguf(
    keys: Facts, shapes: Mapping[str, tuple[int, ...]], config: Transformer, ids: Mapping[str, int]
) -> Tower | None:
    shared = _shared_in_gguf(keys, shapes, config, ids)
    if shared is None or "v.patch_norm.1.weight" not in shapes:
        return None
    return Gemma4Embedder(architecture=GEMMA4_EMBEDDER.name, **shared)


def _shared_in_gguf(
    keys: Facts, shapes: Mapping[str, tuple[int, ...]], config: Transformer, ids: Mapping[str, int]
) -> dict[str, Any] | None:
    """The same from a GGUF file, which does not say whether rows of a picture see each other.

    They do in models whose layers read no inputs from the tokens: all but E2B and E4B.
    """
    marks = [ids.get(text) for text in ("<|image|>", "<|image>", "<image|>")]
    table = shapes.get("v.position_embd.weight")
    if not isinstance(config, Gemma4) or None in marks or not table:
        return None
    marker, *around = marks
    return {
        "width": config.hidden_size,
        "marker": marker,
        "around": tuple(around),
        "whole": not config.layer_inputs,
        "hidden_size": keys.integer("embedding_length"),
        "patch": keys.integer("patch_size"),
        "pool": keys.integer("projector.scale_factor", 3),
        "positions": table[-2],
        "in_gguf": True,
        "epsilon": keys.positive("attention.layer_norm_epsilon", 1e-6),
    }


GEMMA4_VISION = TowerFamily(
    name="gemma4_vision",
    hub=("gemma4_vision",),
    gguf="gemma4v",
    models=(GEMMA4.gguf,),
    tower=Gemma4Tower,
    names={
        f"{_TOWER}patch_embedder.input_proj": "v.patch_embd",
        f"{_TOWER}patch_embedder.position_embedding_table": "v.position_embd.weight",
        f"{_TOWER}encoder.layers.": "v.blk.",
        f"{_TOWER}std": "v.std",
        "embed_vision.embedding_projection": "mm.input_projection",
        "self_attn.o_proj": "attn_out",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj.": ".",
        ".linear": "",
        "input_layernorm": "ln1",
        "pre_feedforward_layernorm": "ln2",
        "post_attention_layernorm": "attn_post_norm",
        "post_feedforward_layernorm": "ffn_post_norm",
    },
    read=_read,
    from_gguf=_from_gguf,
)
GEMMA4_EMBEDDER = TowerFamily(
    name="gemma4_unified_vision",
    hub=("gemma4_unified_vision",),
    gguf="gemma4uv",
    models=(GEMMA4.gguf,),
    tower=Gemma4Embedder,
    names={
        f"{_EMBEDDER}patch_dense": "v.patch_embd",
        f"{_EMBEDDER}pos_embedding": "v.position_embd.weight",
        f"{_EMBEDDER}patch_ln": "v.patch_norm.",
        f"{_EMBEDDER}pos_norm": "v.patch_norm.3",
        "embed_vision.embedding_projection": "mm.input_projection",
    },
    read=_read_embedder,
    from_gguf=_embedder_from_gguf,
)
