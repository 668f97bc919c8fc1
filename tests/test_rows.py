"""What a request changes in the rows, against the definitions written out, and that nothing else does."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.draft import NO_DRAFT, Draft
from edgespec.decoding.rows import Rows, TokenCounts, steps_of
from edgespec.decoding.sampling import Row, SamplingParams
from edgespec.decoding.verification import Verdict, make_verifier
from edgespec_models.errors import EdgespecError, RequestError
from edgespec_runtimes.predictions import DevicePredictions, Logits, Predictions
from tests.rows_for_tests import changed

VOCAB = 9
tokens = st.integers(0, VOCAB - 1)
texts = st.lists(tokens, max_size=12)
logits = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB).map(
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
    rows, done = Rows(steps_of(params)), 0
    while True:
        drafted = data.draw(texts)
        rows.begin(prompt + output[:done])
        matrix: Logits = np.stack([data.draw(logits) for _ in range(len(drafted) + 1)])
        before = matrix.copy()
        for i in range(len(drafted) + 1):
            got = rows.row(Predictions(matrix), drafted[:i])
            expected = changed(before[i], prompt, output[:done] + drafted[:i], params)
            np.testing.assert_array_equal(got, expected)
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
        for text, got in ((history, counts.behind([])), (history + drafted, counts.behind(drafted))):
            assert dict(zip(*map(np.ndarray.tolist, got), strict=True)) == {
                token: text.count(token) for token in text
            }
            assert {each.dtype for each in got} == {np.dtype(np.int64)}  # floats would index no row


def test_the_output_alone_is_counted_for_presence_and_frequency() -> None:
    rows = Rows(steps_of(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)))
    zeros = Predictions(np.zeros((3, 4), np.float32))
    rows.begin([0, 1, 1])
    assert rows.row(zeros, []).tolist() == [0, 0, 0, 0]
    assert rows.row(zeros, [1]).tolist() == [0, -0.75, 0, 0]
    rows.begin([0, 1, 1, 1, 2])
    assert rows.row(zeros, [2, 2]).tolist() == [0, -0.75, -1.25, 0]


def test_a_request_that_changes_nothing_copies_no_rows() -> None:
    def read() -> Logits:
        raise AssertionError("rows were copied")

    columns = np.array([2, 1])
    predictions = DevicePredictions((2, 4), read, columns, np.array([0.5, 0.5], np.float32))
    assert steps_of(SamplingParams()) == []
    assert make_verifier(SamplingParams())(predictions, Draft((2,)), [0]) == Verdict(1, 1)
    with pytest.raises(AssertionError, match="rows were copied"):
        make_verifier(SamplingParams(logit_bias={1: 1.0}))(predictions, Draft((2,)), [0])


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
    verify, tokens = make_verifier(params, [_Odd()]), [0, 0]
    for _ in range(40):
        draft = NO_DRAFT if len(tokens) % 3 else Draft((4, 4))
        verdict = verify(Predictions(matrix[: len(draft.tokens) + 1]), draft, tokens)
        tokens += [*draft.tokens[: verdict.accepted], verdict.token]
    assert all(token % 2 for token in tokens[2::2])
    assert params.greedy or not all(token % 2 for token in tokens[3::2])


class _Nothing(_Odd):
    def apply(self, row: Row, drafted: Sequence[int]) -> None:
        row[:] = -np.inf


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_leaves_nothing_is_told_from_a_damaged_row(temperature: float) -> None:
    verify = make_verifier(SamplingParams(temperature=temperature), [_Nothing()])
    with pytest.raises(RequestError, match="leaves no token that may come next"):
        verify(Predictions(np.zeros((1, 4), np.float32)), NO_DRAFT, [0])
    with pytest.raises(EdgespecError, match="best logit is nan"):
        verify(Predictions(np.full((1, 4), np.nan, np.float32)), NO_DRAFT, [0])
