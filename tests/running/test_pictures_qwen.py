"""A tiny Qwen3.5 that sees: beside transformers, with its MTP layer, what it keeps, and its files."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from edgespec.asking.images import read_image
from edgespec.asking.pictures import Pictures
from edgespec.engine import LoadOptions, load
from edgespec_export.export import export_model
from edgespec_export.graphs.tower import write_tower
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import RequestError, UnsupportedModelError
from edgespec_models.families.qwen3_5_vision import Qwen35Tower
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.session import Rows, Session
from edgespec_runtimes.vision import VisionSession
from tests.kit import seeing_qwen as kit
from tests.kit.drafters import draft_eagerly
from tests.kit.heads import drafts_for
from tests.kit.hf import write_directory

F32 = npt.NDArray[np.float32]
GOLDEN: dict[str, Any] = dict(np.load(Path(__file__).parents[1] / "golden_hf/seeing_qwen.npz"))
PICTURES, NUMBERS = range(len(kit.SIZES)), range(len(kit.PROMPTS))
ONE = CpuOptions(threads=1, prefill_chunk=24)
"""So that a picture is read in several passes."""
OPTIONS = LoadOptions(threads=1, prompt_cache_bytes=0, image_tokens=kit.BUDGET)
FREE: dict[str, Any] = {"max_new_tokens": kit.NEW, "logit_bias": {kit.EOS: -100, kit.MARKER: -100}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.write(tmp_path_factory.mktemp("qwen_sees") / "source", mtp=True)


@pytest.fixture(scope="module")
def bundle(source: Path) -> Bundle:
    export_model(source, source.with_name("bundle"))
    return Bundle(source.with_name("bundle"), verify_digests=True)


@pytest.fixture(scope="module")
def head(source: Path) -> Bundle:
    """The MTP layer."""
    export_model(source, source.with_name("head"), options=drafts_for(source))
    return Bundle(source.with_name("head"))


@pytest.fixture(scope="module")
def of_files(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Of a GGUF file with its tower in a file beside it."""
    folder = tmp_path_factory.mktemp("qwen_files")
    kit.mmproj().write(folder / "mmproj-m.gguf")
    export_model(kit.text_gguf().write(folder / "m.gguf"), folder / "bundle")
    return Bundle(folder / "bundle")


@pytest.fixture(params=["bundle", "of_files"])
def sees(request: pytest.FixtureRequest) -> Bundle:
    """A bundle of a directory, and one of files."""
    made: Bundle = request.getfixturevalue(request.param)
    return made


@pytest.fixture(scope="module")
def session(bundle: Bundle) -> Iterator[Session]:
    with closing(open_cpu(bundle, ONE)) as opened:
        yield opened


def shown(*parts: str | int) -> list[dict[str, Any]]:
    """A question of texts and pictures, by their numbers."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": Image.fromarray(kit.picture(part))}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def tower_of(bundle: Bundle) -> Qwen35Tower:
    return cast("Qwen35Tower", bundle.manifest.vision)


def pictured(bundle: Bundle, number: int, more: Sequence[int] = ()) -> Pictures:
    """A prompt's tokens, and ``more`` behind them, with their pictures."""
    numbers = [part for part in kit.PROMPTS[number] if isinstance(part, int)]
    images = [read_image(Image.fromarray(kit.picture(n)), image_tokens=kit.BUDGET) for n in numbers]
    tokens = [*GOLDEN[f"tokens_{number}"].tolist(), *more]
    session = VisionSession(bundle, ONE)
    return Pictures(
        tokens, images, bundle, lambda _, image, budget, *rest: session.vectors(image.pixels, budget)
    )


def rows_of(session: Session, pictures: Pictures, start: int, end: int, wanted: int = 1) -> Rows:
    seen = {"vectors": pictures.vectors(start, end), "positions": pictures.positions(start, end)}
    return Rows(session, pictures.tokens[start:end], wanted, **cast("Any", seen))


