"""A drafter in NumPy: how wrong it is about a text, and how that depends on the gains of its normalizations.

Forward and backward through the layers of :func:`edgespec_models.graphs.build_native`, over the bundle's own
weights. A layer's matrices are unpacked when they are needed and a layer's values are computed again for the
way back (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"), so memory is a layer's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from edgespec.learning.gains import Gains
from edgespec.learning.layer_math import (
    F32,
    activate,
    attend,
    attend_back,
    normalize,
    normalize_back,
    rotate,
    visible,
)
from edgespec_export.formats.stored_weights import StoredWeights
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.rope import rotary_tables
from edgespec_models.errors import UnsupportedModelError

__all__ = ["NumpyDecoder", "Reading"]

_CHUNK: Final = 8192  # rows of the LM head at a time
_Rope = tuple[F32, F32]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a text was read.

    Attributes:
        loss: the mean of ``-log q(token)`` over the answer's tokens that the LM head can write.
        right: whether each of them was the drafter's first guess.
        gradient: of the loss by the gains; None if not asked for.
    """

    loss: float
    right: npt.NDArray[np.bool_]
    gradient: F32 | None


class NumpyDecoder:
    """Reads texts as a drafter's graph does, but for the rounding of activations.

    Args:
        bundle: a drafter that edgespec exported, one graph of any shape.

    Raises:
        BundleError: weights that cannot be read.
        UnsupportedModelError: another kind of bundle, or weights stored in a way that cannot be undone.
    """

    def __init__(self, bundle: Bundle) -> None:
        if not isinstance(bundle.config, ModelConfig):
            raise UnsupportedModelError(f"{bundle.path} is not a bundle of edgespec's own")
        self.config, self._weights = bundle.config, StoredWeights(bundle)
        self.gains = Gains({name: self._weights.vector(name) for name in _gain_names(self.config)})
        self._rows: npt.NDArray[np.int64] | None = None  # of the LM head, by token; -1 for none
        if bundle.head_tokens is not None:
            self._rows = np.full(self.config.vocab_size, -1, np.int64)
            self._rows[bundle.head_tokens] = np.arange(len(bundle.head_tokens))

    def read(
        self,
        tokens: Sequence[int],
        start: int,
        gains: F32,
        *,
        differentiate: bool,
        breathe: Callable[[], None] = lambda: None,
    ) -> Reading:
        """Read ``tokens`` and compare what the drafter would have said from ``start`` on.

        Gains out of all proportion may give a loss and a gradient that are not finite; nothing warns of it.

        Args:
            tokens: prompt and answer, in the drafter's vocabulary.
            start: where the answer begins, at least 1.
            gains: float32, see :attr:`gains`.
            differentiate: whether the gradient is wanted.
            breathe: called before each layer; may wait, or raise to give up.
        """
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return self._read(np.array(tokens, np.int64), start, gains, differentiate, breathe)

    def _read(
        self,
        ids: npt.NDArray[np.int64],
        start: int,
        gains: F32,
        differentiate: bool,
        breathe: Callable[[], None],
    ) -> Reading:
        config = self.config
        x = self._weights.embed(ids[:-1])
        x *= np.float32(config.embedding_scale)
        ropes = [self._rope(layer, len(x)) for layer in range(config.num_layers)]
        entering = []
        for layer in range(config.num_layers):
            breathe()
            entering.append(x)
            x = _Layer(self, layer, gains, ropes[layer]).forward(x)
        breathe()
        labels = ids[start:] if self._rows is None else self._rows[ids[start:]]
        by_gains = np.zeros(len(self.gains), np.float32)
        loss, right, given = self._head(x, start - 1, labels, gains, by_gains)
        if not differentiate:
            return Reading(loss, right, None)
        for layer in reversed(range(config.num_layers)):
            breathe()
            step = _Layer(self, layer, gains, ropes[layer])
            step.forward(entering.pop())
            given = step.backward(given, by_gains)
        return Reading(loss, right, by_gains)

    def matrix(self, name: str) -> F32:
        """A projection's weights."""
        return self._weights.matrix(name)

    def bias(self, name: str) -> F32 | None:
        """A projection's biases."""
        return self._weights.bias(name)

    def _rope(self, layer: int, tokens: int) -> _Rope | None:
        config = self.config
        kind, tables = config.rope_of(layer), rotary_tables(config, tokens)
        return None if kind is None else (tables[f"{kind}_cos"], tables[f"{kind}_sin"])

    def _head(
        self, x: F32, first: int, labels: npt.NDArray[np.int64], gains: F32, by_gains: F32
    ) -> tuple[float, npt.NDArray[np.bool_], F32]:
        """Loss, right guesses, and the derivative by ``x``; the last gain's is added to ``by_gains``."""
        gain = self.gains.part(gains, "final_norm.weight")
        bare, factor = normalize(x[first:], self.config.norm_epsilon)
        said = np.concatenate([bare * gain @ rows.T for rows in self._head_rows()], axis=1)
        known = labels >= 0
        best = said.argmax(axis=1)
        said -= said.max(axis=1, keepdims=True)
        probs = np.exp(said)
        total = probs.sum(axis=1)
        at = np.flatnonzero(known), labels[known]
        count = max(int(known.sum()), 1)
        loss = float((np.log(total[known]) - said[at]).sum()) / count
        probs /= total[:, None]
        probs[at] -= 1.0
        probs *= known[:, None] / np.float32(count)
        given, column = np.zeros_like(bare), 0
        for rows in self._head_rows():
            given += probs[:, column : column + len(rows)] @ rows
            column += len(rows)
        self.gains.part(by_gains, "final_norm.weight")[:] += (given * bare).sum(axis=0)
        back = np.zeros_like(x)
        back[first:] = normalize_back(given * gain, bare, factor)
        return loss, (best == labels)[known], back

    def _head_rows(self) -> Iterator[F32]:
        """The LM head, some rows at a time."""
        for part in self._weights.parts("lm_head"):
            for start in range(0, self._weights.count(part), _CHUNK):
                yield self._weights.rows(part, start, start + _CHUNK)


