from collections.abc import Sequence

import numpy as np
import pytest

from edgespec.drafting.compose import Extended, FirstConfident, expected_accepted
from edgespec.drafting.draft import NO_DRAFT, Draft
from edgespec.drafting.ngram import NgramDrafter
from edgespec.sampling import SamplingParams
from edgespec.verification import SamplingVerifier, Verdict
from edgespec_models.errors import RequestError


class Fixed:
    """Proposes the same draft always, cut to the limit, and notes what it was asked."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.asked: list[tuple[list[int], int]] = []

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        self.asked.append((list(tokens), limit))
        draft = self._draft
        return Draft(
            draft.tokens[:limit],
            None if draft.probs is None else draft.probs[:limit],
            draft.sources[:limit],
            draft.confidence[:limit],
        )


def _draft(*tokens: int, confidence: float | None = None, source: str = "a") -> Draft:
    stated = () if confidence is None else (confidence,) * len(tokens)
    return Draft(tokens, sources=(source,) * len(tokens), confidence=stated)


def test_expected_accepted_sums_the_running_products() -> None:
    assert expected_accepted(Draft((1, 2, 3), confidence=(0.5, 0.5, 0.8))) == pytest.approx(0.5 + 0.25 + 0.2)
    assert expected_accepted(NO_DRAFT) == 0.0
    assert expected_accepted(_draft(1, 2)) == 0.0


@pytest.mark.parametrize(("confidence", "chosen"), [(0.9, 0), (0.5, 1), (None, 1)])
def test_the_first_drafter_that_promises_enough_is_taken(confidence: float | None, chosen: int) -> None:
    cheap, model = Fixed(_draft(1, 2, confidence=confidence)), Fixed(_draft(3, source="b"))
    draft = FirstConfident([cheap, model], min_expected=1.0).propose([7], 4)
    assert draft.tokens == [(1, 2), (3,)][chosen]
    assert cheap.asked == [([7], 4)]
    assert len(model.asked) == chosen


def test_an_empty_draft_is_never_preferred() -> None:
    drafters = [Fixed(NO_DRAFT), Fixed(_draft(3))]
    assert FirstConfident(drafters, min_expected=0.0).propose([7], 4).tokens == (3,)


def test_a_sampled_draft_is_never_set_aside_for_its_tokens() -> None:
    sampled = Draft((1,), probs=np.array([[0.5, 0.5]]), sources=("a",), confidence=(0.1,))
    assert FirstConfident([Fixed(sampled), Fixed(_draft(3))], min_expected=2.0).propose([7], 4).tokens == (1,)


def test_the_last_drafter_has_the_last_word() -> None:
    drafters = [Fixed(_draft(1, confidence=0.2)), Fixed(NO_DRAFT)]
    assert FirstConfident(drafters, min_expected=0.5).propose([7], 4) == NO_DRAFT
    assert FirstConfident([Fixed(_draft(5))], min_expected=9.0).propose([7], 4).tokens == (5,)


def test_arguments_out_of_range_are_named() -> None:
    with pytest.raises(RequestError, match="drafters is empty"):
        FirstConfident([], min_expected=1.0)
    with pytest.raises(RequestError, match="min_expected is -1"):
        FirstConfident([Fixed(NO_DRAFT)], min_expected=-1)
    with pytest.raises(RequestError, match="min_expected is nan"):
        FirstConfident([Fixed(NO_DRAFT)], min_expected=float("nan"))


def test_a_draft_is_continued_up_to_the_limit() -> None:
    first, then = (
        Fixed(_draft(1, 2, confidence=0.9)),
        Fixed(_draft(3, 4, 5, confidence=0.4, source="b")),
    )
    draft = Extended(first, then).propose([7], 4)
    assert draft == Draft((1, 2, 3, 4), None, ("a", "a", "b", "b"), (0.9, 0.9, 0.4, 0.4))
    assert then.asked == [([7, 1, 2], 2)]


def test_a_full_draft_is_left_alone() -> None:
    then = Fixed(_draft(3))
    assert Extended(Fixed(_draft(1, 2)), then).propose([7], 2).tokens == (1, 2)
    assert then.asked == []


def test_either_part_may_be_missing() -> None:
    assert Extended(Fixed(NO_DRAFT), Fixed(_draft(3))).propose([7], 2).tokens == (3,)
    assert Extended(Fixed(_draft(1)), Fixed(NO_DRAFT)).propose([7], 2).tokens == (1,)
    assert Extended(Fixed(NO_DRAFT), Fixed(NO_DRAFT)).propose([7], 2) == NO_DRAFT


def test_confidence_is_only_stated_for_a_whole_draft() -> None:
    draft = Extended(Fixed(_draft(1)), Fixed(_draft(3, confidence=0.5))).propose([7], 2)
    assert draft.confidence == ()


def test_copied_tokens_in_a_sampled_draft_have_all_the_mass() -> None:
    sampled = Draft((1,), probs=np.array([[0.5, 0.5, 0.0]]), sources=("a",))
    for draft in (
        Extended(Fixed(sampled), Fixed(_draft(2))).propose([0], 2),
        Extended(Fixed(_draft(2)), Fixed(sampled)).propose([0], 2),
    ):
        assert draft.probs is not None
        assert draft.probs[draft.tokens.index(1)].tolist() == [0.5, 0.5, 0.0]
        assert draft.probs[draft.tokens.index(2)].tolist() == [0.0, 0.0, 1.0]
        logits = np.full((3, 3), -50.0, dtype=np.float32)
        logits[[0, 1, 2], [*draft.tokens, 0]] = 0.0
        verdict = SamplingVerifier(SamplingParams(temperature=1.0), 0)(logits, draft, [0])
        assert verdict == Verdict(2, 0)


def test_ngrams_continue_another_draft_and_step_back_from_rejected_tokens() -> None:
    text = [1, 2, 3, 4, 5, 6, 9]
    ngrams = NgramDrafter(stop_below=0.0)
    extended = Extended(Fixed(_draft(1, 2)), ngrams)
    assert extended.propose(text, 5).tokens == (1, 2, 3, 4, 5)
    # The target said 3 instead of 1: nothing of the rejected draft may be left in the n-grams.
    assert ngrams.propose([*text, 3], 2).tokens == NgramDrafter(stop_below=0.0).propose([*text, 3], 2).tokens
