"""What a drafter learns of its user: it helps, it cannot harm for long, and the output stays."""

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.chi_square import pool_rare, two_samples
from edgespec.decode import decode
from edgespec.drafting.bridge import IdentityBridge
from edgespec.drafting.model import Calibration, ModelDrafter, Vocabulary
from edgespec.learning import Correction, Weights
from edgespec.learning.correction import Lesson
from edgespec.learning.weights import CONTEXTS, SLOTS
from edgespec.pricing import Pricing
from edgespec.sampling import SamplingParams
from edgespec.verification import make_verifier
from edgespec_runtimes.cost import CostCurve
from tests.toy import F32, ToySession, markov_law

VOCAB = 12
FLAT = CostCurve({1: 1.0, 64: 1.0001})
TEXT = [5, 3, 1]
PLENTY = 1e9
"""A share of the time that lets everything be learned, however fast the test runs."""

rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=80).map(lambda v: np.array(v, np.float32))


def _correction(*fixed: int) -> Correction:
    return Correction(fixed=fixed, share=PLENTY)


def _plain(logits: F32) -> tuple[int, float]:
    row = int(logits.argmax())
    return row, float(1.0 / np.exp(logits - logits[row]).sum())


def _logits(*likely: int, size: int = VOCAB) -> F32:
    """The likely tokens, one logit apart."""
    logits = np.full(size, -9.0, np.float32)
    for place, token in enumerate(likely):
        logits[token] = -float(place)
    return logits


def _teach(correction: Correction, token: int, times: int = 20) -> None:
    """Behind ``TEXT`` the drafter would guess 0, then 1, then 2; ``token`` is what comes."""
    for _ in range(times):
        correction.guess(TEXT, _logits(0, 1, 2), None)
        correction.settle([*TEXT, token])


@given(rows)
def test_before_it_has_learned_a_guess_is_the_drafter_s_own(logits: F32) -> None:
    row, probability = _correction().guess(TEXT, logits, None)
    assert logits.max() - logits[row] < 1e-5
    assert probability == pytest.approx(_plain(logits)[1], rel=1e-4)


def test_it_guesses_what_the_user_s_target_writes() -> None:
    correction = _correction()
    _teach(correction, 1)
    row, probability = correction.guess(TEXT, _logits(0, 1, 2), None)
    assert row == 1 and probability > 0.8
    assert correction.guess([9, 9, 9], _logits(0, 3), None)[0] == 0  # and nothing of what it never saw
    assert correction.undone == 0


def test_rows_of_a_trimmed_head_are_their_tokens() -> None:
    correction = _correction()
    _teach(correction, 1)
    tokens = np.array([7, 2, 1, 0], np.int32)
    assert correction.guess(TEXT, _logits(3, 2, 1, size=4), tokens)[0] == 2


def test_the_law_of_a_corrected_guess_sums_to_one() -> None:
    correction = _correction()
    _teach(correction, 1)
    logits = np.random.default_rng(0).normal(0.0, 1.0, 400).astype(np.float32)
    _, probability = correction.guess(TEXT, logits, None)
    guess = correction._guesses[-1]
    assert len(guess.law) == 32 and probability == guess.law.max()
    assert 0.0 < guess.law.sum() < 1.0  # what is not corrected keeps its part


@pytest.mark.parametrize(
    ("committed", "learned"),
    [([*TEXT, 1], True), (TEXT, False), ([], False), ([5, 3, 2, 1], False), ([*TEXT, 1, 4, 4], True)],
)
def test_it_learns_from_text_that_goes_on_from_where_it_guessed(committed: list[int], learned: bool) -> None:
    correction = _correction()
    correction.guess(TEXT, _logits(0, 1), None)
    correction.settle(committed)
    assert (correction.lesson() is not None) is learned


