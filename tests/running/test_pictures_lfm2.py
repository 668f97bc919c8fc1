"""A tiny LFM2-VL: vectors, prompts and answers beside transformers', with pictures cut into tiles."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from edgespec.engine import LoadOptions, Model, load
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.graphs.tower import write_tower
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.families.lfm2_vision import Lfm2Tower
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.vision import VisionSession
from tests.kit import seeing_lfm2 as seeing
from tests.kit.gguf_cases import gguf_of

GOLDEN: dict[str, Any] = dict(np.load(Path(__file__).parents[1] / "golden_hf/seeing_lfm2.npz"))
ONE, OPTIONS = CpuOptions(threads=1), LoadOptions(threads=1, prompt_cache_bytes=0)
FREE: dict[str, Any] = {"max_new_tokens": seeing.NEW, "logit_bias": {seeing.EOS: -100, seeing.MARKER: -100}}
PICTURES = range(len(seeing.SIZES))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("lfm2")
    export_model(seeing.write(folder / "source"), folder / "bundle")
    return Bundle(folder / "bundle", verify_digests=True)


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> Iterator[Model]:
    with load(bundle.path, None, options=OPTIONS) as opened:
        yield opened


def messages(*parts: str | int) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": Image.fromarray(seeing.picture(part))}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def budget_of(tower: Lfm2Tower, detail: str = "auto") -> int:
    return tower.budget(detail, None)


def test_vectors_are_those_of_transformers(tmp_path: Path) -> None:
    """In float32, view by view."""
    with open_checkpoint(seeing.write(tmp_path / "source")) as checkpoint:
        assert checkpoint.tower is not None
        tower, tensors = cast("tuple[Lfm2Tower, Any]", checkpoint.tower)
        write_tower(tower, tensors, tmp_path, exact=True)
    exact = cast("Any", SimpleNamespace(path=tmp_path, manifest=SimpleNamespace(vision=tower)))
    session = VisionSession(exact, ONE)
    for number in PICTURES:
        vectors = session.vectors(seeing.picture(number), budget_of(tower))
        np.testing.assert_allclose(vectors, GOLDEN[f"vectors_{number}"], rtol=0, atol=2e-5)


def sees_alike(bundle: Bundle, pictures: Iterable[int]) -> None:
    tower = cast("Lfm2Tower", bundle.manifest.vision)
    session = VisionSession(bundle, ONE)
    for number in pictures:
        vectors = session.vectors(seeing.picture(number), budget_of(tower))
        exact = GOLDEN[f"vectors_{number}"]
        assert np.linalg.norm(vectors - exact) < 0.03 * np.linalg.norm(exact)


def test_in_8_bits_vectors_are_nearly_the_same(bundle: Bundle) -> None:
    sees_alike(bundle, PICTURES)


@pytest.mark.parametrize("number", range(len(seeing.PROMPTS)))
def test_prompts_and_answers_are_those_of_transformers(model: Model, number: int) -> None:
    question, expected = messages(*seeing.PROMPTS[number]), GOLDEN[f"answer_{number}"].tolist()
    assert model.count_tokens(question) == len(GOLDEN[f"tokens_{number}"])
    answer = model.chat(question, **FREE, logprobs=True)
    tokens = [*answer.tokens]
    same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(tokens, expected, strict=True))])
    assert same == seeing.NEW or GOLDEN[f"leads_{number}"][same] < 0.05  # a near-tie, and 8 bits decide
    logits = GOLDEN[f"logits_{number}"].astype(np.float64)
    first = logits[tokens[0]] - np.log(np.exp(logits).sum())
    assert abs((answer.records[0].logprob or 0.0) - first) < 0.1


def test_drafts_and_other_answers_change_nothing(bundle: Bundle, model: Model) -> None:
    questions = [messages(*prompt) for prompt in seeing.PROMPTS] + [messages("a text alone")]
    alone = [model.chat(question, **FREE).tokens for question in questions]
    with load(bundle.path, "ngram", options=OPTIONS) as drafting, ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(lambda question: drafting.chat(question, **FREE), questions)]
        again = drafting.chat(questions[1], **FREE)
    assert [answer.tokens for answer in answers] == alone
    assert again.tokens == alone[1] and again.stats.cached_tokens > 0


def test_pictures_are_cut_as_transformers_cuts_them(bundle: Bundle) -> None:
    """Columns and rows of tiles, width and height of the view of the whole."""
    tower, seen = cast("Lfm2Tower", bundle.manifest.vision), list[tuple[int, ...]]()
    for size in seeing.OTHERS:
        *tiles, whole = tower.views((*size, 3), budget_of(tower))
        high, wide = tiles[0].size if tiles else (512, 512)
        seen.append((wide // 512, high // 512, whole.size[1], whole.size[0]))
        assert len(tiles) in (0, wide * high // 512**2)
    np.testing.assert_array_equal(seen, GOLDEN["layouts"])
    assert len({tuple(row[:2]) for row in seen}) > 8


def test_a_low_detail_and_a_budget_need_no_tiles(bundle: Bundle) -> None:
    tower = cast("Lfm2Tower", bundle.manifest.vision)
    shape = seeing.picture(1).shape
    assert len(tower.views(shape, tower.budget("auto", None))) == 3
    assert len(tower.views(shape, tower.budget("high", 768))) == 3
    for budget in (tower.budget("low", None), tower.budget("auto", 700), tower.budget("auto", 80)):
        (view,) = tower.views(shape, budget)
        assert tower.count(view.extent) <= min(budget, 256)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 4000))
def test_any_picture_fits_its_budget(bundle: Bundle, high: int, wide: int, tokens: int) -> None:
    tower = cast("Lfm2Tower", bundle.manifest.vision)
    budget = tower.budget("auto", tokens)
    views = tower.views((high, wide, 3), budget)
    assert 0 < sum(tower.count(view.extent) for view in views) <= max(budget, 64)
    for view in views:
        assert all(side > 0 and side % 32 == 0 for side in view.extent)
        top, left, *extent = view.box or (0, 0, *view.size)
        assert top + extent[0] <= view.size[0] and left + extent[1] <= view.size[1]


def test_a_tower_in_a_file(tmp_path: Path) -> None:
    """Of a tokenizer that lacks tokens for tiles, so that pictures stay whole."""
    text = gguf_of("lfm2")
    tokens = cast("list[str]", text.metadata["tokenizer.ggml.tokens"])
    tokens[seeing.MARKER : seeing.MARKER + 3] = ["<image>", *seeing.AROUND[:2]]
    source = text.write(tmp_path / "tiny.gguf")
    named = seeing.mmproj().write(tmp_path / "tower.gguf")
    export_model(source, tmp_path / "bundle", options=ExportOptions(mmproj=named))
    made = Bundle(tmp_path / "bundle")
    sees_alike(made, (0, 2))
    tower = cast("Lfm2Tower", made.manifest.vision)
    assert len(tower.views(seeing.picture(1).shape, budget_of(tower))) == 1


@pytest.mark.parametrize(
    "changed", [{"vision_feature_layer": -2}, {"projector_hidden_act": "relu"}, {"model_type": "lfm2"}]
)
def test_towers_that_edgespec_does_not_run_leave_the_text_model(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = seeing.config() | changed
    monkeypatch.setattr(seeing, "config", lambda: facts)
    export_model(seeing.write(tmp_path / "source"), tmp_path / "bundle")
    assert not Bundle(tmp_path / "bundle").reads_images
