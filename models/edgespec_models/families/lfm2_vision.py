"""The tower of LFM2-VL and LFM2.5-VL: SigLIP 2 for any size (Tschannen et al. 2025, arXiv 2502.14786).

A vector is made of 2 x 2 patches. Large pictures are cut into tiles, and a small view of the whole follows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.config import Count
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.families.lfm2 import LFM2, LFM2_MOE, Lfm2
from edgespec_models.families.towers import Operations, Pixels, Token, Tower, TowerFamily, View, patches
from edgespec_models.files.facts import Facts

_LEAST, _MOST = 64, 256  # vectors of a view, as in the makers' processor
_TILES: Final = 10
_LARGE: Final = 2.0  # times the most pixels of a view
_SIDE: Final = 10  # names of tiles in a row and in a column
_TOWER, _OUT = "vision_tower.vision_model.", "multi_modal_projector."


@dataclass(frozen=True, kw_only=True)
class Lfm2Tower(Tower):
    """The tower.

    Attributes:
        num_layers: its layers.
        hidden_size: width of its stream.
        mlp_width: width of its MLPs.
        heads: heads of attention.
        patch: side of a patch in pixels.
        pool: side of the square of patches that becomes a vector.
        positions: positions of a side in the table.
        projected: width between the projector's matrices.
        normed: whether the projector begins with a norm.
        epsilon: epsilon of the layers' norms.
        tiles: tokens before tiles, ten for each row of tiles; empty if pictures are not cut.
        thumbnail: the tokens before the view of the whole.
        in_gguf: whether a patch's values lie colour by colour, as in GGUF files.
    """

    RESAMPLING: ClassVar[str] = "BILINEAR"

    num_layers: Count
    hidden_size: Count
    mlp_width: Count
    heads: Count
    patch: Count
    pool: Count
    positions: Count
    projected: Count
    normed: bool
    epsilon: float
    tiles: tuple[Token, ...] = ()
    thumbnail: tuple[Token, ...] = ()
    in_gguf: bool = False

    def budget(self, detail: str, image_tokens: int | None) -> int:
        if image_tokens is not None:
            return max(image_tokens, _LEAST)
        return _MOST if detail == "low" else (_TILES + 1) * _MOST

    def size(self, shape: Sequence[int], budget: int) -> tuple[int, int]:
        factor, least, most = self.side, _LEAST * self.side**2, min(budget, _MOST) * self.side**2
        height, width = shape[:2]
        high, wide = (max(factor, round(side / factor) * factor) for side in (height, width))
        if high * wide > most:
            scale = sqrt(height * width / most)
            high, wide = (max(factor, floor(side / scale / factor) * factor) for side in (height, width))
        elif high * wide < least:
            scale = sqrt(least / (height * width))
            high, wide = (ceil(side * scale / factor) * factor for side in (height, width))
        long = most // min(high, wide) // factor * factor  # a narrow picture would get more
        return min(high, long), min(wide, long)

    def views(self, shape: Sequence[int], budget: int) -> Sequence[View]:
        small, most = self.size(shape, budget), min(_TILES, budget // _MOST - 1)
        high, wide = (max(self.patch, round(side / self.side) * self.side) for side in shape[:2])
        if not self.tiles or most < 2 or high * wide <= _LARGE * _MOST * self.side**2:
            return [View(small)]
        side = int(sqrt(_MOST)) * self.side
        rows, columns = _layout(shape, most, side)
        whole = rows * side, columns * side
        tiles = [
            View(whole, (row * side, column * side, side, side), (self.tiles[row * _SIDE + column],))
            for row in range(rows)
            for column in range(columns)
        ]
        return [*tiles, View(small, before=self.thumbnail)]

    @property
    def side(self) -> int:
        return self.patch * self.pool

    def inputs(self, pixels: Pixels) -> Mapping[str, npt.NDArray[Any]]:
        squares, (rows, columns) = patches(pixels, self.patch, self.pool)
        if self.in_gguf:
            squares = squares.transpose(0, 3, 1, 2)
        values = squares.reshape(1, len(squares), -1) * np.float32(2 / 255) - np.float32(1)
        across = [
            _shares(self.positions, length // self.patch)[at]
            for length, at in zip(pixels.shape[:2], (rows, columns), strict=True)
        ]
        places = across[0][:, :, None] * across[1][:, None, :]
        return {"patches": values, "places": places.reshape(len(squares), -1)}

    def build(self, b: Operations) -> Any:
        area, width = 3 * self.patch**2, self.hidden_size
        values = b.input("patches", [1, "n", area])
        places = b.input("places", ["n", self.positions**2])
        x = b.linear(values, f"{_TOWER}embeddings.patch_embedding.weight", width, area, bias=True)
        table = b.parameter(f"{_TOWER}embeddings.position_embedding.weight", self.positions**2, width)
        x = b.op("Add", x, b.op("MatMul", places, table))
        for index in range(self.num_layers):
            x = self._layer(b, f"{_TOWER}encoder.layers.{index}.", x)
        x = b.layer_norm(x, width, f"{_TOWER}post_layernorm", epsilon=self.epsilon)
        merged = self.pool**2 * width
        x = b.reshape(x, 1, -1, merged)
        if self.normed:
            x = b.layer_norm(x, merged, f"{_OUT}layer_norm", epsilon=1e-5)
        x = b.op("Gelu", b.linear(x, f"{_OUT}linear_1.weight", self.projected, merged, bias=True))
        return b.linear(x, f"{_OUT}linear_2.weight", self.width, self.projected, bias=True)

    def _layer(self, b: Operations, prefix: str, x: Any) -> Any:
        width = self.hidden_size

        def product(x: Any, name: str, rows: int, columns: int) -> Any:
            return b.linear(x, f"{prefix}{name}.weight", rows, columns, bias=True)

        y = b.layer_norm(x, width, f"{prefix}layer_norm1", epsilon=self.epsilon)
        query, key, value = (product(y, f"self_attn.{kind}_proj", width, width) for kind in "qkv")
        y = b.attention(query, key, value, self.heads, (width // self.heads) ** -0.5)
        x = b.op("Add", x, product(y, "self_attn.out_proj", width, width))
        y = b.layer_norm(x, width, f"{prefix}layer_norm2", epsilon=self.epsilon)
        y = b.op("Gelu", product(y, "mlp.fc1", self.mlp_width, width), approximate="tanh")
        return b.op("Add", x, product(y, "mlp.fc2", width, self.mlp_width))


def _layout(shape: Sequence[int], most: int, side: int) -> tuple[int, int]:
    """Rows and columns of tiles: of the grids with 2 to ``most`` that with the picture's proportions.

    Of equally near ones it is the largest that has at most twice the picture's pixels.
    """
    height, width = shape[:2]
    grids = [(high, wide) for high in range(1, most + 1) for wide in range(1, most // high + 1)]
    best, least = (1, 1), float("inf")
    for high, wide in sorted(grids[1:], key=lambda grid: grid[0] * grid[1]):
        apart = abs(width / height - wide / high)
        if apart < least or (apart == least and height * width > 0.5 * side**2 * high * wide):
            best, least = (high, wide), apart
    return best


def _shares(side: int, length: int) -> npt.NDArray[np.float32]:
    """The shares (length, side) of a table's positions in those of a view, by linear interpolation.

    Where the view has fewer, each is a mean of its surroundings.
    """
    scale = np.float32(side / length)
    centres = (np.arange(length, dtype=np.float32)[:, None] + 0.5) * scale - 0.5
    apart = np.abs(np.arange(side, dtype=np.float32) - centres) / max(scale, np.float32(1))
    shares = np.maximum(1 - apart, 0)
    normal: npt.NDArray[np.float32] = (shares / shares.sum(axis=1, keepdims=True)).astype(np.float32)
    return normal


def _tokens(ids: Mapping[str, int]) -> dict[str, Any] | None:
    """Fields of special tokens; None if the tokenizer lacks those around pictures."""
    around = tuple(ids[text] for text in ("<|image_start|>", "<|image_end|>") if text in ids)
    sides = range(1, _SIDE + 1)
    tiles = [ids.get(f"<|img_row_{row}_col_{column}|>") for row in sides for column in sides]
    thumbnail = ids.get("<|img_thumbnail|>")
    if len(around) < 2:
        return None
    whole = thumbnail is not None and None not in tiles
    cut = {"tiles": tuple(tiles), "thumbnail": (thumbnail,)} if whole else {}
    return {"around": around, **cut}


def _read(facts: Facts, ids: Mapping[str, int]) -> Tower | None:
    vision, tokens = facts.section("vision_config"), _tokens(ids)
    side = round(sqrt(vision.integer("num_patches", 256)))
    others = (
        facts.value("model_type") not in ("lfm2_vl", "lfm2-vl"),  # others have this tower too
        facts.integer("vision_feature_layer", -1) != -1,
        facts.text("projector_hidden_act", "gelu") != "gelu",
        not facts.boolean("projector_bias", default=True),
        vision.text("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh",
        side**2 != vision.integer("num_patches", 256),
    )
    if any(others) or tokens is None:
        return None
    return Lfm2Tower(
        architecture=LFM2_VISION.name,
        width=facts.section("text_config").integer("hidden_size"),
        marker=facts.integer("image_token_id", 396),
        **tokens,
        num_layers=vision.integer("num_hidden_layers", 12),
        hidden_size=vision.integer("hidden_size", 768),
        mlp_width=vision.integer("intermediate_size", 3072),
        heads=vision.integer("num_attention_heads", 12),
        patch=vision.integer("patch_size", 16),
        pool=facts.integer("downsample_factor", 2),
        positions=side,
        projected=facts.integer("projector_hidden_size", 2560),
        normed=facts.boolean("projector_use_layernorm", default=True),
        epsilon=vision.positive("layer_norm_eps", 1e-6),
    )


def _from_gguf(
    keys: Facts, shapes: Mapping[str, tuple[int, ...]], config: Transformer, ids: Mapping[str, int]
) -> Tower | None:
    tokens, marker = _tokens(ids), ids.get("<image>")
    table, projector = shapes.get("v.position_embd.weight"), shapes.get("mm.1.weight")
    if not isinstance(config, Lfm2) or None in (tokens, marker, table, projector):
        return None
    assert tokens is not None and marker is not None and table is not None and projector is not None
    return Lfm2Tower(
        architecture=LFM2_VISION.name,
        width=config.hidden_size,
        marker=marker,
        **tokens,
        num_layers=keys.integer("block_count"),
        hidden_size=keys.integer("embedding_length"),
        mlp_width=keys.integer("feed_forward_length"),
        heads=keys.integer("attention.head_count"),
        patch=keys.integer("patch_size"),
        pool=keys.integer("projector.scale_factor", 2),
        positions=round(sqrt(table[0])),
        projected=projector[0],
        normed="mm.input_norm.weight" in shapes,
        epsilon=keys.positive("attention.layer_norm_epsilon", 1e-6),
        in_gguf=True,
    )


LFM2_VISION = TowerFamily(
    name="lfm2_vision",
    hub=("siglip2_vision_model",),
    gguf="lfm2",
    models=(LFM2.gguf, LFM2_MOE.gguf),
    tower=Lfm2Tower,
    names={
        f"{_TOWER}embeddings.patch_embedding": "v.patch_embd",
        f"{_TOWER}embeddings.position_embedding": "v.position_embd",
        f"{_TOWER}encoder.layers.": "v.blk.",
        f"{_TOWER}post_layernorm": "v.post_ln",
        f"{_OUT}layer_norm": "mm.input_norm",
        f"{_OUT}linear_": "mm.",
        "self_attn.out_proj": "attn_out",
        "self_attn.": "attn_",
        "_proj.": ".",
        "layer_norm": "ln",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    },
    read=_read,
    from_gguf=_from_gguf,
)