def test_what_follows_a_wrong_guess_is_not_judged() -> None:
    once, twice = _correction(), _correction()
    for correction in (once, twice):
        correction.guess(TEXT, _logits(0, 1), None)
    twice.guess([*TEXT, 0], _logits(2, 3), None)
    for correction in (once, twice):
        correction.settle([*TEXT, 1, 3])
    lessons = once.lesson(), twice.lesson()
    assert lessons[0] is not None and lessons[1] is not None
    np.testing.assert_array_equal(lessons[0].change, lessons[1].change)


def test_fixed_tokens_are_left_alone() -> None:
    correction = _correction(0)
    _teach(correction, 1, times=3)
    assert correction.guess([*TEXT, 1], _logits(0), None)[0] == 0
    unfixed = _correction()
    _teach(unfixed, 1, times=3)
    guesses = [each.guess(TEXT, _logits(0, 1), None) for each in (correction, unfixed)]
    assert guesses[0][1] < guesses[1][1]  # the other also learned that 0 does not come


def test_without_time_nothing_is_learned() -> None:
    correction = Correction(share=0.0)
    _teach(correction, 1, times=1)  # what it costs is noticed afterwards
    assert correction.lesson() is not None
    _teach(correction, 1)
    assert correction.lesson() is None


class TestGuard:
    def test_what_misleads_is_put_back(self, caplog: pytest.LogCaptureFixture) -> None:
        correction = _correction()
        _teach(correction, 1)
        assert correction.lesson() is not None
        with caplog.at_level(logging.WARNING, logger="edgespec"):
            self._mislead(correction)
        assert correction.undone >= 1
        assert "undone" in caplog.text

    def test_the_last_state_that_proved_itself_comes_back_then_nothing(self) -> None:
        correction = _correction()
        _teach(correction, 1, times=40)
        good = correction._good.copy()
        assert good.any()
        undone = correction.undone
        while correction.undone == undone:
            self._mislead_once(correction)
        np.testing.assert_array_equal(correction._weights.copy(), good)
        while correction.undone == undone + 1:
            self._mislead_once(correction)
        assert not correction._weights.copy().any()
        lesson = correction.lesson()
        assert lesson is not None and lesson.anew and not lesson.change.any()

    def test_one_that_helps_is_never_put_back(self) -> None:
        correction, random = _correction(), np.random.default_rng(0)
        for _ in range(500):
            _teach(correction, 1 if random.random() < 0.7 else 0, times=1)
        assert correction.undone == 0

    def _mislead(self, correction: Correction) -> None:
        for _ in range(60):
            self._mislead_once(correction)

    @staticmethod
    def _mislead_once(correction: Correction) -> None:
        """The target writes the drafter's own guess, but only where the correction says otherwise."""
        row, _ = correction.guess(TEXT, _logits(0, 1), None)
        if row == 0:
            correction.settle([])
            _teach(correction, 1, times=1)
        else:
            correction.settle([*TEXT, 0])


class TestLessons:
    def test_lessons_add_up_to_what_is_known(self) -> None:
        correction, random = _correction(), np.random.default_rng(1)
        total = np.zeros((2, SLOTS), np.float32)
        for _ in range(5):
            for _ in range(4):
                correction.guess(TEXT, _logits(*random.permutation(4)), None)
                correction.settle([*TEXT, int(random.integers(4))])
            lesson = correction.lesson()
            assert lesson is not None
            total += lesson.change
        np.testing.assert_allclose(total, correction._weights.copy(), atol=1e-5)
        assert correction.lesson() is None

    def test_one_after_the_other(self) -> None:
        ones = np.ones((2, SLOTS), np.float32)
        assert Lesson(ones, anew=False).after(None).change[0, 0] == 1.0
        assert Lesson(ones, anew=False).after(Lesson(ones, anew=True)).change[0, 0] == 2.0
        assert Lesson(ones, anew=False).after(Lesson(ones, anew=True)).anew
        assert Lesson(ones, anew=True).after(Lesson(ones, anew=False)).change[0, 0] == 1.0

    def test_what_is_known_is_taken_up(self) -> None:
        first = _correction()
        _teach(first, 1)
        lesson = first.lesson()
        assert lesson is not None
        second = Correction(lesson.change, share=PLENTY)
        assert second.guess(TEXT, _logits(0, 1, 2), None) == first.guess(TEXT, _logits(0, 1, 2), None)
        assert second.lesson() is None


