"""Which drafter ``"auto"`` takes: by expected speed, and nothing is fetched unasked."""

import logging
from pathlib import Path

import pytest

import edgespec
from edgespec.loading import drafters
from edgespec.loading.drafters import choose, expected_speed, recommended
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.config import DecoderShape
from edgespec_models.downloads.catalog import entries, hub_heads, hub_names
from edgespec_models.downloads.hub import on_hub
from edgespec_models.errors import EdgespecError, RequestError, UnsupportedModelError
from edgespec_models.storage import bundles_dir, models_dir
from tests.kit.downloads import REPOSITORY, Hub
from tests.kit.gguf import tiny_gguf
from tests.kit.toy import tiny_bundle


def shape(architecture: str, vocabulary: int) -> DecoderShape:
    return DecoderShape(
        architecture=architecture,
        vocab_size=vocabulary,
        num_layers=1,
        context_length=64,
    )


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("qwen3-8b", "qwen3-0.6b"),
        ("qwen3-4b", "smollm2-135m-instruct"),  # 2.08 times, 1.98 with the 0.6B
        ("gemma-3-4b-it", "gemma-3-270m"),
        ("llama-3.2-3b-instruct", "smollm2-135m-instruct"),
        ("phi-4-mini-instruct", "smollm2-135m-instruct"),
    ],
)
def test_the_drafter_that_promises_most_is_recommended(target: str, drafter: str) -> None:
    model = hub_names()[target]
    assert recommended(shape(model.architecture, model.vocabulary), model.size_bytes)[0] == drafter


def test_a_head_drafts_for_its_own_target_where_it_was_pulled_and_promises_more(
    request: pytest.FixtureRequest,
) -> None:
    """Of the 4B small models promise 2.1 times, heads of EAGLE-3 1.8, and those that draft blocks 2.3."""
    model = hub_names()["qwen3-1.7b"]
    facts = shape(model.architecture, model.vocabulary), model.size_bytes
    assert recommended(*facts, reference="qwen3-1.7b")[0] not in hub_heads()
    request.getfixturevalue("all_pulled")
    chosen = {}
    for name in ("qwen3-1.7b", "qwen3-4b", "qwen3-8b"):
        model = hub_names()[name]
        facts = shape(model.architecture, model.vocabulary), model.size_bytes
        chosen[name] = recommended(*facts, reference=name)[0]
        assert recommended(*facts)[0] not in hub_heads()
    heads = {name: head for name, head in chosen.items() if head in hub_heads()}
    assert heads == {
        "qwen3-1.7b": "hf:AngelSlim/Qwen3-1.7B_eagle3",
        "qwen3-4b": "hf:z-lab/Qwen3-4B-DFlash-b16",
    }


@pytest.mark.usefixtures("all_pulled")
def test_an_assistant_does_not_draft_where_it_cannot_read_the_cache() -> None:
    model = hub_names()["gemma-4-e2b-it"]
    facts = shape(model.architecture, model.vocabulary), model.size_bytes
    names = [recommended(*facts, reference=model.name, in_bytes=kv)[0] for kv in (False, True)]
    assert names[0] == "hf:google/gemma-4-E2B-it-assistant" != names[1]
    assert all(head.reads_cache == ("assistant" in name) for name, head in hub_heads().items())


def test_heads_are_of_known_models() -> None:
    for reference, head in hub_heads().items():
        assert on_hub(reference) is not None and all(on_hub(name) is not None for name in head.targets)


def test_a_model_as_small_as_drafters_gets_none() -> None:
    entry = entries()["smollm2-135m-instruct"]
    assert recommended(shape("llama", 49_152), entry.size_bytes)[0] == "ngram"


def test_a_file_that_the_catalogue_knows_has_its_own_drafter() -> None:
    entry = entries()["qwen2.5-coder-1.5b-instruct"]
    assert recommended(shape("qwen2", 151_936), entry.size_bytes, entry.sha256)[0] == entry.drafter


def test_expected_speed_is_that_of_the_best_length() -> None:
    assert expected_speed(0.5, 0.95) == pytest.approx(0.75)  # half a token for a pass
    assert expected_speed(0.9, 0.0) == pytest.approx((1 - 0.9**9) / 0.1 / 1.4)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A tiny bundle for which a drafter that is not here is recommended."""
    monkeypatch.setattr(drafters, "recommended", lambda *args, in_bytes: ("qwen3-0.6b", 2.0))
    return tiny_bundle(tmp_path / "bundle").bundle


def test_for_a_path_nothing_is_fetched_and_the_command_is_said(
    large: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "edgespec"):
        assert choose(large, large.path) == "ngram"
    assert "edgespec pull qwen3-0.6b" in caplog.text
    assert "2.0 times" in caplog.text


def test_with_a_name_its_size_is_said_and_it_is_fetched(
    large: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "edgespec"):
        assert choose(large, "qwen3-4b") == "qwen3-0.6b"
    assert "0.4 GB" in caplog.text


@pytest.mark.usefixtures("all_pulled")
def test_what_is_here_is_taken_for_a_path_too(large: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "edgespec"):
        assert choose(large, large.path) == "qwen3-0.6b"
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "2.0 times" in caplog.text


def test_an_aligned_drafter_is_no_target_and_nothing_is_pulled_for_it() -> None:
    with pytest.raises(RequestError, match="is aligned to draft and is no target; give it with --drafter"):
        edgespec.load("smollm2-135m-qwen2.5-coder", None, progress=None)
    with pytest.raises(RequestError, match="is aligned to draft and is no target; give it with --drafter"):
        edgespec.plan("smollm2-135m-qwen2.5-coder")
    assert not any(models_dir().glob("*"))


@pytest.mark.parametrize("name", ["smollm2-135m-instrct", "nowhere.gguf"])
def test_a_mistyped_drafter_is_an_error_before_the_target_is_exported(tmp_path: Path, name: str) -> None:
    source = tiny_gguf("llama", layers=1).write(tmp_path / "m.gguf")
    with pytest.raises(EdgespecError, match=rf"no model '{name}'|{name} does not exist"):
        edgespec.load(source, name, progress=None)
    assert not any(bundles_dir().glob("*"))


def test_a_drafter_of_the_hub_is_pulled_before_the_target_is_exported(tmp_path: Path, hub: Hub) -> None:
    source = tiny_gguf("llama", layers=1).write(tmp_path / "m.gguf")
    hub.files, hub.content = {"config.json": b'{"model_type": "later"}', "model.safetensors": b"x"}, None
    with pytest.raises(UnsupportedModelError, match="later"):
        edgespec.load(source, f"hf:{REPOSITORY}", progress=None)
    assert hub.fetched == ["config.json"] and not any(bundles_dir().glob("*"))
