"""Vectors of texts: what transformers computes, whatever else is read in the same pass or runs beside."""

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread, Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import LoadOptions, Model
from edgespec.asking.request import Request
from edgespec.running.embedding import Embeddings, TextsTicket, direction
from edgespec.running.stream import Stream
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_models.bundles.bundle import Bundle, Embedding
from edgespec_models.errors import BundleError, Cancelled, Closed, DoesNotFit, EdgespecError, RequestError
from tests.kit.gguf_cases import GGUF_CASES, gguf_of
from tests.kit.hf import EMBEDDED, EMBEDDERS, config_of, weights, write_checkpoint, write_safetensors
from tests.kit.models import queue_of, runner_of
from tests.kit.native import edit_manifest, tiny_native
from tests.kit.several import Driven
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import until

GOLDEN = Path(__file__).parents[1] / "golden_hf/vectors.npz"
LAST = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}
MODULES = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling")]
END = 2  # <|im_end|> of the tiny tokenizer
TEXTS = ["def add(a, b):", "the quick brown fox " * 99, "x", "one two three", "naïve café, 日本語"]


def embedder(folder: Path, case: str, pooling: Any = LAST, modules: Any = MODULES) -> Path:
    """A directory that sentence-transformers reads, whose tokenizer ends texts."""
    spec = json.loads(byte_level_json(size=300))
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [END], "tokens": ["<|im_end|>"]}},
    }
    write_checkpoint(folder, config_of(case))
    (folder / "1_Pooling").mkdir()
    files = {"tokenizer.json": spec, "1_Pooling/config.json": pooling, "modules.json": modules}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


def native(folder: Path, **how: Any) -> Path:
    path = tiny_native(folder, **how).path
    edit_manifest(path, lambda value: value.update(embedding={"pooling": "last", "end": END}))
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native(tmp_path_factory.mktemp("embeds") / "embeds")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with edgespec.load(path, "ngram", options=LoadOptions(threads=1)) as loaded:
        yield loaded


@pytest.fixture
def driven(path: Path) -> Iterator[Driven]:
    one = Driven(edgespec.load(path, None, options=LoadOptions(threads=1, parallel=3)))
    yield one
    one.close()


def queued(one: Driven, *texts: str, **options: Any) -> tuple[Any, Stream]:
    ticket = runner_of(one.model).text_reader.ticket(texts, **options)
    return ticket, one.queue(Stream(ticket, queue_of(one.model)))


@pytest.mark.parametrize("case", EMBEDDERS)
@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_vectors_are_those_of_transformers(tmp_path: Path, case: str, form: str) -> None:
    """Multipliers of the residual stream and of logits, which exports fold into gains, leave no trace."""
    source = tmp_path / "source"
    if form == "gguf":
        if case not in GGUF_CASES:
            return  # which GGUF files cannot say
        file = gguf_of(case, "Q8_0")
        file.metadata[f"{file.architecture}.pooling_type"] = 3
        source = file.write(tmp_path / "source.gguf")
    else:
        embedder(source, case, LAST)
    export_model(source, tmp_path / "out")
    expected = np.load(GOLDEN)[case]
    edit_manifest(tmp_path / "out", lambda value: value["embedding"].update(end=None))
    with edgespec.load(tmp_path / "out") as model:
        assert model.drafter_name is None  # none is chosen for a model that is loaded for vectors
        vectors, tokens = model.embed([list(text) for text in EMBEDDED])
        short = model.embed([list(text) for text in EMBEDDED], dimensions=24).vectors
    assert tokens == tuple(map(len, EMBEDDED)) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert ((vectors * expected).sum(axis=1) > 0.999).all()  # activations have eight bits
    cut = vectors[:, :24]
    np.testing.assert_allclose(short, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6)


def test_a_text_has_the_same_bits_in_any_pass(model: Model) -> None:
    alone = [model.embed(text) for text in TEXTS]
    together = model.embed(TEXTS * 4)
    assert together.tokens == tuple(result.tokens[0] for result in alone) * 4
    expected = np.tile(np.concatenate([result.vectors for result in alone]), (4, 1))
    np.testing.assert_array_equal(together.vectors, expected)


def test_texts_are_ended_and_queries_say_what_they_are_to_find(model: Model) -> None:
    ids = model.tokenize("where?")
    vector, tokens = model.embed("where?")
    assert tokens == (len(ids) + 1,)
    assert np.array_equal(model.embed([ids]).vectors, vector)
    assert np.array_equal(model.embed([[*ids, END]]).vectors, vector)
    spelled = model.embed("Instruct: Find code.\nQuery:where?")
    assert np.array_equal(model.embed("where?", instruction="Find code.").vectors, spelled.vectors)
    assert not np.array_equal(spelled.vectors, vector)
    assert not np.array_equal(model.embed("where?<|im_end|>").vectors, vector)  # as a text, not as a token


