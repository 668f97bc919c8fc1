"""Whole turns in a history, and what a drafter learned from them: kept only if asked to, and forgotten."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, PropertyMock

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

import edgespec
from edgespec import History, LoadOptions
from edgespec.align import adapting as training
from edgespec.align.answers import locked
from edgespec.cli import app
from edgespec.history import adapting, store
from edgespec.history.adapting import PassTimes, WhenIdle
from edgespec.history.changes import Learner, Run, learner_of
from edgespec.history.memory import Delta
from edgespec.history.passages import Turn
from edgespec.history.store import Scope, Store, StoredTurn
from edgespec.loading.opening import open_model
from edgespec_export.align.alignment import Alignment, Codes, Origin
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.errors import Cancelled, EdgespecError, RequestError, StorageError
from edgespec_models.progress import ignore_progress
from tests.kit.gguf import HIDDEN, tiny_gguf
from tests.kit.histories import OTHERS, SCOPE, delta_of, merge, passage_of
from tests.kit.native import tiny_native
from tests.kit.toy import LLAMA, until

pytestmark = pytest.mark.usefixtures("consoles")
CHAT = [{"role": "user", "content": "My name is\nFerdinand."}]
KEEPING = LoadOptions(threads=1, keep_prompts=True)
PRICES = PassTimes({1: 1.0}, 0.1)


def turn_of(number: int, *, words: str = "words") -> Turn:
    return Turn(json.dumps([{"role": "user", "content": f"Say {number}"}]).encode(), words.encode(), True)


def keep(path: Path, *turns: Turn, scope: Scope = SCOPE) -> None:
    with closing(Store.open(path)) as opened:
        opened.merge(scope, Delta(turns=list(turns)), lambda tokens: b"")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "histories" / "me.history"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    return tiny_native(folder, LLAMA, "Q4_1", template="{{ messages[0].content }}").path


@pytest.mark.usefixtures("free_passes")
def test_turns_are_kept_whole_and_only_if_asked_for(target: Path) -> None:
    def asked(options: LoadOptions) -> str:
        with edgespec.load(target, "ngram", options=options, history="me") as model:
            model.generate("x = 1", max_new_tokens=4, prompt_cache=False)
            model.generate([5, 6], max_new_tokens=4)  # ids have no text of their own
            return model.chat(CHAT, max_new_tokens=12).text.replace("\ufffd", "")

    asked(LoadOptions(threads=1))
    assert History("me").turns() == []
    text = asked(KEEPING)
    (turn,) = History("me").turns()
    assert (turn.target, turn.prompt, turn.text) == ("target", CHAT, text)
    asked(KEEPING)  # the same again
    assert len(History("me").turns()) == 1
    shown = CliRunner().invoke(app, ["history", "show", "me", "--turns"])
    assert "Ferdinand" in shown.stdout and "1 of 1 turns" in shown.stderr


def test_options_that_need_a_history_say_so(target: Path) -> None:
    for options in (KEEPING, LoadOptions(adapt="idle")):
        with pytest.raises(RequestError, match="need a history"):
            edgespec.load(target, "ngram", options=options)


@pytest.mark.parametrize("text", ["ferdinand", "is\nferd", "SECRET"])
def test_a_forgotten_turn_is_nowhere(path: Path, text: str) -> None:
    turn = Turn(json.dumps(CHAT).encode(), b"a Secret answer", True)
    keep(path, turn, turn_of(1))
    assert History(path).forget(text) == 1
    assert [turn.prompt[0]["content"] for turn in History(path).turns()] == ["Say 1"]
    for file in path.parent.iterdir():
        assert b"Ferdinand" not in file.read_bytes() and b"Secret" not in file.read_bytes()


@pytest.mark.parametrize("text", ["4711", "account", 'the "new" one', "false"])
def test_a_turn_is_found_by_all_that_its_calls_say(path: Path, text: str) -> None:
    """Names and numbers too, where a call's arguments are a table."""
    arguments = {"Account": {"number": 4711, "which": 'the "new" one'}, "now": False}
    call = {"type": "function", "function": {"name": "pay", "arguments": arguments}}
    prompt = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}]
    keep(path, Turn(json.dumps(prompt).encode(), b"paid", True), turn_of(1))
    assert History(path).forget(text) == 1
    assert [turn.prompt[0]["content"] for turn in History(path).turns()] == ["Say 1"]


