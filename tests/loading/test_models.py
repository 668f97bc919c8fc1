"""Several models by name: loads when they are asked for, room, idle models, faults, threads and tasks."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgespec
from edgespec.models import PLANNED_TOKENS, Models
from edgespec_models.errors import Closed, DeviceError, EdgespecError, RequestError
from edgespec_models.progress import Progress
from tests.kit.native import tiny_native
from tests.kit.toy import until

BYTES = {"a": 10, "b": 20, "c": 30, "d": 40}
OPTIONS = edgespec.LoadOptions(threads=1, prompt_cache_bytes=0)


class Fake:
    """A model that says when it is closed."""

    def __init__(self, house: "House", name: str) -> None:
        self.house, self.name, self.closed = house, name, False
        self.target = SimpleNamespace(
            manifest=SimpleNamespace(files={}), config=SimpleNamespace(vocab_size=1), marks=frozenset()
        )
        self.drafter = None

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.house.events.append(f"-{self.name}")


class House:
    """Loads models of :data:`BYTES`; ``gate`` holds up loads, ``fault`` is what they raise."""

    def __init__(self) -> None:
        self.events, self.others = list[str](), {*threading.enumerate()}
        self.gate, self.loading, self.needs_room = threading.Event(), 0, ""
        self.fault: EdgespecError | None = None
        self.gate.set()

    def load(self, target: str, progress: Callable[[Progress], None], ready: Callable[..., None]) -> Any:
        self.loading += 1
        while not self.gate.wait(0.01):
            progress(Progress("Exporting", 1, 2, "layers"))
        if self.fault is not None:
            raise self.fault
        model, self.needs_room = Fake(self, target), target
        ready(model.target, SimpleNamespace(needed=BYTES[target], **vars(model.target)))
        self.events.append(f"+{target}")
        return model


@pytest.fixture
def house(loads: Callable[[Any], None], needs: Callable[[Callable[[Any], int]], None]) -> House:
    house = House()
    loads(house.load)
    needs(lambda drafter: int(drafter.needed))
    return house


@pytest.fixture
def three(house: House) -> Iterator[Models]:
    """Room for two of them at most."""
    with Models({name: name for name in "abc"}, memory=50) as models:
        yield models


def take(models: Models, name: str) -> Any:
    with models.use(name) as model:
        return model


def are_unused(models: Models) -> bool:
    """Nobody uses or waits for any of them: all go as soon as they may."""
    for name in models.names:
        models.unload(name)
    until(lambda: not models.loaded)
    return True


def work_on(house: House) -> bool:
    """Whether a thread of this test's models is left."""
    threads = {*threading.enumerate()} - house.others
    return any(thread.name == "edgespec-models" for thread in threads)


def test_models_are_loaded_when_they_are_used_and_the_least_recently_used_go(
    house: House, three: Models
) -> None:
    assert (three.names, three.loaded, house.events) == (("a", "b", "c"), {}, [])
    first = take(three, "a")
    assert take(three, "a") is first
    take(three, "b")
    take(three, "a")
    assert three.memory_bytes == {"a": 10, "b": 20}
    take(three, "c")  # 60 would be too many
    assert house.events == ["+a", "+b", "-b", "+c"]
    assert three.memory_bytes == {"a": 10, "c": 30} and set(three.loaded) == {"a", "c"}
    three.close()
    assert sorted(house.events[-2:]) == ["-a", "-c"] and three.memory_bytes == {} and three.loaded == {}
    with pytest.raises(Closed):
        take(three, "a")
    three.close()


def test_what_is_used_stays_and_a_load_waits_for_it(house: House, three: Models) -> None:
    with ThreadPoolExecutor(2) as pool:
        with three.use("a"), three.use("b"):
            waiting = pool.submit(take, three, "c")
            until(lambda: house.needs_room == "c")
            later = pool.submit(take, three, "b")  # does not hold up who came before
            time.sleep(0.3)
            assert not waiting.done() and not later.done() and house.events == ["+a", "+b"]
            assert take(three, "a").name == "a"  # who uses one is not held up: others wait for him
        assert waiting.result(10).name == "c" and later.result(10).name == "b"
    assert house.events[:4] == ["+a", "+b", "-b", "+c"] or house.events[:4] == ["+a", "+b", "-a", "+c"]


def test_memory_that_one_alone_does_not_have_is_an_error_and_so_are_names(house: House) -> None:
    with Models({"a": "a", "d": {"target": "d"}}, memory=39) as models:
        take(models, "a")
        with pytest.raises(DeviceError, match=r"d needs 40 bytes, and all models together may take 39 bytes"):
            take(models, "d")
        assert set(models.loaded) == {"a"}
        with pytest.raises(RequestError, match="there is no model 'e'; allowed: a, d"):
            take(models, "e")
    for wrong in ({"memory": 0}, {"keep": -1.0}, {"models": {"a": 3}}):
        with pytest.raises(RequestError):
            Models(**{"models": {"a": "a"}, **wrong})  # type: ignore[arg-type]


