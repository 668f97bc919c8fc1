"""Log probabilities against a softmax by hand, and equal in plain and speculative decoding."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgespec.decoding.draft import Source, Step
from edgespec.decoding.logprobs import log_probabilities, most_likely
from edgespec.decoding.loop import decode
from edgespec.decoding.sampling import Row
from edgespec.requests.request import Request, RequestOptions
from tests.toy import RandomDrafter, Silent, ToySession, markov_logits

VOCAB = 23
PROMPT = [1, 2, 3]
NEXT = markov_logits(0, VOCAB)


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


def _decoded(source: Source, options: RequestOptions) -> list[Step]:
    return list(
        decode(
            ToySession(NEXT, VOCAB),
            source,
            Request.of(options).verifier(),
            PROMPT.copy(),
            max_new_tokens=40,
            max_draft=5,
            stop={7},
        )
    )


def _told(steps: Sequence[Step]) -> tuple[list[int], list[float], list[object]]:
    for step in steps:
        assert len(step.logprobs) == len(step.top_logprobs) == len(step.tokens)
    return (
        [token for step in steps for token in step.tokens],
        [each for step in steps for each in step.logprobs],
        [each for step in steps for each in step.top_logprobs],
    )


CHANGED: list[RequestOptions] = [
    {},
    {"presence_penalty": 1.5, "logit_bias": {4: 3.0, 7: -100}},
    {"temperature": 1.3, "top_k": 5, "seed": 3},
]


@pytest.mark.parametrize("options", CHANGED)
@pytest.mark.parametrize("seed", range(4))
def test_they_are_the_targets_own_with_and_without_drafts(options: RequestOptions, seed: int) -> None:
    """Whatever the request changes in the rows, and however the token was chosen."""
    options = {**options, "logprobs": True, "top_logprobs": 3}
    plain = _told(_decoded(Silent(), options))
    steps = _decoded(RandomDrafter(seed, VOCAB, NEXT), options)
    assert _told(steps) == plain
    assert any(step.accepted for step in steps)
    text = PROMPT.copy()
    for token, logprob, top in zip(*plain, strict=True):
        expected = log_probabilities(NEXT(text))
        assert logprob == float(expected[token])
        assert top == most_likely(expected, 3)
        text.append(token)


def test_nothing_is_told_unasked() -> None:
    assert not any(step.logprobs or step.top_logprobs for step in _decoded(Silent(), {}))
    steps = _decoded(Silent(), {"logprobs": True})
    assert all(len(step.logprobs) == 1 and step.top_logprobs == ((),) for step in steps)
