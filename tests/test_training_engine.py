"""A model that trains its drafter between requests: what is learned from, when it is used, what stays."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import Generation, LoadOptions, Model, RequestOptions
from edgespec.learning.gains import Example
from edgespec.learning.trainer import Trainer
from edgespec_models.bundles.bundle import MANIFEST
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.graph_io import OwnModel
from edgespec_runtimes.session import Session
from tests.kit.models import side_of
from tests.kit.native import tiny_native
from tests.kit.tokenizers import sentencepiece_json
from tests.kit.toy import COLUMNS, F32, INT4, LLAMA, QWEN, tiny_bundle, until

PROMPT = "def add(a, b):"
LONG = "the quick brown fox jumps over the lazy dog, and the lazy dog sleeps on. " * 3
OPTIONS = LoadOptions(threads=1, training_share=1.0)
NEW = 40
Models = dict[str, Path]
pytestmark = pytest.mark.usefixtures("cheap_drafts")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    text = sentencepiece_json()
    foreign = replace(LLAMA, vocab_size=Tokenizer.from_json(text).vocab_size)
    tiny_bundle(folder / "target", LLAMA, COLUMNS)
    _ending(tiny_bundle(folder / "ending", LLAMA, COLUMNS).path)
    tiny_native(folder / "drafter", QWEN, "Q4_0", seed=5, role="drafter")
    tiny_native(folder / "across", foreign, "Q4_0", seed=6, tokenizer_json=text, role="drafter")
    tiny_bundle(folder / "fixed", QWEN, INT4, seed=5)
    tiny_bundle(folder / "standard", QWEN, COLUMNS, seed=5, role="drafter")
    return {path.name: path for path in folder.iterdir()}


def _ending(path: Path) -> None:
    """Make every eighth token of a target end its answer, so that it ends soon."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    manifest["special_tokens"]["eos"] = list(range(3, 404, 8))
    (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _load(models: Models, folder: Path, drafter: str = "drafter", target: str = "target") -> Model:
    return edgespec.load(models[target], models[drafter], options=OPTIONS, history=folder / "me")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not _training()


@pytest.fixture
def model(models: Models, tmp_path: Path) -> Iterator[Model]:
    with _load(models, tmp_path) as model:
        yield model


def _answer(model: Model, prompt: str = PROMPT) -> Generation:
    return model.generate(prompt, max_new_tokens=NEW, stop_at_eos=False)


def _training() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "edgespec-training"]


def _trainer(model: Model) -> Trainer:
    trainer = side_of(model).trainer
    assert trainer is not None
    return trainer


def _drafter(model: Model) -> Session:
    return side_of(model).session


def _tuned(model: Model) -> dict[str, F32]:
    """The gains that the drafter runs with instead of its bundle's."""
    io = _drafter(model).model
    assert isinstance(io, OwnModel)
    return {name: array for name, (array, _) in io._tuned.items()}


def _learned(model: Model, texts: int) -> None:
    """Until the drafter has learned from so many texts, and gains wait to be taken."""
    trainer = _trainer(model)
    until(lambda: trainer._tuning is not None and trainer._tuning.texts >= texts)
    until(lambda: trainer._gains is not None)


