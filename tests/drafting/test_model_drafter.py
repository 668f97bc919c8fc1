"""A model as drafter: what it proposes, what that is worth, and that its reader reads nothing twice."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.draft import NO_DRAFT, Draft, Load
from edgespec.drafting.bridge import ByteBridge, IdentityBridge
from edgespec.drafting.model import Calibration, Guess
from edgespec.drafting.pricing import Pricing
from edgespec.drafting.reading import Reader
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.cost import CostCurve
from tests.kit.drafters import FREE, VOCAB, draft_of, model_of, read, reader_of, step
from tests.kit.tokenizers import byte_level_json, sentencepiece_json
from tests.kit.toy import F32, NextLogits, ToySession, alone, markov_logits, round_of

SURE = Guess(0, 1.0, open=False)


def _sure(seed: int = 0) -> ToySession:
    """A drafter so sure of every token that its confidence is 1."""
    return ToySession.markov(seed, VOCAB, scale=200.0)


def _follow(next_logits: NextLogits, tokens: list[int], count: int) -> tuple[int, ...]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(next_logits(tokens).argmax()))
    return tuple(tokens[-count:])


def test_it_proposes_what_the_model_would_write_and_each_step_reads_one_token() -> None:
    next_logits, session, tokens = markov_logits(0, VOCAB, scale=200.0), _sure(), [3, 1, 4]
    drafter = model_of(session)
    draft = draft_of(drafter, tokens, 4)
    assert draft.tokens == _follow(next_logits, tokens, 4)
    assert draft.sources == ("model",) * 4
    assert draft.confidence == pytest.approx((0.95,) * 4)  # untested, the highest bin means its middle
    tokens += [draft.tokens[0], (draft.tokens[1] + 1) % VOCAB]
    assert draft_of(drafter, tokens, 4).tokens == _follow(next_logits, tokens, 4)
    assert session.passes == [3, 1, 1, 1] + [1] * 4  # the first proposal was in the cache already


def test_beside_others_it_reads_in_pieces_and_never_beyond_its_context() -> None:
    tokens = [(7 * i) % VOCAB for i in range(150)]
    session = ToySession(markov_logits(0, VOCAB, scale=200.0), VOCAB, context=160)
    session.reserve(160)
    prices, drafter = Pricing(FREE).at(Load(2)), model_of(session)
    for limit, length, reads in ((4, 64, True), (6, 64, False), (4, 128, True)):  # 162 tokens have no room
        wanted = alone(drafter.begin(tokens, limit, prices), drafter.take)
        assert wanted == (None if reads else NO_DRAFT) and session.length == length
    assert draft_of(drafter, tokens, 4, prices=prices).tokens


def test_each_proposal_has_its_own_confidence() -> None:
    """Not that of the draft up to it."""
    logits = np.zeros(VOCAB, np.float32)
    logits[7] = math.log(3.0 * (VOCAB - 1))  # a probability of three quarters
    draft = draft_of(model_of(ToySession(lambda tokens: logits, VOCAB)), [3, 1, 4], 4)
    assert draft.tokens == (7,) * 4
    assert draft.confidence == pytest.approx((0.75,) * 4)


def test_tokens_that_make_none_of_the_target_s_are_read_up_to_a_bound() -> None:
    class Joining(IdentityBridge):
        def to_target(self, drafted: Sequence[int]) -> list[tuple[int, int]]:
            return [(7, len(drafted))]

    session = _sure()
    drafter = model_of(session, Joining(session.model.vocab_size))
    assert draft_of(drafter, [3, 1, 4], 3).tokens == (7,)
    assert session.passes == [3] + [1] * 5


STEEP, STEPS = CostCurve({1: 1.0, 2: 2.0}), CostCurve({1: 1.0, 2: 1.0, 3: 9.0, 4: 17.0})
SLOPE = CostCurve({1: 1.0, 2: 1.1, 16: 2.5})


@pytest.mark.parametrize(
    ("scale", "curve", "step_s", "length", "asked"),
    [
        (0.1, SLOPE, 1e-7, 0, True),  # unsure of every token
        (200.0, SLOPE, 1e-7, 8, True),
        (200.0, STEPS, 1e-7, 1, True),  # a second row is free, a third dear
        (200.0, STEEP, 1e-7, 0, False),  # where drafting cannot pay the model is not even asked
        (200.0, FREE, 10.0, 0, False),
        (200.0, FREE, 1e-7, 8, True),
    ],
)
def test_it_drafts_as_far_as_that_pays(
    scale: float, curve: CostCurve, step_s: float, length: int, asked: bool
) -> None:
    session = ToySession.markov(0, VOCAB, scale=scale)
    drafter = model_of(session, curve=CostCurve({1: step_s}))
    assert len(draft_of(drafter, [3, 1, 4], 8, prices=Pricing(curve).at()).tokens) == length
    assert bool(session.passes) == asked


def test_a_cache_without_room_gives_no_draft() -> None:
    session = _sure()
    drafter = model_of(session)
    capacity = session.capacity
    assert draft_of(drafter, [1] * (capacity - 8), 5) == Draft()
    assert len(draft_of(drafter, [1] * (capacity - 10), 5).tokens) == 5
    assert session.capacity == capacity


class _Ending(ToySession):
    """Writes 1, 2, 3 and then the token 0, which ends its texts."""

    def forward(self, tokens: Sequence[int]) -> F32:
        logits = super().forward(tokens)
        for row, token in enumerate(tokens):
            logits[row] = 0.0
            logits[row, (token + 1) % 4] = 20.0
        return logits


@pytest.mark.parametrize(("end", "expected"), [(9, (2, 3, 9)), (None, (2, 3))])
def test_the_end_of_the_text_is_proposed_as_the_target_s_own(
    end: int | None, expected: tuple[int, ...]
) -> None:
    drafter = model_of(_Ending(markov_logits(0, VOCAB), VOCAB), ends={0}, target_end=end)
    assert draft_of(drafter, [5, 1], 8).tokens == expected
    assert draft_of(drafter, [5, 1, 2], 1).tokens == (3,)
    at_end = draft_of(drafter, [5, 1, 2, 3], 8)
    assert at_end.tokens == expected[2:]


def test_it_learns_from_proposals_that_were_judged_what_its_confidence_is_worth() -> None:
    calibration = Calibration()
    drafter = model_of(_sure(), calibration=calibration)
    tokens, seen = [3, 1, 4], Calibration()
    draft = draft_of(drafter, tokens, 5)
    draft_of(drafter, tokens, 5)  # asked again: nothing was committed
    assert calibration.probability(SURE) == seen.probability(SURE)
    # What follows the rejected token was judged by nobody.
    drafter.observe(round_of(*draft.tokens[:2], (draft.tokens[2] + 1) % VOCAB, draft.tokens[3]))
    for accepted in (True, True, False):
        seen.observe(SURE, accepted)
    assert calibration.probability(SURE) == seen.probability(SURE) != Calibration().probability(SURE)
    drafter.observe(round_of(*draft.tokens[1:2]))  # a round that it was not asked in
    assert calibration.probability(SURE) == seen.probability(SURE)


def test_a_drafter_that_fails_is_stopped_and_tried_again_much_later() -> None:
    calibration = Calibration()
    curve = CostCurve({1: 1.0, 2: 1.4, 16: 7.0})
    session = _sure()
    drafter, prices = model_of(session, calibration=calibration), Pricing(curve).at()
    tokens = [3, 1, 4]
    drafted: list[bool] = []
    for _ in range(2000):
        draft = draft_of(drafter, tokens, 2, prices=prices)
        drafted.append(bool(draft.tokens))
        wrong = (draft.tokens[0] + 1) % VOCAB if draft.tokens else 7
        drafter.observe(round_of(wrong))
        tokens = [*tokens[-20:], wrong] if len(tokens) > 900 else [*tokens, wrong]
    assert drafted[0]
    assert sum(drafted) < 150
    assert any(drafted[500:])


class _Watch:
    """Says that each step took so long, which is asked before and after it."""

    now, step_s = 0.0, 0.001

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def test_a_slow_spell_ends_drafting_only_for_a_while_and_one_slow_step_not_at_all() -> None:
    clock, tokens = _Watch(), [3, 1, 4]
    prices = Pricing(CostCurve({1: 0.010, 16: 0.012})).at()
    drafter = model_of(_sure(), curve=CostCurve({1: 0.001}))
    for clock.step_s in (0.001, 60.0, 0.001, 0.001):
        drafted = draft_of(drafter, tokens, 1, clock, prices).tokens
        assert drafted
        tokens += drafted
    clock.step_s = 0.5
    while draft := draft_of(drafter, tokens, 8, clock, prices).tokens:
        tokens += draft
    clock.step_s = 0.001
    for _ in range(400):
        tokens.append(7)
        if draft_of(drafter, tokens, 8, clock, prices).tokens:
            return
    pytest.fail("never drafted again")


def test_a_byte_the_drafter_cannot_spell_only_costs_drafts() -> None:
    spec = sentencepiece_json().replace("<0xFF>", "<0xZZ>")
    lacking, target = Tokenizer.from_json(spec), Tokenizer.from_json(byte_level_json())
    session = ToySession.writing(lacking, b"the quick brown fox ", start=1)
    drafter = model_of(session, ByteBridge(target, lacking, prompt_length=0, drafter_prompt=[7]))
    tokens = target.encode("the")
    assert draft_of(drafter, tokens, 3).tokens
    assert draft_of(drafter, [*tokens, *target.encode_bytes(b"\xff")], 3) == Draft()
    assert draft_of(drafter, [*tokens, *target.encode_bytes(b"\xff quick")], 3) == Draft()


def _guess(confidence: float, *, is_open: bool = False) -> Guess:
    return Guess(5, confidence, is_open)


def test_each_bin_of_confidence_learns_by_itself_and_follows_changes() -> None:
    calibration = Calibration()
    for confidence in (0.0, 0.31, 0.5, 0.99, 1.0):  # at first it means what it says
        assert calibration.probability(_guess(confidence)) == pytest.approx(confidence, abs=0.06)
    assert calibration.typical == pytest.approx(0.6)
    for i in range(400):
        calibration.consider(_guess(0.95))
        calibration.observe(_guess(0.95), i % 4 != 0)
        calibration.observe(_guess(0.45), i % 10 == 0)
        calibration.observe(_guess(0.65, is_open=True), False)  # open tokens have bins of their own
    assert calibration.typical == pytest.approx(0.75, abs=0.05)  # follows what drafted tokens are worth
    assert calibration.probability(_guess(0.93)) == pytest.approx(0.75, abs=0.05)
    assert calibration.probability(_guess(0.42)) == pytest.approx(0.1, abs=0.05)
    assert calibration.probability(_guess(0.65)) == pytest.approx(0.65)
    assert calibration.probability(_guess(0.65, is_open=True)) < 0.2
    for _ in range(1000):
        calibration.observe(_guess(0.95), False)
    assert calibration.probability(_guess(0.95)) < 0.05
    for _ in range(2000):  # a verdict that nothing tests fades
        calibration.fade()
    assert calibration.probability(_guess(0.95)) > 0.7
    assert calibration.typical == pytest.approx(0.6, abs=0.01)


NEXT_LOGITS = markov_logits(3, VOCAB)
SLOW = CostCurve({1: 1.0, 2: 2.0})


def _session() -> ToySession:
    session = ToySession(NEXT_LOGITS, VOCAB)
    session.reserve(200)
    return session


def _reading() -> tuple[ToySession, Reader, list[int]]:
    """A text that was read."""
    session, text = _session(), [1, 2, 3]
    reader = reader_of(session, SLOW)
    read(reader, text)
    return session, reader, text


def _next(tokens: Sequence[int]) -> int:
    return int(NEXT_LOGITS(tokens).argmax())


def test_drafted_tokens_that_were_committed_are_not_read_again() -> None:
    session, reader, text = _reading()
    latest = reader.latest
    for _ in range(3):
        text.append(latest.following)
        latest = step(reader, latest.following)
    assert session.passes == [3, 1, 1, 1]
    assert reader.seconds_of_text(text[:5]) == 0.0
    assert read(reader, text[:5]).following == text[5]
    assert reader.seconds_of_step(text[5]) == 0.0
    assert step(reader, text[5]) == latest
    assert session.passes == [3, 1, 1, 1]
    other = (text[5] + 1) % VOCAB
    assert reader.seconds_of_text([*text[:5], other]) == pytest.approx(2.0, abs=0.3)
    assert read(reader, [*text[:5], other]).following == _next([*text[:5], other])
    assert session.passes == [3, 1, 1, 1, 1]


def test_it_has_room_for_what_the_cache_holds() -> None:
    session = _session()
    reader = reader_of(session, SLOW)
    read(reader, [1, 2, 3])
    assert reader.room_for([1] * session.capacity, 0)
    read(reader, [1] * session.capacity)
    assert not reader.room_for([1] * session.capacity, 1)


def test_what_passes_take_is_learned_and_fades_where_none_run() -> None:
    clock = _Watch()
    reader, text = reader_of(_session(), SLOW), [1, 2, 3]
    clock.step_s = 30.0
    for _ in range(40):
        token = read(reader, text, clock).following
        step(reader, token, clock)
        text += [token, (token + 1) % VOCAB]
    assert reader.seconds_of_text([9]) > 20.0 and reader.seconds_of_step(-1) > 20.0
    for _ in range(2000):
        reader.idle()
    assert reader.seconds_of_text([9]) == pytest.approx(2.0, rel=0.01)
    assert reader.seconds_of_step(-1) == pytest.approx(1.0, rel=0.01)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.booleans()),
            st.tuples(st.just("read"), st.integers(-6, 3), st.integers(0, VOCAB - 1)),
        ),
        max_size=40,
    )
)
def test_whatever_is_asked_in_whatever_order_the_answer_is_the_model_s(
    asked: list[tuple[str, bool] | tuple[str, int, int]],
) -> None:
    session, reader, text = _reading()
    for what, value, *rest in asked:
        if what == "read":
            # Shorter than before, or longer by what was guessed, and one token of anybody's.
            text = [*session.cache[: max(1, len(text) + value)], *rest]
            assert read(reader, text).following == _next(text)
        else:
            token = reader.latest.following if value else (reader.latest.following + 1) % VOCAB
            text.append(token)
            assert step(reader, token).following == _next(text)
        assert session.cache[: len(text)] == text
        assert reader.latest.following == _next(text)
