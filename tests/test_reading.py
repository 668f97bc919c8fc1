"""A drafter's reader: what it says is what the model says behind that text, and nothing is read twice."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafting.reading import Reader
from edgespec_runtimes.cost import CostCurve
from tests.toy import ToySession, markov_logits

VOCAB = 30
NEXT_LOGITS = markov_logits(3, VOCAB)
CURVE = CostCurve({1: 1.0, 2: 2.0})


def _session() -> ToySession:
    session = ToySession(NEXT_LOGITS, VOCAB)
    session.reserve(200)
    return session


def _row(tokens: Sequence[int]) -> int:
    return int(NEXT_LOGITS(tokens).argmax())


def test_drafted_tokens_that_were_committed_are_not_read_again() -> None:
    session = _session()
    reader = Reader(session, CURVE)
    text = [1, 2, 3]
    said = reader.read(text)
    for _ in range(3):
        text.append(said.following)
        said = reader.step(said.following)
    assert session.passes == [3, 1, 1, 1]
    assert reader.seconds_of_text(text[:5]) == 0.0
    assert reader.read(text[:5]).following == text[5]
    assert reader.seconds_of_step(text[5]) == 0.0
    assert reader.step(text[5]) == said
    assert session.passes == [3, 1, 1, 1]
    other = (text[5] + 1) % VOCAB
    assert reader.seconds_of_text([*text[:5], other]) == pytest.approx(2.0, abs=0.3)
    assert reader.read([*text[:5], other]).following == _row([*text[:5], other])
    assert session.passes == [3, 1, 1, 1, 1]


def test_what_was_read_ahead_is_counted_when_it_is_needed() -> None:
    session = _session()
    reader = Reader(session, CURVE)
    text = [1, 2, 3]
    said = reader.read(text)
    for _ in range(4):
        text.append(said.following)
        said = reader.read_on(said.following)
    assert (reader.drafted_ahead, reader.used_ahead) == (4, 0)
    assert reader.read(text[:5]).following == text[5]
    assert (reader.drafted_ahead, reader.used_ahead) == (4, 2)
    assert reader.ahead(0) is not None and reader.ahead(2) is None
    assert reader.step(text[5]).following == text[6]
    assert (reader.drafted_ahead, reader.used_ahead) == (4, 3)
    reader.read([*text[:6], (text[6] + 1) % VOCAB])
    assert (reader.drafted_ahead, reader.used_ahead) == (4, 3)
    assert session.passes == [3, 1, 1, 1, 1, 1]


def test_only_passes_count_as_time_and_the_prompt_s_does_not() -> None:
    session = _session()
    reader = Reader(session, CURVE)
    assert reader.spent_s is None
    said = reader.read([1, 2, 3])
    assert reader.spent_s == 0.0
    reader.step(said.following)
    spent = reader.spent_s
    assert spent
    reader.read([1, 2, 3, said.following])
    assert reader.spent_s == spent
    assert reader.room_ahead and reader.room_for(session.capacity)
    reader.read([1] * session.capacity)
    assert not reader.room_ahead and not reader.room_for(session.capacity + 1)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.booleans()),
            st.tuples(st.just("ahead"), st.booleans()),
            st.tuples(st.just("read"), st.integers(-6, 3), st.integers(0, VOCAB - 1)),
        ),
        max_size=40,
    )
)
def test_whatever_is_asked_in_whatever_order_the_answer_is_the_model_s(
    asked: list[tuple[str, bool] | tuple[str, int, int]],
) -> None:
    session = _session()
    reader = Reader(session, CURVE)
    text = [1, 2, 3]
    reader.read(text)
    for what, value, *rest in asked:
        if what == "read":
            # Shorter than before, or longer by what was guessed, and one token of anybody's.
            text = [*session.cache[: max(1, len(text) + value)], *rest]
            assert reader.read(text).following == _row(text)
        elif what == "step":
            token = reader.latest.following if value else (reader.latest.following + 1) % VOCAB
            text.append(token)
            assert reader.step(token).following == _row(text)
        elif reader.room_ahead:
            token = _row(session.cache)
            said = reader.read_on(token)
            assert said.token == token and said.following == _row(session.cache)
        assert session.cache[: len(text)] == text
        assert reader.latest.following == _row(text)
