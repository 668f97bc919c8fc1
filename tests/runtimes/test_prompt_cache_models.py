"""Prompts on disk in a model: what is written, when, and what never is."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec import LoadOptions
from edgespec_models.decoders.kept import BLOCK
from edgespec_runtimes.block_files import BlockFiles, stored
from tests.kit.models import queue_of, runner_of, toy_model
from tests.kit.native import tiny_native
from tests.kit.prompts import LONG, SIZE, disk_full, keyed, request, sizes, text
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import LLAMA, settle, until


def test_a_new_process_finds_prompt_and_answer(own_prompts: Path) -> None:
    with toy_model(keyed(), keyed(1)) as model:
        answer = model.generate(LONG, max_new_tokens=100)
        settle()
        whole = answer.stats.prompt_tokens + 99
        assert answer.stats.cached_tokens == 0
    target = keyed()
    with toy_model(target, keyed(1)) as model:
        again = model.generate(LONG, max_new_tokens=100)
        assert again.tokens == answer.tokens
        assert again.stats.cached_tokens == answer.stats.prompt_tokens // BLOCK * BLOCK
        assert sum(target.passes) < BLOCK + 200
        assert again.stats.by_source["model"].drafted > 0
        longer = LONG + answer.text
        grown = toy_model(keyed()).generate(longer, max_new_tokens=1)
        assert grown.stats.cached_tokens >= whole // BLOCK * BLOCK - BLOCK
    names = {block.path.parent.name for block in stored(own_prompts)}
    assert names == {target.model.prompt_key}  # a drafter reads little


def test_what_is_written_is_there_behind_the_answer_and_at_the_end(own_prompts: Path) -> None:
    with toy_model(keyed()) as model:
        model.generate(LONG, max_new_tokens=1)
        settle()
        before = sizes(own_prompts)
        assert before > 0
        with queue_of(model).paused():
            runner_of(model).caches.fetch(runner_of(model).session, [*range(200)])
            runner_of(model).session.prefill([*range(200)])
    assert sizes(own_prompts) == before + 6 * SIZE


def test_off_means_that_nothing_is_read_and_written(own_prompts: Path) -> None:
    with toy_model(keyed(), options=LoadOptions(prompt_cache_bytes=0)) as model:
        model.generate(LONG, max_new_tokens=1)
    with toy_model(keyed(), keyed(1)) as model:
        model.generate(LONG, max_new_tokens=1, prompt_cache=False)
    with toy_model() as model:  # whose session promises no bits
        model.generate(LONG, max_new_tokens=1)
    assert not own_prompts.exists()
    with toy_model(keyed()) as model:
        model.generate(LONG, max_new_tokens=1)
    with toy_model(keyed()) as model:
        assert model.generate(LONG, max_new_tokens=1, prompt_cache=False).stats.cached_tokens == 0
    with toy_model(keyed(), options=LoadOptions(prompt_cache_bytes=0)) as model:
        assert model.generate(LONG, max_new_tokens=1).stats.cached_tokens == 0
        model.forget()
    assert sizes(own_prompts) > 0


def test_forgotten_is_forgotten_on_disk_too(own_prompts: Path) -> None:
    request(own_prompts, text(0, 200))  # another model's
    with toy_model(keyed(), keyed(1)) as model:
        model.generate(LONG, max_new_tokens=100)
        model.forget(on_disk=False)
        kept = sizes(own_prompts)
        assert kept > 6 * SIZE
        assert model.generate(LONG, max_new_tokens=1).stats.cached_tokens > 0
        model.forget()
        assert model.generate(LONG, max_new_tokens=1, prompt_cache=False).stats.cached_tokens == 0
    assert sizes(own_prompts) == 6 * SIZE


def test_writing_is_behind_answers_and_makes_way_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    writes, hold = list[bool](), threading.Event()

    def write(self: BlockFiles, key: str, names: Any, content: Any, stop: Callable[[], bool]) -> bool:
        hold.wait(60)
        writes.append(stop())
        return not writes[-1]

    monkeypatch.setattr(BlockFiles, "write", write)
    with toy_model(keyed(), options=LoadOptions(max_waiting=0)) as model:
        model.generate(LONG, max_new_tokens=1)  # answered, though writing waits
        until(lambda: not queue_of(model).running)
        stream = model.stream("Hello", max_new_tokens=1)
        stream.start()  # and the model is not busy
        hold.set()
        assert stream.run().stats.new_tokens == 1
        until(lambda: len(writes) > 1)
        model.generate("Hello", max_new_tokens=1)
    assert writes[0] and not writes[-1]


def test_a_program_that_just_ends_has_written_what_it_read(own_home: Path, tmp_path: Path) -> None:
    target = tiny_native(tmp_path / "m", LLAMA, "Q4_0", tokenizer_json=byte_level_json()).path
    code = f"""if True:
        import edgespec
        model = edgespec.load({str(target)!r}, None, options=edgespec.LoadOptions(threads=1))
        print(model.generate({LONG[:400]!r}, max_new_tokens=2).stats.cached_tokens)"""
    said = [subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)]
    assert int(said[0]) == 0 and int(said[1]) > 200
    assert list(stored(own_home / "prompt-cache"))


def _asked(**options: Any) -> Any:
    with toy_model(keyed(), **options) as model:
        for _ in range(3):
            stats = model.generate(LONG, max_new_tokens=3).stats
            settle()
            runner_of(model).session.rewind(0)
    return stats


@pytest.mark.parametrize("fault", ["full", "a file", "in a file", "not ours"])
def test_where_nothing_can_be_written_it_is_said_once(
    fault: str, own_prompts: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "full":
        monkeypatch.setattr(os, "fdopen", disk_full)
    elif fault == "not ours":
        monkeypatch.setattr(Path, "chmod", disk_full)
    else:
        place = own_prompts if fault == "a file" else own_prompts.parent
        place.parent.mkdir(exist_ok=True)
        place.write_text("x")
    stats = _asked()
    assert stats.cached_tokens == 0
    assert stats.prompt_cache_problem.startswith("prompts are not kept on disk: ")
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text
    monkeypatch.undo()


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    yield
    settle()
