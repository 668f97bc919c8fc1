"""Heads as drafters, over toys that check each row: which token, beside which features or which state."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec import LoadOptions, Model
from edgespec.drafting.heads import HeadReader
from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows
from tests.kit.drafters import read, step
from tests.kit.models import VOCAB, printable, toy_bundle, toy_model
from tests.kit.toy import F32, NextLogits, ToySession, markov_logits

LAW = printable(markov_logits(0, VOCAB, scale=4.0))
PROMPTS = ["the quick brown fox", "x", "a document of many words, " * 5]
KEPT = np.arange(10, VOCAB, dtype=np.int32)
ROUNDS = st.tuples(st.integers(1, 9), st.integers(0, 6), st.integers(0, 3))
CURVE = CostCurve({1: 0.1, 32: 0.2})


def _features(tokens: Sequence[int], start: int) -> F32:
    return np.array([(token, start + at) for at, token in enumerate(tokens)], np.float32)


class _Target(ToySession):
    """Its features of a token are which one it is, and where."""

    def __init__(self, law: NextLogits, vocab: int, **options: Any) -> None:
        super().__init__(law, vocab, **options)
        self.model.kind = type(self)

    def pass_over(self, rows: Sequence[Rows]) -> list[Predictions]:
        starts = [row.session.length for row in rows]
        predictions = super().pass_over(rows)
        for one, each, start in zip(predictions, rows, starts, strict=True):
            one.hidden = _features(each.tokens, start)
        return predictions


class _Head(_Target):
    """It knows the text behind the first features that it read, and writes what the target's law says.

    Its state is how often it has written one. The first ten tokens are not in its vocabulary.
    """

    def __init__(self, law: NextLogits, vocab: int, **options: Any) -> None:
        super().__init__(law, vocab, **options)
        self.model.head_tokens = KEPT
        self.hidden: list[F32] = []
        self.states = 0

    def pass_over(self, rows: Sequence[Rows]) -> list[Predictions]:
        return [cast(_Head, row.session).hear(row) for row in rows]

    def hear(self, rows: Rows) -> Predictions:
        hidden = rows.states if rows.features is None else rows.features
        assert hidden is not None and len(hidden) == len(rows.tokens) and rows.wanted == 1
        del self.hidden[self.length :]
        for token, one in zip(rows.tokens, hidden, strict=True):
            if len(one) == 2 and self.cache:
                assert len(self.hidden[-1]) == 2, "features behind a draft that should be gone"
                assert tuple(one) == (self.cache[-1], self.hidden[-1][1] + 1)
            elif len(one) == 1:
                assert one[0] == self.states, "another state than the last"
            self.hidden.append(one)
            self.forward([token])
        self.states += 1
        first, start = (int(row) for row in self.hidden[0])
        predictions = Predictions(self.model.next_logits([0] * start + [first, *self.cache])[None, KEPT])
        predictions.hidden = np.array([[self.states]], np.float32)
        return predictions


def _bundle(name: str, context: int) -> Bundle:
    bundle = toy_bundle(name, context)
    config = cast(Any, bundle.config)
    config.is_head = name == "small"
    return bundle


def _model(head: _Head | None, *, chunk: int = 8, parallel: int = 1) -> Model:
    target = _Target(LAW, VOCAB, chunk=chunk, several=parallel > 1)
    return toy_model(
        target,
        head,
        bundle=_bundle,
        options=LoadOptions(parallel=parallel),
        clock=lambda: len(target.passes) + 0.01 * sum(target.passes),
    )


@pytest.mark.parametrize("chunk", [2, 8, 128])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 3}, {"prompt_logprobs": True}])
def test_text_is_what_it_is_without_and_most_drafts_are_accepted(chunk: int, options: Any) -> None:
    head = _Head(LAW, VOCAB, chunk=chunk)
    with _model(None, chunk=chunk) as plain, _model(head, chunk=chunk) as model:
        for prompt in PROMPTS:
            answer = model.generate(prompt, max_new_tokens=40, **options)
            assert answer.tokens == plain.generate(prompt, max_new_tokens=40, **options).tokens
            found = answer.stats.by_source["model"]
            assert found.drafted > 8 and (found.accepted > 0.9 * found.drafted or "temperature" in options)


def test_requests_at_once_have_heads_that_read_their_own_text() -> None:
    """Their features come in one pass, and their heads' rows go into one."""
    with _model(None) as plain, _model(_Head(LAW, VOCAB, several=True), parallel=3) as model:
        streams = [model.stream(prompt, max_new_tokens=30) for prompt in PROMPTS]
        results = [stream.run() for stream in streams]
        assert [result.tokens for result in results] == [
            plain.generate(prompt, max_new_tokens=30).tokens for prompt in PROMPTS
        ]


@given(st.lists(ROUNDS, min_size=1, max_size=12), st.integers(20, 60))
def test_it_reads_what_is_unread_or_the_end_of_it(rounds: list[tuple[int, int, int]], capacity: int) -> None:
    """The toy raises where a row is not the next one; rounds without a draft leave features unread."""
    head = _Head(LAW, VOCAB, chunk=8, context=capacity)
    head.reserve(capacity)
    text = [5, 6, 7]
    reader = HeadReader(head, CURVE, 2)
    reader.add_features(_features(text[:-1], 0), 1)
    for committed, drafted, forced in rounds:
        if drafted:
            ahead = [*text, *range(20, 20 + forced)]
            assert reader.room_for(ahead, drafted)
            guess = read(reader, ahead)
            logits = LAW(ahead)[KEPT]
            assert guess.following == KEPT[logits.argmax()]
            for _ in range(drafted - 1):
                guess = step(reader, guess.following)
        new = [(7 * committed + at) % VOCAB for at in range(committed)]
        reader.add_features(_features([text[-1], *new[:-1]], len(text) - 1), committed)
        text += new


def test_a_cache_too_small_for_a_draft_drafts_nothing() -> None:
    head = _Head(LAW, VOCAB, chunk=8, context=9)
    head.reserve(9)
    reader = HeadReader(head, CURVE, 4)
    reader.add_features(_features([1, 2, 3, 4], 0), 1)
    assert reader.room_for([1, 2, 3, 4, 5], 5) and not reader.room_for([1, 2, 3, 4, 5], 6)
    assert reader.room_for([1, 2, 3, 4, 5, 6], 4) and not reader.room_for([1, 2, 3, 4, 5, 6], 5)  # one forced


def test_a_text_that_the_target_reads_anew_is_read_anew() -> None:
    """As where another request's cache found no memory, and all caches were lost."""
    head, text = _Head(LAW, VOCAB, chunk=64), [5, 6, 7, 8, 9]
    head.reserve(64)
    reader = HeadReader(head, CURVE, 2)
    reader.add_features(_features(text[:2], 0), 1)
    reader.add_features(_features(text[2:3], 2), 1)
    reader.add_features(_features(text[:4], 0), 1)
    guess = read(reader, text)
    assert guess.following == KEPT[LAW(text)[KEPT].argmax()] and head.cache == text[1:]
