"""The SDK from prompt to result, on random models: every option, every way a request can end."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgespec
from edgespec import Generation, LoadOptions, Model
from edgespec_models.bundles.bundle import MANIFEST
from edgespec_models.errors import CatalogueError, Closed, DoesNotFit, RequestError
from edgespec_models.progress import Progress
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.session import Session
from tests.kit.models import runner_of, side_of
from tests.kit.native import tiny_native
from tests.kit.tokenizers import sentencepiece_json
from tests.kit.toy import LLAMA, QWEN

PROMPT = "def add(a, b):"
OPTIONS = LoadOptions(threads=1)
NEW = 60
pytestmark = pytest.mark.usefixtures("cheap_drafts")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("models")
    text = sentencepiece_json()
    foreign = replace(LLAMA, vocab_size=Tokenizer.from_json(text).vocab_size)
    return SimpleNamespace(
        target=tiny_native(folder / "target", LLAMA, "Q4_1").path,
        same=tiny_native(folder / "same", LLAMA, "Q4_1").path,
        other=tiny_native(folder / "other", QWEN, "Q4_0", seed=5).path,
        across=tiny_native(folder / "across", foreign, "Q4_0", seed=6, tokenizer_json=text).path,
        short=tiny_native(folder / "short", replace(LLAMA, context_length=100), "Q4_1").path,
        ngram="ngram",
        nothing=None,
    )


def _write(model: Model, **options: Any) -> Generation:
    return model.generate(PROMPT, max_new_tokens=NEW, stop_at_eos=False, **options)


@pytest.fixture
def model(models: SimpleNamespace) -> Iterator[Model]:
    with edgespec.load(models.target, models.same, options=OPTIONS) as model:
        yield model


@pytest.fixture(scope="module")
def plain(models: SimpleNamespace) -> Generation:
    """What plain decoding writes."""
    with edgespec.load(models.target, None, options=OPTIONS) as model:
        assert model.row_exact
        return _write(model)


def _check(result: Generation) -> None:
    """Statistics agree with each other and with the result."""
    stats = result.stats
    assert stats.new_tokens == len(result.tokens)
    assert sum(source.drafted for source in stats.by_source.values()) == stats.drafted
    assert sum(source.accepted for source in stats.by_source.values()) == stats.accepted
    assert sum(stats.drafted_by_position) == stats.drafted
    assert sum(stats.accepted_by_position) == stats.accepted
    assert len(stats.drafted_by_position) == len(stats.accepted_by_position) <= OPTIONS.max_draft
    for drafted, accepted in zip(stats.drafted_by_position, stats.accepted_by_position, strict=True):
        assert 0 <= accepted <= drafted
    assert stats.accepted <= stats.new_tokens <= stats.rounds + stats.accepted
    assert stats.decode_tokens == max(0, stats.new_tokens - 1)
    assert 0 <= stats.cached_tokens < stats.prompt_tokens
    assert stats.ttft_s > 0 and stats.drafter_s >= 0 and (stats.target_s > 0) == (stats.rounds > 1)
    assert stats.target_s + stats.drafter_s <= stats.decode_s + 1e-6


@pytest.mark.parametrize("drafter", ["same", "other", "across", "ngram", "nothing"])
def test_output_is_the_same_with_every_drafter(
    models: SimpleNamespace, plain: Generation, drafter: str
) -> None:
    """Greedy, and sampled with a seed."""
    with edgespec.load(models.target, getattr(models, drafter), options=OPTIONS) as model:
        for speculate in (True, False, True):
            result = _write(model, speculate=speculate)
            _check(result)
            assert (result.tokens, result.text) == (plain.tokens, plain.text)
            assert result.finish_reason == "length"
            if not speculate or drafter == "nothing":
                assert result.stats.drafted == 0 and result.stats.rounds == NEW
            elif drafter != "ngram":
                assert result.stats.by_source["model"].drafted > 0
        assert (model.drafter_name or "nothing") == drafter
        if drafter == "same":  # good drafts save passes
            assert result.stats.rounds < 0.6 * NEW and result.stats.acceptance_rate > 0.5
            assert result.stats.drafter_s > 0 and result.stats.speculation_off_reason is None
        sampled = [
            _write(model, temperature=0.9, seed=seed, speculate=speculate).tokens
            for seed in (1, 2)
            for speculate in (True, False)
        ]
    assert sampled[0] == sampled[1] != sampled[2] == sampled[3]


def test_the_pieces_of_a_stream_join_to_the_text(model: Model, plain: Generation) -> None:
    stream = model.stream(PROMPT, max_new_tokens=NEW, stop_at_eos=False)
    with pytest.raises(RequestError, match="not finished"):
        _ = stream.result
    pieces = list(stream)
    assert len(pieces) > 1 and all(pieces)
    assert "".join(pieces) == stream.result.text == plain.text
    assert stream.run() is stream.result


@pytest.mark.parametrize("read", [0, 1, 3])
def test_a_new_request_waits_for_the_one_before(model: Model, plain: Generation, read: int) -> None:
    first = model.stream("Something else:", max_new_tokens=NEW, stop_at_eos=False)
    pieces = [next(first) for _ in range(read)]
    second = model.stream(PROMPT, max_new_tokens=NEW, stop_at_eos=False)
    assert second.run().tokens == plain.tokens
    assert "".join([*pieces, *first]) == first.result.text
    assert len(first.result.tokens) == NEW


def test_a_request_from_within_another_one_is_refused(model: Model, plain: Generation) -> None:
    refused = []

    def meanwhile() -> bool:
        with pytest.raises(RequestError, match="from another thread"):
            model.generate("Something else:")
        refused.append(True)
        return False

    assert _write(model, cancelled=meanwhile).tokens == plain.tokens
    assert len(refused) > 3


def test_a_stop_string_ends_the_text_in_front_of_it(model: Model, plain: Generation) -> None:
    found = [plain.text[at : at + 3] for at in range(8, NEW)]
    words = [word for word in dict.fromkeys(found) if word.isascii() and plain.text.index(word) >= 8][:3]
    assert words
    for word in words:
        stream = model.stream(PROMPT, max_new_tokens=NEW, stop_at_eos=False, stop=["never there", word])
        pieces = list(stream)
        result = stream.result
        _check(result)
        assert result.text == "".join(pieces) == plain.text[: plain.text.index(word)]
        assert (result.finish_reason, result.stop) == ("stop", word)
        decoded = (model.target.tokenizer.decode(plain.tokens[:count]) for count in range(NEW + 1))
        assert result.tokens == plain.tokens[: next(at for at, text in enumerate(decoded) if word in text)]


def test_the_end_token_ends_the_text_unless_told_otherwise(
    models: SimpleNamespace, plain: Generation, tmp_path: Path
) -> None:
    where = next(i for i in range(5, NEW) if plain.tokens[i] not in plain.tokens[:i])
    target = shutil.copytree(models.target, tmp_path / "ending")
    manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    manifest["special_tokens"]["eos"] = [plain.tokens[where]]
    (target / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for drafter in (models.same, models.across, "ngram", None):
        with edgespec.load(target, drafter, options=OPTIONS) as model:
            ended, going_on = model.generate(PROMPT, max_new_tokens=NEW), _write(model)
        assert (ended.tokens, ended.finish_reason) == (plain.tokens[: where + 1], "stop")
        assert (going_on.tokens, going_on.finish_reason) == (plain.tokens, "length")


def test_an_answer_may_fill_the_context_and_is_shortened_to_it(models: SimpleNamespace) -> None:
    with edgespec.load(models.short, models.same, options=OPTIONS) as model:
        prompt_tokens = model.generate(PROMPT, max_new_tokens=1).stats.prompt_tokens
        room = 100 - prompt_tokens
        full = model.generate(PROMPT, max_new_tokens=room, stop_at_eos=False)
        assert len(full.tokens) == room
        for more in (room + 1, 2**31 - 1):
            shortened = model.generate(PROMPT, max_new_tokens=more, stop_at_eos=False)
            assert (shortened.tokens, shortened.finish_reason) == (full.tokens, "length")
        with pytest.raises(
            DoesNotFit, match=r"^prompt is too long: \d+ tokens > 100 maximum, the model's con"
        ):
            model.stream(PROMPT * 50, max_new_tokens=1)
        assert model.generate(PROMPT, max_new_tokens=5, stop_at_eos=False).tokens == full.tokens[:5]


def test_a_prompt_too_long_for_the_drafter_is_decoded_without_it(models: SimpleNamespace) -> None:
    prompt = "the quick brown fox jumps " * 20
    with edgespec.load(models.target, None, options=OPTIONS) as alone:
        expected = alone.generate(prompt, max_new_tokens=20)
    with edgespec.load(models.target, models.short, options=OPTIONS) as model:
        result = model.generate(prompt, max_new_tokens=20)
    assert result.stats.prompt_tokens > 100
    assert result.tokens == expected.tokens
    assert "model" not in result.stats.by_source


def _is_closed(session: Session) -> bool:
    return session.closed and session.kv_bytes == 0


def test_closed_it_says_so(models: SimpleNamespace) -> None:
    with edgespec.load(models.target, models.same, options=OPTIONS) as model:
        stream = model.stream(PROMPT, max_new_tokens=600, stop_at_eos=False)
        first = next(stream)
        late = model.stream(PROMPT)
    assert _is_closed(runner_of(model).session) and _is_closed(side_of(model).session)
    model.close()
    with pytest.raises(Closed, match="closed"):
        model.generate(PROMPT)
    with pytest.raises(Closed, match="closed"):
        late.run()
    assert stream.run().finish_reason in ("closed", "length")
    assert stream.result.text.startswith(first)
    with pytest.raises(ZeroDivisionError), edgespec.load(models.target, None, options=OPTIONS) as failed:
        raise ZeroDivisionError
    assert _is_closed(runner_of(failed).session)


def test_requests_that_make_no_sense_are_refused(model: Model) -> None:
    asks: tuple[Callable[..., object], ...] = (model.generate, model.stream)
    for ask in asks:
        with pytest.raises(RequestError, match=r"unknown option 'colour'; allowed: .*max_new_tokens"):
            ask(PROMPT, colour=5)
        with pytest.raises(RequestError, match="prompt is ''"):
            ask("")
    with pytest.raises(RequestError, match="no chat template"):
        model.chat([{"role": "user", "content": "Hello"}])


def test_the_catalogue_is_asked_for_names_and_for_drafters(models: SimpleNamespace) -> None:
    for names in (("no-such-model",), (models.target, "no-such-model")):
        with pytest.raises(CatalogueError):
            edgespec.load(*names)
    with edgespec.load(models.target, options=OPTIONS) as model:  # which it does not know
        assert (model.drafter_name, model.name) == ("ngram", "target")
        assert (model.drafter, model.drafter_step_s) == (None, None)


def test_options_of_a_load_that_stand_in_the_wrong_place(models: SimpleNamespace) -> None:
    misplaced: dict[str, Any] = {"threads": 2, "max_draft": 4}
    says = r"options=edgespec.LoadOptions\(threads=2, max_draft=4\)"
    with pytest.raises(RequestError, match=says):
        edgespec.load(models.target, None, **misplaced)


def test_a_load_tells_of_its_measurements(models: SimpleNamespace) -> None:
    reports = list[Progress]()
    edgespec.load(models.target, None, options=OPTIONS, progress=reports.append).close()
    assert "Timing passes" in {report.stage for report in reports}
    edgespec.load(models.target, None, options=OPTIONS, progress=None).close()