def logits_of(session: Session, pictures: Pictures, start: int, end: int, wanted: int = 1) -> F32:
    rows = rows_of(session, pictures, start, end, wanted)
    return session.model.predict_together([rows])[0].logits.copy()


# ---- Beside transformers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [False, True])
def test_vectors_are_those_of_transformers(source: Path, tmp_path: Path, *, files: bool) -> None:
    """In float32, as the graph is for other operators than edgespec's."""
    if files:
        kit.mmproj().write(tmp_path / "mmproj.gguf")
        source = kit.text_gguf().write(tmp_path / "m.gguf")
    with open_checkpoint(source) as checkpoint:
        assert checkpoint.tower is not None
        tower, tensors = checkpoint.tower
        write_tower(tower, tensors, tmp_path, exact=True)
    exact = cast("Any", SimpleNamespace(path=tmp_path, manifest=SimpleNamespace(vision=tower)))
    session = VisionSession(exact, ONE)
    for number in PICTURES:
        vectors = session.vectors(kit.picture(number), kit.BUDGET)[::3]
        np.testing.assert_allclose(vectors, GOLDEN[f"vectors_{number}"], rtol=0, atol=5e-6)


def test_in_8_bits_vectors_are_nearly_the_same(sees: Bundle) -> None:
    session = VisionSession(sees, ONE)
    for number in PICTURES:
        vectors, exact = session.vectors(kit.picture(number), kit.BUDGET)[::3], GOLDEN[f"vectors_{number}"]
        assert np.linalg.norm(vectors - exact) < 0.02 * np.linalg.norm(exact)


def test_sizes_are_those_of_transformers(bundle: Bundle) -> None:
    asked = [(*shape, budget) for budget in kit.BUDGETS for shape in kit.SHAPES]
    sizes = [tower_of(bundle).size((high, wide, 3), budget) for high, wide, budget in asked]
    assert sizes == [*map(tuple, GOLDEN["sizes"].tolist())]


@pytest.mark.parametrize("number", NUMBERS)
def test_positions_are_those_of_transformers(bundle: Bundle, number: int) -> None:
    pictures, known = pictured(bundle, number), GOLDEN[f"positions_{number}"]
    end = len(known)
    np.testing.assert_array_equal(pictures.positions(0, end), known)
    behind = known.max() + 1 + np.arange(7)
    np.testing.assert_array_equal(
        pictures.positions(end - 1, end + 7), [known[-1], *zip(behind, behind, behind, strict=True)]
    )
    np.testing.assert_array_equal(
        pictures.positions(end + 3, end + 7), np.repeat(behind[3:, None], 3, axis=1)
    )


@pytest.mark.parametrize("number", NUMBERS)
def test_choices_are_those_of_transformers(sees: Bundle, number: int) -> None:
    """Those behind the prompt and each token of the answer, but for near-ties, which 8 bits decide."""
    answer, leads = GOLDEN[f"answer_{number}"], GOLDEN[f"leads_{number}"]
    pictures = pictured(sees, number, answer[:-1].tolist())
    end = len(pictures.tokens)
    with closing(open_cpu(sees, ONE)) as session:
        logits = logits_of(session, pictures, 0, end, kit.NEW)
        blurred = pictures.vectors(0, end)
        session.rewind(0)
        (at_places,) = session.model.predict_together(
            [Rows(session, pictures.tokens, kit.NEW, vectors=blurred)]
        )
    known = GOLDEN[f"logits_{number}"]
    assert np.linalg.norm(logits[0] - known) < 0.08 * np.linalg.norm(known)
    assert np.linalg.norm(at_places.logits[0] - known) > 0.15 * np.linalg.norm(known)
    logits[:, [kit.EOS, kit.MARKER]] = -np.inf
    same = logits.argmax(axis=1) == answer
    assert same[leads > 0.25].all() and same.mean() > 0.6