def test_several_texts_share_a_pass(driven: Driven) -> None:
    ticket, stream = queued(driven, "def", "x", "the fox", "x", "one more")
    assert driven.turn() == 1 and len(ticket.unread) == 1
    assert driven.turn() == 1 and not ticket.unread
    assert stream.result.finish_reason == "stop"


def test_answers_beside_texts_stay_the_same(model: Model, driven: Driven) -> None:
    prompt = "def add(a, b):\n"
    whole = model.generate(prompt, max_new_tokens=30, stop_at_eos=False)
    vectors = model.embed(TEXTS).vectors
    answer = driven.queue(driven.model.stream(prompt, max_new_tokens=30, stop_at_eos=False))
    for _ in range(3):
        driven.turn()
    (long, first), (short, second) = queued(driven, *TEXTS * 2), queued(driven, TEXTS[0])
    assert driven.turn() == 3
    assert second.ended and not first.ended  # a short request does not wait for a long one
    driven.run()
    assert answer.result.tokens == whole.tokens
    assert np.array_equal(long.outcome("stop").vectors, np.tile(vectors, (2, 1)))
    assert np.array_equal(short.outcome("stop").vectors, vectors[:1])


def test_short_requests_do_not_throw_away_what_was_read_of_a_long_text(driven: Driven) -> None:
    long, first = queued(driven, TEXTS[1])
    passes = -(-long.longest // runner_of(driven.model).session.model.piece)
    turns, others = 0, []  # which end when nobody holds them
    while not first.ended:
        if turns % 3 == 1:
            others.append(queued(driven, "x", "y"))
        turns += 1
        assert driven.turn() and turns <= passes + 2  # the first short one takes its place once
    assert passes >= 3


def test_what_ends_early_leaves_nothing(driven: Driven) -> None:
    ticket, stream = queued(driven, *TEXTS)
    driven.turn()
    assert ticket.unread
    stream.cancel()
    driven.run()
    with pytest.raises(Cancelled, match=r"\d of 5 texts are unread: cancelled"):
        ticket.outcome(stream.result.finish_reason)
    assert any(session.length for session in runner_of(driven.model).text_sessions)
    driven.model.forget()
    assert not any(session.length for session in runner_of(driven.model).text_sessions)
    late, waiting = queued(driven, "x", timeout=1e-9)
    driven.run()
    with pytest.raises(Cancelled, match="not finished within 1e-09 s"):
        late.outcome(waiting.result.finish_reason)


def test_what_is_cancelled_ends_in_a_pause(driven: Driven) -> None:
    ticket, stream = queued(driven, *TEXTS)
    driven.turn()
    queue = queue_of(driven.model)
    pausing = Thread(target=driven.model.pause)
    pausing.start()
    until(lambda: queue.is_held)
    stream.cancel()
    letting_go = Timer(5, queue.resume)
    letting_go.start()
    driven.turn()
    assert queue.is_held and ticket.result is not None
    letting_go.cancel()
    queue.resume()
    pausing.join(60)
    driven.run()


def test_trim_gives_back_what_texts_took(driven: Driven, model: Model) -> None:
    expected = model.embed(TEXTS).vectors
    ticket, _stream = queued(driven, *TEXTS)
    driven.turn()
    assert ticket.unread
    assert runner_of(driven.model).trim() > 0 == runner_of(driven.model).session.model.kv_bytes
    driven.run()
    assert np.array_equal(ticket.outcome("stop").vectors, expected)


def test_a_pass_that_fails_ends_those_that_share_it(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(runner_of(driven.model).session.model, "predict_together", lambda ticket: 1 / 0)
        _, stream = queued(driven, "x")
        driven.run()
        with pytest.raises(ZeroDivisionError):
            stream.run()
    ticket, stream = queued(driven, "x")
    driven.run()
    assert ticket.outcome(stream.result.finish_reason).tokens == (2,)


def test_tasks_and_the_end_of_a_model(path: Path) -> None:
    async def both(model: Model) -> Any:
        return await asyncio.gather(model.embed_async("x"), model.embed_async(["y", "x"], dimensions=8))

    model = edgespec.load(path, options=LoadOptions(threads=1))
    one, two = asyncio.run(both(model))
    assert one.vectors.shape == (1, 96) and two.vectors.shape == (2, 8)
    model.close()
    with pytest.raises(Closed):
        model.embed("x")


def test_beside_a_head_there_are_no_vectors(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    head = SimpleNamespace(bundle=SimpleNamespace(config=SimpleNamespace(is_head=True)))
    with monkeypatch.context() as patched:
        patched.setattr(runner_of(model), "side", head)
        patched.delitem(vars(runner_of(model)), "text_reader", raising=False)
        with pytest.raises(RequestError, match="load it without a drafter"):
            model.embed("x")


def test_numbers_that_are_not_finite_are_no_vector() -> None:
    of_state = partial(direction, np.ones(3, np.float32), 2)
    ticket = TextsTicket(Request.of({}), [[1], [1]], 2, of_state, Embeddings)
    ticket.put_state(np.zeros(3, np.float32))  # of which there is no direction
    with pytest.raises(EdgespecError, match="not finite"):
        ticket.put_state(np.array([np.nan, 1, 1], np.float32))


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "of length 1 or more"),
        (["x", ""], {}, r"texts\[1\] is empty; leave it out"),
        ([3], {}, r"texts\[0\] is 3; allowed: a text or a list"),
        ([[400_000]], {}, r"texts\[0\] is a list of tokens; allowed: ids from 0 to \d+"),
        ([[1]], {"instruction": "Find."}, "no instruction"),
        (["x"], {"dimensions": 97}, "dimensions is 97; allowed: 1 to the model's own, 96"),
        (["x"], {"dimensions": 0}, "dimensions is 0"),
        (["x"], {"timeout": -1}, "timeout is -1"),
    ],
)
def test_what_is_wrong_is_said(model: Model, texts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.embed(texts, **options)


def test_a_text_that_does_not_fit(model: Model) -> None:
    problem = r"^texts\[1\] is too long: \d+ tokens > \d+ maximum, the model's context; cut"
    with pytest.raises(DoesNotFit, match=problem) as caught:
        model.embed(["x", "the fox " * 5000])
    assert caught.value.field == "texts[1]"


def test_models_that_were_not_made_for_it_refuse(tmp_path: Path) -> None:
    chats = tiny_native(tmp_path / "chats").path
    with edgespec.load(chats, None) as model, pytest.raises(RequestError, match="chats makes no vectors"):
        model.embed("x")
    source = embedder(tmp_path / "m", "qwen3")
    export_model(source, tmp_path / "portable", options=ExportOptions(weights="portable"))
    with (
        edgespec.load(tmp_path / "portable") as model,
        pytest.raises(RequestError, match="returns no hidden states"),
    ):
        model.embed("x")


@pytest.mark.parametrize(
    ("pooling", "modules"),
    [
        ({"pooling_mode_mean_tokens": True}, MODULES),
        ({**LAST, "pooling_mode_mean_tokens": True}, MODULES),
        (LAST, [*MODULES, {"type": "sentence_transformers.models.Dense"}]),
        ({}, MODULES),
    ],
)
def test_other_ways_to_make_vectors_are_not_taken_for_this_one(
    tmp_path: Path, pooling: Any, modules: Any
) -> None:
    with HFCheckpoint(embedder(tmp_path / "m", "qwen3", pooling, modules)) as opened:
        assert opened.embedding() is None


def test_directories_as_qwen_publishes_them(tmp_path: Path) -> None:
    """Names without "model.", no LM head although the configuration says that there is one."""
    source = embedder(tmp_path / "m", "qwen3", {"pooling_mode": "lasttoken"})
    stored = weights(config_of("qwen3"))
    del stored["lm_head.weight"]
    write_safetensors(source / "model.safetensors", {n.removeprefix("model."): v for n, v in stored.items()})
    with HFCheckpoint(source) as opened:
        assert opened.embedding() == Embedding(end=END) and opened.tied_head
        assert source / "1_Pooling/config.json" in opened.files
    export_model(source, tmp_path / "out")
    bundle = Bundle(tmp_path / "out")
    assert bundle.embeds and bundle.manifest.embedding == Embedding(end=END)


@pytest.mark.parametrize(("pooling", "ends", "found"), [(3, True, 2), (3, False, None), (1, True, None)])
def test_gguf_files_say_how(tmp_path: Path, pooling: int, ends: bool, found: int | None) -> None:
    file = gguf_of("qwen3", "Q8_0")
    file.metadata |= {"qwen3.pooling_type": pooling, "tokenizer.ggml.add_eos_token": ends}
    export_model(file.write(tmp_path / "m.gguf"), tmp_path / "out")
    assert Bundle(tmp_path / "out").manifest.embedding == (Embedding(end=found) if pooling == 3 else None)


def test_an_end_that_the_model_lacks_is_a_damaged_bundle(path: Path, tmp_path: Path) -> None:
    broken = native(tmp_path / "broken")
    edit_manifest(broken, lambda value: value["embedding"].update(end=10_000))
    with pytest.raises(BundleError, match=r"embedding.end is \(10000,\); allowed: ids from 0"):
        Bundle(broken)
