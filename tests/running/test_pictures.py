"""Tiny models of Gemma 4 that see: vectors, prompts and answers beside transformers', and what they keep."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from edgespec.asking.images import Image as Picture
from edgespec.asking.images import read_image
from edgespec.asking.pictures import Pictures
from edgespec.decoding.sampling import log_probabilities
from edgespec.engine import LoadOptions, Model, load
from edgespec.loading.footprint import footprint_of
from edgespec.loading.planning import plan
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.graphs.tower import write_tower
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import BundleError, Cancelled, EdgespecError, ModelFileError, RequestError
from edgespec_models.families.towers import Tower
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.session import LoadedModel, Rows, Session
from edgespec_runtimes.vision import VisionSession
from tests.kit import seeing
from tests.kit.gguf_cases import gguf_of
from tests.kit.hf import drawn, weights, write_directory
from tests.kit.several import Driven

F32 = npt.NDArray[np.float32]
GOLDENS: dict[str, dict[str, Any]] = {
    kind: dict(np.load(Path(__file__).parents[1] / f"golden_hf/{kind}.npz")) for kind in seeing.KINDS
}
GOLDEN = GOLDENS["seeing"]
PICTURES, BUDGET = range(len(seeing.SIZES)), 70
ONE = CpuOptions(threads=1, prefill_chunk=24)
"""So that a picture is read in several passes."""
OPTIONS = LoadOptions(threads=1, prompt_cache_bytes=0)
FREE: dict[str, Any] = {"max_new_tokens": seeing.NEW, "logit_bias": {seeing.EOS: -100, seeing.MARKER: -100}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.write(tmp_path_factory.mktemp("seeing") / "source")


@pytest.fixture(scope="module")
def bundle(bundles: Callable[[str], Bundle]) -> Bundle:
    return bundles("seeing")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Callable[[str], Bundle]:
    """The bundle of a kind, made at its first use."""

    @cache
    def made(kind: str) -> Bundle:
        folder = tmp_path_factory.mktemp(kind)
        export_model(source if kind == "seeing" else seeing.write(folder / "source", kind), folder / "bundle")
        return Bundle(folder / "bundle", verify_digests=True)

    return made


@pytest.fixture(params=seeing.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return cast("str", request.param)


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> Iterator[Model]:
    with load(bundle.path, None, options=OPTIONS) as opened:
        yield opened


def messages(*parts: str | int | F32) -> list[dict[str, Any]]:
    """A question of texts and pictures, by their numbers."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": Image.fromarray(seeing.picture(part)), "detail": "low"}
        for part in cast("Sequence[str | int]", parts)
    ]
    return [{"role": "user", "content": content}]


def pictured(bundle: Bundle, number: int) -> Pictures:
    """A prompt's tokens with their pictures, which one tower sees."""
    images = [
        read_image(Image.fromarray(seeing.picture(part)), detail="low")
        for part in seeing.PROMPTS[number]
        if isinstance(part, int)
    ]
    tower = VisionSession(bundle, ONE)

    def see(name: str, image: Picture, budget: int, rows: int, stop: Callable[[], bool]) -> F32:
        return tower.vectors(image.pixels, budget, stop)

    return Pictures(GOLDEN[f"tokens_{number}"].tolist(), images, bundle, see)


@pytest.mark.parametrize(
    ("kind", "name", "facts"),
    [*((kind, "vectors", {}) for kind in seeing.KINDS), ("seeing", "other", seeing.OTHER)],
)
def test_vectors_are_those_of_transformers(
    kind: str, name: str, facts: dict[str, Any], tmp_path: Path
) -> None:
    """In float32, as the graph is for other operators than edgespec's."""
    with open_checkpoint(seeing.write(tmp_path / "source", kind, **facts)) as checkpoint:
        assert checkpoint.tower is not None
        tower, tensors = checkpoint.tower
        write_tower(tower, tensors, tmp_path, exact=True)
    exact = cast("Any", SimpleNamespace(path=tmp_path, manifest=SimpleNamespace(vision=tower)))
    session = VisionSession(exact, ONE)
    for number in PICTURES:
        vectors = session.vectors(seeing.picture(number), BUDGET)
        np.testing.assert_allclose(vectors, GOLDENS[kind][f"{name}_{number}"], rtol=0, atol=2e-5)


