"""Requests from an event loop: the same answers, and a task that is cancelled ends its request."""

import asyncio
import gc

import pytest

from edgespec import Closed, RequestError
from edgespec.answering.results import Record
from tests.kit.models import queue_of, toy_model, toy_session
from tests.kit.toy import F32, settle
from tests.running.test_threads import NEW, PROMPTS, alone, busy, held, slow_session


def test_async_for_gives_the_text_and_the_records() -> None:
    async def main() -> None:
        pieces = [piece async for piece in model.stream(PROMPTS[0], max_new_tokens=NEW)]
        assert "".join(pieces) == whole.text and len(pieces) > 1
        stream = model.stream_chat([{"role": "user", "content": PROMPTS[0]}], max_new_tokens=NEW)
        records: list[Record] = [record async for record in stream.records()]
        assert "".join(record.text for record in records) == stream.result.text
        assert records[-1].finish_reason == "length"
        assert await stream.run_async() is stream.result
        chat = [{"role": "user", "content": "hi"}]
        answers = await asyncio.gather(
            model.chat_async(chat, max_new_tokens=9), model.conversation().ask_async("hi", max_new_tokens=9)
        )
        assert answers[0].tokens == answers[1].tokens

    whole = alone(PROMPTS[0])
    with toy_model() as model:
        asyncio.run(main())


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_cancelling_the_task_ends_the_answer_within_a_pass(way: str) -> None:
    async def ask() -> None:
        if way == "generate":
            await model.generate_async(PROMPTS[0], max_new_tokens=NEW)
        else:
            async for _ in model.stream(PROMPTS[0], max_new_tokens=NEW):
                pass

    async def main() -> None:
        task = asyncio.create_task(ask())
        await asyncio.to_thread(session.do, 8)
        before = len(session.passes)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        session.open()
        settle()
        assert len(session.passes) == before + 1
        answer = await model.generate_async(PROMPTS[0], max_new_tokens=NEW)
        assert answer.tokens == alone(PROMPTS[0]).tokens

    with held() as (session, model):
        asyncio.run(main())


def test_a_task_that_waits_for_its_turn_can_be_cancelled_and_be_too_late() -> None:
    async def main() -> None:
        waiting = asyncio.create_task(model.generate_async(PROMPTS[1]))
        late = await model.generate_async(PROMPTS[1], timeout=0.01)
        assert (late.finish_reason, late.tokens) == ("timeout", ())
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not queue_of(model).waiting
        closed = asyncio.create_task(model.generate_async(PROMPTS[1]))
        closing = asyncio.create_task(asyncio.to_thread(model.close))
        assert (await closed).finish_reason == "closed"
        session.open()
        await closing

    with busy() as (session, model, running):
        asyncio.run(main())
        assert running.result(60).finish_reason == "closed"


def test_leaving_the_block_ends_the_request_without_holding_up_the_loop() -> None:
    async def main() -> None:
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        async with model.stream(PROMPTS[0], max_new_tokens=4000) as stream:
            async for _ in stream:
                before = turns
                break
        assert turns > before
        ticking.cancel()
        assert stream.result.finish_reason == "cancelled"
        async for _ in model.stream(PROMPTS[0], max_new_tokens=4000):  # without a block
            break
        gc.collect()
        await asyncio.to_thread(settle)
        assert len(session.passes) < 4000

    session = slow_session()
    with toy_model(session) as model:
        asyncio.run(main())


def test_what_fails_reaches_the_task() -> None:
    def fail(tokens: object) -> F32:
        raise RuntimeError("broken device")

    async def main() -> None:
        with pytest.raises(RuntimeError, match="broken device"):
            await model.generate_async(PROMPTS[0])
        with pytest.raises(RequestError, match="unknown option"):
            await model.generate_async(PROMPTS[0], words=3)  # type: ignore[call-arg]
        model.close()
        with pytest.raises(Closed):
            await model.generate_async(PROMPTS[0])

    session = toy_session()
    session.forward = fail  # type: ignore[method-assign]
    with toy_model(session) as model:
        asyncio.run(main())
