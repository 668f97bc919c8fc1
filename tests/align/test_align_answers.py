"""Alignment without PyTorch: answers, texts of them, first guesses, and the command."""

import errno
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from edgespec.align import answering as answering_module
from edgespec.align import answers
from edgespec.align.answering import answers as answers_of
from edgespec.align.answers import Answer, locked, read_answers, unanswered, write_answers
from edgespec.align.run import split_texts
from edgespec.asking.request import RequestOptions
from edgespec.cli import app
from edgespec.measuring.prompts import Prompt
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.downloads.catalog import find
from edgespec_models.errors import DoesNotFit, RequestError, StorageError
from edgespec_models.progress import ignore_progress
from tests.kit.fake_model import FakeModel
from tests.kit.gguf import tiny_gguf

ASKED = RequestOptions(max_new_tokens=7, temperature=0.8)
PROMPTS = tuple(Prompt(f"p{i}", "even" if i % 2 == 0 else "odd", (f"question {i}",)) for i in range(12))


def _asked(model: FakeModel, place: Path, prompts: Sequence[Prompt] = PROMPTS) -> int:
    def answering(wanted: Sequence[Prompt]) -> Iterator[Answer | None]:
        return answers_of(model.as_model(), wanted, ASKED)

    return write_answers(answering, prompts, place, ignore_progress, target="fake-target")


def _drafter(out: Path) -> Bundle:
    source = tiny_gguf("llama", "Q8_0").write(out.with_suffix(".gguf"))
    export_model(source, out, options=ExportOptions(role="drafter", trim="full"))
    return Bundle(out)


def test_answers_are_written_line_by_line(tmp_path: Path) -> None:
    model, place = FakeModel(), tmp_path / "answers.jsonl"
    assert _asked(model, place, (*PROMPTS, *PROMPTS[:3])) == 0  # one that stands twice is asked once
    assert len(model.calls) == len(PROMPTS)
    answers = read_answers(place)
    assert [answer.prompt for answer in answers] == [prompt.turns[0] for prompt in PROMPTS]
    assert {answer.category for answer in answers} == {"even", "odd"}
    assert {answer.target for answer in answers} == {"fake-target"}
    assert {answer.temperature for answer in answers} == {0.8}
    seeds = {options["seed"] for _, options in model.calls}
    assert len(seeds) == len(PROMPTS) and {options["max_new_tokens"] for _, options in model.calls} == {7}
    assert not unanswered(PROMPTS, place, "fake-target")
    with pytest.raises(RequestError, match="holds answers of fake-target, not of another"):
        unanswered(PROMPTS, place, "another")
    with locked(place, ""), pytest.raises(RequestError, match="another run"), locked(place, "another run"):
        pass


@pytest.mark.parametrize("half", [b'{"prompt": "question 7", "te', b'{"pro', b"{"])
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, half: bytes) -> None:
    whole, place = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    _asked(FakeModel(), whole)

    def stop(count: int) -> None:
        if count == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _asked(FakeModel(on_call=stop), place)
    kept = place.read_bytes()
    assert whole.read_bytes().startswith(kept) and len(read_answers(place)) in (4, 5)
    place.write_bytes(kept + half)  # killed in the middle of a line
    model = FakeModel()
    _asked(model, place)
    assert place.read_bytes() == whole.read_bytes()
    assert len(model.calls) == len(PROMPTS) - len(kept.splitlines())


OTHERS = ['{"notes": 1}', "[1]", "half a li", '{"prompt": "", "text": "b"}', '{"prompt": "a", "text": 1}']


@pytest.mark.parametrize("text", OTHERS)
def test_a_file_of_something_else_is_refused_and_keeps_its_last_line(tmp_path: Path, text: str) -> None:
    place = tmp_path / "mine.json"
    place.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=r"mine\.json, line 1"):
        _asked(FakeModel(), place)
    assert place.read_text(encoding="utf-8") == text
    with pytest.raises(RequestError, match="cannot read"):
        read_answers(tmp_path / "none.jsonl")


