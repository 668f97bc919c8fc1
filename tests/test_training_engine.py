"""A model that trains its drafter between requests: what is learned from, when it is used, what stays."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

import edgespec
from edgespec import Generation, LoadOptions, Model, RequestOptions, engine
from edgespec.drafting.side import DrafterSide
from edgespec.learning.trainer import Trainer
from edgespec.learning.tuning import Example
from edgespec.loading import opening
from edgespec_models.bundles.bundle import MANIFEST
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes import cost
from edgespec_runtimes.cpu import CpuSession
from edgespec_runtimes.session import Predictions
from tests.native_for_tests import tiny_native
from tests.tokenizers_for_tests import sentencepiece_json
from tests.toy import COLUMNS, F32, INT4, LLAMA, QWEN, tiny_bundle

PROMPT = "def add(a, b):"
LONG = "the quick brown fox jumps over the lazy dog, and the lazy dog sleeps on. " * 3
OPTIONS = LoadOptions(threads=1, training_share=1.0)
NEW = 40
SOON = 30.0  # seconds that nothing here comes near


Models = dict[str, Path]


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
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own a pass of a target takes a second, of any number of rows, a drafter's 10 ms."""
    now = 0.0

    class Timed(CpuSession):
        def _run(self, tokens: Sequence[int], rows: int) -> Predictions:
            nonlocal now
            now += 1.0 if self._options.exact_rows else 0.01
            return super()._run(tokens, rows)

    monkeypatch.setattr(opening, "CpuSession", Timed)
    for module in (cost, engine):
        monkeypatch.setattr(module, "perf_counter", lambda: now)


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


def _side(model: Model) -> DrafterSide:
    assert model._side is not None
    return model._side


def _trainer(model: Model) -> Trainer:
    trainer = _side(model).trainer
    assert trainer is not None
    return trainer


def _tuned(model: Model) -> dict[str, F32]:
    """The gains that the drafter runs with instead of its bundle's."""
    session = _side(model).session
    assert isinstance(session, CpuSession) and session._io is not None
    return {name: array for name, (array, _) in session._io._tuned.items()}


def _tunable(model: Model) -> frozenset[str]:
    return _side(model).session.tunable


def _until(done: Callable[[], bool]) -> None:
    end, never = monotonic() + SOON, threading.Event()
    while not done():
        assert monotonic() < end
        never.wait(0.002)


def _learned(model: Model, texts: int) -> None:
    """Until the drafter has learned from so many texts, and gains wait to be taken."""
    trainer = _trainer(model)
    _until(lambda: trainer._tuning is not None and trainer._tuning.texts >= texts)
    _until(lambda: trainer._gains is not None)


