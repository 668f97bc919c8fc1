"""A drafter that learns from a history: needs PyTorch, which the gate does without (extra ``align``)."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'align', which the gate does without")

import torch
from typer.testing import CliRunner

from edgespec import History
from edgespec.align.adapting import adapt
from edgespec.cli import app
from edgespec.history.adapting import Adapting, PassTimes
from edgespec.history.changes import Adaptation, Learner, learner_of
from edgespec.history.passages import Turn
from edgespec.history.store import Scope
from edgespec.loading.opening import open_model
from edgespec_export.align.alignment import read_alignment
from edgespec_export.align.settings import TrainingOptions
from edgespec_models.errors import Cancelled, EdgespecError, RequestError, StorageError
from edgespec_models.progress import Progress, ignore_progress
from tests.history.test_history_turns import keep
from tests.kit.gguf import tiny_gguf
from tests.kit.histories import SCOPE, learn, tokenizer, used

OPTIONS = TrainingOptions(rate=0.02, passes=6, batch_tokens=256)
PRICES = PassTimes({n: 1.0 + 0.1 * n for n in range(1, 10)}, 0.1)
pytestmark = pytest.mark.usefixtures("consoles")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _turns(count: int) -> list[Turn]:
    """Answers that say one thing again and again."""
    return [Turn(f'"number {number}:"'.encode(), b"the same words " * 2, True) for number in range(count)]


@pytest.fixture(params=["F16", "Q4_1"])
def learner(request: pytest.FixtureRequest, tmp_path: Path) -> Learner:
    return _learner(tmp_path, request.param)


def _learner(folder: Path, kind: str = "Q4_1", turns: int = 60) -> Learner:
    source, path = tiny_gguf("llama", kind).write(folder / "m.gguf"), folder / "h" / "me.history"
    keep(path, *_turns(turns))
    made = learner_of(path, SCOPE, open_model(source, "drafter"), source)
    assert made is not None
    return made


def _adapt(learner: Learner, progress: Callable[[Progress], None] = ignore_progress) -> Adaptation:
    return adapt(learner, PRICES, options=OPTIONS, progress=progress)


def test_a_drafter_learns_from_the_turns_and_goes_on_from_there(learner: Learner) -> None:
    first = _adapt(learner)
    assert first.improved and first.right_after > first.right_before + 0.2
    assert first.speed_after > first.speed_before and (first.texts, first.held_out) == (54, 6)
    assert len(learner.texts()) == 6 and not learner.is_due()
    assert {file.name for file in learner.folder.iterdir()} == {"alignment.safetensors", "run.json"}
    assert learner.changed(None, None, ignore_progress) is not None
    with pytest.raises(RequestError, match="6 new texts"):
        _adapt(learner)
    keep(learner.history, *_turns(130)[60:])
    second = _adapt(learner)
    assert second.right_before >= first.right_after - 0.1
    assert read_alignment(learner.change).origin.target == SCOPE.target


def test_what_is_no_better_is_thrown_away(tmp_path: Path) -> None:
    learner = _learner(tmp_path)
    result = adapt(learner, PRICES, options=replace(OPTIONS, rate=0.0), progress=ignore_progress)
    assert not result.improved and result.right_after == result.right_before
    assert not learner.change.exists() and not learner.is_due()
    keep(learner.history, *_turns(67)[60:])
    assert learner.is_due()


def test_what_was_forgotten_meanwhile_is_not_learned(tmp_path: Path) -> None:
    learner = _learner(tmp_path)

    def forget(report: Progress) -> None:
        if report.stage == "Training" and report.done == 2:
            History(learner.history).forget("number 7:")

    with pytest.raises(StorageError):
        _adapt(learner, forget)
    assert not learner.folder.exists()
    assert _adapt(learner).texts == 54  # of 59


def test_another_drafters_change_is_not_read(tmp_path: Path) -> None:
    learner = _learner(tmp_path)
    _adapt(learner)
    data = learner.change.read_bytes()
    learner.change.write_bytes(data.replace(b'\\"version\\": 1', b'\\"version\\": 9'))
    keep(learner.history, *_turns(130)[60:])
    assert _adapt(learner).improved
    assert learner.change.read_bytes() != data and read_alignment(learner.change).origin.version == 1


def test_without_turns_it_learns_from_passages(tmp_path: Path) -> None:
    learner = _learner(tmp_path, turns=0)
    with used(learner.history) as use:
        for _ in range(40):
            learn(use, tokenizer().encode("the same words and others " * 12))
    with pytest.raises(RequestError, match="new texts"):  # what comes again is kept once
        _adapt(learner)
    with used(learner.history) as use:
        for number in range(40):
            learn(use, tokenizer().encode(f"{number} says the same words and others " * 12))
    assert _adapt(learner).improved


def test_a_process_trains_is_paused_at_once_and_goes_on(tmp_path: Path) -> None:
    learner, seen, paused = _learner(tmp_path), list[Progress](), threading.Event()

    def report(progress: Progress) -> None:
        seen.append(progress)
        if progress.stage == "Training" and not paused.is_set():
            running.pause()
            paused.set()

    running = Adapting(learner, PRICES, report)
    assert paused.wait(60)
    assert not running.wait(1.0)
    count = len(seen)
    assert not running.wait(1.0) and len(seen) <= count + 1
    running.go()
    assert running.run(lambda: False).texts == 54


def test_a_cancelled_process_goes_on_from_where_it_was(tmp_path: Path) -> None:
    learner, reached = _learner(tmp_path, turns=300), threading.Event()

    def report(progress: Progress) -> None:
        if progress.stage == "Training" and progress.done == 2:
            running.pause()
            reached.set()

    running = Adapting(learner, PRICES, report)
    with pytest.raises(Cancelled):
        running.run(reached.is_set)
    assert running.wait(60)
    with pytest.raises(EdgespecError, match="not trained"):
        assert running.result
    again = list[Progress]()
    assert Adapting(learner, PRICES, again.append).run(lambda: False).texts == 270
    assert next(report for report in again if report.stage == "Training").done >= 2


def test_the_command_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = _learner(tmp_path)
    target = open_model(learner.source, "target")
    keep(learner.history, *_turns(60), scope=Scope.of(target, "mail"))
    command = ["align", str(learner.source), "--target", str(learner.source), "--device", "cpu"]
    named = [*command, "--history", str(learner.history), "--namespace", "mail"]
    result = CliRunner().invoke(app, named)
    assert result.exit_code == 0 and "right first guesses" in result.stdout, result.output
    for wrong, says in ((command, "either"), ([*named, "-o", str(tmp_path)], "either")):
        assert says in CliRunner().invoke(app, wrong).stderr
