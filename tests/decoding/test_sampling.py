"""What is done to a row of logits, against the definitions written out, and what is drawn from it."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgespec.decoding.draft import NO_DRAFT, Draft, Round
from edgespec.decoding.sampling import (
    Penalties,
    Row,
    SamplingParams,
    TokenCounts,
    changed_row,
    distribution,
    draw,
    log_probabilities,
    most_likely,
    uniform,
)
from edgespec.drafting.source import Source
from edgespec.running.verifier import Verifier
from edgespec_models.errors import EdgespecError, RequestError
from edgespec_runtimes.predictions import DevicePredictions, Logits, Predictions
from tests.kit.rows import changed
from tests.kit.toy import RandomDrafter, Silent, ToySession, decode, markov_logits

rows = st.lists(st.integers(-40, 40), min_size=2, max_size=30).map(
    lambda values: np.array(values, dtype=np.float32) / 4
)


def _naive(
    logits: Row, temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.float64]:
    """The definition, with a full sort; ties with the last kept token are kept."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    if top_k:
        weights[weights < np.sort(weights)[::-1][:top_k][-1]] = 0.0
    probs = weights / weights.sum()
    ordered = np.sort(probs)[::-1]
    before = np.cumsum(ordered) - ordered
    probs[probs < ordered[before < top_p - 1e-12][-1]] = 0.0
    probs[probs < min_p * probs.max()] = 0.0
    return np.asarray(probs / probs.sum(), dtype=np.float64)


@given(
    rows,
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, 35),
    st.sampled_from([0.123, 0.517, 0.951, 1.0]),
    st.sampled_from([0.0, 0.07, 0.61]),
)
def test_the_law_is_that_of_the_definition(
    logits: Row, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    before = logits.copy()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = distribution(logits, params)
    np.testing.assert_allclose(probs, _naive(logits, temperature, top_k, top_p, min_p), atol=1e-12)
    np.testing.assert_array_equal(logits, before)


@given(rows)
def test_top_p_0_keeps_the_most_likely_token(logits: Row) -> None:
    """OpenAI takes it, and means this."""
    kept = distribution(logits, SamplingParams(temperature=1.0, top_p=0.0)) > 0
    np.testing.assert_array_equal(kept, logits == logits.max())


def test_top_p_over_a_wide_flat_vocabulary_is_that_of_the_definition() -> None:
    logits = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    probs = distribution(logits, SamplingParams(temperature=1.0, top_p=0.9))
    np.testing.assert_allclose(probs, _naive(logits, 1.0, 0, 0.9, 0.0), atol=1e-12)


@pytest.mark.parametrize(
    ("row", "params", "expected"),
    [
        ([1.0, 3.0, 2.0], SamplingParams(temperature=1e-300), [0.0, 1.0, 0.0]),  # greedy in the limit
        ([1.0, 3.0, 3.0], SamplingParams(), [0.0, 1.0, 0.0]),  # the lowest of equals
        ([-np.inf, 0.0, -np.inf], SamplingParams(temperature=0.7, top_k=3, top_p=0.99), [0.0, 1.0, 0.0]),
        ([0.0, -40.0], SamplingParams(temperature=1.0), [1.0, np.exp(-40.0)]),  # too rare for a sum
    ],
)
def test_extreme_rows(row: list[float], params: SamplingParams, expected: list[float]) -> None:
    assert distribution(np.array(row, np.float32), params).tolist() == pytest.approx(expected, abs=0.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_law_is_refused(bad: float, temperature: float) -> None:
    logits = np.array([0.0, bad, 1.0], dtype=np.float32)
    with pytest.raises(EdgespecError, match="best logit"):
        distribution(logits, SamplingParams(temperature=temperature))


OUT_OF_RANGE = {
    "temperature": (-0.1, math.nan, math.inf),
    "top_k": (-1, 2.5),
    "top_p": (-0.1, 1.1),
    "min_p": (-0.1, 1.5),
    "repetition_penalty": (0.0,),
    "presence_penalty": (2.1, math.nan),
    "frequency_penalty": (-2.1,),
    "logit_bias": (3,),
    "seed": (-(2**63) - 1, 2**64),
}


@pytest.mark.parametrize(("field", "value"), [(f, value) for f, bad in OUT_OF_RANGE.items() for value in bad])
def test_parameters_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{field} is {value!r}; allowed: "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_uniform_is_repeatable_uniform_and_independent() -> None:
    count = 4000
    values = np.array([[uniform(seed, p) for seed in (7, 8)] for p in range(count)])
    assert values[5, 1] == uniform(8, 5)
    assert uniform(7, 5) != uniform(8, 5)
    assert uniform(2**64 - 1, 5) != uniform(2**64 - 2, 5)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    # Five standard errors around the moments of independent uniform variables.
    assert values.mean(axis=0) == pytest.approx(0.5, abs=5 * math.sqrt(1 / 12 / count))
    assert np.corrcoef(values.T)[0, 1] == pytest.approx(0.0, abs=5 / math.sqrt(count))
    assert np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1] == pytest.approx(0.0, abs=5 / math.sqrt(count))


def test_seeded_output_stays_the_same_from_release_to_release() -> None:
    assert uniform(0, 0) == 0.011546754286331562
    assert uniform(12345, 678) == 0.6086564058754754


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-300, 0.1, 1.0, 3.0]), min_size=1, max_size=3000).filter(any),
    st.floats(0.0, 1.0, exclude_max=True),
)
@example([0.0, 1.0, 1.0], 0.0)
@example([*np.random.default_rng(1).gamma(0.1, size=5000)], 0.7)
def test_draw_inverts_the_cumulative_law_and_never_returns_a_token_without_mass(
    masses: list[float], u: float
) -> None:
    probs = np.array(masses) / np.sum(masses)
    token, edges = draw(probs, u), np.cumsum(probs)
    assert probs[token] > 0.0 and abs(np.clip(u, edges[token] - probs[token], edges[token]) - u) < 1e-12


