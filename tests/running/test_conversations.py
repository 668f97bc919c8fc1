"""Conversations: what is said stays, KV caches are found again, and memory has a bound."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec import DoesNotFit, LoadOptions, RequestError
from edgespec.answering.results import Generation
from edgespec.asking.request import Request
from tests.kit.models import runner_of, toy_model, toy_session
from tests.kit.toy import KV_BYTES
from tests.running.test_threads import slow_session

NEW = 12
SYSTEM = "You answer in as few words as you can, and never in verse. " * 3


def ask_alone(messages: list[dict[str, Any]]) -> Generation:
    """What a model of its own answers."""
    with toy_model() as model:
        return model.chat(messages, max_new_tokens=NEW)


def question(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_conversation_remembers_and_alternating_ones_keep_their_caches() -> None:
    with toy_model() as model:
        talks = [model.conversation(f"You are number {n}. {SYSTEM}", max_new_tokens=NEW) for n in range(3)]
        for turn in range(3):
            for talk in talks:
                messages = [*talk.messages, question(f"Question {turn}")]
                answer = talk.ask(f"Question {turn}")
                assert answer.tokens == ask_alone(messages).tokens
                assert talk.messages == [*messages, {"role": "assistant", "content": answer.text}]
                if turn:  # all that was said, and its answer
                    read = answer.stats.prompt_tokens - answer.stats.cached_tokens
                    assert read < 30 < answer.stats.cached_tokens
        assert runner_of(model).caches.nbytes > 0
        answer = model.conversation(f"You are number 1. {SYSTEM}", max_new_tokens=NEW).ask("Another question")
        assert answer.stats.cached_tokens >= len(model.tokenize(SYSTEM))  # a new one shares a beginning


def test_the_drafter_keeps_caches_too() -> None:
    drafter, said, other = toy_session(1), [question(SYSTEM)], "Something else, which it does not read"
    with toy_model(drafter=drafter) as model:
        prompt = runner_of(model).prompt(said, Request())[1]
        assert isinstance(prompt, list)
        drafter.prefill(prompt)  # as after an answer that it drafted for
        read = len(drafter.passes)
        model.generate(other, max_new_tokens=1)
        drafter.rewind(0)
        model.chat(said, max_new_tokens=1)
        assert (drafter.cache, len(drafter.passes)) == (prompt, read)


def test_plain_chats_find_their_caches_until_the_model_forgets() -> None:
    with toy_model(drafter=toy_session()) as model:
        chats = [[{"role": "system", "content": name + SYSTEM}, question("Who?")] for name in ("Ann", "Bob")]
        for chat in chats * 2:
            stats = model.chat(chat, max_new_tokens=NEW).stats
        assert stats.cached_tokens == stats.prompt_tokens - 1
        model.forget()
        assert runner_of(model).caches.nbytes == runner_of(model).session.length == 0
        assert model.chat(chats[0], max_new_tokens=NEW).stats.cached_tokens == 0


def test_an_answer_that_ended_early_is_kept_as_far_as_it_came() -> None:
    with toy_model(slow_session()) as model:
        talk = model.conversation()
        with talk.stream("Tell me everything", max_new_tokens=4000) as stream:
            next(stream)
        said = {"role": "assistant", "content": stream.result.text}
        assert talk.messages == [question("Tell me everything"), said]
        talk.ask("Nothing", cancelled=lambda: True)
        assert len(talk.messages) == 2


def test_options_of_a_question_go_before_the_conversations() -> None:
    with toy_model() as model:
        talk = model.conversation(max_new_tokens=NEW, temperature=1.0, seed=1)
        assert len(talk.ask("Hello", max_new_tokens=3).tokens) == 3
        assert len(talk.ask("Hello").tokens) == NEW
        with pytest.raises(RequestError, match="top_p"):
            talk.ask("Hello", top_p=-1.0)
        with pytest.raises(RequestError, match="text is ''"):
            talk.ask("")
        with pytest.raises(RequestError, match="max_new_tokens"):
            model.conversation(max_new_tokens=-1)


def test_what_was_said_may_be_edited_and_outgrow_the_context() -> None:
    with toy_model(toy_session(context=300)) as model:
        talk = model.conversation("Be brief.", max_new_tokens=NEW)
        with pytest.raises(DoesNotFit, match="> 300 maximum, the model's context"):
            for n in range(100):
                talk.ask(f"Question {n}, in many words")
        said = len(talk.messages)
        del talk.messages[1:-2]
        talk.ask("And now?")
        assert said > 5 and len(talk.messages) == 5


@settings(max_examples=20, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 10)), max_size=9),
    budget=st.sampled_from([0, 40 * KV_BYTES, 150 * KV_BYTES, 1 << 20]),
    shared=st.booleans(),
)
def test_conversations_in_any_order_are_answered_as_if_alone(
    asked: list[tuple[int, int, int]], budget: int, shared: bool
) -> None:
    target, drafter = toy_session(), toy_session(1)
    with toy_model(target, drafter, options=LoadOptions(cache_bytes=budget)) as model:
        talks = [model.conversation("Be brief. " * 4 if shared else f"{n}" * 30) for n in range(3)]
        for who, length, new in asked:
            messages = [*talks[who].messages, question("why " * length + "?")]
            answer = talks[who].ask("why " * length + "?", max_new_tokens=new)
            with toy_model() as fresh:
                assert answer.tokens == fresh.chat(messages, max_new_tokens=new).tokens
            assert answer.stats.cached_tokens < answer.stats.prompt_tokens
            assert runner_of(model).caches.nbytes <= budget
