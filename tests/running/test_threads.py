"""Requests from many threads: in turn, within bounds, and each ended for its own reason."""

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from time import sleep
from typing import Any
from weakref import ref

import pytest

from edgespec import Closed, LoadOptions, Model, PromptProgress, RequestError, RequestOptions
from edgespec.answering.results import Generation, Record, nothing
from edgespec.asking.request import Request
from edgespec.running.ticket import Ticket
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows
from tests.kit.models import Gated, queue_of, runner_of, toy_bundle, toy_model, toy_session
from tests.kit.toy import F32, ToySession, settle, until

NEW = 24
PROMPTS = ("the quick brown fox", "jumps over", "a lazy dog, and so on")


def alone(prompt: str, new: int = NEW) -> Generation:
    """What a model of its own answers."""
    with toy_model() as model:
        return model.generate(prompt, max_new_tokens=new)


@contextmanager
def held(most_waiting: int = 64) -> Iterator[tuple[Gated, Model]]:
    """A model whose passes wait."""
    session = Gated()
    with toy_model(session, options=LoadOptions(max_waiting=most_waiting)) as model:
        try:
            yield session, model
        finally:
            session.open()


@contextmanager
def busy(most_waiting: int = 64) -> Iterator[tuple[Gated, Model, Future[Generation]]]:
    """The same at work on its first request, whose first pass waits; and that request."""
    with held(most_waiting) as (session, model), ThreadPoolExecutor(1) as pool:
        running = pool.submit(model.generate, PROMPTS[0], max_new_tokens=NEW)
        session.arrived.acquire()
        try:
            yield session, model, running
        finally:
            session.open()


def delayed(before: Callable[[], object]) -> ToySession:
    """A session that does something before every pass."""
    session = toy_session()
    forward = session.forward

    def forward_later(tokens: Sequence[int]) -> F32:
        before()
        return forward(tokens)

    session.forward = forward_later  # type: ignore[method-assign]
    return session


def slow_session() -> ToySession:
    """Slow enough for whoever is to end an answer in time."""
    return delayed(lambda: sleep(0.005))


def waiting(model: Model) -> int:
    return len(queue_of(model).waiting)


def test_threads_are_answered_in_the_order_in_which_they_asked() -> None:
    prompts = PROMPTS * 3
    expected, read = {prompt: alone(prompt).tokens for prompt in PROMPTS}, list[Sequence[int]]()

    class Logged(Gated):
        def pass_over(self, rows: Sequence[Rows]) -> list[Predictions]:
            said = super().pass_over(rows)
            read.append(list(self.cache))
            return said

    session = Logged()
    with toy_model(session) as model, ThreadPoolExecutor(len(prompts)) as pool:
        futures = []
        for count, prompt in enumerate(prompts):
            futures.append(pool.submit(model.generate, prompt, max_new_tokens=NEW))
            if count == 0:
                session.arrived.acquire()
            until(lambda count=count: waiting(model) == count)  # type: ignore[misc]
        session.open()
        results = [future.result(60) for future in futures]
        assert [result.tokens for result in results] == [expected[prompt] for prompt in prompts]
        whole = [model.tokenize(prompt) for prompt in prompts]
        assert [tokens for tokens in read if tokens in whole] == whole
        assert results[-1].stats.queued_s > 0.0


def test_a_close_ends_what_renders_a_slow_template() -> None:
    def bundle(name: str, context: int) -> Bundle:
        made = toy_bundle(name, context)
        loops = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
        made.chat_template = ChatTemplate("{% if messages|length > 2 %}" + loops + "{% endif %}")
        return made

    model = toy_model(bundle=bundle)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            model.chat, [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
        )
        sleep(0.3)
        model.close()
        with pytest.raises(Closed):
            future.result(1.0)


def test_what_a_close_ends_while_it_waits_ends_once() -> None:
    """Also where its reader, when told of the end, cancels it."""
    ended = list[Generation]()

    def told(result: Generation) -> None:
        ended.append(result)
        queue_of(model).withdraw(answer, "cancelled")

    with ThreadPoolExecutor(1) as pool, busy() as (session, model, running):
        answer = Ticket(Request(), lambda: pytest.fail("it never begins"), ended=told)
        queue_of(model).put(answer)
        closing = pool.submit(model.close)
        until(lambda: answer.result is not None)
        session.open()
        closing.result(60)
        assert running.result(60).finish_reason == "closed"
    assert [result.finish_reason for result in ended] == ["closed"]


LONG = "a prompt that is longer than what a pass of the toy reads"


@pytest.mark.parametrize("tasks", [False, True])
def test_progress_is_told_to_who_waits_and_is_no_text(tasks: bool) -> None:
    told = list[tuple[PromptProgress, threading.Thread]]()
    new: RequestOptions = {"max_new_tokens": NEW}
    asked: RequestOptions = {
        **new,
        "on_progress": lambda report: told.append((report, threading.current_thread())),
    }
    with toy_model() as model:
        total = model.count_tokens(LONG)
        first = asyncio.run(model.generate_async(LONG, **asked)) if tasks else model.generate(LONG, **asked)
        ends = [*range(0, total, 8), total]
        assert [report.read for report, _ in told] == ends and len(ends) > 3
        assert {(report.total, report.cached, where) for report, where in told} == {
            (total, 0, threading.current_thread())
        }
        assert sorted(report.seconds for report, _ in told) == [report.seconds for report, _ in told]
        told.clear()
        again = model.stream(LONG, **asked)  # its prompt lies in the cache
        assert "".join(again) == first.text and told == []
        model.forget()
        records = list(model.stream(LONG, **new).records())
        progress = records[: len(ends)]
        assert [record.progress.read for record in progress if record.progress] == ends
        assert not any(record.progress for record in records[len(ends) :])
        assert not any(record.text or record.tokens for record in progress)


