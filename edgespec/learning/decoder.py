"""A drafter in NumPy: its loss on a text, and the loss's gradient by the gains of its normalizations.

Forward and backward through the layers of :class:`edgespec_models.bundles.layers.Decoder`, over the
bundle's own weights. A layer's matrices are unpacked when they are needed and a layer's values are computed
again for the way back (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"), so memory is a
layer's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from edgespec.learning.gains import Gains
from edgespec.learning.layer_math import F32, activate, attend, normalize, rotate, visible
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.layers import Decoder, Layer, gain_names, graph_name, rotary_tables
from edgespec_models.bundles.stored_weights import StoredWeights
from edgespec_models.errors import UnsupportedModelError

_CHUNK: Final = 8192  # rows of the LM head at a time
_Back = Callable[[F32], Sequence[F32]]


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading a text.

    Attributes:
        loss: the mean of ``-log q(token)`` over the answer's tokens that the LM head can write.
        right: whether each of them was the drafter's first guess.
        gradient: of the loss by the gains; None if not asked for.
    """

    loss: float
    right: npt.NDArray[np.bool_]
    gradient: F32 | None


@dataclass(slots=True, eq=False)
class _Value:
    """A value within a layer, and the derivative of the loss by it once that is known."""

    data: F32
    by_it: F32 | None = None


