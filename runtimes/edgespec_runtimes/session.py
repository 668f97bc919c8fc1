"""Loaded models, whatever device they run on, and sessions: the sequences of tokens that they read."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.graph_contract import Part
from edgespec_models.decoders.config import DecoderShape
from edgespec_models.decoders.kept import BLOCK
from edgespec_models.errors import BundleError, DeviceError, RequestError
from edgespec_runtimes.kv_cache import KVBuffers, Saved, Stretch, shared_length
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.states import ANYWHERE, States

KV_STEP: Final = 256
"""The room in the KV cache grows in steps of this many tokens."""
_SAME, _NEAR = 1e-3, 0.2  # of the largest logit
_TESTED = 28  # tokens: on ARM ONNX Runtime's sums differ by rows, and eight tokens do not show it


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a sequence in a pass: ``tokens``, behind those in its session's cache.

    ``wanted`` is the number of last tokens whose logits are wanted. A head also reads ``features`` or
    ``states`` of the tokens (:class:`edgespec_models.bundles.graph_contract.Part`). A head without keys and
    values reads the cache of ``target``, at its last token, a row in a pass. Of the first ``injected`` tokens
    a head reads only the features. Negative tokens are names of rows of pictures, of which ``vectors`` has
    one each, in their order: rows with the same name have the same vector. Behind or in a picture a row's
    place may not be its position: then ``positions`` has them, as in ``Part``.
    """

    session: "Session"
    tokens: Sequence[int]
    wanted: int
    features: npt.NDArray[np.float32] | None = None
    states: npt.NDArray[np.float32] | None = None
    target: "Session | None" = None
    injected: int = 0
    vectors: npt.NDArray[np.float32] | None = None
    positions: npt.NDArray[np.int64] | None = None