def test_answers_from_elsewhere_are_kept_and_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    def refuse(count: int) -> None:
        if count in (2, 3):
            raise DoesNotFit("too long")

    place = tmp_path / "a.jsonl"
    place.write_text('{"prompt": "a", "text": "b", "more": 1}', encoding="utf-8")  # without a line break
    assert _asked(FakeModel(on_call=refuse), place) == 2
    assert [answer.prompt for answer in read_answers(place)][:3] == ["a", "question 0", "question 3"]
    assert len(read_answers(place)) == len(PROMPTS) - 1


def test_a_disk_that_is_full_keeps_the_answers_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, write = tmp_path / "a.jsonl", answers._write

    def full(file: Any, answer: Any) -> None:
        if answer.prompt == "question 3":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, answer)

    monkeypatch.setattr(answers, "_write", full)
    with pytest.raises(StorageError, match="disk is full"):
        _asked(FakeModel(), place)
    assert len(read_answers(place)) == 3


def test_texts_are_as_the_drafter_reads_them(tmp_path: Path) -> None:
    model, place = FakeModel(), tmp_path / "answers.jsonl"
    prompts = [Prompt(f"p{i}", "c", (f"question {i}",)) for i in range(80)]
    _asked(model, place, prompts)
    drafter = _drafter(tmp_path / "drafter")
    kept, held = split_texts(read_answers(place), drafter)
    assert len(kept) + len(held) == 80 and 2 <= len(held) <= 20
    again, held_again = split_texts(reversed(read_answers(place)), drafter)
    assert set(held) == set(held_again) and set(again) == set(kept)
    tokenizer = drafter.tokenizer
    answers = {answer.text: answer for answer in read_answers(place)}
    for text in kept:
        written = tokenizer.decode(text.tokens[text.start :])
        assert answers[written].category == text.category


def _align(*options: str) -> Any:
    result = CliRunner().invoke(app, ["align", *options])
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        ("{}/bundle", "is a bundle; give the checkpoint"),
        ("{}/none.gguf", "does not exist"),
        ("smollm2-135m-qwen2.5-coder", "smollm2-135m-qwen2.5-coder is aligned already"),
        ("without PyTorch", 'pip install "edgespec[align]"'),
    ],
)
def test_what_cannot_be_aligned_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, says: str
) -> None:
    torch = None if drafter == "without PyTorch" else ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    if drafter.startswith("smollm2"):
        monkeypatch.setattr("edgespec.loading.first_use.locate", lambda *_: (tmp_path, find(drafter)))
    _drafter(tmp_path / "bundle")
    code, _, stderr = _align(drafter.format(tmp_path), "--target", "t", "-o", str(tmp_path / "out"))
    assert code == 1 and says in stderr
    assert torch is not None or not (tmp_path / "out").exists()


def test_answers_only_writes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: Callable[[Any], None]
) -> None:
    model, out, prompts = FakeModel(), tmp_path / "out", tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "category": "c", "turns": ["Who?", "Why?"]}', encoding="utf-8")
    loaded = []

    def load(target: str, drafter: str, **settings: Any) -> FakeModel:
        loaded.append((target, drafter))
        return model

    portable = SimpleNamespace(manifest=SimpleNamespace(graph_kind="dynamic", operators="standard"))
    monkeypatch.setattr(answering_module, "open_model", lambda *_, **__: portable)
    monkeypatch.setattr(answering_module, "check_target", lambda _: None)
    loads(load)
    options = ("d", "--target", "t", "-o", str(out), "--prompts", str(prompts), "--answers-only", "--json")
    monkeypatch.setitem(sys.modules, "torch", None)  # which is not needed for that
    code, stdout, _ = _align(*options, "--temperature", "0.5")
    assert (code, json.loads(stdout)) == (0, {"path": str(out / "answers.jsonl"), "answers": 1})
    assert _align(*options)[0] == 0
    assert loaded == [("t", "d")] and len(model.calls) == 1  # the second run found all there
    assert [(answer.prompt, answer.temperature) for answer in read_answers(out / "answers.jsonl")] == [
        ("Who?", 0.5)
    ]
