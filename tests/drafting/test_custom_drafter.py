"""An app's own drafter: what it may propose, and that no proposal changes a text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgespec
from edgespec import Draft, Round
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.custom import Custom
from edgespec.running.verifier import Verifier
from edgespec_models.errors import RequestError
from tests.kit.drafters import draft_of, plain
from tests.kit.native import tiny_native
from tests.kit.toy import ToySession, decode, markov_logits

VOCAB = 30
NEXT = markov_logits(2, VOCAB)
PROMPT = [4, 5, 6]
LOAD = edgespec.LoadOptions(threads=1)


@dataclass
class Anything(edgespec.Drafter):
    """Proposes what it is told, in turn."""

    proposals: Sequence[Any]
    told: list[object] = field(default_factory=list)
    asked: int = 0

    def propose(self, tokens: Sequence[int], limit: int) -> Any:
        self.asked += 1
        return self.proposals[self.asked % len(self.proposals)]

    def observe(self, round_: Round) -> None:
        self.told.append(round_)

    def close(self) -> None:
        self.told.append("closed")


class Empty(Anything):
    """An app's, with a length of its own."""

    def __len__(self) -> int:
        return 0


proposals = st.lists(st.integers(0, VOCAB - 1), max_size=9)
drafts = st.builds(
    lambda tokens, sure: Draft(tuple(tokens), confidence=(sure,) * len(tokens)), proposals, st.floats(0, 1)
)


@settings(deadline=None)
@given(st.lists(proposals | drafts | proposals.map(np.array), min_size=1, max_size=5), st.booleans())
def test_no_proposal_changes_a_text(given: list[Any], sampled: bool) -> None:
    params, tokens = SamplingParams(temperature=1.0 * sampled, seed=3), PROMPT.copy()
    session, source = ToySession(NEXT, VOCAB), Custom(Anything(given), VOCAB)
    for round_ in decode(session, source, Verifier(params), tokens, max_new_tokens=20, max_draft=4):
        assert len(round_.draft.tokens) <= 4
        assert len(round_.draft.confidence) == len(round_.draft.sources) == len(round_.draft.tokens)
    assert tokens == plain(NEXT, 20, params, PROMPT)


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        ([30], r"Anything.propose returned \[0\] = 30; allowed: token ids, whole numbers from 0 to 29"),
        ([1, -1], r"returned \[1\] = -1"),
        ([1.0], r"returned \[0\] = 1.0"),
        ([True], r"returned \[0\] = True"),
        ("text", r"returned \[0\] = 't'"),
        (None, "returned None; allowed: a Draft, or a list of token ids"),
        (7, "returned 7; allowed: a Draft"),
        (Draft((99,)), r"returned \[0\] = 99"),
        (Draft((1, 2), confidence=(0.5,)), "the confidence .*for each of its 2 proposals"),
        (Draft((1,), confidence=(1.5,)), "the confidence "),
    ],
)
def test_what_is_no_proposal_is_an_error(proposal: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        draft_of(Custom(Anything([proposal]), VOCAB), PROMPT, 8)


def test_confidence_is_learned_from_what_is_accepted_and_the_drafter_told() -> None:
    own = Anything([[1, 2]])
    source = Custom(own, VOCAB)
    first = draft_of(source, PROMPT, 8).confidence
    for _ in range(30):
        draft_of(source, PROMPT, 8)
        source.observe(Round((1, 3), accepted=1))
    last = draft_of(source, PROMPT, 8).confidence
    assert first[0] == first[1] and last[0] == last[1]
    assert last[0] < first[0]
    for _ in range(90):
        draft_of(source, PROMPT, 8)
        source.observe(Round((1, 2, 3), accepted=2))
    assert draft_of(source, PROMPT, 8).confidence[0] > 0.9
    assert own.told == [Round((1, 3), accepted=1)] * 30 + [Round((1, 2, 3), accepted=2)] * 90


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_native(tmp_path_factory.mktemp("own") / "target").path


def test_a_model_drafts_with_it_from_load_or_for_a_request(bundle: Path) -> None:
    with edgespec.load(bundle, None, options=LOAD) as model:
        text = model.generate("def add", max_new_tokens=20).tokens
        own = Empty([list(text)])
        assert model.drafter_name is None
        drafted = model.generate("def add", max_new_tokens=20, drafter=own)
        assert drafted.tokens == text and drafted.stats.drafted > 0
        assert own.told[-1] == "closed" and isinstance(own.told[0], Round)
        assert model.generate("def add", max_new_tokens=20, drafter=own, speculate=False).stats.drafted == 0
    own = Empty([list(text)])
    with edgespec.load(bundle, own, options=LOAD) as model:
        assert model.drafter_name == "Empty"
        for _ in range(2):
            assert model.generate("def add", max_new_tokens=20).tokens == text
        assert own.told.count("closed") == 2 and own.asked > 0
        other = Anything([[7, 8]])
        assert model.generate("def add", max_new_tokens=20, drafter=other).tokens == text
        assert other.told[-1] == "closed" and own.told.count("closed") == 2


@pytest.mark.parametrize("wrong", [3, object(), ["ngram"]])
def test_what_is_no_drafter_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"drafter is .*; allowed: .*a Drafter"):
        edgespec.load("m", wrong)
