"""EAGLE-3 heads of every published form, exported, and compared with the equations in plain NumPy."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from edgespec.cli import app
from edgespec_export.export import export_model
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import GRAPH, HEAD_TOKENS, Bundle
from edgespec_models.decoders.kept import types_of
from edgespec_models.decoders.operations import Experts
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import EdgespecError, ModelFileError, UnsupportedModelError
from edgespec_models.families import read_config
from edgespec_models.families.eagle3 import Eagle3
from edgespec_models.families.rope import scaled
from edgespec_models.files.facts import Facts
from edgespec_models.files.onnx_header import read_header
from tests.kit import block_heads as blocks
from tests.kit import heads as heads
from tests.kit import mtp as mtp
from tests.kit.gguf import tiny_gguf
from tests.kit.heads import (
    DRAFTED,
    F32,
    HIDDEN,
    TARGET_HIDDEN,
    TOKENS,
    VOCAB,
    Head,
    Reference,
    Running,
    export,
)
from tests.kit.hf import weights
from tests.kit.toy import LLAMA
from tests.kit.weights import config_of_json

IDS = [5, 17, 300, 17, 5, 260, 3, 3, 90, 41]
READ = 6  # of these have features
NEAR = 0.03
"""Of the standard deviation: weights in 8 bits and activations in 8 bits; what differs in kind is beyond."""


def inputs(width: int = 3 * TARGET_HIDDEN, hidden: int = HIDDEN) -> tuple[F32, F32]:
    """Features of the first tokens, states of the others."""
    rng = np.random.default_rng(4)
    features = rng.normal(0, 2, (READ, width)) * rng.uniform(0.2, 3, width)
    states = rng.normal(0, 1, (len(IDS) - READ, hidden))
    return features.astype(np.float32), states.astype(np.float32)


def distance(bundle: Path, reference: Reference) -> float:
    """Root mean square of the differences of states and logits from the reference, over its deviation."""
    running = Running(bundle)
    given = inputs(running.width, running.hidden)
    logits, states, columns, likely = running(IDS, *given)
    expected = reference(IDS, *given)
    assert (columns == logits.argmax(1)).all()
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(likely, 1 / shifted.sum(1), rtol=1e-4)
    return max(
        float(np.sqrt(np.square(actual - wanted).mean()) / wanted.std())
        for actual, wanted in zip((states, logits), expected, strict=True)
    )


def embedding_of(target: Path) -> F32:
    return weights(json.loads((target / "config.json").read_text()))["model.embed_tokens.weight"]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return heads.target(tmp_path / "target")


FORMS: dict[str, tuple[dict[str, Any], Callable[[Head, Path], Path]]] = {
    "eagle": ({}, Head.write),
    "bfloat16": ({}, lambda head, folder: head.write(folder, "BF16")),
    "speculators": ({"norm_before_residual": True}, Head.write_speculators),
    "norm_before_fc": ({"norm_before_fc": True}, Head.write),
    "both": ({"norm_before_fc": True, "norm_before_residual": True}, Head.write_speculators),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_head_computes_what_the_equations_say(tmp_path: Path, target: Path, form: str) -> None:
    facts, write = FORMS[form]
    head = Head.random(**facts)
    bundle = export(write(head, tmp_path / "head"), target, tmp_path / "out")
    kinds: dict[str, Any] = {
        "normed_features": "norm_before_fc" in facts,
        "normed_residual": "norm_before_residual" in facts,
    }
    right = Reference(head.values(), embedding_of(target), **kinds)
    assert distance(bundle.path, right) < NEAR
    for name in kinds if "norm_before_fc" in facts else ("normed_residual",):
        assert distance(bundle.path, replace(right, **dict[str, Any]({name: not kinds[name]}))) > 2 * NEAR
    swapped = {**head.values(), "hidden_norm": head.values()["input_layernorm"]}
    assert distance(bundle.path, replace(right, weights=swapped)) > 2 * NEAR


def test_what_a_bundle_says_of_its_head(tmp_path: Path, target: Path) -> None:
    bundle = export(Head.random().write(tmp_path / "head"), target, tmp_path / "out")
    export_model(target, tmp_path / "whole")
    whole, manifest = Bundle(tmp_path / "whole"), bundle.manifest
    assert (
        manifest.role == "drafter"
        and manifest.operators == "edgespec"
        and types_of(manifest.kept) == "float16"
    )
    assert isinstance(bundle.config, Transformer) and bundle.config.is_head and not whole.config.is_head
    assert bundle.config.architecture == "eagle3" and bundle.config.num_layers == 1
    assert bundle.config.feature_layers == (2, 4, 5) and bundle.config.feature_width == TARGET_HIDDEN
    assert bundle.config.vocab_size == whole.config.vocab_size == VOCAB
    assert manifest.head_rows == DRAFTED and manifest.provenance["source"] == "head"
    assert manifest.provenance["target_sha256"] == whole.manifest.provenance["sha256"]
    assert manifest.provenance["sha256"] != whole.manifest.provenance["sha256"]
    np.testing.assert_array_equal(bundle.head_tokens, TOKENS)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (bundle.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert manifest.special_tokens == whole.manifest.special_tokens
    assert bundle.report()["row_exact"] is True
    graph = read_header(bundle.graph)
    assert graph.inputs["features"].dims == (1, "m", 3 * TARGET_HIDDEN)
    assert graph.inputs["states"].dims == (1, "k", HIDDEN)


def test_passes_of_any_kind_follow_each_other(tmp_path: Path, target: Path) -> None:
    head = Head.random()
    bundle = export(head.write(tmp_path / "head"), target, tmp_path / "out")
    right, (features, states) = Reference(head.values(), embedding_of(target)), inputs()
    none, nothing = features[:0], states[:0]
    running = Running(bundle.path)
    logits, first_states, *_ = running([], none, nothing)
    assert logits.shape == (0, DRAFTED) and first_states.shape == (0, HIDDEN)
    logits, first, *_ = running(IDS[:READ], features, nothing, [READ - 1])
    _, second, *_ = running(IDS[READ : READ + 1], none, first)
    running.length -= 1  # cut back, and with another token
    logits, second, *_ = running(IDS[READ : READ + 1], none, first)
    _, third, *_ = running(IDS[READ + 1 : READ + 2], none, second)
    expected = right(IDS[:READ], features, nothing)[0][-1:]
    np.testing.assert_allclose(first, expected, atol=NEAR * expected.std())
    chained, wanted = first, list[Any]()
    for step in (1, 2):
        wanted.append(right(IDS[: READ + step], features, np.asarray(chained, np.float32)))
        chained = np.concatenate([chained, wanted[-1][0][-1:]])
    np.testing.assert_allclose(logits[0], wanted[0][1][-1], atol=NEAR * wanted[0][1].std())
    np.testing.assert_allclose(third, wanted[1][0][-1:], atol=2 * NEAR * wanted[1][0].std())
    together = Running(bundle.path)(IDS[: READ + 1], features, first)
    np.testing.assert_array_equal(together[0][-1], logits[0])


@pytest.mark.parametrize("scaling", [{}, {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}])
def test_an_embedding_of_its_own_no_reduced_head_and_scaled_rotation(
    tmp_path: Path, target: Path, scaling: dict[str, Any]
) -> None:
    rope = {"rope_type": "llama3", "original_max_position_embeddings": 24, **scaling} if scaling else None
    head = Head.random(rope_scaling=rope, draft_vocab_size=VOCAB).own_embedding()
    head.tensors["lm_head.weight"] = Head.random().own_embedding(3).tensors[
        "embed_tokens.weight"
    ] * np.float32(0.125)
    head.offsets = None
    bundle = export(head.write(tmp_path / "head"), target, tmp_path / "out")
    divisors: Any = 1.0
    if rope:
        divisors = scaled(Facts(rope, ""), 500.0, 16, 64, 64)["factors"]
    right = Reference(head.values(), head.values()["embed_tokens"], divisors=divisors)
    assert distance(bundle.path, right) < NEAR
    assert distance(bundle.path, replace(right, embedding=embedding_of(target))) > 2 * NEAR
    assert distance(bundle.path, replace(right, divisors=2.0)) > 2 * NEAR
    assert bundle.manifest.head_rows is None and bundle.head_tokens is None
    assert HEAD_TOKENS not in bundle.manifest.files


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_without_matrices_of_its_own_takes_the_targets(tmp_path: Path, tied: bool) -> None:
    target = heads.target(tmp_path / "target", tie_word_embeddings=tied)
    head = Head.random(draft_vocab_size=VOCAB)
    head.offsets = None
    del head.tensors["lm_head.weight"]
    bundle = export(head.write(tmp_path / "head"), target, tmp_path / "out")
    stored = weights(json.loads((target / "config.json").read_text()))
    lm_head = stored["model.embed_tokens.weight" if tied else "lm_head.weight"]
    right = Reference({**head.values(), "lm_head": lm_head}, embedding_of(target))
    assert distance(bundle.path, right) < NEAR
    assert bundle.manifest.bytes_by_class["embedding"] == (0 if tied else lm_head.size * 34 // 32)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("normed", [False, True])
def test_gguf_heads_keep_their_blocks(tmp_path: Path, kind: str, normed: bool) -> None:
    whole = tiny_gguf("llama", "Q8_0", layers=8)
    target = whole.write(tmp_path / "target.gguf")
    model = heads.gguf_head(kind, norm_before_residual=normed, norm_before_fc=normed)
    quantization = heads.EIGHT if kind == "F32" else None
    bundle = export(model.write(tmp_path / "head.gguf"), target, tmp_path / "out", quantization=quantization)
    right = Reference(
        heads.gguf_values(model),
        whole.values("token_embd.weight"),
        neighbours=True,
        normed_features=normed,
        normed_residual=normed,
    )
    assert distance(bundle.path, right) < NEAR
    assert distance(bundle.path, replace(right, neighbours=False)) > 2 * NEAR
    np.testing.assert_array_equal(bundle.head_tokens, TOKENS)  # llama.cpp's list is of tokens, not of offsets
    assert isinstance(bundle.config, Transformer) and bundle.config.feature_layers == (1, 4, 6)
    for loss in bundle.report()["weights"]:
        assert loss["source"] == "F32" or loss["relative_error"] == 0
    if kind == "Q4_K":
        assert {"Q4_K", "Q8_0"} == {loss["format"] for loss in bundle.report()["weights"]}


@pytest.mark.parametrize(
    ("facts", "layers"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (1, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 7]}, (0, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}, (2, 3, 4)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 4, 5)),
    ],
)
def test_which_layers_a_configuration_means(
    tmp_path: Path, target: Path, facts: dict[str, Any], layers: tuple[int, ...]
) -> None:
    head = Head.random(**facts)
    head.tensors["fc.weight"] = np.zeros((HIDDEN, len(layers) * TARGET_HIDDEN), np.float32)
    bundle = export(head.write(tmp_path / "head"), target, tmp_path / "out")
    assert isinstance(bundle.config, Transformer) and bundle.config.feature_layers == layers


class Touching:
    """Its unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_a_file_of_torch(tmp_path: Path, target: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'align', which the gate does without")
    head = Head.random()
    folder = head.write(tmp_path / "head")
    (folder / "model.safetensors").unlink()
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in head.arrays().items()}
    tensors = {
        name: tensor.bfloat16() if tensor.dtype == torch.float32 else tensor
        for name, tensor in tensors.items()
    }
    torch.save(tensors, folder / "pytorch_model.bin")
    bundle = export(folder, target, tmp_path / "out")
    assert distance(bundle.path, Reference(head.values(), embedding_of(target))) < NEAR
    np.testing.assert_array_equal(bundle.head_tokens, TOKENS)
    for damaged in (b"PK\x03\x04", (folder / "pytorch_model.bin").read_bytes()[:9000]):
        (folder / "pytorch_model.bin").write_bytes(damaged)
        with pytest.raises(ModelFileError, match=r"cannot read .*pytorch_model.bin"):
            export(folder, target, tmp_path / "other")
    torch.save({"fc.weight": Touching(tmp_path / "touched")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"cannot read .*pytorch_model.bin"):
        export(folder, target, tmp_path / "other")
    assert not (tmp_path / "touched").exists()
    torch.save([1], folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"cannot read .*pytorch_model.bin"):
        export(folder, target, tmp_path / "other")


def test_without_torch_the_error_says_what_to_install(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Head.random().write(tmp_path / "head")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(EdgespecError, match=r"pip install .edgespec\[align\]"):
        export(folder, target, tmp_path / "out")


def test_streams_of_targets_have_names(tmp_path: Path, target: Path) -> None:
    export_model(target, tmp_path / "out")
    graph = read_header(tmp_path / "out" / GRAPH)
    made = [name for node in graph.nodes for name in node.outputs]
    streams = [f"layers.{layer}.stream" for layer in range(heads.LAYERS + 1)]
    assert [name for name in made if name.endswith(".stream")] == streams
    assert not set(streams) & set(graph.outputs)
    readers = {name: node.op_type for node in graph.nodes for name in node.inputs if name in streams}
    assert readers.keys() == set(streams)


def test_a_configuration_of_a_head_is_whole() -> None:
    plain: dict[str, Any] = {"architecture": "eagle3", "num_layers": 1}
    plain |= {"feature_layers": (2, 4, 5), "feature_width": 64}
    head = LLAMA.become(Eagle3, **plain)
    assert head.is_head and config_of_json(json.loads(json.dumps(asdict(head)))) == head
    changes: list[dict[str, Any]] = [{"feature_layers": ()}, {"feature_width": 0}, {"num_layers": 2}]
    for change in (*changes, {"experts": Experts(count=2, used=1, width=32)}):
        with pytest.raises(UnsupportedModelError, match=r"eagle3 needs both|layers of eagle3, or experts"):
            replace(head, **change)
    changes = [{"feature_layers": (-1,)}, {"feature_width": -1}]
    for change in changes:
        with pytest.raises(UnsupportedModelError, match="allowed"):
            replace(head, **change)
    with pytest.raises(UnsupportedModelError, match="llama is no head"):
        replace(LLAMA, feature_width=64)


def test_configurations_of_heads_pass_what_the_hub_asks_before_it_fetches(tmp_path: Path) -> None:
    for name, write in (("eagle", Head.write), ("speculators", Head.write_speculators)):
        config = read_config(Facts.read(write(Head.random(), tmp_path / name) / "config.json"))
        assert config.num_layers == 1 and config.vocab_size == VOCAB


@pytest.mark.usefixtures("consoles")
def test_the_command_line(tmp_path: Path, target: Path) -> None:
    head = Head.random().write(tmp_path / "head")
    out = str(tmp_path / "out")
    done = CliRunner().invoke(app, ["export", str(head), "-o", out, "--target", str(target)])
    assert done.exit_code == 0, done.output
    digest = Bundle(tmp_path / "out").manifest.provenance["target_sha256"]
    shown = CliRunner().invoke(app, ["inspect", out])
    assert f"layers 2, 4, 5 of the target with SHA-256 {digest}" in shown.output
    failed = CliRunner().invoke(app, ["export", str(head), "-o", f"{out}2"])
    assert failed.exit_code and "--target" in failed.output
    failed = CliRunner().invoke(app, ["export", str(target), "-o", f"{out}2", "--target", str(target)])
    assert failed.exit_code and "Leave out --target" in failed.output


def test_bits_round_a_head_too(tmp_path: Path, target: Path) -> None:
    from edgespec_export.formats.quantization import Quantization

    head = Head.random()
    bundle = export(head.write(tmp_path / "head"), target, tmp_path / "out", quantization=Quantization())
    assert distance(bundle.path, Reference(head.values(), embedding_of(target))) < 1
    assert "Q4_1" in bundle.manifest.formats


def test_floats_get_four_bits_where_nothing_else_is_asked(tmp_path: Path, target: Path) -> None:
    head = Head.random().write(tmp_path / "head")
    export_model(head, tmp_path / "out", options=heads.drafts_for(target))
    assert "Q4_1" in Bundle(tmp_path / "out").manifest.formats
    assert "Q4_1" not in export(head, target, tmp_path / "eight").manifest.formats


def test_a_head_for_blocks_in_a_file_keeps_the_scaling_of_its_rotation(tmp_path: Path) -> None:
    target, model = blocks.target_gguf().write(tmp_path / "m.gguf"), blocks.gguf()
    model.metadata |= {"dflash.rope.scaling.type": "linear", "dflash.rope.scaling.factor": 2.0}
    with open_checkpoint(model.write(tmp_path / "head.gguf"), target) as head:
        assert set(head.config.rope.factors) == {2.0}


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "directory"])
def test_a_layer_reads_the_norm_of_a_target_in_another_form(tmp_path: Path, is_file: bool) -> None:
    """Directories of Qwen3.5 have the weights of norms less 1."""
    layer, target = mtp.layer_alone(), mtp.write_hf(tmp_path / "m")
    del layer.tensors["output_norm.weight"]
    source = layer.write(tmp_path / "mtp-m.gguf")
    if not is_file:
        source, target = target, mtp.model_alone().write(tmp_path / "m.gguf")
    with open_checkpoint(source, target) as head, open_checkpoint(target) as base:
        np.testing.assert_array_equal(head.values("target_norm"), base.values("final_norm"))