def test_in_8_bits_vectors_are_nearly_the_same(bundles: Callable[[str], Bundle], kind: str) -> None:
    bundle = bundles(kind)
    session, gentle = VisionSession(bundle, ONE), VisionSession(bundle, replace(ONE, low_priority=True))
    for number in PICTURES:
        vectors, exact = session.vectors(seeing.picture(number), BUDGET), GOLDENS[kind][f"vectors_{number}"]
        assert np.linalg.norm(vectors - exact) < 0.03 * np.linalg.norm(exact)
        np.testing.assert_array_equal(gentle.vectors(seeing.picture(number), BUDGET), vectors)


def test_prompts_and_answers_are_those_of_transformers(bundles: Callable[[str], Bundle], kind: str) -> None:
    golden = GOLDENS[kind]
    with load(bundles(kind).path, None, options=OPTIONS) as model:
        for number, prompt in enumerate(seeing.PROMPTS):
            question, expected = messages(*prompt), golden[f"answer_{number}"].tolist()
            assert model.count_tokens(question) == len(golden[f"tokens_{number}"])
            answer = model.chat(question, **FREE, logprobs=True)
            tokens = [*answer.tokens]
            same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(tokens, expected, strict=True))])
            # Else a near-tie, and 8 bits decide.
            assert same == seeing.NEW or golden[f"leads_{number}"][same] < 0.05
            logits = golden[f"logits_{number}"].astype(np.float64)
            first = logits[tokens[0]] - np.log(np.exp(logits).sum())
            assert abs((answer.records[0].logprob or 0.0) - first) < 0.1


def test_drafts_and_other_answers_change_nothing(bundles: Callable[[str], Bundle], kind: str) -> None:
    bundle = bundles(kind)
    questions = [messages(*prompt) for prompt in seeing.PROMPTS] + [messages("a text alone")]
    with load(bundle.path, None, options=OPTIONS) as model:
        alone = [model.chat(question, **FREE).tokens for question in questions]
    with (
        load(bundle.path, "ngram", options=OPTIONS) as drafting,
        ThreadPoolExecutor(len(questions)) as pool,
    ):
        answers = [*pool.map(lambda question: drafting.chat(question, **FREE), questions)]
    assert [answer.tokens for answer in answers] == alone
    assert sum(answer.stats.accepted for answer in answers) > 0


