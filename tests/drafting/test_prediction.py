"""Drafts from a predicted text: the place in it is followed, lost and found again; answers never change."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgespec
from edgespec import LoadOptions, RequestOptions
from edgespec.decoding.draft import Draft, Round
from edgespec.drafting.copies import CopyDrafter
from edgespec.drafting.prediction import PredictedText, PredictionFinder
from edgespec_models.errors import RequestError
from tests.kit.native import tiny_native
from tests.kit.toy import LLAMA

PROMPT = [300, 301]
TEXT = [*range(10, 40)]
TOKENS = st.lists(st.integers(0, 5), max_size=40)


def drafter_of(text: Sequence[int], stop_below: float = 0.0) -> CopyDrafter:
    finder = PredictionFinder(PredictedText(text), len(PROMPT))
    return CopyDrafter(finder, stop_below=stop_below)


def proposed(text: Sequence[int], answer: Sequence[int], limit: int = 4) -> tuple[int, ...]:
    drafter = drafter_of(text)
    draft = drafter.propose([*PROMPT, *answer], limit)
    assert set(draft.sources) <= {"prediction"}
    return draft.tokens


def test_the_text_is_followed_from_its_beginning_to_its_end() -> None:
    for at in (0, 1, 7, 29):
        assert proposed(TEXT, TEXT[:at]) == tuple(TEXT[at : at + 4])
    assert proposed(TEXT, TEXT) == ()


@pytest.mark.parametrize(
    ("answer", "following"),
    [
        ([10, 11, 99], 13),  # replaced
        ([10, 11, 98, 99], 14),
        ([10, 11, 99, 13], 14),
        ([10, 11, 20, 21], 22),  # some tokens are left out
        ([10, 11, 95, 96, 97, 98, 99, 12, 13], 14),  # some stand between
        ([10, 11, 12, 10, 11], 12),  # back
    ],
)
def test_the_place_is_found_again_behind_an_edit(answer: list[int], following: int) -> None:
    assert proposed(TEXT, answer)[0] == following


def test_of_equal_lines_the_nearest_is_taken() -> None:
    line = [1, 2, 3]
    text = [*line, 11, *line, 12, *line, 13, *line, 14]
    assert proposed(text, [*line, 11, *line, 99, *line])[0] == 13


def test_a_place_that_is_lost_for_long_proposes_nothing() -> None:
    assert proposed(TEXT, [10, 11, 95, 96, 97, 98]) == ()


@given(TOKENS, TOKENS, st.integers(1, 40))
def test_proposals_are_a_function_of_the_tokens_and_stand_in_the_text(
    text: list[int], answer: list[int], limit: int
) -> None:
    tokens = [*PROMPT, *answer]
    drafter = drafter_of(text)
    whole = drafter.propose(tokens, limit)
    assert whole == drafter.propose(tokens, limit)
    assert len(whole.tokens) <= limit and set(whole.tokens) <= set(text)
    in_steps = drafter_of(text)
    for end in range(len(PROMPT), len(tokens)):
        in_steps.propose(tokens[:end], limit)
    assert in_steps.propose(tokens, limit).tokens == whole.tokens


def test_what_extends_a_draft_depends_on_no_earlier_call() -> None:
    tokens, before = [*PROMPT, *TEXT[:5], 99], Draft((16, 17), ("other",) * 2, (0.9,) * 2)
    for earlier in (0, 1, 8):
        drafter = drafter_of(TEXT)
        drafter.propose(tokens, earlier)
        assert drafter.extend(tokens, before, 5).tokens == (16, 17, 18, 19, 20)
        assert drafter.extend(tokens, Draft((99,), ("other",), (0.9,)), 5).tokens == (99,)


def test_wrong_proposals_are_soon_trusted_less() -> None:
    drafter = drafter_of([5] * 400, stop_below=0.15)
    lengths = []
    for wrong in range(30):
        lengths.append(len(drafter.propose([*PROMPT, *[9, 5] * wrong], 8).tokens))
        drafter.observe(Round((9,)))
        drafter.propose([*PROMPT, *[9, 5] * wrong, 9], 8)
        drafter.observe(Round((5,)))
    assert lengths[-1] < lengths[1]


def test_answers_are_the_same_with_any_prediction_and_come_in_fewer_passes(tmp_path: Path) -> None:
    path = tiny_native(tmp_path / "target", LLAMA, "Q4_1").path
    options: RequestOptions = {"max_new_tokens": 60, "stop_at_eos": False}
    plainly: RequestOptions = {**options, "speculate": False}
    with edgespec.load(path, "ngram", options=LoadOptions(threads=1)) as model:
        plain = model.generate(PROMPT, **plainly)
        for prediction in (plain.text, plain.text[20:], "nothing of the kind", ""):
            predicted: RequestOptions = {**options, "prediction": prediction}
            answer = model.generate(PROMPT, **predicted)
            assert answer.tokens == plain.tokens
            assert ("prediction" in answer.stats.by_source) <= bool(prediction)
        wrong: RequestOptions = {"prediction": 3}  # type: ignore[typeddict-item]
        with pytest.raises(RequestError, match="prediction is 3"):
            model.generate(PROMPT, **wrong)
