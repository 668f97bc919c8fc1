"""MTP layers (arXiv 2412.19437): against the formula, from file to drafts, unasked, and refused by name."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

import edgespec
from edgespec import RequestOptions, plan
from edgespec.cli import app
from edgespec.drafting.heads import HeadReader
from edgespec.loading.drafters import expected_speed, mtp_price
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.formats.quantization import Quantization
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import EdgespecError, ModelFileError, RequestError, UnsupportedModelError
from edgespec_models.families import read_config
from edgespec_models.files.facts import Facts
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Rows
from tests.kit import mtp as mtp
from tests.kit.drafters import check_acceptance, check_drafts, draft_eagerly, read, step
from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import gguf_of
from tests.kit.heads import drafts_for
from tests.kit.hf import VOCAB, write_safetensors
from tests.kit.mtp import LAYERS, Reference, streams_of

NEAR = 0.03
"""Of the deviation: activations in 8 bits. What differs in kind is beyond."""
CLEAR = 0.15
"""Deviations that a logit is above the second where rounding moves none."""
BLOCK = f"blk.{LAYERS}."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a model and its layer."""
    return mtp.gguf().write(tmp_path_factory.mktemp("mtp") / "m.gguf")


@pytest.fixture(scope="module")
def pair(source: Path) -> tuple[Bundle, Bundle]:
    target, head = source.with_name("target"), source.with_name("head")
    export_model(source, target)
    export_model(source, head, options=drafts_for(source))
    return Bundle(target), Bundle(head, verify_digests=True)


def text_of(seed: int, tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 300, tokens)]


def distance(target: Path, head: Path, reference: Reference) -> float:
    """How far nine of ten rows are from the reference, in its deviation: in one, rounding may choose other
    experts. The first rows know the target, the others are behind them.
    """
    text, known = text_of(0, 24), 16
    streams = open_cpu(Bundle(target), read_layers=Bundle(head).config.feature_layers)
    session = open_cpu(Bundle(head))
    with closing(streams), closing(session):
        read_by_target = streams_of(streams, text)[:known]
        rng = np.random.default_rng(1)
        states = rng.normal(0, 3, (len(text) - 1 - known, 64)).astype(np.float32)
        rows_of_both = [
            Rows(session, text[1 : 1 + known], known, features=read_by_target),
            Rows(session, text[1 + known :], len(states), states=states),
        ]
        outputs = []
        for rows in rows_of_both:
            (predictions,) = session.model.predict_together([rows])
            outputs.append([np.array(each) for each in (predictions.hidden, predictions.logits)])
    expected = reference(text[1:], read_by_target, states)
    apart = [
        np.sqrt(np.square(np.concatenate(parts) - wanted).mean(-1)) / wanted.std()
        for parts, wanted in zip(zip(*cast(Any, outputs), strict=True), expected, strict=True)
    ]
    return max(float(np.quantile(rows, 0.9)) for rows in apart)


# ---- What it computes --------------------------------------------------------------------------------------


def test_a_layer_of_a_file_computes_the_formula(pair: tuple[Bundle, Bundle]) -> None:
    target, head = (bundle.path for bundle in pair)
    right = Reference(mtp.config())
    assert distance(target, head, right) < NEAR
    for wrong in (replace(right, is_normed=False), replace(right, swapped=True)):
        assert distance(target, head, wrong) > 3 * NEAR


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("case", ["qwen35_moe", "glm4_moe_lite", "nemotron_h_moe"])
def test_a_layer_with_experts_computes_the_formula(tmp_path: Path, case: str, is_file: bool) -> None:
    if is_file:
        source = mtp.gguf(case=case).write(tmp_path / "m.gguf")
    else:
        source = mtp.write_hf(tmp_path / "m", case=case)
    eight = None if is_file else Quantization(bits=8)
    export_model(source, tmp_path / "target", options=ExportOptions(quantization=eight))
    export_model(source, tmp_path / "head", options=drafts_for(source, quantization=eight))
    right = Reference(mtp.config(case))
    assert distance(tmp_path / "target", tmp_path / "head", right) < NEAR
    for wrong in (replace(right, is_normed=False), replace(right, swapped=True)):
        assert distance(tmp_path / "target", tmp_path / "head", wrong) > 3 * NEAR
    answers = []
    for drafter in (None, tmp_path / "head"):
        with edgespec.load(tmp_path / "target", drafter) as model:
            draft_eagerly(model)
            answers.append(model.generate("one two three", max_new_tokens=30, stop_at_eos=False))
    assert answers[0].tokens == answers[1].tokens and answers[1].stats.by_source["model"].drafted > 5