def test_turns_are_exported_and_imported(path: Path, tmp_path: Path) -> None:
    keep(path, *map(turn_of, range(5)), Turn(b'"a text"', b"half a \xc3", False))
    merge(path, delta_of(passage_of(1)))
    History(path).export(tmp_path / "out.json")
    other = History(tmp_path / "other.history")
    other.load(tmp_path / "out.json")
    assert other.turns() == History(path).turns() and len(other.turns()) == 6


def test_the_oldest_turns_go_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_TURN_BYTES", 20_000)
    for number in range(300):
        keep(path, turn_of(number, words="w" * 100))
    keep(path, turn_of(300, words="w" * 300))  # more than a hundredth of all
    numbers = [int(turn.prompt[0]["content"].split()[1]) for turn in History(path).turns()]
    assert numbers == [*range(299, 299 - len(numbers), -1)] and 100 < len(numbers) < 200


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_gguf("llama", "F16").write(tmp_path / "m.gguf")


@pytest.fixture
def learner(path: Path, source: Path) -> Learner:
    """A drafter with turns to learn from, and with a change."""
    keep(path, *map(turn_of, range(3)))
    made = learner_of(path, SCOPE, open_model(source, "drafter"), source)
    assert made is not None
    made.begin()
    with open_checkpoint(source) as checkpoint:
        origin = Origin("m", checkpoint.digest(ignore_progress), "target", 9, 0.5, 0.6, {})
    gains = Codes.of(np.full((1, HIDDEN), 0.5, np.float32))
    Alignment(origin, {"final_norm": gains}).write(made.change)
    return made


def test_the_next_load_merges_what_was_learned(learner: Learner, path: Path, source: Path) -> None:
    changed = learner.changed(None, None, ignore_progress)
    assert changed is not None and "alignment" in changed.manifest.provenance
    again = learner.changed(None, None, ignore_progress)
    assert again is not None and again.path == changed.path and changed.path.parent == learner.folder
    assert learner.changed(None, "npu-qnn", ignore_progress) is None
    other = learner_of(path, OTHERS[0], open_model(source, "drafter"), source)
    assert other is not None and other.changed(None, None, ignore_progress) is None
    if os.name == "posix":
        assert learner.folder.parent.stat().st_mode & 0o777 == 0o700
    learner.change.write_bytes(b"damaged")
    assert learner.changed(None, None, ignore_progress) is None


@pytest.mark.usefixtures("free_passes")
def test_a_model_drafts_with_what_was_learned(learner: Learner, target: Path, source: Path) -> None:
    with edgespec.load(target, source, options=LoadOptions(threads=1), history=learner.history) as model:
        plain, scope = model.drafter, Scope.of(model.target, "")
    assert plain is not None
    mine = learner_of(learner.history, scope, plain, source)
    assert mine is not None
    mine.begin()
    learner.change.replace(mine.change)
    with edgespec.load(target, source, options=LoadOptions(threads=1), history=learner.history) as model:
        assert model.drafter is not None and model.drafter.path.parent == mine.folder
        assert model.generate("x = 1", max_new_tokens=8).tokens


def test_what_cannot_be_trained_does_not_learn(target: Path, path: Path) -> None:
    bundle = open_model(target, "target")
    assert learner_of(path, SCOPE, bundle, target) is None  # a bundle has no checkpoint
    says = pytest.raises(EdgespecError, match=r"cannot learn|needs torch")
    with edgespec.load(target, "ngram", options=LoadOptions(threads=1), history=path) as model, says:
        model.adapt()


@pytest.mark.parametrize("how", ["text", "namespace", "all"])
def test_forgotten_text_takes_with_it_what_was_trained_on_it(learner: Learner, path: Path, how: str) -> None:
    keep(path, turn_of(0, words="others"), scope=OTHERS[0])
    merge(path, delta_of(passage_of(1)))
    history = History(path)
    if how == "text":
        history.forget("words")
    else:
        history.delete("mail" if how == "namespace" else None)
    assert not learner.folder.exists()
    with pytest.raises(StorageError):  # a training that runs cannot bring it back
        learner.note(learner.run)
    assert not learner.folder.exists()


def test_what_is_not_found_may_have_been_learned_before(learner: Learner, path: Path) -> None:
    assert History(path).forget("long gone") == 0
    assert not learner.folder.exists()


def test_other_namespaces_keep_what_they_learned(learner: Learner, path: Path) -> None:
    keep(path, turn_of(0), scope=OTHERS[2])
    History(path).delete(OTHERS[2].namespace)
    assert learner.change.is_file()