class NumpyDecoder(Decoder):
    """Reads texts as a drafter's graph does, but for the rounding of activations.

    ``bundle`` is a drafter that edgespec exported: one graph of any shape.

    Raises:
        BundleError: weights that cannot be read.
        UnsupportedModelError: another kind of bundle, or weights stored in a way that cannot be undone.
    """

    medium = "NumPy"

    def __init__(self, bundle: Bundle) -> None:
        if not isinstance(bundle.config, ModelConfig):
            raise UnsupportedModelError(f"{bundle.path} is not a bundle of edgespec's own")
        super().__init__(bundle.config)
        self._weights = StoredWeights(bundle)
        names = [f"{graph_name(name)}.weight" for name in gain_names(self.config)]
        self.gains = Gains({name: self._weights.vector(name) for name in names})
        self._rows: npt.NDArray[np.int64] | None = None  # of the LM head, by token; -1 for none
        if bundle.head_tokens is not None:
            self._rows = np.full(self.config.vocab_size, -1, np.int64)
            self._rows[bundle.head_tokens] = np.arange(len(bundle.head_tokens))
        self._tape: list[tuple[_Value, tuple[_Value, ...], _Back]] | None = None

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def read(
        self,
        tokens: Sequence[int],
        start: int,
        gains: F32,
        *,
        differentiate: bool,
        breathe: Callable[[], None] = lambda: None,
    ) -> Reading:
        """Read ``tokens`` and compare the drafter's predictions from ``start`` on with them.

        Gains out of all proportion may give a loss and a gradient that are not finite; nothing warns of it.

        Args:
            tokens: prompt and answer, in the drafter's vocabulary.
            start: where the answer begins, at least 1.
            gains: float32, see :attr:`gains`.
            differentiate: whether the gradient is wanted.
            breathe: called before each layer; may wait, or raise to give up.
        """
        ids = np.array(tokens, np.int64)
        self._values, self._by_gains = gains, np.zeros(len(self.gains), np.float32)
        self._tables, self._tape = rotary_tables(self.config, len(ids) - 1), None
        x = self._weights.embed(ids[:-1]) * np.float32(self.config.embedding_scale)
        entering = []
        for layer in self.all_layers:
            breathe()
            entering.append(x)
            x = self.layer(layer, _Value(x)).data
        breathe()
        labels = ids[start:] if self._rows is None else self._rows[ids[start:]]
        normed, back = self._differentiable(partial(self.norm, name="final_norm"), x[start - 1 :])
        loss, right, by_normed = self._head(normed, labels)
        if not differentiate:
            return Reading(loss, right, None)
        by_x = np.zeros_like(x)
        by_x[start - 1 :] = back(by_normed)
        for layer in reversed(self.all_layers):
            breathe()
            _, back = self._differentiable(partial(self.layer, layer), entering.pop())
            by_x = back(by_x)
        return Reading(loss, right, self._by_gains)

    def _head(self, x: F32, labels: npt.NDArray[np.int64]) -> tuple[float, npt.NDArray[np.bool_], F32]:
        """Loss, right guesses, and the derivative of the loss by ``x``."""
        logits = np.concatenate([x @ rows.T for rows in self._head_rows()], axis=1)
        known = labels >= 0
        best = logits.argmax(axis=1)
        logits -= logits.max(axis=1, keepdims=True)
        probs = np.exp(logits)
        total = probs.sum(axis=1)
        at = np.flatnonzero(known), labels[known]
        count = max(int(known.sum()), 1)
        loss = float((np.log(total[known]) - logits[at]).sum()) / count
        probs /= total[:, None]
        probs[at] -= 1.0
        probs *= known[:, None] / np.float32(count)
        by_x, column = np.zeros_like(x), 0
        for rows in self._head_rows():
            by_x += probs[:, column : column + len(rows)] @ rows
            column += len(rows)
        return loss, (best == labels)[known], by_x

    def _head_rows(self) -> Iterator[F32]:
        """The LM head, some rows at a time."""
        for part in self._weights.parts("lm_head"):
            for start in range(0, self._weights.count(part), _CHUNK):
                yield self._weights.rows(part, start, start + _CHUNK)

    def _differentiable(self, part: Callable[[_Value], _Value], x: F32) -> tuple[F32, Callable[[F32], F32]]:
        """The result of a part of the model for ``x``, and the way back, which turns the derivative by the
        result into the derivative by ``x`` and adds up the derivatives by gains.
        """
        tape = self._tape = []
        start = _Value(x)
        end = part(start)
        self._tape = None

        def back(by_y: F32) -> F32:
            end.by_it = by_y
            while tape:
                result, inputs, derivatives = tape.pop()
                assert result.by_it is not None
                for value, by in zip(inputs, derivatives(result.by_it), strict=True):
                    value.by_it = by if value.by_it is None else value.by_it + by
            assert start.by_it is not None
            return start.by_it

        return end.data, back

    def _step(self, data: F32, back: _Back, *inputs: _Value) -> _Value:
        """A value computed from ``inputs``; ``back`` gives the derivatives by them."""
        value = _Value(data)
        if self._tape is not None:
            self._tape.append((value, inputs, back))
        return value

    def norm(self, x: _Value, name: str) -> _Value:
        name = f"{graph_name(name)}.weight"
        gain = self.gains.part(self._values, name)
        bare, bare_back = normalize(x.data, self.config.norm_epsilon)

        def back(by_y: F32) -> tuple[F32]:
            axes = tuple(range(bare.ndim - 1))
            self.gains.part(self._by_gains, name)[:] += (by_y * bare).sum(axis=axes)
            return (bare_back(by_y * gain),)

        return self._step(bare * gain, back, x)

    def add(self, x: _Value, y: _Value, name: str) -> _Value:
        return self._step(x.data + y.data, lambda by_y: (by_y, by_y), x, y)

    def product(self, name: str, x: _Value) -> _Value:
        """The product with the matrix ``name``, which is unpacked for it."""
        matrix, bias = self._weights.matrix(graph_name(name)), self._weights.bias(graph_name(name))
        y = x.data @ matrix.T
        return self._step(y if bias is None else y + bias, lambda by_y: (by_y @ matrix,), x)

    def projected(self, layer: Layer, x: _Value) -> Iterator[tuple[str, _Value]]:
        """``(tokens, heads * head_dim)`` each."""
        if self.config.wide_qk_norm:
            yield from ((which, self.product(f"{layer.name}.{which}", x)) for which in "qkv")
            return
        packed, start = self.product(f"{layer.name}.qkv", x), 0
        for which in "qkv":
            columns = slice(start, start := start + self.shapes[f"{layer.name}.{which}"][0])

            def back(by_y: F32, columns: slice = columns) -> tuple[F32]:
                by_packed = np.zeros_like(packed.data)
                by_packed[:, columns] = by_y
                return (by_packed,)

            yield which, self._step(packed.data[:, columns], back, packed)

    def apart(self, flat: _Value, name: str) -> _Value:
        """``(heads, tokens, head_dim)``."""
        return self._step(self._apart(flat.data), lambda by_y: (_side_by_side(by_y),), flat)

    def rotate(self, layer: Layer, heads: _Value, which: str) -> _Value:
        cos, sin = (self._tables[f"{layer.rope}_{part}"] for part in ("cos", "sin"))
        turn = partial(rotate, cos=cos, interleaved=self.config.rope_interleaved)
        return self._step(turn(heads.data, sin=sin), lambda by_y: (turn(by_y, sin=-sin),), heads)

    def attend(self, layer: Layer, query: _Value, key: _Value, value: _Value) -> _Value:
        scale, kv = np.float32(self.config.attention_scale), self.config.num_kv_heads

        def grouped(heads: F32) -> F32:
            return heads.reshape(kv, -1, *heads.shape[1:])

        mask = visible(query.data.shape[1], layer.window)
        attended, attended_back = attend(grouped(query.data) * scale, key.data, value.data, mask)

        def back(by_y: F32) -> tuple[F32, F32, F32]:
            by_query, by_key, by_value = attended_back(grouped(self._apart(by_y)))
            return by_query.reshape(query.data.shape) * scale, by_key, by_value

        return self._step(_side_by_side(attended), back, query, key, value)

    def gated(self, layer: Layer, x: _Value) -> _Value:
        both = self.product(f"{layer.name}.gate_up", x)
        gate, up = np.split(both.data, 2, axis=1)
        active, slope = activate(gate, self.config.activation)

        def back(by_y: F32) -> tuple[F32]:
            return (np.concatenate([by_y * up * slope, by_y * active], axis=1),)

        return self._step(active * up, back, both)

    def _apart(self, flat: F32) -> F32:
        """``(tokens, heads * head_dim) -> (heads, tokens, head_dim)``."""
        return flat.reshape(len(flat), -1, self.config.head_dim).swapaxes(0, 1)


def _side_by_side(heads: F32) -> F32:
    """``(..., tokens, head_dim) -> (tokens, heads * head_dim)``."""
    together = heads.reshape(-1, *heads.shape[-2:])
    return together.swapaxes(0, 1).reshape(together.shape[1], -1)
