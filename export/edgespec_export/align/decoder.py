"""A drafter in PyTorch: its losses on the answers in a batch of texts, as a function of the trained
parameters.

It computes the operations of :mod:`edgespec_models.decoders`, over a checkpoint's weights in float32.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as computed_again

from edgespec_export.align.alignment import BLOCKS, Codes
from edgespec_export.align.settings import Text
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.decoders.operations import UNUSUAL, XIELU, Activation, Attention, Backend, Rope, Rows
from edgespec_models.decoders.record import record
from edgespec_models.files.blocks import fields
from edgespec_models.files.tensors import FLOATS, U8, GGMLType

_ROWS: Final = 64  # answer tokens with logits in memory at a time: a row may have 262,144 logits


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side: ``ids`` int64 ``(texts, tokens)``, padded at the end; ``answer`` bool ``(texts,
    tokens - 1)``, true if the next token belongs to an answer.
    """

    ids: Tensor
    answer: Tensor

    @property
    def labels(self) -> Tensor:
        """The answers' tokens, one text after the other."""
        return self.ids[:, 1:][self.answer]


@dataclass(frozen=True, slots=True)
class _Quantized:
    """A quantized matrix, which takes a quarter of the memory that its float32 would.

    Weights are ``scale * (code - zero) - minimum``. ``codes`` are uint8 ``(rows, columns)``, ``scales`` and
    ``minimums`` float32 ``(rows, blocks)``. ``factors`` of a row grow: a scale for each block of the file,
    and with minimums one for these.
    """

    codes: Tensor
    zero: int
    scales: Tensor
    minimums: Tensor | None
    factors: int

    @classmethod
    def of(cls, kind: GGMLType, raw: U8, device: str) -> "_Quantized":
        """The matrix of raw blocks, uint8 ``(rows, blocks, bytes)``."""
        blocks = fields(kind, raw).blocks()
        minimums = None if blocks.minimums is None else _tensor(blocks.minimums, device)
        codes, scales = _tensor(blocks.codes, device), _tensor(blocks.scales, device)
        return cls(codes, blocks.zero, scales, minimums, raw.shape[1] * kind.factors)

    def grown(self, growth: Tensor) -> Tensor:
        """The weights whose factors grow by ``growth``, float32 ``(factors, rows)``."""
        kinds = 1 if self.minimums is None else 2
        factors = (1.0 + growth.T).unflatten(1, (-1, kinds)).unbind(2)
        weights = self.codes.unflatten(1, (self.scales.shape[1], -1)).float() - self.zero
        weights = weights * _by_block(self.scales, factors[0])
        if self.minimums is not None:
            weights = weights - _by_block(self.minimums, factors[1])
        return weights.flatten(1)


def _tensor(array: np.ndarray, device: str) -> Tensor:
    """A copy of an array."""
    return torch.from_numpy(np.array(array)).to(device)


def _by_block(values: Tensor, factors: Tensor) -> Tensor:
    """Values of blocks ``(rows, blocks)`` times factors of the file's blocks: ``(rows, blocks, 1)``."""
    return (values.unflatten(1, (factors.shape[1], -1)) * factors[..., None]).flatten(1)[..., None]


