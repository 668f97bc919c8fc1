"""Models whose layers have states, computed in whole numbers as edgespec's operators keep them.

A row depends on all tokens before, by a hash; so a state of another place, or a row of the log that was
overwritten, shows in all that follows.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from edgespec_models.bundles.graph_contract import Part
from edgespec_models.decoders.config import DecoderShape
from edgespec_models.decoders.kept import BLOCK, LOGGED, KeptTensor, block_ends, last_inputs
from edgespec_runtimes.block_pool import BlockPool
from edgespec_runtimes.kv_cache import Stretch
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import LoadedModel, Rows, Session
from edgespec_runtimes.states import ResumePoints, States

F32 = npt.NDArray[np.float32]
VOCAB: Final = 97
_TAPS: Final = 3
_CHANNELS: Final = 32
_RING: Final = LOGGED + _TAPS - 1
_PRIME: Final = 4093
KEYS: Final = KeptTensor(input="k", output="k+", per="token", shape=(1, 1), type="float32")
CONVOLUTION: Final = (KEYS, last_inputs(1, _CHANNELS, _TAPS), block_ends(1, _CHANNELS, _TAPS))
DELTA: Final = (
    KEYS,
    KeptTensor(input="s", output="s+", per="sequence", shape=(1,), type="float32"),
    KeptTensor(input="l", output="l+", per="sequence", shape=(LOGGED,), type="float32"),
)


class StatesModel(LoadedModel):
    """Rows are one-hot: which token follows is a function of all before, computed from what is kept.

    ``raises`` ends the next pass halfway. ``read`` are the rows of all passes.
    """

    row_exact, takes_several, prompt_key = True, True, "states"
    cache: BlockPool
    states: States

    def __init__(self, kept: Sequence[KeptTensor], *, chunk: int = 40) -> None:
        shape = DecoderShape(architecture="toy", vocab_size=VOCAB, num_layers=2, context_length=4096)
        super().__init__(shape, chunk=chunk)
        self.cache = BlockPool([tensor for tensor in kept if tensor.per != "sequence"], lambda: None)
        self.states, self.places, self.most_rows = States(kept), ResumePoints.of(kept), 4096
        self.raises: BaseException | None = None
        self.read = 0

    @property
    def kv_bytes(self) -> int:
        return self.cache.nbytes + self.states.nbytes

    def make_room(self, stretch: Stretch, capacity: int) -> None:
        self.states.reserve(1 + max((stretch.slot for stretch in self.stretches), default=0))
        self.cache.reserve(capacity, len(stretch.tokens))

    def run(self, parts: Sequence[Part]) -> list[Predictions]:
        assert len({part.slot for part in parts}) == len(parts)
        said = []
        for part in parts:
            self.read += len(part.tokens)
            assert 0 <= part.start - part.behind <= LOGGED
            rows = self._convolved(part) if self.places.every else self._recurrent(part)
            following = rows[len(rows) - part.rows :] % VOCAB
            said.append(Predictions(np.eye(VOCAB, dtype=np.float32)[following]))
        if self.raises is not None:
            raise self.raises
        return said

    def close(self) -> None:
        self.cache.clear()
        self.states.clear()

    def _summed(self, part: Part, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """With what keys say, which are of all tokens."""
        pool, blocks = self.cache.arrays[0].reshape(-1, BLOCK), np.array(part.blocks)
        for at, token in enumerate(part.tokens, part.start):
            pool[blocks[at // BLOCK], at % BLOCK] = token
        keys = pool[blocks].reshape(-1)[: part.end]
        sums = np.cumsum(keys.astype(np.int64) * (1 + np.arange(part.end) % 13))[part.start :]
        return sums + np.array(values, np.int64)

    def _convolved(self, part: Part) -> npt.NDArray[np.int64]:
        ring = self.states.arrays[0][part.slot]
        ends = self.cache.arrays[1]

        def row(token: int) -> F32:
            if token < 0:
                return np.zeros(_CHANNELS, np.float32)
            at = token % BLOCK - (BLOCK - _TAPS + 1)
            return ring[token % _RING] if at < 0 else ends[part.blocks[token // BLOCK], at]  # type: ignore[no-any-return]

        said = []
        for at, token in enumerate(part.tokens, part.start):
            row(at)[:] = token + np.arange(_CHANNELS)
            said.append(
                sum(int(row(at - back) @ np.arange(_CHANNELS)) * (1 + 5 * back) for back in range(_TAPS))
            )
        return self._summed(part, said)

    def _recurrent(self, part: Part) -> npt.NDArray[np.int64]:
        state, log = (array[part.slot] for array in self.states.arrays)
        log = log.reshape(-1)
        if part.start == 0:
            state[0] = 0
        for at in range(part.behind, part.start):
            state[0] = _next(state[0], log[at % LOGGED])
        said, value = [], state[0]
        for at, token in enumerate(part.tokens, part.start):
            if at == part.end - LOGGED:
                state[0] = value
            value = _next(value, token)
            said.append(int(value))
        for at, token in list(enumerate(part.tokens, part.start))[-LOGGED:]:
            log[at % LOGGED] = token
        return self._summed(part, said)


def _next(state: float, token: float) -> float:
    return (17 * state + token + 1) % _PRIME


def shared(session: Session, text: Sequence[int]) -> Session:
    """Another session of the model that shares the blocks of a beginning of what ``session`` holds."""
    other = session.model.session()
    for at in range(0, len(text), BLOCK):
        if other.length == at:
            saved = session.save(at // BLOCK)
            assert saved is not None
            other.append(text[at : at + BLOCK], saved)
    return other


def rows_in_one_pass(session: Session, text: list[int]) -> F32:
    """The logits behind each token of a text that ``session`` reads in one pass."""
    session.rewind(0)
    return session.predict(text).logits.copy()


_STEPS: Final = ("open", "read", "read", "keep", "rewind", "fail", "close", "share")


def check_rows(
    data: st.DataObject,
    model: LoadedModel,
    rows_of: Callable[[list[int]], F32],
    *,
    place_behind: Callable[[int], int],
    fail: Callable[[Session], object] = lambda session: None,
) -> None:
    """Read, keep, rewind, share and fail at random; each row is that of its text read in one pass.

    Args:
        data: draws the script.
        model: of which sequences are opened and closed.
        rows_of: the logits behind each token of a text.
        place_behind: where a sequence goes on that cannot go back to a length.
        fail: has a pass of a session fail.
    """
    texts: dict[Session, list[int]] = {}
    longest = min(model.longest, 300)
    for _ in range(data.draw(st.integers(1, 14))):
        step = data.draw(st.sampled_from(_STEPS))
        if step == "open" or not texts:
            texts[model.session()] = []
            continue
        session = data.draw(st.sampled_from(list(texts)))
        text = texts[session]
        if step == "read":
            together = data.draw(st.lists(st.sampled_from(list(texts)), min_size=1, max_size=3, unique=True))
            rows = []
            for reading in together:
                room = min(70, longest - len(texts[reading]))
                read = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=min(1, room), max_size=room))
                if read:
                    rows.append(Rows(reading, read, data.draw(st.integers(0, len(read)))))
            predictions = model.predict_together(rows) if rows else []
            logits = [prediction.logits.copy() for prediction in predictions]  # the next pass has this memory
            for row, own in zip(rows, logits, strict=True):
                texts[row.session] = texts[row.session] + list(row.tokens)
                expected = rows_of(texts[row.session])
                np.testing.assert_array_equal(own[: row.wanted], expected[len(expected) - row.wanted :])
        elif step == "keep" and session.stretch.fresh:
            fresh = session.stretch.fresh
            least = max(0, session.stretch.behind - len(text) + fresh)  # more rows cannot be undone
            kept = data.draw(st.integers(least, fresh))
            session.keep(kept)
            texts[session] = text[: len(text) - fresh + kept]
        elif step == "rewind":
            length = data.draw(st.integers(max(0, len(text) - 60), len(text)))
            place = session.rewind(length)
            assert place in (length, place_behind(length))
            texts[session] = text[:place]
        elif step == "fail":
            fail(session)
            texts[session] = text[: session.length]
        elif step == "close" and len(texts) > 1:
            session.close()
            del texts[session]
        elif step == "share":
            other = shared(session, text[: data.draw(st.integers(0, len(text)))])
            assert place_behind(other.length) == other.length
            texts[other] = text[: other.length]
        assert [opened.stretch.tokens for opened in texts] == list(texts.values())
    for session in texts:
        session.close()