@pytest.mark.parametrize("number", NUMBERS)
def test_tokens_are_those_of_transformers(bundle: Bundle, number: int) -> None:
    with load(bundle.path, None, options=OPTIONS) as model:
        answer = model.chat(shown(*kit.PROMPTS[number]), **FREE, logprobs=True)
    assert answer.stats.prompt_tokens == len(GOLDEN[f"tokens_{number}"])
    logits = GOLDEN[f"logits_{number}"].astype(np.float64)
    first = logits[answer.tokens[0]] - np.log(np.exp(logits).sum())
    assert abs((answer.records[0].logprob or 0.0) - first) < 0.1


# ---- Sequences, undone rows, and what is kept --------------------------------------------------------------


def test_drafts_and_other_answers_change_nothing(bundle: Bundle, head: Bundle) -> None:
    """Of n-grams and of the MTP layer, for which pictures are pictures too."""
    questions = [shown(*prompt) for prompt in kit.PROMPTS] + [shown("a text alone")]
    with load(bundle.path, None, options=OPTIONS) as plain:
        alone = [plain.chat(question, **FREE).tokens for question in questions]
    for drafter in ("ngram", head.path):
        with load(bundle.path, drafter, options=OPTIONS) as drafting, ThreadPoolExecutor(5) as pool:
            draft_eagerly(drafting)
            for _ in range(2):
                answers = [*pool.map(lambda question: drafting.chat(question, **FREE), questions)]
                assert [answer.tokens for answer in answers] == alone
                kind = "ngram" if drafter == "ngram" else "model"
                counts = [answer.stats.by_source.get(kind) for answer in answers]
                assert sum(count.drafted for count in counts if count is not None) > 10


def test_an_mtp_layer_reads_vectors_at_the_positions_of_the_tokens_before(
    bundle: Bundle, head: Bundle
) -> None:
    assert head.manifest.vision is None and not (head.path / "vision.onnx").exists()
    pictures = pictured(bundle, 2)
    count = len(pictures.tokens) - 1
    features = np.random.default_rng(0).normal(0, 1, (count, kit.WIDTH)).astype(np.float32)
    with closing(open_cpu(head, ONE)) as session:
        plain = Rows(session, GOLDEN["tokens_2"][1:].tolist(), 1, features=features)
        seen = pictures.of_head(plain, 1)
        assert seen.tokens == pictures.tokens[1:] and min(seen.tokens) < 0
        np.testing.assert_array_equal(cast("Any", seen.positions), pictures.positions(0, count))

        def logits(rows: Rows) -> F32:
            session.rewind(0)
            return session.model.predict_together([rows])[0].logits.copy()

        whole, others = logits(seen), [replace(seen, positions=None), plain]
        assert all(np.abs(whole - logits(other)).max() > 0.05 for other in others)
        session.rewind(0)
        for start, end in ((0, 50), (50, count)):
            part = replace(plain, tokens=plain.tokens[start:end], features=features[start:end])
            (last,) = session.model.predict_together([pictures.of_head(part, 1 + start)])
        np.testing.assert_array_equal(last.logits, whole)


def test_undone_rows_of_a_picture_are_read_again_alike(bundle: Bundle, session: Session) -> None:
    pictures = pictured(bundle, 2)
    end = len(pictures.tokens)
    session.rewind(0)
    whole = logits_of(session, pictures, 0, end)
    session.rewind(0)
    logits_of(session, pictures, 0, 40)
    logits_of(session, pictures, 40, 52)
    session.keep(7)
    np.testing.assert_array_equal(logits_of(session, pictures, 47, end), whole)


