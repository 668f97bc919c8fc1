"""The audit finds what it should find, and does not pass where nothing was tested."""

import json
import random
from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.asking.request import RequestOptions
from edgespec.measuring.audit import ALPHA, audit_answers, audit_sampling, first_difference, verdict
from edgespec.measuring.chi_square import ChiSquare, pool_rare, survival, two_samples
from edgespec.measuring.prompts import Prompt
from edgespec_models.errors import RequestError
from tests.kit.fake_model import FakeModel

PROMPTS = (Prompt("p1", "x", ("first",)), Prompt("p2", "y", ("second",)))


def audit(model: FakeModel, samples: int = 200) -> dict[str, Any]:
    subject = model.as_model()
    answers = audit_answers(subject, PROMPTS, max_new_tokens=6)
    sampling = audit_sampling(subject, samples=samples) if samples else None
    return verdict(subject, answers, sampling)


def test_a_lossless_model_passes() -> None:
    value = json.loads(json.dumps(audit(FakeModel()), allow_nan=False))
    assert value["passed"] is True and value["problems"] == [] and value["row_exact"] is True
    answers = {"prompts": 2, "identical": 2, "first_differences": [], "flip_rate": 0.0}
    assert value["answers"].items() >= answers.items() and value["answers"]["drafted"] > 0
    assert value["sampling"]["p_value"] > ALPHA and value["sampling"]["samples"] == 600
    assert value["sampling"]["degrees_of_freedom"] >= 3 * 8
    assert value["sampling"]["equal_seeds"] == {"pairs": 150, "identical": 150}


def test_a_greedy_difference_is_found_and_named() -> None:
    result = audit(FakeModel(flips=("second",)), samples=0)
    difference = {"prompt": "p2", "position": 2, "plain": len("second") + 2, "speculative": 0}
    assert result["answers"]["first_differences"] == [difference]
    assert result["answers"]["identical"] == 1
    assert result["answers"]["flip_rate"] == pytest.approx(1 / (6 + 3))
    assert result["problems"] == ["1 of 2 answers differ"]
    assert result["passed"] is False and result["sampling"] is None


def test_an_answer_that_ends_early_differs() -> None:
    shorter, longer = first_difference("p", (1, 2, 3), (1, 2)), first_difference("p", (1,), (1, 2))
    assert shorter == {"prompt": "p", "position": 2, "plain": 3, "speculative": None}
    assert longer == {"prompt": "p", "position": 1, "plain": None, "speculative": 2}


def test_another_law_of_sampled_tokens_is_found_by_both_tests() -> None:
    result = audit(FakeModel(biased=True))
    assert result["sampling"]["p_value"] < 1e-6
    seeds = result["sampling"]["equal_seeds"]
    assert seeds["identical"] < seeds["pairs"]
    assert len(result["problems"]) == 2


def test_an_audit_without_drafts_does_not_pass() -> None:
    problems = audit(FakeModel(drafts=False))["problems"]
    assert len(problems) == 2 and all("nothing was drafted" in problem for problem in problems)


def test_answers_and_samples_are_drawn_as_asked() -> None:
    model = FakeModel()
    asked: RequestOptions = {"temperature": 0.8, "top_p": 0.9}
    answers = audit_answers(model.as_model(), PROMPTS, sampling=asked)
    assert answers["identical"] == answers["prompts"] == 2
    seeds = [options["seed"] for _, options in model.calls]
    assert seeds == [1, 1, 2, 2]
    audit_sampling(model.as_model(), samples=1, sampling=asked)
    assert all((options["temperature"], options["top_p"]) == (0.8, 0.9) for _, options in model.calls)
    audit_sampling(model.as_model(), samples=1, sampling={"temperature": 0.0, "top_k": 40})
    assert (model.calls[-1][1]["temperature"], model.calls[-1][1]["top_k"]) == (1.0, 40)


def test_too_few_samples_are_said_and_do_not_pass() -> None:
    result = audit_sampling(FakeModel().as_model(), samples=2)
    assert result == audit_sampling(FakeModel().as_model(), samples=2)  # seeds make it so
    assert result["p_value"] is None
    assert "too few samples" in audit(FakeModel(), samples=2)["problems"][0]
    with pytest.raises(RequestError, match="samples is 0"):
        audit_sampling(FakeModel().as_model(), samples=0)


def test_the_first_token_is_not_counted() -> None:
    # With one position left to compare, three tokens make three bins: two degrees a text.
    model = FakeModel(new_tokens=2)
    assert audit_sampling(model.as_model(), samples=100)["degrees_of_freedom"] == 3 * 2


def test_survival_agrees_with_tables() -> None:
    table = {(3.841459, 1): 0.05, (10.827566, 1): 0.001, (18.307038, 10): 0.05, (3.940299, 10): 0.95}
    table |= {(124.342113, 100): 0.05, (77.929465, 100): 0.95, (5.991465, 2): 0.05, (7.814728, 3): 0.05}
    for (x, degrees), p in table.items():
        assert survival(x, degrees) == pytest.approx(p, abs=1e-7)


@given(st.integers(1, 2000), st.floats(0, 5000))
def test_survival_is_a_falling_probability(degrees: int, x: float) -> None:
    assert 0.0 <= survival(x + 1.0, degrees) <= survival(x, degrees) + 1e-12 <= 1.0 + 1e-12  # rounding


def test_the_statistic_for_a_table_worked_by_hand() -> None:
    # A 2 x 2 table: N (ad - bc)^2 over the product of the sums of rows and columns.
    comparison = two_samples({"a": 30, "b": 10}, {"a": 20, "b": 20})
    assert comparison.statistic == pytest.approx(80 * (30 * 20 - 10 * 20) ** 2 / (40 * 40 * 50 * 30))
    assert comparison.degrees == 1
    assert two_samples({"a": 30}, {"a": 20}) == ChiSquare(0.0, 0)
    assert two_samples({}, {"a": 20, "b": 3}) == ChiSquare(0.0, 0)
    assert comparison + comparison == ChiSquare(2 * comparison.statistic, 2)


OUTCOMES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=200)


@given(OUTCOMES, OUTCOMES, st.integers(1, 40))
def test_pooling_loses_nothing_and_leaves_no_rare_bin(
    first: list[tuple[Hashable, ...]], second: list[tuple[Hashable, ...]], minimum: int
) -> None:
    a, b = pool_rare(first, second, minimum=minimum)
    assert (a.total(), b.total()) == (len(first), len(second))
    joint = a + b
    assert len(joint) <= 1 or min(joint.values()) >= minimum


def test_pooling_keeps_the_beginning_rare_outcomes_share() -> None:
    counts = {("a", 1): 8, ("a", 2): 3, ("a", 3): 3, ("b", 1): 8}
    outcomes = [outcome for outcome, count in counts.items() for _ in range(count)]
    assert pool_rare(outcomes, [], minimum=5)[0] == Counter({("a", 1): 8, ("a",): 6, ("b", 1): 8})


def test_p_values_under_one_law_are_spread_evenly() -> None:
    draws = random.Random(7)
    values = []
    for _ in range(400):
        samples = [[tuple(draws.choices("abc", (5, 2, 1), k=2)) for _ in range(100)] for _ in range(2)]
        p_value = two_samples(*pool_rare(samples[0], samples[1], minimum=10)).p_value
        assert p_value is not None
        values.append(p_value)
    for level in (0.1, 0.25, 0.5, 0.75):
        assert sum(value < level for value in values) / len(values) == pytest.approx(level, abs=0.07)