@given(
    st.lists(st.integers(0, 1 << 20), max_size=6), st.lists(st.integers(0, 1 << 20), min_size=1, max_size=9)
)
def test_slots_are_within_the_table_and_depend_on_three_tokens_at_most(
    text: list[int], tokens: list[int]
) -> None:
    found: npt.NDArray[np.intp] = Weights.slots(text, np.array(tokens, np.int64))
    assert found.shape == (CONTEXTS, len(tokens))
    assert found.min() >= 0 and found.max() < SLOTS
    if len(text) >= 3:
        longer = Weights.slots([8, *text], np.array(tokens, np.int64))
        np.testing.assert_array_equal(found, longer)


def test_slots_are_spread_over_the_whole_table() -> None:
    slots = Weights.slots([1, 2, 3], np.arange(20_000))
    counts = np.bincount(slots.ravel() >> 8, minlength=SLOTS >> 8)
    assert counts.min() > 0.75 * counts.mean() and counts.max() < 1.25 * counts.mean()


def _run(
    correction: Correction | None, prompt: Sequence[int], params: SamplingParams, count: int = 30
) -> tuple[list[int], int]:
    """Tokens and passes of a request whose drafter has another law than the target."""
    session = ToySession.markov(1, VOCAB, scale=1.0)
    tokens, rounds = list(prompt), 0
    drafter = None
    if correction is not None:
        other = ToySession(lambda text: 0.5 * markov_law(2, VOCAB, scale=1.0)(text), VOCAB)
        other.reserve(500)
        drafter = ModelDrafter(
            other,
            IdentityBridge(VOCAB),
            Vocabulary(),
            pricing=Pricing(FLAT),
            calibration=Calibration(),
            curve=CostCurve({1: 1e-9}),
            correction=correction,
        )
    for _ in decode(session, drafter, make_verifier(params), tokens, max_new_tokens=count, max_draft=4):
        rounds += 1
    return tokens, rounds


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=5),
    st.sampled_from([SamplingParams(), SamplingParams(temperature=1.0, seed=3)]),
)
def test_whatever_was_learned_every_token_is_that_of_plain_decoding(
    prompts: list[list[int]], params: SamplingParams
) -> None:
    correction = _correction()
    for prompt in prompts:
        assert _run(correction, prompt, params)[0] == _run(None, prompt, params)[0]


def test_drafts_get_better_request_by_request() -> None:
    correction, greedy = _correction(), SamplingParams()
    prompts = [[number % VOCAB] for number in range(30)]
    rounds = [_run(correction, prompt, greedy, 60)[1] for prompt in prompts]
    unlearned = [_run(_correction(), prompt, greedy, 60)[1] for prompt in prompts]
    assert sum(rounds[-10:]) < 0.8 * sum(unlearned[-10:])


def test_samples_keep_their_law_while_the_drafter_learns_from_them() -> None:
    """1,000 answers of three tokens each way, Pearson's chi-square."""
    correction = _correction()
    drawn: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}
    accepted = 0
    for number in range(1000):
        for learns in (False, True):
            params = SamplingParams(temperature=1.0, seed=2 * number + learns)
            tokens, rounds = _run(correction if learns else None, [1, 2], params, 3)
            drawn[learns].append(tuple(tokens[2:]))
            accepted += 3 - rounds
    assert accepted > 100
    counts = pool_rare(drawn[False], drawn[True], minimum=20)
    p_value = two_samples(*counts).p_value
    assert len(counts[0]) > 10
    assert p_value is not None and p_value > 1e-3