def test_only_new_texts_are_trained_on(learner: Learner) -> None:
    dates = [text.written_on for text in learner.texts()]
    assert len(dates) == 3 and not learner.is_due()
    learner.note(replace(learner.run, through=dates[0]))
    assert len(learner.texts()) == 2
    learner.note(replace(learner.run, until=dates[1]))
    assert len(learner.texts()) == 1 and learner.is_due()
    learner.folder.joinpath("run.json").write_text("{", encoding="utf-8")
    assert len(learner.texts()) == 3


def test_after_a_run_in_vain_a_tenth_of_the_texts_has_to_be_newer(learner: Learner, path: Path) -> None:
    """Also in a full history, which drops a text for each that comes."""
    start = learner.texts()[-1].written_on
    turns = [StoredTurn(SCOPE, turn_of(number), start + number) for number in range(1, 70)]
    learner.note(Run(through=start, tried=start + 60))

    def is_due(dropped: int) -> bool:
        with closing(Store.open(path)) as opened:
            opened.remove([], list(opened.turns()))
            opened.put([], turns[dropped : 60 + dropped])
        return learner.is_due()

    assert [is_due(dropped) for dropped in (0, 5, 6)] == [False, False, True]


def test_a_run_is_kept_from_a_folder_that_another_still_has(learner: Learner, path: Path) -> None:
    """If it made the folder anew, the other one could write there what was forgotten meanwhile."""
    with locked(learner.folder, "the other one"):
        History(path).forget("words")
        with pytest.raises(RequestError, match="another run trains"):
            training.adapt(learner, PRICES, progress=ignore_progress)
        assert not learner.folder.exists()


def test_a_stopped_run_whose_texts_the_history_dropped_begins_with_those_it_has(
    learner: Learner, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(path, *(Turn(f'"number {number}"'.encode(), b"words", True) for number in range(60)))
    learner.note(Run(until=1.0))
    monkeypatch.setattr(training, "trained", Mock(side_effect=Cancelled("it has begun")))
    with pytest.raises(Cancelled):
        training.adapt(learner, PRICES, progress=ignore_progress)
    assert len(learner.texts()) == 63 and learner.run.until == learner.texts()[-1].written_on


def test_a_replay_takes_drafts_of_the_best_length() -> None:
    prices = PassTimes({n: 1.0 + 0.1 * n for n in range(1, 10)}, 0.1)
    assert training.speed([[False] * 9], prices) == pytest.approx(1.1 / 1.3)
    all_right = training.speed([[True] * 90], prices)
    assert all_right == pytest.approx(9 * 1.1 / (1.9 + 0.8))
    assert training.speed([[True] * 90, [True, False] * 45], prices) < all_right


class _Process:
    """Stands in for a process that trains."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.result = "nothing"

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)

    def wait(self, seconds: float) -> bool:
        return False


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    state = SimpleNamespace(busy=True, plugged=True, process=_Process(), begun=0)
    battery = lambda: SimpleNamespace(power_plugged=state.plugged)  # noqa: E731
    monkeypatch.setattr(psutil, "sensors_battery", battery, raising=False)
    for name, seconds in (("_LOOK_S", 0.01), ("_LOOK_AGAIN_S", 0.01), ("CALM_S", 0.05)):
        monkeypatch.setattr(adapting, name, seconds)

    def begin() -> Any:
        state.begun += 1
        return state.process

    state.idle = WhenIdle(begin, lambda: state.busy)
    yield state
    state.idle.close()


def test_it_trains_while_nothing_runs_on_mains_power(idle: SimpleNamespace) -> None:
    calls = idle.process.calls
    time.sleep(0.1)
    idle.plugged, idle.busy = False, False
    time.sleep(0.1)
    assert not idle.begun
    idle.plugged = True
    until(lambda: idle.begun == 1)
    idle.busy = True
    until(lambda: calls == ["pause"])
    idle.busy = False
    until(lambda: calls == ["pause", "go"])
    idle.plugged = False
    until(lambda: calls == ["pause", "go", "pause"])
    idle.idle.close()
    assert calls[-1] == "stop"


def test_it_goes_on_after_a_start_and_a_process_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"_LOOK_S": 0.01, "_LOOK_AGAIN_S": 0.01, "CALM_S": 0.0, "on_battery": lambda: False}
    for name, value in settings.items():
        monkeypatch.setattr(adapting, name, value)
    ended = Mock(**{"wait.return_value": True})
    type(ended).result = PropertyMock(side_effect=EdgespecError("it was not trained"))
    begin = Mock(side_effect=[EdgespecError("another run trains"), ended, _Process()])
    with closing(WhenIdle(begin, lambda: True)):  # requests come all the time
        until(lambda: begin.call_count == 3)