def test_two_pictures_share_nothing_and_the_same_one_all(bundle: Bundle) -> None:
    """Of one size, so that their prompts have the same tokens."""
    first = seeing.picture(0)
    other = first.copy()
    other[-1, -1] ^= 1

    def question(pixels: Any, detail: str = "low") -> list[dict[str, Any]]:
        image = {"type": "image", "image": Image.fromarray(pixels), "detail": detail}
        return [{"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]}]

    with load(bundle.path, None, options=OPTIONS) as opened:
        before = opened.chat(question(first), **FREE)
        again = opened.chat(question(first), **FREE)
        assert again.stats.cached_tokens == before.stats.prompt_tokens - 1
        changed = opened.chat(question(other), **FREE)
        assert 0 < changed.stats.cached_tokens < 16  # the opening of the turn
        larger = opened.chat(question(first, "auto"), **FREE)
        assert larger.stats.prompt_tokens > 3 * before.stats.prompt_tokens
        assert larger.stats.cached_tokens < 16
        back = opened.chat(question(first), **FREE)
        assert back.stats.cached_tokens > before.stats.prompt_tokens // 2
        assert before.tokens == again.tokens == back.tokens


@pytest.mark.parametrize("same", [True, False])
def test_requests_wait_for_each_others_pictures_alone_if_they_are_the_same(
    bundle: Bundle, same: bool
) -> None:
    """Their prompts have the same tokens."""
    first = seeing.picture(0)
    other = first.copy()
    other[-1, -1] ^= not same

    with load(bundle.path, None, options=replace(OPTIONS, parallel=2)) as opened:
        driven, streams = Driven(opened), []
        for pixels in (first, other):
            parts = [{"type": "image", "image": Image.fromarray(pixels)}, {"type": "text", "text": "what?"}]
            streams.append(driven.queue(opened.stream_chat([{"role": "user", "content": parts}], **FREE)))
        driven.turn()
        taken = sum(driven.taken)
        driven.run()
        assert taken == (1 if same else 2)
        cached = [stream.result.stats.cached_tokens for stream in streams]
        assert (cached[1] > cached[0]) == same


def test_a_known_picture_is_not_seen_again_after_a_restart(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, options = messages(*seeing.PROMPTS[2]), LoadOptions(threads=1)
    with load(bundle.path, None, options=options) as opened:
        before = opened.chat(question, **FREE)
        other = messages("and now ", *seeing.PROMPTS[2])
        behind = opened.chat(other, **FREE, prompt_cache=False)
    monkeypatch.setattr(VisionSession, "vectors", None)
    with load(bundle.path, None, options=options) as opened:
        after = opened.chat(question, **FREE)
        assert opened.chat(other, **FREE).tokens == behind.tokens  # pictures elsewhere
        with pytest.raises(TypeError):
            opened.chat(messages(2), **FREE)  # one that it never saw
        opened.forget()
        with pytest.raises(TypeError):
            opened.chat(question, **FREE)
    assert after.tokens == before.tokens
    assert after.stats.cached_tokens >= before.stats.prompt_tokens - 32


def large() -> npt.NDArray[np.uint8]:
    """A picture whose vectors take a second or more."""
    return np.zeros((1600, 1600, 3), np.uint8)


def test_a_tower_stops_when_its_vectors_are_no_longer_wanted(bundle: Bundle) -> None:
    session = VisionSession(bundle, ONE)
    before = session.vectors(seeing.picture(0), BUDGET)
    with pytest.raises(Cancelled):
        session.vectors(large(), 1120, lambda: True)
    np.testing.assert_array_equal(session.vectors(seeing.picture(0), BUDGET), before)


def test_a_request_ends_while_its_picture_is_seen(model: Model) -> None:
    image = {"type": "image", "image": Image.fromarray(large())}
    chat, looks = [{"role": "user", "content": [image, {"type": "text", "text": "ab"}]}], iter([False])
    result = model.chat(chat, image_tokens=560, cancelled=lambda: next(looks, True), **FREE)
    assert (result.finish_reason, result.tokens) == ("cancelled", ())
    again = model.chat(messages(0, "ab"), **FREE)
    assert again.finish_reason == "length"


def test_pictures_of_private_requests_are_not_written(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, options = messages(*seeing.PROMPTS[3]), LoadOptions(threads=1)
    with load(bundle.path, None, options=options) as opened:
        opened.forget()
        opened.chat(question, **FREE, prompt_cache=False)
    monkeypatch.setattr(VisionSession, "vectors", None)
    with load(bundle.path, None, options=options) as opened, pytest.raises(TypeError):
        opened.chat(question, **FREE)


def test_rows_of_a_picture_see_each_other_in_windows(bundles: Callable[[str], Bundle]) -> None:
    """So a pass reads all of them, or all that are not in the cache, whatever else it reads."""
    bundle = bundles("whole")
    pictures = pictured(bundle, 2)
    rows, end = pictures.tokens, len(pictures.tokens)
    first = next(at for at, row in enumerate(rows) if row < 0)
    stop = next(at for at in range(first, end) if rows[at] >= 0)
    assert [pictures.end(0, at) for at in (first, first + 1, stop - 1, stop)] == [first, first, first, stop]
    assert [pictures.end(first, at) for at in (first + 1, stop)] == [stop, stop]
    with closing(open_cpu(bundle, ONE)) as session:
        model, other = session.model, session.model.session()

        def part(start: int, stop: int, of: Session = session) -> Rows:
            return Rows(of, rows[start:stop], 1, vectors=pictures.vectors(start, stop))

        def logits(*cuts: int) -> F32:
            for start, stop in pairwise(cuts):
                predictions = model.predict_together([part(start, stop)])
            return predictions[0].logits.copy()

        whole = logits(0, end)
        for cuts in ((0, first, stop, end), (0, first - 1, end)):
            session.rewind(0)
            np.testing.assert_array_equal(logits(*cuts), whole)
        session.rewind(first + 5)  # the picture's beginning stays
        np.testing.assert_array_equal(logits(first + 5, stop, end), whole)
        session.rewind(0)
        assert not np.array_equal(logits(0, first + 20, end), whole)  # not all of it
        session.rewind(first)
        together = [part(first, end), part(0, stop, other)]
        np.testing.assert_array_equal(model.predict_together(together)[0].logits, whole)


@pytest.mark.parametrize("kind", ["seeing", "whole"])
def test_texts_around_pictures_are_scored_and_no_logits_are_made_of_pictures(
    bundles: Callable[[str], Bundle], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, wanted, together = bundles(kind), list[int](), LoadedModel.predict_together
    pictures = pictured(bundle, 2)
    rows, end = pictures.tokens, len(pictures.tokens)
    with closing(open_cpu(bundle, ONE)) as session:
        part = Rows(session, rows, end, vectors=pictures.vectors(0, end))
        logits = session.model.predict_together([part])[0].logits.copy()
    expected = [log_probabilities(row)[max(0, token)] for row, token in zip(logits, rows[1:], strict=False)]

    def measured(model: LoadedModel, parts: Sequence[Rows]) -> Any:
        wanted.extend(part.wanted for part in parts)
        return together(model, parts)

    with load(bundle.path, None, options=OPTIONS) as opened:
        monkeypatch.setattr(LoadedModel, "predict_together", measured)
        scored = opened.chat(messages(*seeing.PROMPTS[2]), prompt_logprobs=True, max_tokens=1).prompt
    logprobs = [token.logprob for token in scored]
    assert [at for at, logprob in enumerate(logprobs) if logprob is None] == [
        at for at, row in enumerate(rows) if row < 0 or not at
    ]
    assert all(is_ in (None, by_hand) for is_, by_hand in zip(logprobs[1:], expected, strict=True))
    texts = sum(row >= 0 for row in rows)
    assert texts <= sum(wanted) <= texts + 8 < end // 2  # one for each pass over a picture's rows


def test_undone_rows_of_a_picture_are_read_again_alike(bundle: Bundle) -> None:
    pictures = pictured(bundle, 2)
    rows, end = pictures.tokens, len(pictures.tokens)
    with closing(open_cpu(bundle, ONE)) as session:

        def logits(start: int, stop: int) -> F32:
            part = Rows(session, rows[start:stop], 1, vectors=pictures.vectors(start, stop))
            return session.model.predict_together([part])[0].logits.copy()

        whole = logits(0, end)
        session.rewind(20)
        logits(20, 50)
        session.keep(13)
        np.testing.assert_array_equal(logits(33, end), whole)
        with pytest.raises(RequestError, match="token ids"):
            session.predict(rows)  # names without vectors
        with pytest.raises(RequestError, match="token ids"):
            session.model.predict_together([Rows(session, [7, 8], 1, vectors=pictures.vectors(20, 22))])


def test_with_text_alone_it_is_the_model_without_eyes(bundle: Bundle, tmp_path: Path) -> None:
    facts = seeing.config()["text_config"]
    blind = seeing.write(tmp_path / "blind")
    write_directory(blind, facts, weights(facts))
    export_model(blind, tmp_path / "bundle")
    made = Bundle(tmp_path / "bundle")
    assert not made.reads_images
    assert "vision" not in made.manifest.to_json()
    texts = [[9, 8, 7], list(range(10, 60))]
    with closing(open_cpu(bundle, ONE)) as sees, closing(open_cpu(made, ONE)) as reads:
        for text in texts:
            for session in (sees, reads):
                session.rewind(0)
            np.testing.assert_array_equal(sees.predict(text).logits, reads.predict(text).logits)


def write_text_model(path: Path, case: str = "gemma4") -> Path:
    text = gguf_of(case)
    tokens = cast("list[str]", text.metadata["tokenizer.ggml.tokens"])
    tokens[seeing.BEGIN : seeing.END + 1] = seeing.SPECIALS[seeing.BEGIN :]
    return text.write(path)


def sees_alike(bundle: Bundle, kind: str) -> None:
    """Its vectors are those of the golden, and it is told of pictures as the directory's bundle is."""
    tower = cast("Tower", bundle.manifest.vision)
    told = tower.marker, tower.around, tower.whole
    assert told == (seeing.MARKER, (seeing.BEGIN, seeing.END), kind != "seeing")
    session = VisionSession(bundle, ONE)
    for number in PICTURES:
        vectors, exact = session.vectors(seeing.picture(number), BUDGET), GOLDENS[kind][f"vectors_{number}"]
        assert np.linalg.norm(vectors - exact) < 0.03 * np.linalg.norm(exact)


def test_a_tower_in_a_file_beside_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The most alike by name, of those that fit. One that is damaged is named."""
    source = write_text_model(tmp_path / "tiny-Q8_0.gguf")
    seeing.mmproj(projection_dim=128).write(tmp_path / "mmproj-a-wide.gguf")
    seeing.mmproj(projector_type="gemma4uv").write(tmp_path / "mmproj-other.gguf")
    (tmp_path / "mmproj-tiny-Q8_0.gguf").write_bytes(b"GGUF, cut off")
    export_model(source, tmp_path / "blind")
    assert not Bundle(tmp_path / "blind").reads_images
    assert "mmproj-tiny-Q8_0.gguf is left out: " in caplog.text
    seeing.mmproj().write(tmp_path / "mmproj-tiny-F16.gguf")
    export_model(source, tmp_path / "sees")
    sees_alike(Bundle(tmp_path / "sees"), "seeing")


def test_a_tower_in_a_file_that_is_named(kind: str, tmp_path: Path) -> None:
    source = write_text_model(tmp_path / "tiny.gguf", "gemma4" if kind == "seeing" else "gemma4_tied")
    (tmp_path / "elsewhere").mkdir()
    named = seeing.mmproj(kind).write(tmp_path / "elsewhere/tower.gguf")
    with load(source, None, options=LoadOptions(threads=1, mmproj=named)) as opened:
        assert opened.reads_images
        sees_alike(opened.target, kind)
    with load(source, None, options=OPTIONS) as opened:
        assert not opened.reads_images
    seen, blind = (plan(source, None, mmproj=mmproj).target for mmproj in (named, None))
    assert seen.working_bytes > blind.working_bytes


def test_named_towers_that_do_not_fit_are_refused(source: Path, bundle: Bundle, tmp_path: Path) -> None:
    model = write_text_model(tmp_path / "tiny.gguf")
    good = seeing.mmproj().write(tmp_path / "good.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF, cut off")
    wide = seeing.mmproj(projection_dim=128).write(tmp_path / "wide.gguf")
    cases: list[tuple[Path, ExportOptions, str]] = [
        (model, ExportOptions(mmproj=tmp_path / "cut.gguf"), "cut.gguf has GGUF version"),
        (model, ExportOptions(mmproj=wide), "has no tower that edgespec runs with tiny.gguf; give the"),
        (model, ExportOptions(mmproj=model), "has no tower"),
        (model, ExportOptions(mmproj=tmp_path / "none.gguf"), "none.gguf"),
        (source, ExportOptions(mmproj=good), "is a directory or a head; leave out mmproj"),
        (model, ExportOptions(mmproj=good, weights="portable"), "mmproj is for targets on edgespec's own"),
        (model, ExportOptions(mmproj=good, role="drafter"), "mmproj is for targets on edgespec's own"),
        (model, ExportOptions(mmproj=good, device="cuda"), "mmproj is for targets on edgespec's own"),
    ]
    for path, options, problem in cases:
        with pytest.raises(EdgespecError, match=problem):
            export_model(path, tmp_path / "bundle", options=options)
    with pytest.raises(ModelFileError, match="which is no file; give a model's mmproj"):
        load(model, None, options=LoadOptions(mmproj=tmp_path / "none.gguf"))
    with pytest.raises(RequestError, match="no model's source"):
        load(bundle.path, None, options=LoadOptions(mmproj=good))


def test_exports_for_other_operators_say_that_they_are_blind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_model(
        seeing.write(tmp_path / "s", "whole"), tmp_path / "bundle", options=ExportOptions(weights="portable")
    )
    assert not Bundle(tmp_path / "bundle").reads_images
    assert "pictures need edgespec's own kernels" in caplog.text


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from(["low", "auto", "high"]))
def test_any_picture_fits_its_budget(bundle: Bundle, high: int, wide: int, detail: str) -> None:
    tower = cast("Tower", bundle.manifest.vision)
    budget = tower.budget(detail, None)
    size = tower.size((high, wide, 3), budget)
    assert all(side > 0 and side % 24 == 0 for side in size)
    assert 0 < tower.count(size) <= budget


@pytest.mark.parametrize(
    ("detail", "tokens", "budget"),
    [
        ("low", None, 70),
        ("auto", None, 280),
        ("high", None, 1120),
        ("low", 1000, 560),
        ("auto", 140, 140),
        ("auto", 20, 70),
    ],
)
def test_a_budget_is_one_of_those_that_the_model_knows(
    bundle: Bundle, detail: str, tokens: int | None, budget: int
) -> None:
    assert cast("Tower", bundle.manifest.vision).budget(detail, tokens) == budget


def test_a_template_that_hides_pictures_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    template = tmp_path / "blind.jinja"
    template.write_text("{% for m in messages %}{{ m.content[1].text }}{% endfor %}")
    options = LoadOptions(threads=1, prompt_cache_bytes=0, chat_template=template)
    with (
        load(bundle.path, None, options=options) as opened,
        pytest.raises(RequestError, match="1 pictures, and the model's chat template shows 0"),
    ):
        opened.chat(messages(0, "what?"))


def test_the_text_of_a_marker_is_no_picture(model: Model) -> None:
    plain, marked = (model.count_tokens(messages(text)) for text in ("x", "x<|image|><|image>"))
    assert marked > plain + 2


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("vision_tower.encoder.layers.1.mlp.up_proj.linear.weight", None, "is missing"),
        ("embed_vision.embedding_projection.weight", (64, 32), r"has the shape \(64, 32\), not \(64, 64\)"),
        ("vision_tower.encoder.layers.0.self_attn.q_norm.weight", (33,), "has the shape"),
    ],
)
def test_towers_that_are_not_whole_are_refused(
    name: str, values: tuple[int, ...] | None, problem: str, tmp_path: Path
) -> None:
    facts, folder = seeing.config(), seeing.write(tmp_path / "source")
    tensors = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in weights(facts["text_config"]).items()
    }
    tower = seeing.tower_tensors(facts["vision_config"])
    del tower[name]
    if values is not None:
        tower |= drawn({name: values}, 0)
    write_directory(folder, facts, tensors | {f"model.{key}": value for key, value in tower.items()})
    with pytest.raises(ModelFileError, match=problem):
        export_model(folder, tmp_path / "bundle")


@pytest.mark.parametrize(
    "changed",
    [
        lambda facts: facts["text_config"].update(pad_token_id=2),
        lambda facts: facts["vision_config"].update(hidden_activation="relu"),
        lambda facts: facts["vision_config"].update(num_key_value_heads=1),
    ],
)
def test_towers_that_edgespec_does_not_run_leave_the_text_model(
    changed: Callable[[dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = seeing.config()
    changed(facts)
    monkeypatch.setattr(seeing, "config", lambda _: facts)
    export_model(seeing.write(tmp_path / "source"), tmp_path / "bundle")
    assert not Bundle(tmp_path / "bundle").reads_images


def test_a_plan_counts_the_tower(bundle: Bundle, source: Path, tmp_path: Path) -> None:
    export_model(source, tmp_path / "bundle", options=ExportOptions(role="drafter", trim="full"))
    seen, blind = (footprint_of(made, exact_rows=True) for made in (bundle, Bundle(tmp_path / "bundle")))
    tower = (bundle.path / "vision.onnx.data").stat().st_size
    assert seen.working_bytes == blind.working_bytes + tower


def test_drafters_have_no_eyes(source: Path, tmp_path: Path) -> None:
    export_model(source, tmp_path / "bundle", options=ExportOptions(role="drafter", trim="full"))
    assert not Bundle(tmp_path / "bundle").reads_images


def test_damaged_bundles_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    text = (bundle.path / "edgespec.json").read_text("utf-8")
    for file in bundle.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for old, new in (('"gemma4_vision"', '"gemma5_vision"'), ('"marker": 4', '"marker": 400')):
        (tmp_path / "edgespec.json").write_text(text.replace(old, new), "utf-8")
        with pytest.raises(BundleError, match="vision"):
            Bundle(tmp_path)