class TorchDecoder(Backend):
    """Reads texts.

    ``source`` is read as long as this object lives. ``parameters`` are the trained ones, by the names of
    alignment files: the gains of the normalizations themselves; the relative growth of scales and minimums of
    a quantized matrix, which changes neither codes nor the cost of a step; for a matrix in floats, which an
    export rounds anyway, a change of ``rank``.
    """

    medium = "PyTorch"
    lacks = UNUSUAL - {"attention.growth"}  # which begins behind longer texts than one trains on

    def __init__(
        self,
        source: Checkpoint,
        *,
        rank: int = 8,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.config, self._record = source.config, record(source.config)
        self._record.refuse(type(self), self.config.architecture)
        self._source, self._device = source, device
        self.parameters: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._quantized: dict[str, _Quantized] = {}
        products = self._record.products.values()
        projections = {name for made in products if made.part for name in made.matrices}
        generator = torch.Generator().manual_seed(seed)
        for name in source.tensors:
            stored = source.tensor(name).type
            if name in projections and stored.factors:
                self._quantized[name] = matrix = _Quantized.of(*source.read(name), device)
                self.parameters[name + BLOCKS] = torch.zeros(matrix.factors, len(matrix.codes))
                continue
            self._weights[name] = _tensor(source.values(name), device)
            if name.endswith("norm"):
                self.parameters[name] = self._weights[name]
            elif name in projections and stored in FLOATS:
                rows, columns = self._weights[name].shape
                a = torch.empty(rank, columns).uniform_(-1, 1, generator=generator) / sqrt(columns)
                self.parameters |= {f"{name}.lora_b": torch.zeros(rank, rows), f"{name}.lora_a": a}
        for name, value in self.parameters.items():
            self.parameters[name] = value.to(device).requires_grad_()
            if name in self._weights:
                self._weights[name] = self.parameters[name]
        self._tables: dict[str, Tensor] = {}
        self._positions = 0

    def rows(self, batch: Batch) -> Tensor:
        """The last layer's row before every answer token, normalized: ``(answer tokens, hidden)``."""
        self._batch = batch
        self._reach(batch.ids.shape[1] - 1)
        self.config.decode(self)
        return self._rows

    def losses(self, batch: Batch) -> Tensor:
        """``-log q(token)`` of every answer token: ``(answer tokens,)``."""
        parts = zip(self.rows(batch).split(_ROWS), batch.labels.split(_ROWS), strict=True)
        return torch.cat([computed_again(self._loss, *part, use_reentrant=False) for part in parts])

    def right(self, batch: Batch) -> Tensor:
        """Whether each answer token is the first guess: bool ``(answer tokens,)``."""
        with torch.no_grad():
            guesses = [self._logits(rows).argmax(dim=-1) for rows in self.rows(batch).split(_ROWS)]
            return torch.cat(guesses) == batch.labels

    def changes(self) -> dict[str, Codes]:
        """The trained parameters in the form of an alignment."""
        return {name: Codes.of(change) for name, change in self._changes()}

    def load(self, changes: Mapping[str, Codes]) -> None:
        """Continue from an alignment's parameters, with their rounding."""
        for name, codes in changes.items():
            values = codes.values()
            if name in self._weights:
                values = (self._values(name) + values).reshape(self.parameters[name].shape)
            self.parameters[name].data.copy_(torch.from_numpy(values))

    def _changes(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, value in self.parameters.items():
            now = value.detach().cpu().numpy()
            yield name, now.reshape(-1, now.shape[-1]) - self._values(name) if name in self._weights else now

    def _values(self, name: str) -> np.ndarray:
        """A tensor of the checkpoint, as a matrix."""
        values = self._source.values(name)
        return values.reshape(-1, values.shape[-1])

    def _loss(self, rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(rows), labels, reduction="none")

    def _logits(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self._weights[self._source.stored_name("lm_head")])

    def embed(self, rows: int, width: int, scale: float = 1.0) -> Tensor:
        return F.embedding(self._batch.ids[:, :-1], self._weights["embed"]) * scale

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[self.name(name)], self.config.norm_epsilon)

    def post_norm(self, y: Tensor, name: str, epsilon: float | None = None) -> Tensor:
        return self.norm(y, name)

    def add(self, x: Tensor, y: Tensor, name: str = "") -> Tensor:
        return x + y

    def wanted(self, x: Tensor) -> Tensor:
        return x[self._batch.answer]

    def logits(self, x: Tensor, rows: int, cap: float | None = None) -> Tensor:
        """The rows, normalized: their logits would take too much memory at a time."""
        return self.norm(x, "final_norm")

    def write(self, logits: Tensor, choices: object = None) -> None:
        self._rows = logits

    def linear(self, x: Tensor, name: str, rows: Rows, *, biases: bool | None = False, part: str = "") -> Any:
        """A value for each matrix."""
        names = [name] if isinstance(rows, int) else [*rows]
        values = [self.product(self.name(matrix), x) for matrix in names]
        return values if len(values) > 1 else values[0]

    def product(self, name: str, x: Tensor) -> Tensor:
        """A product with the matrix ``name`` and its trained change."""
        bias = self._weights.get(f"{name}_bias")
        if name in self._quantized:
            return F.linear(x, self._quantized[name].grown(self.parameters[name + BLOCKS]), bias)
        y = F.linear(x, self._weights[name], bias)
        if f"{name}.lora_b" not in self.parameters:
            return y
        a, b = self.parameters[f"{name}.lora_a"], self.parameters[f"{name}.lora_b"]
        return y + F.linear(F.linear(x, a), b.T)

    def gated(
        self, x: Tensor, name: str, names: tuple[str, ...], rows: int, activation: Activation | XIELU
    ) -> Tensor:
        gate, up = self.linear(x, name, dict.fromkeys(names, rows))
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def attention(self, qkv: Sequence[Tensor], facts: Attention, known: Any = None) -> Tensor:
        """Of ``(texts, tokens, heads * width)`` each."""
        query, key, value = (self._heads(*part, facts) for part in zip("qkv", qkv, strict=True))
        group = facts.heads // facts.kv_heads
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        mask = self._mask(facts.window, query.shape[2])
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=facts.scale
        )
        return attended.transpose(1, 2).flatten(-2)

    def _heads(self, which: str, flat: Tensor, facts: Attention) -> Tensor:
        """``(texts, heads, tokens, width)``."""
        normed = which != "v" and facts.norms
        if normed == "wide":
            flat = self.norm(flat, f"{which}_norm")
        heads = flat.unflatten(-1, (-1, facts.width)).transpose(1, 2)
        if normed == "head":
            heads = self.norm(heads, f"{which}_norm")
        return heads if which == "v" or facts.rope is None else self._rotated(heads, facts.rope)

    def _rotated(self, heads: Tensor, rope: Rope) -> Tensor:
        cos, sin = (self._tables[f"{rope.name}_{part}"][: heads.shape[2]] for part in ("cos", "sin"))
        turned, rest = heads[..., : rope.width], heads[..., rope.width :]
        first, second = (turned[..., ::2], turned[..., 1::2]) if rope.interleaved else turned.chunk(2, dim=-1)
        both = first * cos - second * sin, second * cos + first * sin
        joined = torch.stack(both, dim=-1).flatten(-2) if rope.interleaved else torch.cat(both, -1)
        return torch.cat([joined, rest], dim=-1)

    def _mask(self, window: int | None, tokens: int) -> Tensor | None:
        """The mask of a windowed layer; None if a token sees all tokens before it."""
        if window is None or window >= tokens:
            return None
        at = torch.arange(tokens, device=self._device)
        ago = at[:, None] - at[None, :]
        return (ago >= 0) & (ago < window)

    def _reach(self, positions: int) -> None:
        """Make rotary tables for this many positions."""
        if positions > self._positions:
            tables = self._record.tables(positions)
            self._tables = {name: torch.from_numpy(table).to(self._device) for name, table in tables.items()}
            self._positions = positions


def batch_of(texts: Sequence[Text], device: str = "cpu") -> Batch:
    """A batch of texts, whose answers begin at 1 or later."""
    longest = max(len(text.tokens) for text in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    answer = torch.zeros(len(texts), longest - 1, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = torch.tensor(text.tokens)
        answer[row, text.start - 1 : len(text.tokens) - 1] = True
    return Batch(ids.to(device), answer.to(device))