def test_a_directory_and_a_file_hold_the_same_layer(tmp_path: Path) -> None:
    made, case = list[bytes](), "glm4_moe_lite"
    for source in (
        mtp.write_hf(tmp_path / "m", case=case),
        mtp.gguf("F32", case=case).write(tmp_path / "m.gguf"),
    ):
        export_model(source, tmp_path / f"{source.name}-head", options=drafts_for(source))
        made.append((tmp_path / f"{source.name}-head" / "model.onnx.data").read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize("tied", [False, True])
def test_a_layer_of_a_directory_computes_the_formula(tmp_path: Path, tied: bool) -> None:
    folder = mtp.write_hf(tmp_path / "m", tie_word_embeddings=tied)
    eight = Quantization(bits=8)
    export_model(folder, tmp_path / "target", options=ExportOptions(quantization=eight))
    export_model(folder, tmp_path / "head", options=drafts_for(folder, quantization=eight))
    facts = mtp.config(tie_word_embeddings=tied)
    assert distance(tmp_path / "target", tmp_path / "head", Reference(facts)) < NEAR


def test_a_layer_in_a_file_of_its_own_is_the_same(tmp_path: Path, pair: tuple[Bundle, Bundle]) -> None:
    target = mtp.model_alone().write(tmp_path / "m.gguf")
    layer = mtp.layer_alone().write(tmp_path / "mtp-m.gguf")
    export_model(layer, tmp_path / "head", options=drafts_for(target))
    made = Bundle(tmp_path / "head")
    assert made.digest == pair[1].digest and made.config == pair[1].config
    facts = made.manifest.provenance
    assert facts["source"] == "mtp-m.gguf" and facts["sha256"] != facts["target_sha256"]


def test_what_the_file_leaves_out_is_the_targets(tmp_path: Path, pair: tuple[Bundle, Bundle]) -> None:
    """No norm of its own behind the layer; or an embedding and an LM head of its own, here the same ones."""
    model = mtp.gguf()
    model.tensors[f"{BLOCK}nextn.shared_head_norm.weight"] = model.tensors["output_norm.weight"]
    export_model(model.write(tmp_path / "a.gguf"), tmp_path / "a", options=drafts_for(tmp_path / "a.gguf"))
    del model.tensors[f"{BLOCK}nextn.shared_head_norm.weight"]
    export_model(model.write(tmp_path / "b.gguf"), tmp_path / "b", options=drafts_for(tmp_path / "b.gguf"))
    assert Bundle(tmp_path / "a").digest == Bundle(tmp_path / "b").digest != pair[1].digest
    model = mtp.gguf()
    for own, shared in {"embed_tokens": "token_embd", "shared_head_head": "output"}.items():
        model.tensors[f"{BLOCK}nextn.{own}.weight"] = model.tensors[f"{shared}.weight"]
    export_model(model.write(tmp_path / "c.gguf"), tmp_path / "c", options=drafts_for(tmp_path / "c.gguf"))
    assert Bundle(tmp_path / "c").digest == pair[1].digest


def test_drafts_are_those_of_the_formula(pair: tuple[Bundle, Bundle]) -> None:
    """Behind each token of a text, as the target reads it; what was drafted does not stay."""
    reference, streams = Reference(mtp.config()), open_cpu(pair[0], read_layers=(LAYERS,))
    session, compared = open_cpu(pair[1]), 0
    with closing(streams), closing(session):
        session.reserve(session.model.longest)
        text = text_of(2, 30)
        whole = streams_of(streams, text)
        reader = HeadReader(session, CostCurve({1: 1.0}), 7)
        reader.add_features(whole[:7], 1)
        for length in range(8, 30):
            drafted, clear = reference.draft(whole[: length - 1], text[:length], 3)
            guesses = [read(reader, text[:length])]
            while len(guesses) < len(drafted):
                guesses.append(step(reader, guesses[-1].following))
            for guess, wanted, margin in zip(guesses, drafted, clear, strict=True):
                if margin < CLEAR:
                    break
                assert guess.following == wanted
                compared += 1
            reader.add_features(whole[length - 1 : length], 1)
    assert compared > 30


# ---- What a bundle says ------------------------------------------------------------------------------------


def test_a_bundle_of_a_layer(pair: tuple[Bundle, Bundle]) -> None:
    target, head = pair
    config, manifest = head.config, head.manifest
    assert isinstance(config, Transformer) and config.is_head and config.architecture == "qwen35-mtp"
    assert (config.feature_layers, config.feature_width, config.num_layers) == ((LAYERS,), 64, 1)
    assert manifest.role == "drafter" and manifest.name == "m-mtp" and manifest.head_rows is None
    assert target.manifest.provenance["left_out"] == "mtp" and "left_out" not in manifest.provenance
    assert manifest.provenance["target_sha256"] == target.manifest.provenance["sha256"]
    token = 2 * 2 * 64 * 2  # keys and values of two heads, in float16
    assert manifest.kv_bytes_per_token == manifest.kept_bytes(1) == token
    attention = 64 * (2 * 256 + 2 * 128) + 256 * 64 + 128 * 64
    mlp, lm_head = 3 * 64 * 96, VOCAB * 64
    assert manifest.parameters_per_pass == attention + mlp + lm_head
    assert head.report()["trim"] is None and head.tokenizer.digest == target.tokenizer.digest
    shown = CliRunner().invoke(app, ["inspect", str(head.path)], env={"COLUMNS": "400"})
    digest = target.manifest.provenance["sha256"]
    assert f"layers {LAYERS} of the target with SHA-256 {digest}" in shown.output, shown.output


def test_an_lm_head_is_trimmed_to_what_is_written(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "head"
    done = CliRunner().invoke(
        app, ["export", str(source), "-o", str(out), "--target", str(source), "--trim-vocab", "290"]
    )
    assert done.exit_code == 0, done.output
    assert "290 of 320 rows" in done.output and "of the tokens that targets write" in done.output
    bundle = Bundle(out)
    assert bundle.manifest.head_rows == 290 == len(cast(Any, bundle.head_tokens))
    assert bundle.report()["trim"].keys() == {"rows", "of", "coverage", "texts"}
    with closing(open_cpu(bundle)) as session:
        assert session.predict([5, 6]).shape == (2, 290)
    with pytest.raises(RequestError, match="trim size is 3; this vocabulary can keep"):
        export_model(source, tmp_path / "no", options=drafts_for(source, trim=3))


def test_a_step_is_priced_by_its_weights() -> None:
    """Qwen3.5-4B's, with 32,768 rows of 248,320: a twentieth of a pass, and twice plain decoding."""
    price = mtp_price(_published())
    assert 0.04 < price < 0.06 and 2 < expected_speed(0.77, price) < 3


def _published() -> Transformer:
    facts: dict[str, Any] = {"model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216}
    facts |= {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4}
    return read_config(Facts(facts, "config.json"))


# ---- Requests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 40}, {"max_new_tokens": 40, "temperature": 0.9, "seed": 5}]
)
def test_answers_are_those_without(pair: tuple[Bundle, Bundle], options: RequestOptions) -> None:
    target, head = (bundle.path for bundle in pair)
    check_drafts(target, head, options)


def test_a_layer_that_is_mostly_right_is_mostly_accepted(tmp_path: Path) -> None:
    """It says the token that it reads again, and the target repeats tokens."""
    file = mtp.gguf("F32")
    embedding_alone = np.concatenate([np.eye(64), np.zeros((64, 64))], axis=1).astype(np.float32)
    file.tensors[f"{BLOCK}nextn.eh_proj.weight"] = "F32", embedding_alone
    file.tensors["output.weight"] = file.tensors["token_embd.weight"]
    for name, (kind, values) in file.tensors.items():
        if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
            file.tensors[name] = kind, values * np.float32(0.02)  # so what enters a layer nearly leaves it
    source = file.write(tmp_path / "m.gguf")
    export_model(source, tmp_path / "target")
    export_model(source, tmp_path / "head", options=drafts_for(source))
    check_acceptance(tmp_path / "target", tmp_path / "head")


@pytest.fixture
def step_price(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets what a step of any layer costs, in passes of its target."""
    name = "edgespec.loading.drafters.mtp_price"
    return lambda price: monkeypatch.setattr(name, lambda shape: price)


def test_the_layer_of_a_file_drafts_unasked(
    tmp_path: Path, home: Path, step_price: Callable[[float], None]
) -> None:
    """Where its price says so, as ``plan`` foretells; what is named stays what it is."""
    step_price(0.05)
    source = mtp.gguf().write(tmp_path / "m.gguf")
    planned = cast(Any, plan(source).drafter)
    for _ in range(2):
        with edgespec.load(source) as model:
            head, answer = cast(Bundle, model.drafter), model.generate("one two", max_new_tokens=20)
        assert head.config.architecture == "qwen35-mtp" and head.manifest.name == planned.name == "m-mtp"
        assert planned.weights_bytes == head.manifest.bytes_per_pass
    assert cast(Any, plan(source).drafter).state == "here"
    for drafter in (None, "ngram"):
        with edgespec.load(source, drafter) as model:
            assert model.drafter is None
            assert model.generate("one two", max_new_tokens=20).tokens == answer.tokens
    with edgespec.load(source, source) as model:
        assert cast(Bundle, model.drafter).path == head.path
    other = mtp.gguf(num_attention_heads=8).write(tmp_path / "other.gguf")
    with edgespec.load(other, source) as model:  # a whole model, which is another's drafter
        assert cast(Bundle, model.drafter).config.architecture == "qwen35"
    step_price(2.0)
    assert plan(source).drafter is None


def test_a_layer_beside_a_file_drafts_unasked(
    tmp_path: Path, home: Path, step_price: Callable[[float], None]
) -> None:
    step_price(0.05)
    source = mtp.model_alone().write(tmp_path / "m-q8.gguf")
    assert plan(source).drafter is None
    (tmp_path / "mtp-damaged.gguf").write_bytes(b"GGUF")
    mtp.layer_alone(num_hidden_layers=LAYERS).write(tmp_path / "mtp-a.gguf")
    mtp.layer_alone().write(tmp_path / "mtp-m-f16.gguf")
    with edgespec.load(source) as model:
        assert cast(Bundle, model.drafter).manifest.provenance["source"] == "mtp-m-f16.gguf"
    with pytest.raises(RequestError, match=r"is a head, which drafts for one target"):
        edgespec.load(tmp_path / "mtp-a.gguf")


# ---- Refused -----------------------------------------------------------------------------------------------


def _without(name: str) -> Callable[[TinyGGUF], object]:
    return lambda model: model.tensors.pop(f"{BLOCK}{name}.weight")


def _as(name: str, shape: tuple[int, ...]) -> Callable[[TinyGGUF], object]:
    return lambda model: model.tensors.update({f"{BLOCK}{name}.weight": ("F32", np.ones(shape, np.float32))})


def _says(**keys: object) -> Callable[[TinyGGUF], object]:
    return lambda model: model.metadata.update({f"qwen35.{key}": value for key, value in keys.items()})


WRONG: dict[str, tuple[Callable[[TinyGGUF], object], type[EdgespecError], str]] = {
    "no product": (_without("nextn.eh_proj"), ModelFileError, "lacks a tensor for fuse"),
    "no norm": (_without("nextn.hnorm"), ModelFileError, "lacks a tensor for fuse_norm"),
    "no queries": (_without("attn_q"), ModelFileError, r"lacks a tensor for layers\.0\.q \(qwen35-mtp\)"),
    "no embedding norm": (_without("nextn.enorm"), ModelFileError, "lacks a tensor for embed_norm"),
    "a narrow product": (_as("nextn.eh_proj", (64, 64)), ModelFileError, r"eh_proj.*\(64, 64\).*\(64, 128\)"),
    "ungated queries": (_as("attn_q", (256, 64)), ModelFileError, r"attn_q.*\(256, 64\).*\(512, 64\)"),
    "a wide norm": (_as("nextn.enorm", (128,)), ModelFileError, r"enorm.*\(128,\).*\(64,\)"),
    "a tensor more": (_as("ssm_conv1d", (4, 4)), ModelFileError, "conv"),
    "a strange tensor": (_as("nextn.other", (4, 4)), UnsupportedModelError, "unknown in MTP layers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_layers_that_are_cut_off_or_others_are_named(tmp_path: Path, name: str) -> None:
    """The model itself is exported all the same."""
    change, kind, words = WRONG[name]
    model = mtp.gguf()
    change(model)
    source = model.write(tmp_path / "m.gguf")
    with pytest.raises((kind, UnsupportedModelError), match=words):
        export_model(source, tmp_path / "head", options=drafts_for(source))
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


COUNTS: dict[str, tuple[Callable[[TinyGGUF], object], type[EdgespecError], str]] = {
    "not counted": (_says(block_count=LAYERS), ModelFileError, r"blk\.4\.nextn.*block 4 is none for MTP"),
    "not said": (_says(nextn_predict_layers=0), ModelFileError, r"blk\.4\.nextn.*block 4 is none for MTP"),
    "one more": (_says(block_count=LAYERS + 2), ModelFileError, r"blk\.4\.nextn.*block 4 is none for MTP"),
    "two": (_says(nextn_predict_layers=2), UnsupportedModelError, "2 MTP layers|has tensors"),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("is_head", [False, True])
def test_counts_of_blocks_that_are_wrong_are_named(tmp_path: Path, name: str, is_head: bool) -> None:
    change, kind, words = COUNTS[name]
    model = mtp.gguf()
    change(model)
    source = model.write(tmp_path / "m.gguf")
    options = drafts_for(source) if is_head else None
    if name == "two" and not is_head:
        return  # its last layer is taken for the first of two
    with pytest.raises(kind, match=words):
        export_model(source, tmp_path / "out", options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_layer_of_another_model_is_refused(
    tmp_path: Path, source: Path, pair: tuple[Bundle, Bundle]
) -> None:
    more = mtp.layer_alone()
    more.metadata["qwen35.block_count"] = LAYERS + 3
    more.tensors = {n.replace(BLOCK, f"blk.{LAYERS + 2}."): tensor for n, tensor in more.tensors.items()}
    layer = more.write(tmp_path / "mtp-m.gguf")
    with pytest.raises(RequestError, match=r"MTP layer of a qwen35 model of 6 layers.*is qwen35 of 4"):
        export_model(layer, tmp_path / "head", options=drafts_for(source))
    alone = mtp.model_alone().write(tmp_path / "alone.gguf")
    with pytest.raises(RequestError, match="has no MTP layer"):
        export_model(alone, tmp_path / "head", options=drafts_for(alone))
    folder = mtp.write_hf(tmp_path / "hf")
    tensors = {n: x for n, x in mtp.tensors(mtp.config()).items() if not n.startswith("mtp.")}
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(RequestError, match="has no MTP layer"):
        export_model(folder, tmp_path / "head", options=drafts_for(folder))
    cut_off = {"fc": "fuse", "norm": "final_norm", "layers.0.mlp.up_proj": r"layers\.0\.up"}
    for name, lacking in cut_off.items():
        tensors = mtp.tensors(mtp.config())
        del tensors[f"mtp.{name}.weight"]
        write_safetensors(folder / "model.safetensors", tensors)
        with pytest.raises(ModelFileError, match=f"hf lacks a tensor for {lacking}"):
            export_model(folder, tmp_path / "head", options=drafts_for(folder))
    export_model(gguf_of("qwen35_equal").write(tmp_path / "deeper.gguf"), tmp_path / "deeper")
    with pytest.raises(RequestError, match=r"and 4 layers; deeper has 320, 64 and 5; use the head"):
        edgespec.load(tmp_path / "deeper", pair[1].path)


def test_a_file_without_an_lm_head_has_the_targets(tmp_path: Path) -> None:
    model, layer = mtp.gguf(), mtp.layer_alone()
    kind, embedding = model.tensors["token_embd.weight"]
    model.tensors["output.weight"] = kind, embedding[::-1].copy()
    layer.tensors.pop("output.weight", None)
    source, file = model.write(tmp_path / "m.gguf"), layer.write(tmp_path / "mtp-m.gguf")
    with open_checkpoint(file, source) as opened:
        assert not opened.tied_head
        np.testing.assert_array_equal(opened.values("lm_head"), model.values("output.weight"))


def test_a_configuration_of_a_layer_is_whole() -> None:
    layer = _published().mtp_layer
    assert layer is not None
    changes: list[dict[str, Any]] = [{"feature_layers": ()}, {"feature_width": 64}, {"num_layers": 2}]
    for change in changes:
        with pytest.raises(UnsupportedModelError, match=r"needs both|an MTP layer is alone"):
            replace(layer, **change)