def test_sequences_of_a_pass_have_positions_of_their_own(bundle: Bundle, session: Session) -> None:
    session.rewind(0)
    everything = [pictured(bundle, number) for number in NUMBERS]
    alone = []
    for pictures in everything:
        session.rewind(0)
        alone.append(logits_of(session, pictures, 0, len(pictures.tokens)))
    text = [*range(10, 40)]
    session.rewind(0)
    alone.append(session.predict(text).logits[-1:].copy())
    session.rewind(0)
    others = [session.model.session() for _ in everything]
    try:
        rows = [
            rows_of(other, pictures, 0, len(pictures.tokens))
            for other, pictures in zip(others, everything, strict=True)
        ]
        together = session.model.predict_together([*rows, Rows(session, text, 1)])
        for one, many in zip(alone, together, strict=True):
            np.testing.assert_array_equal(many.logits, one)
    finally:
        for other in others:
            other.close()


def test_a_known_picture_is_not_seen_again_after_a_restart(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what follows goes on at the same positions."""
    options = replace(OPTIONS, prompt_cache_bytes=1 << 30)
    question, more = (
        shown(*kit.PROMPTS[2]),
        shown(*kit.PROMPTS[2], " and what more do you see in both of them?"),
    )
    with load(bundle.path, None, options=OPTIONS) as opened:
        expected = [opened.chat(asked, **FREE).tokens for asked in (question, more)]
    with load(bundle.path, None, options=options) as opened:
        assert opened.chat(question, **FREE).tokens == expected[0]
    monkeypatch.setattr(VisionSession, "vectors", None)
    with load(bundle.path, None, options=options) as opened:
        for asked, tokens in zip((question, more), expected, strict=True):
            after = opened.chat(asked, **FREE)
            assert after.tokens == tokens
            assert after.stats.cached_tokens >= 200


def test_two_pictures_share_nothing_and_the_same_one_all(bundle: Bundle) -> None:
    """Of one size, so that their prompts have the same tokens."""
    first = kit.picture(0)
    other = first.copy()
    other[-1, -1] ^= 1

    def question(pixels: Any) -> list[dict[str, Any]]:
        image = {"type": "image", "image": Image.fromarray(pixels)}
        return [{"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]}]

    with load(bundle.path, None, options=OPTIONS) as opened:
        before = opened.chat(question(first), **FREE)
        assert opened.chat(question(other), **FREE).stats.cached_tokens < 16  # the opening of the turn
        back = opened.chat(question(first), **FREE)
        assert back.stats.cached_tokens > before.stats.prompt_tokens // 2
        assert before.tokens == back.tokens


def test_another_question_about_a_picture_reads_the_question_alone(bundle: Bundle) -> None:
    """Whose states do not lead back behind the picture."""
    image = {"type": "image", "image": Image.fromarray(kit.picture(3))}
    texts = ["what is on the picture, and where?", "how many letters does it have, and which?"]
    with load(bundle.path, None, options=OPTIONS) as opened:
        first, second = (
            opened.chat([{"role": "user", "content": [image, {"type": "text", "text": text}]}], **FREE)
            for text in texts
        )
    assert first.stats.prompt_tokens > 100
    assert second.stats.prompt_tokens - second.stats.cached_tokens < 64


def test_with_text_alone_it_is_the_model_without_eyes(
    bundle: Bundle, session: Session, tmp_path: Path
) -> None:
    facts = kit.config()["text_config"]
    blind = kit.write(tmp_path / "blind")
    write_directory(blind, facts, kit.text_tensors(facts))
    export_model(blind, tmp_path / "bundle")
    made = Bundle(tmp_path / "bundle")
    assert not made.reads_images and "row_positions" not in (made.path / "model.onnx").read_bytes().decode(
        "latin-1"
    )
    with closing(open_cpu(made, ONE)) as reads:
        for text in ([9, 8, 7], list(range(10, 60))):
            for opened in (session, reads):
                opened.rewind(0)
            np.testing.assert_array_equal(session.predict(text).logits, reads.predict(text).logits)


# ---- Budgets and files -------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 20_000), st.floats(1, 200), st.booleans(), st.integers(1, 20_000))
def test_any_picture_fits_its_budget(
    bundle: Bundle,
    short: int,
    ratio: float,
    upright: bool,
    tokens: int,
) -> None:
    tower, sides = tower_of(bundle), sorted((short, int(short * ratio)), reverse=upright)
    budget = tower.budget("auto", tokens)
    size = tower.size((*sides, 3), budget)
    assert 64 <= budget <= 16_384
    assert all(side > 0 and side % 16 == 0 for side in size)
    assert 0 < tower.count(size) <= budget


@pytest.mark.parametrize(
    ("detail", "tokens", "budget"),
    [("low", None, 256), ("auto", None, 1024), ("high", None, 4096), ("low", 500, 500), ("auto", 9, 64)],
)
def test_a_budget_is_what_is_asked_for(bundle: Bundle, detail: str, tokens: int | None, budget: int) -> None:
    assert tower_of(bundle).budget(detail, tokens) == budget


def test_a_picture_that_is_too_long_is_refused(bundle: Bundle) -> None:
    line = {"type": "image", "image": Image.new("RGB", (402, 2))}
    with (
        load(bundle.path, None, options=OPTIONS) as opened,
        pytest.raises(RequestError, match=r"402 x 2 pixels.* 200 times as long"),
    ):
        opened.count_tokens([{"role": "user", "content": [line]}])


@pytest.mark.parametrize("names", [("image_min_pixels", "image_max_pixels"), ("min_pixels", "max_pixels")])
def test_a_file_may_state_the_limits(names: tuple[str, str], tmp_path: Path) -> None:
    """By llama.cpp's keys, or by those of ollama."""
    kit.mmproj(**dict(zip(names, (16 * 256, 100 * 256), strict=True))).write(tmp_path / "mmproj.gguf")
    with open_checkpoint(kit.text_gguf().write(tmp_path / "m.gguf")) as checkpoint:
        tower = cast("Any", checkpoint.tower)[0]
    assert (tower.fewest, tower.most) == (16, 100)
    assert [tower.budget("high", None), tower.budget("auto", 3)] == [100, 16]


@pytest.mark.parametrize(
    "changed", [{"is_deepstack_layers": [False, True]}, {"deepstack_visual_indexes": [1]}]
)
def test_features_for_the_decoders_layers_are_refused_by_name(
    changed: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of Qwen3-VL. A file that nobody named is left out."""
    kit.mmproj(**changed).write(tmp_path / "mmproj.gguf")
    with open_checkpoint(kit.text_gguf().write(tmp_path / "m.gguf")) as checkpoint:
        assert checkpoint.tower is None
    assert "mmproj.gguf is left out: " in caplog.text and "deepstack_visual_indexes are [1]" in caplog.text
    with pytest.raises(UnsupportedModelError, match=r"deepstack_visual_indexes are \[1\]"):
        open_checkpoint(kit.write(tmp_path / "directory", deepstack_visual_indexes=[1]))


@pytest.mark.parametrize(
    "changed",
    [
        lambda facts: facts["text_config"]["rope_parameters"].update(mrope_section=[4, 2, 2]),
        lambda facts: facts["vision_config"].update(hidden_act="relu"),
        lambda facts: facts["vision_config"].update(temporal_patch_size=1),
    ],
)
def test_towers_that_edgespec_does_not_run_leave_the_text_model(
    changed: Callable[[dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = kit.config()
    changed(facts)
    monkeypatch.setattr(kit, "config", lambda: facts)
    with open_checkpoint(kit.write(tmp_path / "source")) as checkpoint:
        assert checkpoint.tower is None


def test_drafters_of_text_have_no_eyes(source: Path, tmp_path: Path) -> None:
    export_model(source, tmp_path / "bundle", options=replace(drafts_for(source), target=None, trim="full"))
    assert not Bundle(tmp_path / "bundle").reads_images
