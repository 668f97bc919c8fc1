"""Which prompts are worth a drafter's reading."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.drafting.experience import Experience, Outcome

TEMPLATE = list(range(24))
TRANSLATE, WRITE = [500, 501, 502, 503, 504, 505, 506, 507], [600, 601, 602, 603, 604, 605, 606, 607]


def _request(experience: Experience, instruction: list[int], text: int, gain: float, price: float) -> bool:
    """Whether the prompt was read; if so, what that gained."""
    prompt = TEMPLATE + instruction + [text] * 20
    read = experience.expected(prompt) > price
    if read:
        experience.add(prompt, gain)
    else:
        experience.skip(prompt)
    return read


def test_instructions_that_gain_nothing_are_not_read_and_others_are() -> None:
    experience = Experience()
    for text in range(6):
        _request(experience, TRANSLATE, 1000 + text, -0.02, 0.05)
        assert _request(experience, WRITE, 2000 + text, 0.2, 0.05)
    assert not _request(experience, TRANSLATE, 3000, -0.02, 0.05)
    assert _request(experience, [700, 701, 702, 703], 3001, 0.2, 0.05)


def test_what_is_not_read_is_tried_again() -> None:
    experience = Experience()
    while _request(experience, TRANSLATE, 1, -0.1, 0.05):
        pass
    rounds = next(n for n in range(1000) if _request(experience, TRANSLATE, 1, 0.3, 0.05))
    assert rounds > 5


def test_asking_changes_nothing() -> None:
    experience, told = Experience(), list[Outcome]()
    for text in range(5):
        _request(experience, TRANSLATE, text, -0.02, 0.05)
    asked = Experience(experience._records, tell=told.append)
    first = asked.expected(TEMPLATE + TRANSLATE)
    assert {asked.expected(TEMPLATE + TRANSLATE) for _ in range(100)} == {first}
    assert told == []
    asked.skip(TEMPLATE + TRANSLATE)
    assert asked.expected(TEMPLATE + TRANSLATE) > first and told == []


def test_each_beginning_is_weighed_against_what_shorter_ones_let_expect() -> None:
    experience, prompt = Experience(), [*TEMPLATE, *TRANSLATE]
    experience.add(prompt, 0.5)
    # Ten beginnings that say the same count as one request, beside a prior of 15 %.
    assert experience.expected(prompt) == pytest.approx((0.5 + 0.15) / 2)
    experience.add([*TEMPLATE, *WRITE], 0.1)
    shared = (0.9 * 0.5 + 0.1 + 0.15) / (1.9 + 1)
    assert experience.expected(TEMPLATE) == pytest.approx(shared)
    assert experience.expected(prompt) == pytest.approx((0.5 + 0.3 * shared) / (1 + 0.3))
    experience.skip(prompt)
    shared = (0.97 * (0.9 * 0.5 + 0.1) + 0.15) / (0.97 * 1.9 + 1)
    assert experience.expected(TEMPLATE) == pytest.approx(shared)


@pytest.mark.parametrize("length", [0, 3, 4, 7, 95, 96, 97, 300])
def test_a_prompt_begins_at_every_fourth_token_up_to_96(length: int) -> None:
    told = list[Outcome]()
    experience, prompt = Experience(tell=told.append), list(range(length))
    experience.add(prompt, 0.1)
    experience.add([*prompt, 9, 9, 9, 9], 0.2)
    first, longer = (outcome.beginnings for outcome in told)
    assert len(set(first)) == len(first) == 1 + min(length, 96) // 4
    assert len(longer) == 1 + min(length + 4, 96) // 4 and longer[: len(first)] == first
    assert {len(each) for each in longer} == {8}
    assert [outcome.share for outcome in told] == [0.1, 0.2]


def test_the_beginnings_seen_last_are_remembered() -> None:
    experience = Experience()
    experience.add([1] * 4, 0.9)
    experience.add([2] * 4, 0.9)
    for text in range(3, 4090):
        experience.add([text] * 4, 0.0)
    experience.add([1] * 4, 0.9)
    for text in range(5000, 5010):
        experience.add([text] * 4, 0.0)
    assert len(experience._records) == 4096
    assert experience.expected([1] * 4) > 0.5 > 0.1 > experience.expected([2] * 4)


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=60), st.floats(-1, 1)), max_size=30))
def test_expectations_stay_within_what_was_seen(requests: list[tuple[list[int], float]]) -> None:
    experience = Experience()
    for prompt, gain in requests:
        experience.add(prompt, gain)
        assert -1.01 < experience.expected(prompt) < 1.01