@pytest.mark.parametrize("tasks", [False, True])
def test_what_is_raised_over_progress_ends_the_request(tasks: bool) -> None:
    def tell(progress: PromptProgress) -> None:
        if progress.read == 16:
            raise KeyboardInterrupt if not tasks else ValueError("enough")

    with held() as (session, model):
        session.let(3)  # it may read on while it is told
        with pytest.raises(ValueError if tasks else KeyboardInterrupt):
            if tasks:
                asyncio.run(model.generate_async(LONG, on_progress=tell))
            else:
                model.generate(LONG, on_progress=tell)
        session.open()
        settle()
        assert len(session.passes) <= 4
        assert model.generate(LONG, max_new_tokens=NEW).tokens == alone(LONG).tokens


def test_a_stream_that_nobody_holds_any_more_is_cancelled() -> None:
    with held() as (session, model):
        stream = model.stream(PROMPTS[0], max_new_tokens=NEW)
        stream.start()
        session.do(8)
        next(stream)
        before = len(session.passes)
        del stream
        gc.collect()
        session.open()
        settle()
        assert len(session.passes) == before + 1


def test_a_request_whose_time_is_up_ends_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    session = toy_session()
    monkeypatch.setattr("edgespec.running.ticket.monotonic", lambda: float(len(session.passes)))
    with toy_model(session) as model:
        result = model.generate(PROMPTS[0], max_new_tokens=NEW, timeout=10.0)
        assert result.finish_reason == "timeout" and len(session.passes) == 10
        assert result.tokens == alone(PROMPTS[0]).tokens[: len(result.tokens)] != ()
        late = model.generate(" and ".join(PROMPTS * 20), timeout=2.5)  # while the prompt is read
        assert (late.text, late.finish_reason) == ("", "timeout") and len(session.passes) == 13
        for none in (0, -1.0, float("nan")):
            with pytest.raises(RequestError, match="timeout"):
                model.stream(PROMPTS[0], timeout=none)


def test_a_request_whose_time_is_up_while_it_waits_has_no_text() -> None:
    with busy() as (session, model, running):
        result = model.generate(PROMPTS[1], timeout=0.01)
        assert (result.text, result.tokens, result.finish_reason) == ("", (), "timeout")
        stream = model.stream(PROMPTS[1], cancelled=lambda: True)
        assert list(stream.records()) == [Record("", (), "cancelled")]
        session.open()
        assert len(running.result(60).tokens) == NEW


def test_records_join_to_the_text_and_say_where_tokens_came_from() -> None:
    ticks = itertools.count()
    with toy_model(drafter=toy_session(), clock=lambda: 0.3 * next(ticks)) as model:  # whatever drafts pays
        stream = model.stream(PROMPTS[0], max_new_tokens=200)
        records = list(stream.records())
        result = stream.result
    assert "".join(record.text for record in records) == result.text
    assert tuple(token for record in records for token in record.tokens) == result.records
    assert tuple(token.id for token in result.records) == result.tokens
    assert [record.finish_reason for record in records] == [None] * (len(records) - 1) + ["length"]
    accepted = {name: source.accepted for name, source in result.stats.by_source.items() if source.accepted}
    assert accepted
    for name, count in accepted.items():
        assert sum(token.source == name for token in result.records) == count
    assert {token.source for token in result.records} == {"target", *accepted}


def test_what_is_told_of_the_end_may_fail() -> None:
    """A reader is told, and the result is there as far as it came."""
    ticket = Ticket(Request(), ended=lambda result: 1 // 0)  # type: ignore[arg-type]
    ticket.end(nothing("stop"))
    with pytest.raises(ZeroDivisionError):
        ticket.get()
    assert ticket.result == nothing("stop")


def test_caches_are_forgotten_between_requests() -> None:
    with toy_model() as model:

        def cancelled() -> bool:
            with pytest.raises(RequestError, match="from another thread"):
                model.forget()
            return False

        model.generate(PROMPTS[0], max_new_tokens=NEW, cancelled=cancelled)
        model.forget()
        assert runner_of(model).session.length == 0


def test_an_idle_model_has_no_thread_and_goes_when_nobody_holds_it() -> None:
    model = toy_model()
    model.generate(PROMPTS[0], max_new_tokens=NEW)
    settle()
    assert queue_of(model).thread is None
    gone, worker = ref(model), ref(queue_of(model))
    del model
    gc.collect()
    assert gone() is None and worker() is None


def test_a_program_may_end_while_an_answer_is_written() -> None:
    code = (
        "from tests.running.test_threads import *\n"
        "model = toy_model(slow_session())\n"
        "stream = model.stream('hello', max_new_tokens=4000)\n"
        "print(len(next(stream)))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_forked_while_an_answer_is_written_is_told_so() -> None:
    """The model's thread stays in the parent: whatever waits for it there would wait without end."""
    target = Gated()
    with toy_model(target) as model:
        stream = model.stream("a", max_new_tokens=8)
        stream.start()
        target.arrived.acquire()
        asks: list[Any] = [lambda: model.generate("b"), stream.run, stream.__exit__, lambda: stream.place]
        asks += [model.forget, model.trim, model.pause, model.resume]
        pid = os.fork()
        if not pid:
            told = 0
            try:
                signal.alarm(20)
                for ask in asks:
                    try:
                        ask()
                    except RequestError as error:
                        told += "this process was forked" in str(error)
                model.close()
            finally:
                os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(asks)
        target.open()
        assert len(stream.run().tokens) == 8