def _offered(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[Example]:
    """What the trainer is offered from now on; it learns nothing."""
    examples: list[Example] = []
    monkeypatch.setattr(_trainer(model), "offer", examples.append)
    return examples


@pytest.mark.parametrize("drafter", ["drafter", "across"])
def test_it_is_taught_in_its_own_vocabulary_with_its_own_end(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    monkeypatch.setattr("edgespec.drafting.side._SHORTEST", 1)
    with _load(models, tmp_path, drafter, "ending") as model:
        assert model.drafter is not None
        examples, stopped = _offered(model, monkeypatch), 0
        [end, *_] = model.drafter.manifest.special_tokens.eos or (None,)
        ours, theirs = model.target.tokenizer, model.drafter.tokenizer
        for prompt in (PROMPT, LONG, "once upon a time"):
            examples.clear()
            result = model.generate(prompt, max_new_tokens=150)
            tokens = result.tokens
            if result.finish_reason == "stop":
                tokens, stopped = tokens[:-1], stopped + 1
            if not tokens and end is None:
                assert examples == []
                continue
            [example] = examples
            question, answer = example.tokens[: example.start], example.tokens[example.start :]
            assert question == tuple(theirs.encode(prompt))
            if result.finish_reason == "stop" and end is not None:
                assert answer[-1] == end
                answer = answer[:-1]
            assert theirs.bytes_of(answer) == ours.bytes_of(tokens)
        assert stopped


@pytest.mark.usefixtures("drafter_reads")
@pytest.mark.parametrize("drafter", ["drafter", "across"])
def test_greedy_output_is_the_same_whatever_the_drafter_learned(
    models: Models, tmp_path: Path, drafter: str
) -> None:
    prompts = [PROMPT, LONG, "once upon a time", PROMPT]
    with edgespec.load(models["target"], None, options=LoadOptions(threads=1)) as model:
        assert model.row_exact
        plain = [_answer(model, p).tokens for p in prompts]
    with _load(models, tmp_path, drafter) as model:
        before: dict[str, F32] = {}
        for number, (prompt, expected) in enumerate(zip(prompts, plain, strict=True)):
            result = _answer(model, prompt)
            assert result.tokens == expected
            assert result.stats.drafted > 0 and result.stats.history_problem is None
            after = _tuned(model)
            assert set(after) == (_drafter(model).model.tunable if number else set())
            assert not [name for name, gain in before.items() if np.array_equal(gain, after[name])]
            before = after
            _learned(model, number + 1)


def test_a_long_conversation_keeps_its_gains(model: Model) -> None:
    first = _answer(model, LONG)
    _learned(model, 1)
    cached = _drafter(model).length
    assert cached > 64
    follow = LONG + first.text + " and then"
    _answer(model, follow)
    assert _tuned(model) == {}
    assert _drafter(model).length > cached  # the cache was kept
    _learned(model, 2)
    _answer(model, follow + " again")
    assert _tuned(model) == {}
    _answer(model)
    assert set(_tuned(model)) == _drafter(model).model.tunable


def test_a_drafter_without_gains_to_tune_is_told_and_has_no_thread(models: Models, tmp_path: Path) -> None:
    with _load(models, tmp_path, "fixed") as model:
        for _ in range(2):
            assert "export it again" in (_answer(model).stats.history_problem or "")
        assert side_of(model).trainer is None and not _training()


@pytest.mark.parametrize(("speculate", "polls"), [(True, 1000), (True, 16), (False, 1000)])
def test_training_stands_still_while_any_request_runs_then_it_is_offered_what_was_written(
    model: Model, monkeypatch: pytest.MonkeyPatch, speculate: bool, polls: int
) -> None:
    examples, trainer, busy = _offered(model, monkeypatch), _trainer(model), list[bool]()

    def cancelled() -> bool:
        busy.append(bool(trainer.busy))
        return len(busy) > polls

    options = RequestOptions(max_new_tokens=NEW, stop_at_eos=False, speculate=speculate, cancelled=cancelled)
    stream = model.stream(PROMPT, **options)
    assert not trainer.busy
    result = stream.run()
    assert len(busy) > 8 and all(busy) and not trainer.busy
    assert (8 <= len(result.tokens) < NEW) == (polls == 16)
    assert [example.tokens[example.start :] for example in examples] == [result.tokens] * speculate


def test_what_was_taught_is_there_at_the_next_load(models: Models, tmp_path: Path) -> None:
    with _load(models, tmp_path) as model:
        _answer(model)
        _learned(model, 1)
        taught = dict(_trainer(model)._gains or {})
    with _load(models, tmp_path) as model:
        _answer(model)
        recalled = _tuned(model)
    assert recalled.keys() == taught.keys() != set()
    for name, gain in taught.items():
        np.testing.assert_allclose(recalled[name], gain, atol=1e-6)


def test_another_history_begins_with_the_bundles_gains(model: Model, tmp_path: Path) -> None:
    _answer(model)
    _learned(model, 1)
    _answer(model, LONG)
    assert _tuned(model)
    _learned(model, 2)
    model.use_history(tmp_path / "someone else")
    assert _tuned(model) == {} and len(_training()) == 0
    _answer(model)
    assert _tuned(model) == {}


def test_a_drafter_that_cannot_be_trained_is_told_and_used(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _load(models, tmp_path, "standard") as model:
        first = _answer(model)
        until(lambda: _trainer(model).problem is not None)
        again = _answer(model)
    assert first.stats.history_problem is None
    assert again.stats.history_problem is not None and "operators" in again.stats.history_problem
    assert again.tokens == first.tokens and "operators" in caplog.text