def test_without_a_bound_the_machine_has_one(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models go while they are told to be in the way; alone a model is loaded whatever there is."""
    monkeypatch.setattr("edgespec.models.machine_memory", lambda: SimpleNamespace(available=25))
    with Models({name: name for name in "abc"}) as models:
        for name in "abc":
            take(models, name)
    assert house.events[:5] == ["+a", "+b", "-a", "-b", "+c"]


def test_the_callback_of_a_load_may_close_the_models(house: House, three: Models) -> None:
    house.gate.clear()
    with pytest.raises(Closed), three.use("a", progress=lambda report: three.close()):
        pass
    house.gate.set()


def test_idle_models_are_unloaded_in_their_time(house: House) -> None:
    with Models({name: name for name in "ab"}, keep=0.3) as models:
        with models.use("b"):
            started = time.monotonic()
            take(models, "a")
            until(lambda: house.events == ["+b", "+a", "-a"])
            assert 0.25 < time.monotonic() - started < 5
            time.sleep(0.4)
            assert set(models.loaded) == {"b"}
        until(lambda: house.events[-1] == "-b")
        with models.use("a"):
            assert set(models.loaded) == {"a"}


def test_any_time_may_be_named(house: House) -> None:
    with Models({"a": "a"}, keep=1e15) as models:  # longer than a thread can wait
        take(models, "a")
        assert 1e14 < (models.kept_s("a") or 0) <= 1e15
        models.unload("a")
        until(lambda: not models.loaded)


def test_a_model_is_unloaded_on_request_as_soon_as_nobody_uses_it(house: House) -> None:
    with Models({name: name for name in "ab"}) as models:
        take(models, "a")
        with models.use("b"):
            for name in "ab":
                assert models.kept_s(name) is None
                models.unload(name)
            until(lambda: house.events == ["+a", "+b", "-a"])
            time.sleep(0.1)
            assert set(models.loaded) == {"b"}
        until(lambda: house.events[-1] == "-b")
        models.unload("a")  # which is not there
        take(models, "a")
        time.sleep(0.1)
        assert set(models.loaded) == {"a"}
    with Models({"c": "c"}, keep=100) as models:
        with models.use("c"):
            assert models.kept_s("c") == 100
        assert 0 < (models.kept_s("c") or 0) <= 100


def test_many_that_wait_cause_one_load_and_get_its_error(house: House, three: Models) -> None:
    for fault in (EdgespecError("no such file"), None):
        house.fault, house.loading = fault, 0
        house.gate.clear()
        with ThreadPoolExecutor(8) as pool:
            told = list[Progress]()
            asking = [pool.submit(use_telling, three, told) for _ in range(8)]
            until(lambda told=told: len(told) > 20 and len(three._users) == 8)  # type: ignore[misc]
            house.gate.set()
            if fault is None:
                assert len({id(future.result(10)) for future in asking}) == 1
            else:
                assert [future.exception(10) for future in asking] == [fault] * 8
        assert house.loading == 1
        assert told[0] == Progress("Exporting", 1, 2, "layers")


def use_telling(models: Models, told: list[Progress]) -> Any:
    with models.use("a", progress=told.append) as model:
        return model


def test_who_uses_a_model_cannot_wait_for_its_room(house: House, three: Models) -> None:
    with three.use("c"), pytest.raises(DeviceError, match="leave that"), three.use("a"), three.use("b"):
        pass
    assert take(three, "b").name == "b"

    async def nested() -> None:
        async with three.use_async("c"), three.use_async("a"):
            with pytest.raises(DeviceError, match="leave that"):
                async with three.use_async("b"):
                    pass

    asyncio.run(nested())
    assert are_unused(three)


def test_models_that_are_always_in_use_do_not_keep_others_out(house: House) -> None:
    stop = threading.Event()

    def overlapping(models: Models) -> None:
        while not stop.is_set():
            with models.use("c"):
                time.sleep(0.02)

    with Models({name: name for name in "cd"}, memory=50) as models, ThreadPoolExecutor(3) as pool:
        users = [pool.submit(overlapping, models) for _ in range(3)]
        try:
            until(lambda: "+c" in house.events)
            assert take(models, "d").name == "d"
        finally:
            stop.set()
        for user in users:
            user.result(10)


def test_any_number_of_threads_finish_within_the_bound(house: House) -> None:
    with Models({name: name for name in BYTES}, memory=60, keep=0.01) as models:

        def client(seed: int) -> int:
            drawn, used = random.Random(seed), 0
            for _ in range(40):
                with models.use(drawn.choice("abcd")) as model:
                    assert sum(models.memory_bytes.values()) <= 60
                    time.sleep(drawn.random() / 300)
                    assert not model.closed  # type: ignore[attr-defined]
                    used += 1
            return used

        with ThreadPoolExecutor(6) as pool:
            assert sum(pool.map(client, range(6))) == 240
        assert are_unused(models)
    assert sorted(e[1] for e in house.events if e[0] == "+") == sorted(
        e[1] for e in house.events if e[0] == "-"
    )


def test_closing_ends_a_load_and_who_waits(house: House, three: Models) -> None:
    house.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take, three, "a")
        until(lambda: house.loading == 1)
        three.close()
        with pytest.raises(Closed):
            waiting.result(10)
    assert house.events == [] and not work_on(house)


def test_an_interrupt_in_a_load_leaves_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        until(lambda: house.loading == 1)
        raise KeyboardInterrupt

    house.gate.clear()
    monkeypatch.setattr("edgespec.models.wait", interrupted)
    with pytest.raises(KeyboardInterrupt), Models({"a": "a"}) as models, models.use("a"):
        pass
    assert house.events == [] and not work_on(house)


def test_a_task_that_is_cancelled_leaves_the_load_and_no_user(house: House, three: Models) -> None:
    async def leaving() -> None:
        async with three.use_async("a"):
            pass

    async def both() -> None:
        house.gate.clear()
        tasks = [asyncio.create_task(leaving()) for _ in range(2)]
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        house.gate.set()
        await tasks[1]
        assert tasks[0].cancelled()

    asyncio.run(both())
    assert house.events == ["+a"] and set(three.loaded) == {"a"} and are_unused(three)


def test_who_comes_when_nobody_waits_any_more_gets_the_model(
    house: House, three: Models, loads: Callable[[Any], None]
) -> None:
    given_up, late_waits = threading.Event(), threading.Event()

    def load(**arguments: Any) -> Any:
        try:
            return house.load(**arguments)
        except Closed:  # the load gives up
            given_up.set()
            assert late_waits.wait(20)
            raise

    loads(load)

    async def main() -> None:
        async with three.use_async("b"):
            waits = asyncio.create_task(three.use_async("c").__aenter__())
            while house.needs_room != "c":
                await asyncio.sleep(0.01)
            waits.cancel()
            while not given_up.is_set():
                await asyncio.sleep(0.01)
            late = asyncio.create_task(three.use_async("c").__aenter__())
            await asyncio.sleep(0.1)
            late_waits.set()
        assert (await late).name == "c"

    with three.use("a"):
        asyncio.run(asyncio.wait_for(main(), 20))


def test_models_answer_as_alone_take_what_is_planned_and_share_a_tokenizer(tmp_path: Path) -> None:
    def slowly() -> bool:  # asked before every pass
        time.sleep(0.05)
        return False

    paths = {name: tiny_native(tmp_path / name, seed=seed).path for seed, name in enumerate("abc")}
    drafter = tiny_native(tmp_path / "drafter", seed=9, role="drafter").path
    given = {name: {"target": path, "drafter": drafter, "options": OPTIONS} for name, path in paths.items()}
    planned = edgespec.plan(paths["a"], drafter)
    model_bytes = planned.fit(PLANNED_TOKENS).memory_bytes - planned.program_bytes
    with Models(given, memory=2 * model_bytes) as models:
        for name in "abca":
            with models.use(name) as model:
                text = model.generate("the cat and", max_new_tokens=8).text
            with edgespec.load(paths[name], drafter, options=OPTIONS) as alone:
                assert alone.generate("the cat and", max_new_tokens=8).text == text
        assert models.memory_bytes == {"a": model_bytes, "c": model_bytes}
        tokenizers = [bundle.tokenizer for m in models.loaded.values() for bundle in (m.target, m.drafter)]  # type: ignore[union-attr]
        assert len({id(tokenizer) for tokenizer in tokenizers}) == 1
        with models.use("a") as model:
            stream = model.stream("the", max_new_tokens=2000, cancelled=slowly)
            stream.start()
            models.close()  # ends what runs
        assert stream.result.finish_reason == "closed"


def test_marks_of_a_given_template_belong_to_one_model(tmp_path: Path) -> None:
    """They are control tokens of that model, whichever of one vocabulary was loaded first."""
    plain, marked = (tiny_native(tmp_path / name).path for name in ("plain", "marked"))
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}<tool>{{ m.content }}<tool>{% endfor %}", encoding="utf-8")
    options = edgespec.LoadOptions(threads=1, prompt_cache_bytes=0, chat_template=template)
    given = {
        "plain": {"target": plain, "drafter": None, "options": OPTIONS},
        "marked": {"target": marked, "drafter": None, "options": options},
    }
    for order in (("plain", "marked"), ("marked", "plain")):
        with Models(given) as models:
            for name in order:
                with models.use(name) as model:
                    assert (model.target.tokenizer.special_id("<tool>") is not None) == (name == "marked")
            assert len(models.loaded) == 2


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with Models({"a": tmp_path / "nothing", "b": {"target": tmp_path, "colour": "red"}}) as models:
        for _ in range(2):
            with pytest.raises(EdgespecError, match="nothing"):
                take(models, "a")
        with pytest.raises(TypeError, match="colour"):
            take(models, "b")
