import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.sampling import (
    ACCEPT_LANE,
    DRAFT_LANE,
    TOKEN_LANE,
    SamplingParams,
    distribution,
    draw,
    resolve_seed,
    uniform,
)
from edgespec_models.errors import EdgespecError, RequestError

Row = npt.NDArray[np.float32]

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


def test_top_p_over_a_wide_flat_vocabulary_is_that_of_the_definition() -> None:
    logits = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    probs = distribution(logits, SamplingParams(temperature=1.0, top_p=0.9))
    np.testing.assert_allclose(probs, _naive(logits, 1.0, 0, 0.9, 0.0), atol=1e-12)


def test_a_top_p_of_one_keeps_what_is_too_rare_for_a_sum() -> None:
    probs = distribution(np.array([0.0, -40.0], np.float32), SamplingParams(temperature=1.0))
    assert probs[1] == pytest.approx(np.exp(-40.0), abs=0.0)


def test_truncations_apply_one_after_another() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    # Of the top 2, the first alone has 4/7 of the mass: with top-k first it reaches 0.55, alone not.
    both = distribution(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.55))
    assert np.flatnonzero(both).tolist() == [0]
    alone = distribution(logits, SamplingParams(temperature=1.0, top_p=0.55))
    assert np.flatnonzero(alone).tolist() == [0, 1]


def test_tokens_without_any_chance_stay_without() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 1.0], dtype=np.float32)
    probs = distribution(logits, SamplingParams(temperature=0.7, top_k=3, top_p=0.99))
    assert probs[[0, 2]].tolist() == [0.0, 0.0]
    assert probs.sum() == pytest.approx(1.0)


def test_a_tiny_temperature_is_greedy_in_the_limit() -> None:
    logits = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    assert distribution(logits, SamplingParams(temperature=1e-300)).tolist() == [0.0, 1.0, 0.0]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.array([1.0, 3.0, 3.0], dtype=np.float32)
    assert distribution(logits, SamplingParams()).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_law_is_refused(bad: float, temperature: float) -> None:
    logits = np.array([0.0, bad, 1.0], dtype=np.float32)
    with pytest.raises(EdgespecError, match="best logit"):
        distribution(logits, SamplingParams(temperature=temperature))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("logit_bias", 3),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_parameters_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{field} is {value!r}; allowed: "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_a_given_seed_is_kept_and_a_missing_one_drawn() -> None:
    assert resolve_seed(SamplingParams(seed=0)) == 0
    assert resolve_seed(SamplingParams()) != resolve_seed(SamplingParams())


def test_uniform_is_repeatable_uniform_and_independent() -> None:
    count = 4000
    values = np.array([[uniform(7, p, lane) for lane in (0, 1)] for p in range(count)])
    assert values[5, 1] == uniform(7, 5, 1)
    assert uniform(7, 5) != uniform(8, 5)
    assert uniform(2**64 - 1, 5) != uniform(2**64 - 2, 5)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    # Five standard errors around the moments of independent uniform variables.
    assert values.mean(axis=0) == pytest.approx(0.5, abs=5 * math.sqrt(1 / 12 / count))
    assert np.corrcoef(values.T)[0, 1] == pytest.approx(0.0, abs=5 / math.sqrt(count))
    assert np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1] == pytest.approx(0.0, abs=5 / math.sqrt(count))


def test_seeded_output_stays_the_same_from_release_to_release() -> None:
    assert (TOKEN_LANE, ACCEPT_LANE, DRAFT_LANE) == (0, 1, 2)
    assert uniform(0, 0) == 0.011546754286331562
    assert uniform(12345, 678, 1) == 0.34216654565283544


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 0.1, 1.0, 3.0]), min_size=1, max_size=3000).filter(any),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_draw_never_returns_a_token_without_mass(masses: list[float], u: float) -> None:
    probs = np.array(masses) / np.sum(masses)
    assert probs[draw(probs, u)] > 0.0


def test_draw_inverts_the_cumulative_law_across_blocks() -> None:
    probs = np.random.default_rng(1).dirichlet(np.full(5000, 0.1))
    edges = np.cumsum(probs)
    tokens = [17, 1023, 1024, 2500, 4999]
    tokens = [int(t + np.argmax(probs[t:] > 1e-6)) if t < 4990 else int(np.argmax(probs)) for t in tokens]
    assert [draw(probs, float(edges[t] - probs[t] / 2)) for t in tokens] == tokens


def test_draw_at_the_very_end_is_the_last_token_with_mass() -> None:
    """Two ways to add up the same masses differ: many of these draws lie behind the last of them."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        probs = np.append(rng.uniform(0.5, 1.0, 2900), np.zeros(100))
        assert draw(probs / probs.sum(), math.nextafter(1.0, 0.0)) == 2899
    assert draw(np.array([0.0, 0.5, 0.5]), 0.0) == 1
