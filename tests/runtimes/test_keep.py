"""What stays of a pass and where a sequence goes on, of models with keys and values and of others."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafting.source import Source
from edgespec.running.verifier import Verifier
from edgespec_models.errors import RequestError
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Session
from tests.kit.drafters import GREEDY, model_of, plain
from tests.kit.models import VOCAB, printable, toy_model, toy_session
from tests.kit.native import tiny_native
from tests.kit.toy import F32, NextLogits, RandomDrafter, ToySession, decode, markov_logits

TOKENS = st.integers(0, VOCAB - 1)
LOGGED = 12
"""Rows behind a state that a layer remembers."""
STORED = 8
"""At every so many tokens a state is kept."""
NEXT = printable(markov_logits(0, VOCAB, scale=4.0))


class Recurrent(ToySession):
    """A model whose layers have a state: behind ``behind`` tokens, with a log of the rows since."""

    def __init__(self, next_logits: NextLogits = NEXT) -> None:
        super().__init__(next_logits, VOCAB)
        self.behind = 0

    def view(self, start: int, end: int) -> None:
        return None

    def forward(self, tokens: Sequence[int]) -> F32:
        logits = super().forward(tokens)
        self.behind = max(self.behind, self.length - LOGGED)
        return logits

    def keep(self, rows: int) -> None:
        super().keep(rows)
        assert self.length >= self.behind

    def rewind(self, length: int) -> int:
        if length < self.behind:
            length = self.behind = length // STORED * STORED
        return super().rewind(length)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return open_cpu(tiny_native(tmp_path_factory.mktemp("keep") / "m").bundle)


def test_a_number_of_rows_that_the_pass_has_not_is_refused(model: Session) -> None:
    model.predict([1, 2, 3])
    for rows in (-1, 4):
        with pytest.raises(RequestError, match="the last pass read 3"):
            model.keep(rows)
    model.keep(2)
    with pytest.raises(RequestError, match="the last pass read 2"):
        model.keep(3)
    with pytest.raises(RequestError, match="cannot rewind to 3: the cache holds 2"):
        model.rewind(3)
    assert model.rewind(2) == model.length == 2
    with pytest.raises(RequestError, match="the last pass read 0"):
        model.keep(1)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_sequences_are_lists_of_tokens(model: Session, data: st.DataObject) -> None:
    """Whatever is read, kept and gone back to, the next row is that of the tokens that stayed."""
    recurrent, text, fresh = Recurrent(), list[int](), 0
    model.rewind(0)
    for _ in range(data.draw(st.integers(1, 8))):
        step = data.draw(st.sampled_from(("read", "keep", "rewind")))
        if step == "read":
            read = data.draw(st.lists(TOKENS, min_size=1, max_size=LOGGED))
            text, fresh = [*text, *read], len(read)
            model.predict(read)
            recurrent.prefill(text[: -len(read)])  # again, where it had to go back further
            recurrent.predict(read)
        elif step == "keep":
            rows = data.draw(st.integers(0, fresh))
            text, fresh = text[: len(text) - fresh + rows], rows
            model.keep(rows)
            if recurrent.length == model.length + recurrent.stretch.fresh - rows:
                recurrent.keep(rows)
        else:
            length, fresh = data.draw(st.integers(0, len(text))), 0
            del text[length:]
            assert model.rewind(length) == length == model.length
            place = recurrent.rewind(min(length, recurrent.length))
            assert place == recurrent.length <= length
            assert place == length or (place % STORED == 0 and place > length - STORED - LOGGED)
        assert model.shared_prefix(text) == len(text) == model.length
        assert recurrent.cache == text[: recurrent.length]


def _drafter(session: ToySession, kind: str, seed: int) -> Source:
    if kind == "random":
        return RandomDrafter(seed, VOCAB, NEXT)
    return model_of(session)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 5),
    kind=st.sampled_from(("random", "model")),
    prompts=st.lists(st.lists(TOKENS, min_size=1, max_size=40), min_size=1, max_size=3),
    shared=st.lists(TOKENS, max_size=30),
)
def test_texts_and_drafts_are_the_same_with_states(
    seed: int, kind: str, prompts: list[list[int]], shared: list[int]
) -> None:
    """One text behind another, which begins alike: the models go on from where a state allows it."""
    target, small = Recurrent(), Recurrent()
    for prompt in prompts:
        drafter, tokens = _drafter(small, kind, seed), [*shared, *prompt]
        expected = plain(NEXT, 30, prompt=tokens)
        steps = list(decode(target, drafter, Verifier(GREEDY), tokens, max_new_tokens=30, max_draft=8))
        assert tokens == expected
        if kind == "model":  # of which nothing is refused, since it is the target's
            assert all(step.accepted == len(step.draft.tokens) for step in steps)


def test_conversations_go_on_with_states() -> None:
    with toy_model(Recurrent(), Recurrent()) as one, toy_model(toy_session(), toy_session()) as other:
        for prompt in ("A tale of two", "A tale of many", "A tale of many tokens, all alike", "A"):
            texts = [each.generate(prompt, max_new_tokens=40) for each in (one, other)]
            assert texts[0].text == texts[1].text
