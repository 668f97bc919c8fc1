"""The tower of Qwen3.5 and its successors: a ViT, and vectors of 2 x 2 patches, which lie on a grid.

It is Qwen3-VL's without features for the decoder's first layers (Bai et al. 2025, arXiv 2511.21631).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isqrt, sqrt
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.config import Count
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import RequestError, UnsupportedModelError
from edgespec_models.families.qwen35 import QWEN35, QWEN35_MOE, Qwen35
from edgespec_models.families.towers import Operations, Pixels, Tower, TowerFamily, patches
from edgespec_models.files.facts import Facts
from edgespec_models.schema import shown

_OF_DETAIL: Final = {"low": 256, "high": 4096}
_USUAL: Final = 1024
_FEWEST, _MOST = 64, 16_384  # vectors of a picture, as in the models' preprocessor_config.json
_MOST_RATIO: Final = 200
_MARKER, _ID = "<|image_pad|>", 248_056
_TOWER: Final = "visual."


@dataclass(frozen=True, kw_only=True)
class Qwen35Tower(Tower):
    """The tower.

    Attributes:
        num_layers: its layers.
        hidden_size: width of its stream.
        mlp_width: width of its MLPs.
        heads: heads of attention.
        patch: side of a patch in pixels.
        merged: side of the square of patches that becomes a vector.
        positions: positions of a side in the table.
        frames: whether files have a patch's weights frame by frame; the two frames of a picture are the same.
        fewest: the least vectors of a picture, to which smaller ones are enlarged.
        most: the most.
        epsilon: epsilon of all norms.
        theta: base of the rotation.
    """

    axes: ClassVar[int] = 3
    num_layers: Count
    hidden_size: Count
    mlp_width: Count
    heads: Count
    patch: Count
    merged: Count
    positions: Count
    frames: bool = False
    fewest: Count = _FEWEST
    most: Count = _MOST
    epsilon: float
    theta: float

    def budget(self, detail: str, image_tokens: int | None) -> int:
        wanted = _OF_DETAIL.get(detail, _USUAL) if image_tokens is None else image_tokens
        return max(self.fewest, min(wanted, self.most))

    def size(self, shape: Sequence[int], budget: int) -> tuple[int, int]:
        """As transformers' ``smart_resize``; where that exceeds the budget, the longer side is cut down."""
        (height, width), side = shape[:2], self.side
        if max(height, width) > _MOST_RATIO * min(height, width):
            raise RequestError(
                f"have a picture of {width} x {height} pixels; this model takes pictures up to "
                f"{_MOST_RATIO} times as long as wide. Cut it",
                "messages",
            )
        high, wide = round(height / side), round(width / side)
        if high * wide > budget:
            factor = sqrt(height * width / (budget * side**2))
            high, wide = (max(1, floor(length / factor / side)) for length in (height, width))
        elif high * wide < self.fewest:
            factor = sqrt(self.fewest * side**2 / (height * width))
            high, wide = (ceil(length * factor / side) for length in (height, width))
        if high * wide > budget:
            high, wide = (high, budget // high) if high < wide else (budget // wide, wide)
        return high * side, wide * side

    @property
    def side(self) -> int:
        return self.patch * self.merged

    def inputs(self, pixels: Pixels) -> Mapping[str, npt.NDArray[Any]]:
        squares, places = patches(pixels, self.patch, self.merged)
        values = squares.transpose(0, 3, 1, 2).reshape(1, len(squares), -1).astype(np.float32)
        quarter = self.hidden_size // self.heads // 4
        powers = np.arange(0, 2 * quarter, 2, dtype=np.float32) / np.float32(2 * quarter)
        angles = places.T[:, :, None].astype(np.float32) * (1 / np.float32(self.theta) ** powers)
        angles = angles.reshape(1, len(squares), 2 * quarter)
        near, shares = self._neighbours(places)
        return {
            "patches": values / np.float32(127.5) - np.float32(1),
            "near": near,
            "shares": shares,
            "cos": np.cos(angles),
            "sin": np.sin(angles),
        }

    def _neighbours(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The four nearest rows of the table for each patch, (4, n), and their shares, (4, n, 1).

        The corners of picture and table coincide.
        """
        steps = np.maximum(places.max(axis=1, keepdims=True), 1)
        exact = places.astype(np.float32) * np.float32(self.positions - 1) / steps.astype(np.float32)
        first = np.floor(exact)
        share = exact - first
        sides = np.stack([first, np.minimum(first + 1, self.positions - 1)]).astype(np.int64)
        parts = np.stack([1 - share, share])
        near = sides[:, None, 0] * self.positions + sides[None, :, 1]
        count = places.shape[1]
        return near.reshape(4, count), (parts[:, None, 0] * parts[None, :, 1]).reshape(4, count, 1)

    def build(self, b: Operations) -> Any:
        area, width = 3 * self.patch**2, self.hidden_size
        half = width // self.heads // 2
        values = b.input("patches", [1, "n", area])
        near, shares = b.input("near", [4, "n"], "int"), b.input("shares", [4, "n", 1])
        tables = [b.input(name, [1, "n", half]) for name in ("cos", "sin")]
        x = b.op("MatMul", values, b.op("Transpose", self._of_patches(b, area)))
        x = b.op("Add", x, b.parameter(f"{_TOWER}patch_embed.proj.bias", width))
        table = b.parameter(f"{_TOWER}pos_embed.weight", self.positions**2, width)
        x = b.op(
            "Add", x, b.op("ReduceSum", b.op("Mul", b.op("Gather", table, near), shares), b.constant([0]))
        )
        for index in range(self.num_layers):
            x = self._layer(b, f"{_TOWER}blocks.{index}.", x, tables)
        x = b.layer_norm(x, width, f"{_TOWER}merger.norm", epsilon=self.epsilon)
        joined = width * self.merged**2
        x = b.linear(
            b.reshape(x, 1, -1, joined), f"{_TOWER}merger.linear_fc1.weight", joined, joined, bias=True
        )
        x = b.op("Gelu", x)
        return b.linear(x, f"{_TOWER}merger.linear_fc2.weight", self.width, joined, bias=True)

    def _of_patches(self, b: Operations, area: int) -> Any:
        """The weights of a patch, (width, 3 * patch**2), the sum of those of two frames."""
        name, side = f"{_TOWER}patch_embed.proj.weight", self.patch
        if self.frames:
            shape = self.hidden_size, area
            return b.op("Add", b.parameter(name, *shape), b.parameter(f"{name}.1", *shape))
        frames = b.parameter(name, self.hidden_size, 3, 2, side**2)
        return b.reshape(b.op("ReduceSum", frames, b.constant([2])), self.hidden_size, area)

    def _layer(self, b: Operations, prefix: str, x: Any, tables: list[Any]) -> Any:
        width = self.hidden_size

        def product(x: Any, name: str, rows: int, columns: int) -> Any:
            return b.linear(x, f"{prefix}{name}.weight", rows, columns, bias=True)

        y = b.layer_norm(x, width, f"{prefix}norm1", epsilon=self.epsilon)
        both = product(y, "attn.qkv", 3 * width, width)
        query, key, value = (
            b.op("Slice", both, *(b.constant([n]) for n in (at * width, (at + 1) * width, 2)))
            for at in range(3)
        )
        query, key = (b.op("RotaryEmbedding", z, *tables, num_heads=self.heads) for z in (query, key))
        y = b.attention(query, key, value, self.heads, (width // self.heads) ** -0.5)
        x = b.op("Add", x, product(y, "attn.proj", width, width))
        y = b.layer_norm(x, width, f"{prefix}norm2", epsilon=self.epsilon)
        y = b.op("Gelu", product(y, "mlp.linear_fc1", self.mlp_width, width), approximate="tanh")
        return b.op("Add", x, product(y, "mlp.linear_fc2", width, self.mlp_width))


def _read(facts: Facts, ids: Mapping[str, int]) -> Tower | None:
    text, vision = facts.section("text_config"), facts.section("vision_config")
    rope, sections = vision.section("rope_parameters"), text.section("rope_parameters")
    _refuse(vision)
    others = (
        vision.text("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh",
        vision.integer("temporal_patch_size", 2) != 2,
        rope.text("rope_type", "axial") != "axial",
        not _take_turns(sections.numbers("mrope_section", 3)),
    )
    if any(others):
        return None
    return Qwen35Tower(
        architecture=QWEN35_VISION.name,
        width=text.integer("hidden_size"),
        marker=facts.integer("image_token_id", _ID),
        num_layers=vision.integer("depth", 27),
        hidden_size=vision.integer("hidden_size", 1152),
        mlp_width=vision.integer("intermediate_size", 4304),
        heads=vision.integer("num_heads", 16),
        patch=vision.integer("patch_size", 16),
        merged=vision.integer("spatial_merge_size", 2),
        positions=isqrt(vision.integer("num_position_embeddings", 2304)),
        epsilon=1e-6,
        theta=rope.positive("rope_theta", 1e4),
    )


def _take_turns(sections: Sequence[float]) -> bool:
    """Whether time, row and column take turns among all frequencies, as with 11, 11 and 10 of 32."""
    return not sections or [*sections] == [(sum(sections) + 2 - axis) // 3 for axis in range(3)]


def _refuse(vision: Facts) -> None:
    """Raise UnsupportedModelError for a tower with features for the decoder's first layers."""
    layers = vision.value("deepstack_visual_indexes")
    if not layers:
        marks = vision.value("is_deepstack_layers")
        layers = [layer for layer, mark in enumerate(marks) if mark] if isinstance(marks, list) else []
    if layers:
        raise UnsupportedModelError(
            f"{vision.where}: deepstack_visual_indexes are {shown(layers)}: features of these layers go into "
            "the decoder's, as in Qwen3-VL; edgespec runs towers without such layers"
        )


def _from_gguf(
    keys: Facts, shapes: Mapping[str, tuple[int, ...]], config: Transformer, ids: Mapping[str, int]
) -> Tower | None:
    table, patch = shapes.get("v.position_embd.weight"), keys.integer("patch_size", 16)
    if not isinstance(config, Qwen35) or _MARKER not in ids or not table:
        return None
    _refuse(keys)
    merged = keys.integer("spatial_merge_size", 2)
    area = (patch * merged) ** 2

    def limit(which: str, usual: int) -> int:
        """By llama.cpp's key, or by that of ollama's files."""
        pixels = keys.integer(f"image_{which}_pixels", keys.integer(f"{which}_pixels", usual * area))
        return max(1, pixels // area)

    return Qwen35Tower(
        architecture=QWEN35_VISION.name,
        width=config.hidden_size,
        marker=ids[_MARKER],
        num_layers=keys.integer("block_count"),
        hidden_size=keys.integer("embedding_length"),
        mlp_width=keys.integer("feed_forward_length"),
        heads=keys.integer("attention.head_count"),
        patch=patch,
        merged=merged,
        positions=isqrt(table[0]),
        frames=True,
        epsilon=keys.positive("attention.layer_norm_epsilon", 1e-6),
        theta=keys.positive("rope.freq_base", 1e4),
        fewest=limit("min", _FEWEST),
        most=limit("max", _MOST),
    )


QWEN35_VISION = TowerFamily(
    name="qwen3_5_vision",
    hub=("qwen3_5_vision", "qwen3_5", "qwen3_5_moe_vision", "qwen3_5_moe"),
    gguf="qwen3vl_merger",
    models=(QWEN35.gguf, QWEN35_MOE.gguf),
    tower=Qwen35Tower,
    names={
        f"{_TOWER}patch_embed.proj": "v.patch_embd",
        f"{_TOWER}pos_embed": "v.position_embd",
        f"{_TOWER}blocks.": "v.blk.",
        f"{_TOWER}merger.norm": "v.post_ln",
        f"{_TOWER}merger.linear_fc1": "mm.0",
        f"{_TOWER}merger.linear_fc2": "mm.2",
        "norm1": "ln1",
        "norm2": "ln2",
        "attn.qkv": "attn_qkv",
        "attn.proj": "attn_out",
        "mlp.linear_fc1": "ffn_up",
        "mlp.linear_fc2": "ffn_down",
    },
    read=_read,
    from_gguf=_from_gguf,
)