class _Layer:
    """One layer reading one text: forward, and then back."""

    def __init__(self, decoder: NumpyDecoder, layer: int, gains: F32, rope: _Rope | None) -> None:
        self._decoder, self._config, self._layer, self._gains = decoder, decoder.config, layer, gains
        self._rope = rope
        self._window = None if self._config.is_global(layer) else self._config.sliding_window
        self._matrices: dict[str, F32] = {}
        self._normed: dict[str, tuple[F32, F32]] = {}

    def forward(self, x: F32) -> F32:
        """``(tokens, hidden) -> (tokens, hidden)``, the residual stream."""
        x = x + self._post("post_attn_norm", self._attention(self._norm("attn_norm", x)))
        mlp: F32 = x + self._post("post_mlp_norm", self._mlp(self._norm("mlp_norm", x)))
        return mlp

    def backward(self, given: F32, by_gains: F32) -> F32:
        """The derivative by what :meth:`forward` was given; adds to ``by_gains``."""
        self._by_gains = by_gains
        given = given + self._norm_back("mlp_norm", self._mlp_back(self._post_back("post_mlp_norm", given)))
        inner = self._attention_back(self._post_back("post_attn_norm", given))
        back: F32 = given + self._norm_back("attn_norm", inner)
        return back

    def _attention(self, x: F32) -> F32:
        config = self._config
        packed = self._project("attention.qkv", x)
        query, rest = packed[:, : config.query_width], packed[:, config.query_width :]
        heads = [self._heads(part) for part in (query, *np.split(rest, 2, axis=1))]
        if config.qk_norm:
            heads[0] = self._norm("attention.q_norm", heads[0])
            heads[1] = self._norm("attention.k_norm", heads[1])
        query, key = (self._rotate(part, 1.0) for part in heads[:2])
        query = self._grouped(query) * np.float32(config.attention_scale)
        self._parts = query, key, heads[2]
        attended, self._probs = attend(*self._parts, visible(len(x), self._window))
        return self._project("attention.o", self._flat(attended))

    def _attention_back(self, given: F32) -> F32:
        config = self._config
        given = self._grouped(self._heads(self._project_back("attention.o", given)))
        query, key, value = attend_back(given, self._probs, self._parts)
        query = query.reshape(config.num_heads, -1, config.head_dim) * np.float32(config.attention_scale)
        query, key = self._rotate(query, -1.0), self._rotate(key, -1.0)
        if config.qk_norm:
            query = self._norm_back("attention.q_norm", query)
            key = self._norm_back("attention.k_norm", key)
        packed = np.concatenate([self._flat(part) for part in (query, key, value)], axis=1)
        return self._project_back("attention.qkv", packed)

    def _mlp(self, x: F32) -> F32:
        gate, up = np.split(self._project("mlp.gate_up", x), 2, axis=1)
        active, slope = activate(gate, self._config.activation)
        self._gate = active, slope, up
        return self._project("mlp.down", active * up)

    def _mlp_back(self, given: F32) -> F32:
        active, slope, up = self._gate
        inner = self._project_back("mlp.down", given)
        both = np.concatenate([inner * up * slope, inner * active], axis=1)
        return self._project_back("mlp.gate_up", both)

    def _project(self, name: str, x: F32) -> F32:
        path = f"layers.{self._layer}.{name}"
        self._matrices[name] = self._decoder.matrix(path)
        y: F32 = x @ self._matrices[name].T
        bias = self._decoder.bias(path)
        return y if bias is None else y + bias

    def _project_back(self, name: str, given: F32) -> F32:
        back: F32 = given @ self._matrices[name]
        return back

    def _norm(self, name: str, x: F32) -> F32:
        self._normed[name] = bare, _ = normalize(x, self._config.norm_epsilon)
        return bare * self._gain(name, self._gains)

    def _norm_back(self, name: str, given: F32) -> F32:
        bare, factor = self._normed[name]
        axes = tuple(range(bare.ndim - 1))
        self._gain(name, self._by_gains)[:] += (given * bare).sum(axis=axes)
        return normalize_back(given * self._gain(name, self._gains), bare, factor)

    def _post(self, name: str, x: F32) -> F32:
        return self._norm(name, x) if self._config.post_norms else x

    def _post_back(self, name: str, given: F32) -> F32:
        return self._norm_back(name, given) if self._config.post_norms else given

    def _gain(self, name: str, vector: F32) -> F32:
        return self._decoder.gains.part(vector, f"layers.{self._layer}.{name}.weight")

    def _rotate(self, heads: F32, direction: float) -> F32:
        if self._rope is None:
            return heads
        cos, sin = self._rope
        return rotate(heads, cos, sin * np.float32(direction), interleaved=self._config.rope_interleaved)

    def _heads(self, flat: F32) -> F32:
        """``(tokens, heads * head_dim) -> (heads, tokens, head_dim)``."""
        return flat.reshape(len(flat), -1, self._config.head_dim).swapaxes(0, 1)

    def _grouped(self, heads: F32) -> F32:
        """``(heads, tokens, head_dim) -> (kv heads, group, tokens, head_dim)``."""
        return heads.reshape(self._config.num_kv_heads, -1, *heads.shape[1:])

    @staticmethod
    def _flat(heads: F32) -> F32:
        """``(..., tokens, head_dim) -> (tokens, heads * head_dim)``."""
        together = heads.reshape(-1, *heads.shape[-2:])
        return together.swapaxes(0, 1).reshape(together.shape[1], -1)


def _gain_names(config: ModelConfig) -> list[str]:
    """In the order of the graph's layers."""
    kinds = ["attn_norm", "mlp_norm"]
    kinds += ["attention.q_norm", "attention.k_norm"] if config.qk_norm else []
    kinds += ["post_attn_norm", "post_mlp_norm"] if config.post_norms else []
    inner = [f"layers.{layer}.{kind}.weight" for layer in range(config.num_layers) for kind in kinds]
    return [*inner, "final_norm.weight"]
