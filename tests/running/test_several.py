"""Several requests at once: each is answered as if it were alone, whoever comes, fails and goes beside it."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec import Model
from edgespec.running.stream import Stream
from edgespec.running.ticket import Stage
from tests.kit.models import queue_of, runner_of
from tests.kit.several import (
    LONG,
    PROMPTS,
    Driven,
    alone,
    driving,
    facts,
    queued,
    reads,
    session,
    several,
)
from tests.kit.toy import KV_BYTES, settle


def test_rounds_share_passes_and_prompts_are_read_between_in_pieces() -> None:
    """Those that run take a round in every pass, whatever is read meanwhile."""
    with driving(chunk=64) as (driven, target):
        running = [queued(driven, prompt, max_new_tokens=60, speculate=False) for prompt in PROMPTS[:2]]
        for _ in range(3):
            driven.turn()
        question, before = queued(driven, LONG * 3, max_new_tokens=4), len(target.passes)
        written = [sum(len(record.tokens) for record in taken(stream)) for stream in running]
        assert written == [3, 2]
        while reads(question):
            driven.turn()
            assert [sum(len(record.tokens) for record in taken(stream)) for stream in running] == [1, 1]
        pieces = target.passes[before:]
        most = runner_of(driven.model).pricing.at()
        assert len(pieces) > 5
        assert all(most.pass_seconds(rows) <= 3 * most.pass_seconds(2) for rows in pieces[1:])
        driven.run()
        for stream, prompt in zip(running, PROMPTS, strict=False):
            assert facts(stream.result) == facts(alone(prompt, max_new_tokens=60))


@pytest.mark.parametrize("one_text", [False, True])
def test_a_drafter_drafts_for_all_that_run_or_for_the_one_that_it_can_read(one_text: bool) -> None:
    with driving(drafter=session(several=not one_text)) as (driven, target):
        streams = [queued(driven, prompt, max_new_tokens=40) for prompt in PROMPTS[:3]]
        driven.run()
        right = [stream.result.stats.by_source for stream in streams]
        drafted = ["model" in sources and sources["model"].accepted > 0 for sources in right]
        assert drafted == [True, not one_text, not one_text]
        assert len(target.passes) < 60
        for prompt, stream in zip(PROMPTS, streams, strict=False):
            assert facts(stream.result) == facts(alone(prompt, max_new_tokens=40))


def test_a_short_prompt_is_read_between_pieces_of_a_long_one() -> None:
    """However long that is: the long one is held up by as many rows as the short one takes."""
    with driving(chunk=16) as (driven, target):
        long = queued(driven, LONG * 4, max_new_tokens=4, speculate=False)
        for _ in range(3):
            driven.turn()
        short, before = queued(driven, "hi there", max_new_tokens=4, speculate=False), len(target.passes)
        while reads(short):
            driven.turn()
        assert len(target.passes) - before <= 1 and reads(long)
        driven.run()
        assert short.result.stats.queued_s < 1
        assert facts(long.result) == facts(alone(LONG * 4, max_new_tokens=4))
        assert facts(short.result) == facts(alone("hi there", max_new_tokens=4))
        assert max(target.passes) <= 16 + 1  # of which one is a round's


def test_a_short_prompt_does_not_wait_for_the_answers_to_one_long_prompt() -> None:
    with driving(chunk=16) as (driven, _):
        several = [queued(driven, LONG * 4, max_new_tokens=2) for _ in range(3)]
        short = queued(driven, "hi there", max_new_tokens=2)
        driven.turn()
        assert not reads(short) and all(map(reads, several))
        driven.run()


def test_a_question_of_a_conversation_does_not_wait_for_a_prompt_either() -> None:
    with driving(chunk=16) as (driven, target):
        queued(driven, LONG * 4, max_new_tokens=4)
        driven.turn()
        question, before = (
            driven.queue(driven.model.conversation().stream("hi", max_new_tokens=2)),
            len(target.passes),
        )
        while reads(question):
            driven.turn()
        assert len(target.passes) - before <= 6
        driven.run()


def test_a_long_prompt_ends_however_many_short_ones_come() -> None:
    """A quarter of the rows is for the prompt that came first."""
    with driving(chunk=16) as (driven, target):
        long = queued(driven, LONG * 2, max_new_tokens=2, speculate=False)
        count = 0
        while reads(long):
            driven.turn()
            if sum(map(bool, queue_of(driven.model).waiting)) < 2:
                count += 1
                queued(driven, f"{count} " * 20, max_new_tokens=0, speculate=False)
        assert len(target.passes) <= 2 + len(LONG * 2) // 4
        driven.run()
        assert facts(long.result) == facts(alone(LONG * 2, max_new_tokens=2))


def test_what_another_reads_is_not_read_twice() -> None:
    """A short question behind a beginning that is being read waits for that, and takes it over."""
    with driving(chunk=16) as (driven, target):
        first = queued(driven, LONG * 2 + "and then a question of many words " * 4, max_new_tokens=2)
        driven.turn()
        second = queued(driven, LONG * 2 + "why?", max_new_tokens=2)
        driven.run()
        read = [
            stream.result.stats.prompt_tokens - stream.result.stats.cached_tokens
            for stream in (first, second)
        ]
        assert read[1] < 8 and sum(target.passes) < read[0] + read[1] + 20
        scored = [queued(driven, LONG, max_new_tokens=0, prompt_logprobs=True) for _ in range(2)]
        driven.turn()
        driven.turn()
        assert all(stream._ticket.answer for stream in scored)
        driven.run()
        held = [queued(driven, text, max_new_tokens=2) for text in (LONG * 3, LONG * 3)]
        driven.turn()
        driven.turn()
        assert held[1]._ticket.stage is Stage.RUNNING and held[1]._ticket.answer is None
        held[1].cancel()
        driven.turn()
        assert held[1].result.finish_reason == "cancelled"


def taken(stream: Stream) -> list[Any]:
    records = []
    while stream._ticket._records:
        records.append(stream._ticket.get())
    return records


def test_answers_of_one_prompt_share_its_reading() -> None:
    with driving() as (driven, target):
        options: Any = {"max_new_tokens": 2, "temperature": 1.0, "speculate": False}
        first = queued(driven, LONG, seed=1, **options)
        others = [queued(driven, LONG, seed=seed, **options) for seed in (2, 3)]
        driven.run()
        length = first.result.stats.prompt_tokens
        assert [other.result.stats.cached_tokens for other in others] == [length - 1] * 2
        assert sum(target.passes) == length + 1 + 2 * (1 + 1)
        for seed, stream in enumerate([first, *others], start=1):
            assert facts(stream.result) == facts(alone(LONG, max_new_tokens=2, temperature=1.0, seed=seed))


def test_answers_that_run_at_once_all_teach_a_history(tmp_path: Path) -> None:
    model, _ = several()
    model.use_history(tmp_path / "h")
    driven = Driven(model)
    for _ in range(2):
        streams = [queued(driven, prompt, max_new_tokens=60) for prompt in PROMPTS]
        driven.run()
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            assert facts(stream.result) == facts(alone(prompt, max_new_tokens=60))
    assert sum(stream.result.stats.by_source["history"].accepted for stream in streams) > 0
    driven.close()


# ---- Threads -----------------------------------------------------------------------------------------------


def all_at_once(model: Model, pool: ThreadPoolExecutor, new: int) -> list[Any]:
    streams = [model.stream(prompt, max_new_tokens=new) for prompt in PROMPTS]
    for stream in streams:  # before anybody closes the model
        stream.start()
    return [pool.submit(stream.run) for stream in streams]


def test_what_pauses_waits_for_all_that_run(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        model, _ = several(3)
        with model:
            for pause in (model.forget, partial(model.use_history, tmp_path / "h")):
                answers = all_at_once(model, pool, 40)
                pause()
                for prompt, answer in zip(PROMPTS, answers, strict=True):
                    assert facts(answer.result(60)) == facts(alone(prompt, max_new_tokens=40))
            settle()
            model.forget()
            assert all(session.length == 0 for session in runner_of(model)._sessions)


def test_an_answer_without_a_limit_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV cache grows as it is written, so nobody waits for room that few answers need."""
    available = 2 * 1100 * KV_BYTES  # half of it may be taken
    monkeypatch.setattr(
        "edgespec.running.runner.machine_memory", lambda: SimpleNamespace(available=available)
    )
    with driving() as (driven, _):
        streams = [queued(driven, prompt, max_new_tokens=2000) for prompt in PROMPTS[1:3]]
        driven.turn()
        assert sum(driven.taken) == 2
        for stream in streams:
            stream.cancel()