def test_draw_at_the_very_end_is_the_last_token_with_mass() -> None:
    """Two ways to add up the same masses differ: many of these draws lie behind the last of them."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        probs = np.append(rng.uniform(0.5, 1.0, 2900), np.zeros(100))
        assert draw(probs / probs.sum(), math.nextafter(1.0, 0.0)) == 2899


VOCAB = 9
tokens = st.integers(0, VOCAB - 1)
texts = st.lists(tokens, max_size=12)
changeable = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB).map(
    lambda values: np.array(values, np.float32) / 4
)
penalties = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 10.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.1, 2.0]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -0.5, 3.25, 100.0]), max_size=4),
)


@settings(deadline=None)
@given(st.data(), penalties, st.lists(tokens, min_size=1, max_size=8), texts)
def test_rows_are_those_of_the_definitions(
    data: st.DataObject, params: SamplingParams, prompt: list[int], output: list[int]
) -> None:
    """In whatever rounds the output came, and whatever was proposed behind it."""
    step, done = Penalties(params), 0
    while True:
        drafted = data.draw(texts)
        step.begin(prompt + output[:done])
        matrix: Logits = np.stack([data.draw(changeable) for _ in range(len(drafted) + 1)])
        before = matrix.copy()
        for i in range(len(drafted) + 1):
            actual = changed_row(Predictions(matrix), drafted[:i], [step])
            expected = changed(before[i], prompt, output[:done] + drafted[:i], params)
            np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(matrix, before)
        if done == len(output):
            return
        done = data.draw(st.integers(done + 1, len(output)))


@settings(deadline=None)
@given(st.lists(texts, max_size=6), texts)
def test_counts_follow_any_history(histories: list[list[int]], drafted: list[int]) -> None:
    counts = TokenCounts()
    for history in histories:
        counts.align(history)
        for text, actual in ((history, counts.behind([])), (history + drafted, counts.behind(drafted))):
            assert dict(zip(*map(np.ndarray.tolist, actual), strict=True)) == {
                token: text.count(token) for token in text
            }
            assert {each.dtype for each in actual} == {np.dtype(np.int64)}  # floats would index no row


def test_a_request_that_changes_nothing_copies_no_rows() -> None:
    def read() -> Logits:
        raise AssertionError("rows were copied")

    columns = np.array([2, 1])
    predictions = DevicePredictions((2, 4), read, columns, np.array([0.5, 0.5], np.float32))
    assert Verifier(SamplingParams())(predictions, Draft((2,)), [0]) == (1, 1)
    with pytest.raises(AssertionError, match="rows were copied"):
        Verifier(SamplingParams(logit_bias={1: 1.0}))(predictions, Draft((2,)), [0])


class _Odd:
    """A mask: even tokens are forbidden behind an even number of tokens."""

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def apply(self, row: Row, drafted: Sequence[int]) -> None:
        if (len(self._tokens) + len(drafted)) % 2 == 0:
            row[::2] = -np.inf


@pytest.mark.parametrize(
    "params", [SamplingParams(logit_bias={1: 50.0}), SamplingParams(temperature=1.0, seed=3)]
)
def test_a_mask_is_one_step_more(params: SamplingParams) -> None:
    """What it forbids is never written, sampled or greedy, and proposals of it are rejected."""
    matrix = np.tile(np.array([9, 0, 9, 0, 9, 0], np.float32), (3, 1))
    verify, tokens = Verifier(params, [_Odd()]), [0, 0]
    for _ in range(40):
        draft = NO_DRAFT if len(tokens) % 3 else Draft((4, 4))
        accepted, token = verify(Predictions(matrix[: len(draft.tokens) + 1]), draft, tokens)
        tokens += [*draft.tokens[:accepted], token]
    assert all(token % 2 for token in tokens[2::2])
    assert params.greedy or not all(token % 2 for token in tokens[3::2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_leaves_nothing_is_told_from_a_damaged_row(temperature: float) -> None:
    verify = Verifier(SamplingParams(temperature=temperature, logit_bias={0: 1.0}), [_Odd()])
    with pytest.raises(RequestError, match="allows no next token"):
        verify(Predictions(np.array([[1.0, -np.inf, 1.0]], np.float32)), NO_DRAFT, [0, 0])
    with pytest.raises(EdgespecError, match="best logit is nan"):
        verify(Predictions(np.full((1, 3), np.nan, np.float32)), NO_DRAFT, [0, 0])


NEXT = markov_logits(0, 23)


@settings(deadline=None)
@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32)), st.integers(0, 45))
def test_they_are_the_logarithms_of_a_softmax(row: Row, count: int) -> None:
    before = row.copy()
    logprobs = log_probabilities(row)
    total = math.log(math.fsum(math.exp(float(value)) for value in row))
    np.testing.assert_allclose(logprobs, [float(value) - total for value in row], atol=1e-9)
    np.testing.assert_array_equal(row, before)
    ordered = sorted(range(len(row)), key=lambda token: (-logprobs[token], token))[:count]
    assert most_likely(logprobs, count) == tuple((token, float(logprobs[token])) for token in ordered)


def _decoded(source: Source, params: SamplingParams, top: int | None) -> list[Round]:
    session, ends = ToySession(NEXT, 23), partial(decode, stop={7}, top_logprobs=top)
    return list(ends(session, source, Verifier(params), [1, 2, 3], max_new_tokens=40, max_draft=5))


def _told(rounds: Sequence[Round]) -> tuple[list[int], list[float], list[object]]:
    for round_ in rounds:
        assert len(round_.logprobs) == len(round_.top_logprobs) == len(round_.tokens)
    return (
        [token for round_ in rounds for token in round_.tokens],
        [logprob for round_ in rounds for logprob in round_.logprobs],
        [logprob for round_ in rounds for logprob in round_.top_logprobs],
    )


CHANGED = [
    SamplingParams(),
    SamplingParams(presence_penalty=1.5, logit_bias={4: 3.0, 7: -100}),
    SamplingParams(temperature=1.3, top_k=5, seed=3),
]


@pytest.mark.parametrize("params", CHANGED)
@pytest.mark.parametrize("seed", range(4))
def test_they_are_the_targets_own_with_and_without_drafts(params: SamplingParams, seed: int) -> None:
    """Whatever the request changes in the rows, and however the token was chosen."""
    plain = _told(_decoded(Silent(), params, 3))
    rounds = _decoded(RandomDrafter(seed, 23, NEXT), params, 3)
    assert _told(rounds) == plain
    assert any(round_.accepted for round_ in rounds)
    text = [1, 2, 3]
    for token, logprob, top in zip(*plain, strict=True):
        expected = log_probabilities(NEXT(text))
        assert logprob == float(expected[token])
        assert top == most_likely(expected, 3)
        text.append(token)


def test_nothing_is_told_unasked() -> None:
    assert not any(round_.logprobs or round_.top_logprobs for round_ in _decoded(Silent(), CHANGED[0], None))
    rounds = _decoded(Silent(), CHANGED[0], 0)
    assert all(len(round_.logprobs) == 1 and round_.top_logprobs == ((),) for round_ in rounds)
