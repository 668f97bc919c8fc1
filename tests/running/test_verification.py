"""The whole propose, verify, commit loop on toy targets must keep the distribution of plain decoding."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.draft import NO_DRAFT, Draft
from edgespec.decoding.sampling import SamplingParams, distribution
from edgespec.measuring.chi_square import survival
from edgespec.running.verifier import Verifier
from edgespec_models.errors import RequestError
from edgespec_runtimes.predictions import Predictions
from tests.kit.rows import changed

VOCAB = 12
LENGTH = 3
PROMPT = [3]

Matrix = npt.NDArray[np.float32]
Propose = Callable[[Sequence[int]], Draft]
Verify = Callable[[Predictions, Draft, Sequence[int]], tuple[int, int]]


def _markov(seed: int, scale: float = 1.5) -> Matrix:
    return np.random.default_rng(seed).normal(0.0, scale, (VOCAB, VOCAB)).astype(np.float32)


TARGET = _markov(0)


def _generate(verify: Verify, propose: Propose, length: int, target: Matrix = TARGET) -> tuple[int, ...]:
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + length:
        draft = propose(tokens)
        accepted, token = verify(Predictions(target[[tokens[-1], *draft.tokens]]), draft, tokens)
        tokens += [*draft.tokens[:accepted], token]
    return tuple(tokens[len(PROMPT) : len(PROMPT) + length])


def _plain(tokens: Sequence[int]) -> Draft:
    return NO_DRAFT


def _likely(tokens: Sequence[int]) -> Draft:
    """A deterministic drafter that is often right: the two likeliest steps of a blurred target."""
    first = int(np.argmax(TARGET[tokens[-1]] + 0.5 * _WRONG[tokens[-1]]))
    return Draft((first, int(np.argmax(TARGET[first]))))


_WRONG = _markov(1)


def _expected(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The exact distribution of the first LENGTH tokens of plain sampling."""
    probs: dict[tuple[int, ...], float] = {}
    for path in product(range(VOCAB), repeat=LENGTH):
        mass, before = 1.0, PROMPT[-1]
        for at, token in enumerate(path):
            row = changed(TARGET[before], PROMPT, path[:at], params)
            mass *= distribution(row, params)[token]
            if mass == 0.0:
                break
            before = token
        else:
            probs[path] = mass
    return probs


def _chi_square_p(samples: list[tuple[int, ...]], probs: dict[tuple[int, ...], float]) -> float:
    """p-value of the samples under the distribution; cells expected less than 8 times are pooled."""
    if any(sample not in probs for sample in samples):
        return 0.0
    count, seen = len(samples), Counter(samples)
    cells = [(seen[path], mass * count) for path, mass in probs.items() if mass * count >= 8.0]
    rest = [count - sum(each) for each in zip(*cells, strict=True)]
    if rest[1] < 8.0:
        last = cells.pop()
        rest = [rest[0] + last[0], rest[1] + last[1]]
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in [*cells, rest])
    return survival(statistic, len(cells))


PARAMS = [
    SamplingParams(temperature=0.8, top_k=4),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=1.2, min_p=0.2, repetition_penalty=1.8),
    SamplingParams(
        temperature=1.1, presence_penalty=1.5, frequency_penalty=0.9, logit_bias={4: 2.0, 7: -3.0}
    ),
]
RUNS = 2500


def _seeded(params: SamplingParams, seed: int) -> Verifier:
    return Verifier(replace(params, seed=seed))


def _samples(propose: Propose, verifier: Callable[[int], Verify]) -> list[tuple[int, ...]]:
    return [_generate(verifier(seed), propose, LENGTH) for seed in range(RUNS)]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("propose", [_plain, _likely])
def test_the_output_keeps_the_law_of_plain_sampling(params: SamplingParams, propose: Propose) -> None:
    assert _chi_square_p(_samples(propose, partial(_seeded, params)), _expected(params)) > 1e-4


def _lossy(seed: int) -> Verify:
    """Accepts whatever the target finds likely enough."""
    right = _seeded(PARAMS[0], seed)

    def verify(predictions: Predictions, draft: Draft, tokens: Sequence[int]) -> tuple[int, int]:
        kept, token = right(predictions, draft, tokens)
        refused = draft.tokens[kept : kept + 1]
        probs = distribution(predictions.logits[kept], PARAMS[0])
        return kept, refused[0] if refused and probs[refused[0]] > 0.3 else token

    return verify