class LoadedModel(ABC):
    """A graph with its weights on a device; runs passes over rows of its sessions.

    Predictions have a column for every row of the LM head: every token, or the tokens a trimmed drafter's
    bundle lists (:attr:`edgespec_models.bundles.bundle.Bundle.head_tokens`). They lie in the model's own
    buffers: the next pass overwrites them. By default the host cannot read the cache, weights are fixed, and
    the LM head has every token.

    Attributes:
        config: the shape of the decoder.
        most_rows: the most rows of a pass with logits if not all are wanted, which bounds their memory.
        takes_several: whether a pass may have rows of several sessions.
        reads_vectors: whether rows may be vectors of pictures.
        copies_cache: whether every pass writes the whole KV cache anew, as in graphs that concatenate.
        cache: keys and values of all sessions; None if the host has none.
        stretches: the sessions' parts of it.
        states: states of all sessions; None without such layers.
        places: places from which sequences can go on.
        head_tokens: the token of every column of the logits, int32; None if column i is token i.
        row_exact: whether passes over one and over several tokens gave the same bits in the self-test.
        experts_read: the number of different experts that the last pass used, in all layers.
        prepared_s: seconds of the last pass that later passes of its shape do not take.
        prompt_key: a name for everything that decides the KV cache's bits, besides its tokens. Empty if other
            processes may compute other bits.
    """

    most_rows: int
    takes_several = False
    reads_vectors = False
    copies_cache = False
    cache: KVBuffers | None = None
    states: States | None = None
    places = ANYWHERE
    head_tokens: npt.NDArray[np.int32] | None = None
    row_exact = False
    experts_read = 0
    prepared_s = 0.0
    prompt_key = ""

    def __init__(self, config: DecoderShape, *, chunk: int) -> None:
        """``chunk`` are tokens of one prefill pass."""
        self.config, self._chunk = config, chunk
        self.stretches: list[Stretch] = []

    def opened(self, row_exact: bool | None) -> "Session":
        """The first session. ``row_exact`` is the result of an earlier self-test; None tests now.

        Raises:
            BundleError: the graph cannot roll back.
        """
        session = Session(self)
        self.row_exact = session.self_test() if row_exact is None else row_exact
        return session

    def session(self) -> "Session":
        """A further session with an empty cache; RequestError if passes take one."""
        if self.stretches and not self.takes_several:
            raise RequestError("this model's passes are of one sequence")
        return Session(self)

    @property
    def vocab_size(self) -> int:
        """The number of tokens: ids from 0 to ``vocab_size - 1``."""
        return self.config.vocab_size

    @property
    def longest(self) -> int:
        """The most tokens of a session's cache."""
        return self.config.context_length

    @property
    def piece(self) -> int:
        """The most tokens of a prompt in a pass."""
        return min(self._chunk, self.most_rows)

    @property
    def compiled(self) -> str:
        """Whether context binaries are used and, if not, why; empty if there are none for the device."""
        return ""

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes reserved for the KV caches of all sessions."""

    @property
    def block_bytes(self) -> int:
        """Bytes of the cache for 32 tokens of a sequence; 0 if the host has none."""
        return 0 if self.cache is None else self.cache.block_bytes

    def predict_together(self, rows: Sequence[Rows]) -> list[Predictions]:
        """Run a pass over rows of sessions and append them to their caches. A row has the same bits as alone.

        Raises:
            RequestError: rows belong to another model's session, or tokens are unknown.
            BundleError: ONNX Runtime fails to run a foreign graph.
            DeviceError: it fails to run a graph of edgespec's, mostly for lack of memory.
        """
        parts = list[Part]()
        for entry in rows:
            session, tokens = entry.session, entry.tokens
            if session.model is not self:
                raise RequestError("a pass cannot read rows of another model's session")
            session.reserve(session.length + len(tokens))
            named = 0 if entry.vectors is None or not self.reads_vectors else len(entry.vectors)
            unknown = sum(token < 0 for token in tokens) != named
            if not len(tokens) or unknown or max(tokens) >= self.vocab_size:
                raise RequestError(f"a pass needs token ids from 0 to {self.vocab_size - 1}, at least one")
        owners = [entry for entry in rows if entry.target is None]
        self._extend([(entry.session.stretch, entry.session.length + len(entry.tokens)) for entry in owners])
        for entry in rows:
            stretch, target = entry.session.stretch, entry.target
            source = stretch if target is None else target.stretch
            start = len(source.tokens) - (target is not None)
            used = -(-(start + len(entry.tokens)) // BLOCK)  # of blocks, of which it may have more
            parts.append(
                Part(
                    entry.tokens,
                    start,
                    entry.wanted,
                    [block.number for block in source.blocks[:used]],
                    features=entry.features,
                    states=entry.states,
                    slot=stretch.slot,
                    behind=stretch.behind,
                    cache=None if target is None else target.model.cache,
                    injected=entry.injected,
                    vectors=entry.vectors,
                    positions=entry.positions,
                )
            )
        try:
            predictions = self.run(parts)
        except BaseException:  # Ctrl-C too: states may be from before the pass or behind it
            for entry, part in zip(rows, parts, strict=True):
                entry.session.stretch.behind = part.end
                entry.session.rewind(entry.session.length)
            raise
        for entry, part in zip(rows, parts, strict=True):
            behind = self.places.behind(part.behind, part.start, part.end)
            entry.session.stretch.add(entry.tokens, fresh=len(entry.tokens), behind=behind)
        return predictions

    @abstractmethod
    def run(self, parts: Sequence[Part]) -> list[Predictions]:
        """Run a pass for which there is room; for each part a row for each of its last ``rows``."""

    def reserve(self, stretch: Stretch, capacity: int) -> None:
        """Make room for ``capacity`` tokens in ``stretch``, and keep all tokens; after a failure all are
        empty.

        Raises:
            DeviceError: no memory for it, or the device's compiler refuses a graph.
        """
        try:
            self.make_room(stretch, capacity)
        except BaseException as error:  # also for Ctrl-C: the cache may have two sizes
            for other in self.stretches:
                other.cut(0)
                other.capacity = 0
            if isinstance(error, MemoryError):
                raise _no_memory(capacity) from error
            raise
        stretch.capacity = capacity

    def _extend(self, ends: Sequence[tuple[Stretch, int]]) -> None:
        """Extend sequences, for which room is reserved, to these numbers of tokens."""
        if self.cache is None:
            return
        try:
            for stretch, end in ends:
                self.cache.extend(stretch, end)
        except BaseException as error:
            for stretch, _ in ends:
                stretch.cut(len(stretch.tokens))
            if isinstance(error, MemoryError):
                raise _no_memory(max(end for _, end in ends)) from error
            raise

    @abstractmethod
    def make_room(self, stretch: Stretch, capacity: int) -> None:
        """The work of :meth:`reserve`, which handles failures."""

    def rounded(self, capacity: int) -> int:
        """The number of tokens to make room for if ``capacity`` are needed."""
        return min(-(-capacity // KV_STEP) * KV_STEP, self.longest)

    def too_long(self, tokens: int) -> str:
        """The message that there is no room for this many tokens."""
        return (
            f"{tokens:,} tokens do not fit the model's context of {self.config.context_length:,}; "
            "shorten the prompt or ask for fewer new tokens"
        )

    def offer(self, tokens: Sequence[int]) -> None:
        """Let an LM head that is tied to the embedding write ``tokens`` too, in columns behind its own.

        They replace earlier ones; the tokens in caches stay. Other LM heads ignore them.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Free the memory of passes."""


class Session:
    """A sequence of tokens that a model reads, with its cache. The model closes with its last session.

    The cache holds ``length`` tokens, at most ``capacity``. After a pass :meth:`keep` says how many of its
    rows stay; :meth:`rewind` goes back further.

    Attributes:
        model: the model that reads it; sessions of the same model can exchange saved caches.
        stretch: its part of the model's cache.
        closed: whether it is closed; then it reads nothing.
    """

    def __init__(self, model: LoadedModel) -> None:
        taken = {stretch.slot for stretch in model.stretches}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self.model, self.stretch, self.closed = model, Stretch(slot=slot), False
        model.stretches.append(self.stretch)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.stretch.tokens)

    @property
    def attended(self) -> float:
        """Tokens that a layer attends to, the mean of all layers; see :meth:`DecoderShape.attended`."""
        return self.model.config.attended(self.length)

    @property
    def capacity(self) -> int:
        """The most tokens of the cache now."""
        return self.stretch.capacity

    @property
    def kv_bytes(self) -> int:
        """Bytes of its part of the cache; others may have the same blocks."""
        if self.closed:
            return 0
        several = self.model.takes_several
        return len(self.stretch.blocks) * self.model.block_bytes if several else self.model.kv_bytes

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens, and keep the cache's tokens; after a failure it is empty.

        Raises:
            RequestError: they are more than the model can hold.
            DeviceError: as :meth:`LoadedModel.reserve`.
        """
        if self.closed:
            raise RequestError("this session is closed; open the bundle again")
        if capacity > self.model.longest:
            raise RequestError(self.model.too_long(capacity))
        if capacity > self.capacity:
            self.model.reserve(self.stretch, self.model.rounded(capacity))

    def prepare(self, end: int) -> None:
        """Take the memory for ``end`` tokens now, which the passes up to there use.

        Raises:
            RequestError, DeviceError: as :meth:`reserve`; other sequences' caches may be empty then.
        """
        self.reserve(end)
        self.model._extend([(self.stretch, end)])

    def shared_prefix(self, tokens: Sequence[int]) -> int:
        """The number of first ``tokens`` that the cache holds already."""
        return shared_length(self.stretch.tokens, tokens)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Make the cache hold exactly ``tokens``; a shared prefix is kept."""
        self._extend(tokens, len(tokens))

    def predict_next(self, tokens: Sequence[int]) -> Predictions:
        """Make the cache hold exactly ``tokens``; return the prediction of the next token, a row.

        At least the last token is computed.
        """
        predictions = self._extend(tokens, len(tokens) - 1)
        if predictions is None:
            raise RequestError("the next token needs at least one before it")
        return predictions

    def predict(self, tokens: Sequence[int]) -> Predictions:
        """Append ``tokens``; return a row of predictions behind each."""
        return self.model.predict_together([Rows(self, tokens, len(tokens))])[0]

    def keep(self, rows: int) -> None:
        """Keep the first ``rows`` of the last pass over this sequence. Without this call all rows stay.

        Nothing is copied: keys and values behind them are overwritten. A layer with a state holds it from
        before the pass, with a log of the pass's rows, and applies the kept rows in the next pass.

        Raises:
            RequestError: the last pass read fewer rows, the sequence was changed since, or layers with a
                state cannot undo that many.
        """
        stretch, length = self.stretch, self.length - self.stretch.fresh + rows
        if not 0 <= rows <= stretch.fresh:
            raise RequestError(f"cannot keep {rows} rows: the last pass read {stretch.fresh}")
        if self.model.places.nearest(length, stretch.behind) != length:
            undone, most = stretch.fresh - rows, self.model.places.undone
            raise RequestError(f"cannot undo {undone} rows of a pass; this model's states allow {most}")
        stretch.cut(length)
        stretch.fresh = rows

    def rewind(self, length: int) -> int:
        """Go back to the nearest place, at most ``length``, from which the sequence can go on.

        Returns:
            That place, the number of kept tokens. With keys and values alone it is ``length``; layers with a
            state can go back as far as their log of rows, to 0, and some to the ends of blocks. Callers have
            to read the tokens between again.

        Raises:
            RequestError: the cache holds fewer tokens.
        """
        if not 0 <= length <= self.length:
            raise RequestError(f"cannot rewind to {length}: the cache holds {self.length} tokens")
        place = self.model.places.nearest(length, self.stretch.behind)
        self.stretch.cut(place)
        return place

    def release(self) -> int:
        """Forget every token, free the memory if no graph must be opened for that, and return the bytes."""
        before = self.model.kv_bytes
        self.rewind(0)
        if self.model.takes_several:
            self.model.reserve(self.stretch, 0)
        return before - self.model.kv_bytes

    def save(self, at: int) -> Saved | None:
        """The present block ``at`` of its tokens; None if the device keeps no rows."""
        return None if self.model.cache is None else self.model.cache.save(self.stretch, at)

    def append(self, tokens: Sequence[int], saved: Saved) -> None:
        """Append ``tokens``, the first ones of a block, behind whole blocks of tokens, with the same bits.

        They were behind the same tokens. Tokens behind the last place from which the sequence can go on are
        left out.

        Raises:
            DeviceError: no memory for them; the cache may be empty then.
        """
        self.reserve(self.length + len(tokens))
        count = max(0, self.model.places.floor(self.length + len(tokens)) - self.length)
        if count:
            self._load(tokens[:count], saved)
            self.stretch.behind = self.length

    def state(self) -> tuple[npt.NDArray[Any], ...]:
        """The sequence's states and logs, in the model's own memory; see :attr:`Stretch.behind`."""
        states = self.model.states
        return () if states is None else states.of_slot(self.stretch.slot)

    def resume(
        self,
        length: int,
        parts: Sequence[tuple[Sequence[int], Saved]],
        state: Sequence[npt.NDArray[Any]],
        behind: int,
    ) -> None:
        """Hold the first ``length`` present tokens and the tokens of ``parts``, and go on from a state of
        them.

        Args:
            length: tokens of whole blocks.
            parts: blocks of tokens with their kept rows; the last may have fewer tokens.
            state: a value of :meth:`state`.
            behind: the number of tokens behind which it lies, at most 16 before the end.

        Raises:
            DeviceError: no memory for them; the cache may be empty then.
        """
        self.reserve(length + sum(len(tokens) for tokens, _ in parts))
        self.stretch.cut(length)
        try:
            for tokens, saved in parts:
                self._load(tokens, saved)
        except BaseException:  # the present tokens have no state
            self.stretch.cut(0)
            raise
        for mine, other in zip(self.state(), state, strict=True):
            mine[...] = other
        self.stretch.behind = behind

    def _load(self, tokens: Sequence[int], saved: Saved) -> None:
        cache = self.model.cache
        assert cache is not None  # the cache saved it
        try:
            cache.load(self.stretch, saved, len(tokens))
        except MemoryError as error:
            raise _no_memory(self.length + len(tokens)) from error
        self.stretch.add(tokens)

    def close(self) -> None:
        """Free the cache and, with the model's last session, the model."""
        if not self.closed:
            self.closed = True
            self.model.stretches.remove(self.stretch)
            if not self.model.stretches:
                self.model.close()
        self.stretch = Stretch()

    def _extend(self, tokens: Sequence[int], keep: int) -> Predictions | None:
        """Make the cache hold ``tokens``, reusing at most ``keep``; return the last row if a pass ran."""
        self.reserve(len(tokens))
        self.rewind(min(self.shared_prefix(tokens), max(keep, 0)))
        last, size = None, self.model.piece
        while self.length < len(tokens):
            rows = Rows(self, tokens[self.length : self.length + size], 1)
            (last,) = self.model.predict_together([rows])
        return last

    def self_test(self) -> bool:
        """Roll back and compare; return whether a row's bits are independent of the number of rows.

        The cache is empty afterwards.

        Raises:
            BundleError: the graph cannot roll back.
        """
        vocab_size, count = self.model.vocab_size, min(_TESTED, self.model.longest)
        tokens, kept = [(7 * i * i + 5) % vocab_size for i in range(count)], count - 7
        # Later tokens must not change the bits either, as a bias that counts from the end would.
        text, tokens = tokens[:kept], tokens[kept:]
        self.prefill(text)
        together = self.predict(tokens).logits[:3].copy()
        self.keep(0)
        tokens = tokens[:3]
        again = self.predict(tokens).logits.copy()
        self.keep(0)
        single = np.concatenate([self.predict([token]).logits.copy() for token in tokens])
        self.prefill(text)
        self.predict([(token + 1) % vocab_size for token in tokens])
        self.keep(0)
        after = self.predict(tokens).logits.copy()
        self.rewind(0)
        scale, pairs = float(np.abs(together).max()), [(together, again), (again, single)]
        if self.model.config.block is not None:  # whose rows see those behind them
            together, pairs = again, [(again, after)]
        # Passes over the same number of rows agree to the bit; others may round differently in every layer.
        rolled_back = np.allclose(again, after, atol=_SAME * scale)
        if not (
            np.isfinite(together).all() and rolled_back and np.allclose(together, again, atol=_NEAR * scale)
        ):
            raise BundleError(
                "this graph cannot roll back: the same tokens gave other logits after a roll-back. "
                "Export the model again; sliding-window and recurrent caches cannot be used for speculation."
            )
        return all(np.array_equal(first, second) for first, second in pairs)


def _no_memory(tokens: int) -> DeviceError:
    return DeviceError(
        f"not enough memory for a KV cache of {tokens:,} tokens; shorten the prompt, ask for fewer new "
        "tokens, or free memory"
    )