def _offered(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[Example]:
    """What the trainer is offered from now on; it learns nothing."""
    examples: list[Example] = []
    monkeypatch.setattr(_trainer(model), "offer", examples.append)
    return examples


def test_a_drafter_is_offered_its_prompt_and_the_answer(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = _offered(model, monkeypatch)
    result = _answer(model)
    prompt = model.target.tokenizer.encode(PROMPT)
    assert examples == [Example((*prompt, *result.tokens), len(prompt))]


def test_the_answer_is_in_the_drafters_own_vocabulary(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _load(models, tmp_path, "across") as model:
        examples = _offered(model, monkeypatch)
        result = _answer(model)
        ours, theirs = model.target.tokenizer, _side(model).bundle.tokenizer
    [example] = examples
    assert example.tokens[: example.start] == tuple(theirs.encode(PROMPT))
    assert theirs.bytes_of(example.tokens[example.start :]) == ours.bytes_of(result.tokens)


@pytest.mark.parametrize("drafter", ["drafter", "across"])
def test_where_an_answer_ends_stands_the_drafters_own_end(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    monkeypatch.setattr("edgespec.drafting.side._SHORTEST", 1)
    with _load(models, tmp_path, drafter, "ending") as model:
        examples, stopped = _offered(model, monkeypatch), 0
        [end, *_] = _side(model).bundle.manifest.special_tokens.eos or (None,)
        ours, theirs = model.target.tokenizer, _side(model).bundle.tokenizer
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
            answer = example.tokens[example.start :]
            if result.finish_reason == "stop" and end is not None:
                assert answer[-1] == end
                answer = answer[:-1]
            assert theirs.bytes_of(answer) == ours.bytes_of(tokens)
        assert stopped


def test_long_prompts_and_answers_are_cut_and_short_answers_left_out(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.drafting.side._PROMPT", 5)
    monkeypatch.setattr("edgespec.drafting.side._ANSWER", 20)
    examples = _offered(model, monkeypatch)
    result = _answer(model)
    prompt = model.target.tokenizer.encode(PROMPT)
    assert len(prompt) > 5
    assert examples == [Example((*prompt[-5:], *result.tokens[:20]), 5)]
    model.generate(PROMPT, max_new_tokens=7, stop_at_eos=False)
    assert len(examples) == 1
    model.generate(PROMPT, max_new_tokens=8, stop_at_eos=False)
    assert len(examples) == 2


def test_an_answer_left_early_is_learned_from(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = _offered(model, monkeypatch)
    busy = list[bool]()

    def cancelled() -> bool:
        busy.append(_trainer(model)._busy)
        return len(busy) > 16

    model.generate(PROMPT, max_new_tokens=NEW, stop_at_eos=False, cancelled=cancelled)
    assert all(busy) and not _trainer(model)._busy
    [example] = examples
    assert 8 <= len(example.tokens) - example.start < NEW


@pytest.mark.parametrize("drafter", ["drafter", "across"])
def test_greedy_output_is_the_same_whatever_the_drafter_learned(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    monkeypatch.setattr("edgespec.drafting.experience.Experience.expected", lambda *_: 1e9)
    prompts = [PROMPT, LONG, "once upon a time", PROMPT]
    with edgespec.load(models["target"], None, options=LoadOptions(threads=1)) as model:
        assert model.row_exact
        plain = [_answer(model, p).tokens for p in prompts]
    with _load(models, tmp_path, drafter) as model:
        before: dict[str, F32] = {}
        for number, (prompt, expected) in enumerate(zip(prompts, plain, strict=True)):
            result = _answer(model, prompt)
            assert result.tokens == expected
            assert result.stats.drafted > 0
            assert result.stats.history_problem is None
            after = _tuned(model)
            assert set(after) == (_tunable(model) if number else set())
            for name, gain in before.items():
                assert not np.array_equal(gain, after[name])
            before = after
            _learned(model, number + 1)


def test_a_long_conversation_keeps_its_gains(model: Model) -> None:
    first = _answer(model, LONG)
    _learned(model, 1)
    cached = _side(model).session.length
    assert cached > 64
    follow = LONG + first.text + " and then"
    _answer(model, follow)
    assert _tuned(model) == {}
    assert _side(model).session.length > cached  # the cache was kept
    _learned(model, 2)
    _answer(model, follow + " again")
    assert _tuned(model) == {}
    latest = _side(model)._gains
    assert latest is not None
    _answer(model)
    assert set(_tuned(model)) == _tunable(model)


@pytest.mark.parametrize("why", ["share", "history", "drafter"])
def test_where_nothing_is_to_be_trained_there_is_no_thread(models: Models, tmp_path: Path, why: str) -> None:
    options = replace(OPTIONS, training_share=0.0) if why == "share" else OPTIONS
    history = None if why == "history" else tmp_path / "me"
    drafter = models["fixed"] if why == "drafter" else models["drafter"]
    with edgespec.load(models["target"], drafter, options=options, history=history) as model:
        for _ in range(2):
            result = _answer(model)
            problem = result.stats.history_problem or ""
            assert ("export it again" in problem) == (why == "drafter")
        assert _side(model).trainer is None
        assert not _training() and _tuned(model) == {}


@pytest.mark.parametrize("speculate", [True, False])
def test_training_stands_still_while_any_request_runs(
    model: Model, monkeypatch: pytest.MonkeyPatch, speculate: bool
) -> None:
    examples = _offered(model, monkeypatch)
    trainer = _trainer(model)
    busy = list[bool]()

    def cancelled() -> bool:
        busy.append(trainer._busy)
        return False

    options = RequestOptions(max_new_tokens=NEW, stop_at_eos=False, speculate=speculate, cancelled=cancelled)
    stream = model.stream(PROMPT, **options)
    assert not trainer._busy
    stream.run()
    assert len(busy) > 8 and all(busy) and not trainer._busy
    assert len(examples) == speculate


def test_a_request_that_never_began_is_not_mixed_up_with_the_next(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = _offered(model, monkeypatch)
    model.stream(PROMPT, max_new_tokens=NEW, stop_at_eos=False)
    model.generate(LONG, max_new_tokens=NEW, stop_at_eos=False, speculate=False)
    assert examples == []


def test_a_request_that_fails_lets_training_go_on(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a pass failed")

    session = model._session
    with monkeypatch.context() as patch:
        patch.setattr(session, "predict", fail)
        with pytest.raises(RuntimeError):
            _answer(model)
    assert not _trainer(model)._busy
    _answer(model)
    _learned(model, 1)


def test_what_was_taught_is_there_at_the_next_load(models: Models, tmp_path: Path) -> None:
    with _load(models, tmp_path) as model:
        _answer(model)
        _learned(model, 1)
        taught = dict(_trainer(model)._gains or {})
    assert taught
    with _load(models, tmp_path) as model:
        _answer(model)
        recalled = _tuned(model)
        assert recalled.keys() == taught.keys()
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
        _until(lambda: _trainer(model).problem is not None)
        again = _answer(model)
    assert first.stats.history_problem is None
    assert again.stats.history_problem is not None and "operators" in again.stats.history_problem
    assert again.tokens == first.tokens and "operators" in caplog.text