def _from_p(seed: int) -> Verify:
    """After a rejection draws again, from all of p."""
    right, again = _seeded(PARAMS[0], seed), _seeded(PARAMS[0], seed + 10**6)

    def verify(predictions: Predictions, draft: Draft, tokens: Sequence[int]) -> tuple[int, int]:
        kept, _ = right(predictions, draft, tokens)
        row = Predictions(predictions.logits[kept : kept + 1])
        return kept, again(row, NO_DRAFT, [*tokens, *draft.tokens[:kept]])[1]

    return verify


@pytest.mark.parametrize("verifier", [_lossy, _from_p])
def test_mistakes_are_caught(verifier: Callable[[int], Verify]) -> None:
    assert _chi_square_p(_samples(_likely, verifier), _expected(PARAMS[0])) < 1e-8


drafts = st.lists(st.integers(0, VOCAB - 1), max_size=5)
scripts = st.lists(drafts, min_size=1, max_size=12)


def _scripted(script: list[list[int]], params: SamplingParams) -> Propose:
    """Any drafts at all, some made right by replaying the plain generation."""
    plain = _generate(Verifier(params), _plain, 24)
    calls = iter(range(10**6))

    def propose(tokens: Sequence[int]) -> Draft:
        given_tokens = script[next(calls) % len(script)]
        if len(given_tokens) % 2:
            done = len(tokens) - len(PROMPT)
            return Draft((*plain[done : done + len(given_tokens)], *given_tokens[:1]))
        return Draft(tuple(given_tokens))

    return propose


@settings(max_examples=60, deadline=None)
@given(
    scripts,
    st.sampled_from(
        [
            SamplingParams(),
            SamplingParams(repetition_penalty=1.5),
            SamplingParams(presence_penalty=0.7, frequency_penalty=1.1),
            SamplingParams(repetition_penalty=1.2, frequency_penalty=-0.4, logit_bias={2: 1.5, 9: -100}),
            SamplingParams(temperature=0.8, presence_penalty=-1.0, logit_bias={0: 3}, seed=4),
            SamplingParams(temperature=0.9, top_p=0.8, seed=11),
            SamplingParams(temperature=1.5, repetition_penalty=1.3, seed=2**64 - 1),
        ]
    ),
)
def test_any_deterministic_draft_leaves_every_token_as_it_was(
    script: list[list[int]], params: SamplingParams
) -> None:
    plain = _generate(Verifier(params), _plain, 16)
    assert _generate(Verifier(params), _scripted(script, params), 16) == plain


def test_each_proposal_is_judged_by_its_own_row() -> None:
    """The first is certain, the second impossible, the third certain again."""
    logits = np.full((4, VOCAB), -200.0, dtype=np.float32)
    logits[[0, 1, 2, 3], [1, 5, 3, 4]] = 0.0
    for seed in range(20):
        verify = Verifier(SamplingParams(temperature=1.0, seed=seed))
        assert verify(Predictions(logits), Draft((1, 2, 3)), PROMPT) == (1, 5)


NOT_READ = [np.nan] * 3


@pytest.mark.parametrize(
    ("logits", "drafted", "expected"),
    [
        ([[0, 1, 0], NOT_READ, NOT_READ], (2, 0), (0, 1)),  # nothing behind the first mismatch
        ([[0, 1, 1], NOT_READ], (2,), (0, 1)),  # the lowest of equals
        ([[0, 1, 1], [2, 2, 2]], (1,), (1, 0)),
    ],
)
def test_greedy_matches_the_most_likely_token(
    logits: list[list[float]], drafted: tuple[int, ...], expected: tuple[int, int]
) -> None:
    predictions = Predictions(np.array(logits, np.float32))
    assert Verifier(SamplingParams())(predictions, Draft(drafted), [0]) == expected


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0)])
def test_shapes_that_do_not_fit_are_refused(params: SamplingParams) -> None:
    verify, predictions = Verifier(params), Predictions(TARGET[:2])
    with pytest.raises(RequestError, match=r"shape \(2, \d+\) for 2 proposals; needed: \(3, vocab\)"):
        verify(predictions, Draft((1, 2)), PROMPT)
