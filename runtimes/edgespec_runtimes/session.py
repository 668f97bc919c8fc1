"""A running model, whatever device it runs on: sessions, each a sequence of tokens over a graph."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.config import DecoderShape
from edgespec_models.bundles.graph_contract import Part
from edgespec_models.errors import BundleError, DeviceError, RequestError
from edgespec_runtimes.graph_io import GraphIO
from edgespec_runtimes.kv_cache import SavedCache, Stretch, shared_length
from edgespec_runtimes.predictions import Predictions

KV_STEP: Final = 256
"""Room in the KV cache is made in steps of so many tokens."""
_SAME, _NEAR = 1e-3, 0.2  # of the largest logit
_TESTED = 28  # tokens: ONNX Runtime's sums differ by rows on ARM, of which eight tokens show nothing


@dataclass(frozen=True, slots=True)
class Rows:
    """What a pass is to read of one sequence: ``tokens``, behind those in its session's cache.

    ``wanted`` rows of logits are asked for, of the last tokens. ``hidden`` is what a head reads beside them
    (:class:`edgespec_models.bundles.graph_contract.Part`).
    """

    session: "Session"
    tokens: Sequence[int]
    wanted: int
    hidden: npt.NDArray[np.float32] | None = None


class Session:
    """A sequence that a model reads; the only owner of its KV cache.

    The cache holds what the model keeps of ``length`` tokens, at most ``capacity``. Behind a pass
    :meth:`keep` says how many of its rows stay; :meth:`rewind` goes back further.

    Predictions have a column for every row of the LM head: every token, or the tokens a trimmed drafter's
    bundle lists (:attr:`edgespec_models.bundles.bundle.Bundle.head_tokens`). They lie in the session's own
    buffers: the next pass overwrites them.

    Attributes:
        row_exact: whether passes over one and over several tokens gave the same bits in the self-test.
        prompt_key: what the bits of the KV cache depend on besides its tokens, as a name that a folder may
            have. Empty where a session does not promise them to other processes. Weights given to
            :meth:`tune` are not in it: who gives some keeps nothing on disk.
    """

    prompt_key = ""

    def __init__(self, io: GraphIO, config: DecoderShape, *, chunk: int, row_exact: bool | None) -> None:
        """Prove that the graph can roll back.

        ``io`` is closed with the last of the sessions beside each other. ``chunk`` are tokens of one prefill
        pass. ``row_exact`` is what an earlier self-test found; None tests now.

        Raises:
            BundleError: the graph cannot roll back.
        """
        self._config, self._chunk = config, chunk
        self._io: GraphIO | None = io
        self._stretch = self._new_stretch()
        self.row_exact = self.self_test() if row_exact is None else row_exact

    @property
    def vocab_size(self) -> int:
        """Tokens the model reads: ids from 0 to ``vocab_size - 1``."""
        return self._config.vocab_size

    @property
    def length(self) -> int:
        """Tokens the KV cache holds."""
        return len(self._stretch.tokens)

    @property
    def attended(self) -> float:
        """Tokens that a layer attends to, the mean of all layers; see :meth:`DecoderShape.attended`."""
        return self._config.attended(self.length)

    @property
    def capacity(self) -> int:
        """Tokens the KV cache can hold now."""
        return self._stretch.capacity

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved for its part of the KV cache."""
        if self._io is None:
            return 0
        whole = sum(each.capacity for each in self._io.stretches)
        return self._io.kv_bytes * self.capacity // whole if whole else self._io.kv_bytes

    @property
    def longest(self) -> int:
        """Tokens the KV cache can hold at most."""
        return self._config.context_length

    @property
    def model(self) -> object:
        """The same for sessions of one model, which understand each other's saved caches."""
        return self._io

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens, keeping what the cache holds; it is empty after a failure.

        Raises:
            RequestError: more than :attr:`longest`.
            DeviceError: no memory for it, or the device's compiler refuses a graph.
        """
        io = self._open_io
        if capacity > self.longest:
            raise RequestError(self._too_long(capacity))
        if capacity <= self.capacity:
            return
        self._resize(io, self._rounded(capacity))

    def _resize(self, io: GraphIO, capacity: int) -> None:
        try:
            io.reserve(self._stretch, capacity)
        except BaseException as error:  # Ctrl-C too: the cache may be half of one size, half of another
            for each in io.stretches:
                each.cut(0)
                each.capacity = 0
            if isinstance(error, MemoryError):
                raise DeviceError(
                    f"not enough memory for a KV cache of {capacity:,} tokens; shorten the prompt, ask for "
                    "fewer new tokens, or free memory"
                ) from error
            raise
        self._stretch.capacity = capacity

    def shared_prefix(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens``, from the first on, the cache holds already."""
        return shared_length(self._stretch.tokens, tokens)

    @property
    def piece(self) -> int:
        """Tokens of a prompt that one pass reads at most."""
        return min(self._chunk, self._open_io.most_rows)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Make the cache hold exactly ``tokens``, keeping a shared prefix."""
        self._extend(tokens, len(tokens))

    def predict_next(self, tokens: Sequence[int]) -> Predictions:
        """Make the cache hold exactly ``tokens``; what the model says of what follows, one row.

        At least the last token is computed.
        """
        predictions = self._extend(tokens, len(tokens) - 1)
        if predictions is None:
            raise RequestError("the next token needs at least one before it")
        return predictions

    def predict(self, tokens: Sequence[int]) -> Predictions:
        """Append ``tokens``; what the model says behind each, a row for each of them."""
        return self.predict_together([Rows(self, tokens, len(tokens))])[0]

    def predict_together(self, asked: Sequence[Rows]) -> list[Predictions]:
        """One pass over rows of this session and of those that it made :meth:`beside` it.

        They are appended to their caches; a row has the bits it has alone.
        """
        for each in asked:
            each.session.reserve(each.session.length + len(each.tokens))
        return self._run(asked)

    @property
    def takes_several(self) -> bool:
        """Whether passes may be over rows of several sequences."""
        return self._open_io.takes_several

    def beside(self) -> Self:
        """Another session of the model, its cache empty; RequestError if passes are of one sequence."""
        if not self.takes_several:
            raise RequestError("this model's passes are of one sequence")
        other = copy(self)
        other._stretch = self._new_stretch()
        return other

    def keep(self, rows: int) -> None:
        """Of the rows that the last pass read of this sequence the first ``rows`` stay; all do if not called.

        Nothing is copied: keys and values behind these are overwritten. A layer with a state has it from
        before the pass, with a log of the pass's rows, and applies those that stay in the next pass.

        Raises:
            RequestError: the last pass read fewer, or the sequence was changed since.
        """
        stretch = self._stretch
        if not 0 <= rows <= stretch.fresh:
            raise RequestError(f"cannot keep {rows} rows: the last pass read {stretch.fresh}")
        stretch.cut(self.length - stretch.fresh + rows)
        stretch.fresh = rows

    def rewind(self, length: int) -> int:
        """Go back to the nearest place, at most ``length``, from which the sequence can go on.

        Returns:
            That place, the tokens that stay. With keys and values alone it is ``length``; layers with a
            state can go back as far as their log of rows reaches, and to 0. Whoever needs the tokens
            between has to read them again.

        Raises:
            RequestError: the cache holds fewer tokens.
        """
        if not 0 <= length <= self.length:
            raise RequestError(f"cannot rewind to {length}: the cache holds {self.length} tokens")
        self._stretch.cut(length)
        return length

    def release(self) -> int:
        """Forget every token and free their memory, where no graph has to be opened for that; its bytes."""
        self.rewind(0)
        io, before = self._open_io, self.kv_bytes
        if io.takes_several:
            self._resize(io, 0)
        return before - self.kv_bytes

    def view(self, start: int, end: int) -> SavedCache | None:
        """The cache's tokens from ``start`` on and before ``end``; None where the device keeps no rows.

        They lie in the session's own memory: the next call overwrites them. ``start`` is a multiple of 16.
        """
        begin, cache = self._stretch.begin, self._open_io.cache
        arrays = None if cache is None else cache.view(begin + start, begin + end)
        return None if arrays is None else SavedCache(tuple(self._stretch.tokens[start:end]), tuple(arrays))

    def append(self, saved: SavedCache, count: int) -> None:
        """Put the first ``count`` tokens of a view behind what the cache holds: the same bits again.

        They have been behind the same tokens, as many as a multiple of 16.

        Raises:
            DeviceError: no memory for them; the cache is empty then.
        """
        self.reserve(self.length + count)
        cache = self._open_io.cache
        assert cache is not None  # which gave the view
        cache.paste(saved.arrays, self._stretch.begin + self.length, count)
        self._stretch.add(saved.tokens[:count])

    @property
    def compiled(self) -> str:
        """Whether context binaries are used and, if not, why; empty where there are none for the device."""
        return ""

    @property
    def tunable(self) -> frozenset[str]:
        """Weights that :meth:`tune` replaces, by their names in the graph."""
        return self._open_io.tunable

    def tune(self, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Run with these weights from the next pass on; the cache, which others computed, is empty then.

        Raises:
            RequestError: one that is not among :attr:`tunable`, or of another shape.
        """
        self._open_io.tune(weights)

    @property
    def head_tokens(self) -> npt.NDArray[np.int32] | None:
        """The token of every column of the logits, int32; None where column i is token i."""
        return self._open_io.head_tokens

    def offer(self, tokens: Sequence[int]) -> None:
        """Let a head that is tied to the embedding write ``tokens`` too: a column each, behind its rows'.

        They replace what was offered before; the tokens in the cache stay. Other heads take no notice.
        """
        self._open_io.offer(tokens)

    def close(self) -> None:
        """Free the cache and, behind the last of those beside each other, the model."""
        io, self._io = self._io, None
        if io is not None:
            io.stretches.remove(self._stretch)
            if not io.stretches:
                io.close()
        self._stretch = Stretch()

    @property
    def _open_io(self) -> GraphIO:
        if self._io is None:
            raise RequestError("this session is closed; open the bundle again")
        return self._io

    def _stretch_of(self, rows: Rows) -> Stretch:
        if rows.session._io is not self._open_io:
            raise RequestError("a pass cannot read rows of another model's session")
        return rows.session._stretch

    def _new_stretch(self) -> Stretch:
        self._open_io.stretches.append(Stretch())
        return self._open_io.stretches[-1]

    def _rounded(self, capacity: int) -> int:
        """Tokens to make room for where ``capacity`` are asked for."""
        return min(-(-capacity // KV_STEP) * KV_STEP, self.longest)

    def _too_long(self, tokens: int) -> str:
        return (
            f"{tokens:,} tokens do not fit the model's context of {self._config.context_length:,}; "
            "shorten the prompt or ask for fewer new tokens"
        )

    def _extend(self, tokens: Sequence[int], keep: int) -> Predictions | None:
        """Make the cache hold ``tokens``, reusing at most ``keep`` of them; the last's row if any ran."""
        self.reserve(len(tokens))
        self.rewind(min(self.shared_prefix(tokens), max(keep, 0)))
        last, size = None, self.piece
        while self.length < len(tokens):
            (last,) = self._run([Rows(self, tokens[self.length : self.length + size], 1)])
        return last

    def _run(self, asked: Sequence[Rows]) -> list[Predictions]:
        """Append tokens, for which there is room."""
        parts = list[Part]()
        for each in asked:
            tokens, stretch = each.tokens, self._stretch_of(each)
            if not len(tokens) or not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
                raise RequestError(f"a pass needs token ids from 0 to {self.vocab_size - 1}, at least one")
            parts.append(Part(tokens, len(stretch.tokens), each.wanted, stretch.begin, hidden=each.hidden))
        predictions = self._open_io.run(parts)
        for each in asked:
            self._stretch_of(each).add(each.tokens, fresh=len(each.tokens))
        return predictions

    def self_test(self) -> bool:
        """Roll back and compare; returns whether the number of rows leaves no trace in the bits.

        The cache is empty afterwards.

        Raises:
            BundleError: the graph cannot roll back.
        """
        count = min(_TESTED, self.longest)
        tokens, kept = [(7 * i * i + 5) % self.vocab_size for i in range(count)], count - 7
        # What comes behind must leave no trace either, as a bias that is counted from the end does.
        text, tokens = tokens[:kept], tokens[kept:]
        self.prefill(text)
        together = self.predict(tokens).logits[:3].copy()
        self.keep(0)
        tokens = tokens[:3]
        again = self.predict(tokens).logits.copy()
        self.keep(0)
        single = np.concatenate([self.predict([token]).logits.copy() for token in tokens])
        self.prefill(text)
        self.predict([(token + 1) % self.vocab_size for token in tokens])
        self.keep(0)
        after = self.predict(tokens).logits.copy()
        self.rewind(0)
        scale = float(np.abs(together).max())
        # Passes over as many rows agree to the bit; others may round otherwise in every layer.
        rolled_back = np.allclose(again, after, atol=_SAME * scale)
        if not (
            np.isfinite(together).all() and rolled_back and np.allclose(together, again, atol=_NEAR * scale)
        ):
            raise BundleError(
                "this graph cannot roll back: the same tokens gave other logits after a roll-back. "
                "Export the model again; sliding-window and recurrent caches cannot be used for speculation."
            )
        return bool(np.array_equal(together, again) and np.array_equal(again, single))
