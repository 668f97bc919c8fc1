"""From Hugging Face directories to bundles, compared with what transformers computes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from typer.testing import CliRunner

import edgespec
from edgespec.cli import app
from edgespec.drafting.copies import CopyDrafter
from edgespec.drafting.ngram import ContextTree
from edgespec.drafting.source import Extending
from edgespec.loading.opening import open_model
from edgespec.running.verifier import Verifier
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.formats import plan
from edgespec_export.formats.quantization import Quantization
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import UnsupportedModelError
from edgespec_models.families import model_of, read_config
from edgespec_models.files.facts import Facts
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Session
from tests.kit.drafters import GREEDY
from tests.kit.gguf_cases import GGUF_CASES, gguf_of
from tests.kit.hf import (
    CASES,
    CONTEXT,
    F32,
    NATIVE,
    PORTABLE,
    ROWS,
    TOKENS,
    VOCAB,
    config_of,
    shapes,
    weights,
    write_checkpoint,
    write_with_tower,
)
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import RandomDrafter, Silent, decode

GOLDEN = Path(__file__).parents[1] / "golden_hf"
FLOATS = ExportOptions(weights="portable")


def checkpoint(folder: Path, case: str, **how: Any) -> Path:
    """A complete directory."""
    return with_tokenizer(write_checkpoint(folder, config_of(case), **how))


def with_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
    return folder


def logits_of(bundle: Path) -> F32:
    session = open_cpu(Bundle(bundle, verify_digests=True))
    logits = session.predict(TOKENS).logits[list(ROWS)].copy()
    session.close()
    return logits


def golden(case: str) -> F32:
    with np.load(GOLDEN / f"{case}.npz") as data:
        assert json.loads(str(data["config"])) == config_of(case), "run tools/make_hf_golden.py"
        logits: F32 = data["logits"]
        assert data["tensors"].tolist() == sorted(shapes(config_of(case)))
        assert case not in GGUF_CASES or data["gguf_tensors"].tolist() == sorted(gguf_of(case).tensors)
    return logits


def distance(logits: F32, case: str) -> float:
    """The largest difference from the golden, over the golden's standard deviation."""
    expected = golden(case)
    return float(np.abs(logits - expected).max() / expected.std())


def divergence(logits: F32, expected: F32) -> float:
    """KL of the most different row, whose first guess is the same but for near-ties."""
    ours, theirs = (each - np.log(np.exp(each).sum(axis=1, keepdims=True)) for each in (logits, expected))
    chosen = theirs.max(axis=1) - np.take_along_axis(theirs, ours.argmax(axis=1)[:, None], 1)[:, 0]
    assert (chosen < 0.1).all()
    return float((np.exp(theirs) * (theirs - ours)).sum(axis=1).max())


@pytest.mark.parametrize("case", PORTABLE)
def test_the_graph_computes_what_transformers_computes(tmp_path: Path, case: str) -> None:
    report = export_model(checkpoint(tmp_path / "m", case), tmp_path / "out", options=FLOATS)
    assert report["row_exact"]
    assert all(loss["format"] == "float32" and loss["relative_error"] == 0 for loss in report["weights"])
    assert distance(logits_of(tmp_path / "out"), case) < 2e-5


@pytest.mark.parametrize("case", GGUF_CASES)
def test_the_same_checkpoint_as_gguf(tmp_path: Path, case: str) -> None:
    """In floats, and over our own operators with the same values in blocks, whose activations are rounded."""
    for kind, options, bound in (("F32", FLOATS, 2e-5), ("Q8_0", ExportOptions(), 0.25)):
        if case in NATIVE and options is FLOATS:
            continue
        source, out = gguf_of(case, kind).write(tmp_path / f"{kind}.gguf"), tmp_path / kind
        report = export_model(source, out, options=options)
        assert report["row_exact"]
        assert all(loss["relative_error"] < 1e-6 for loss in report["weights"])
        assert distance(logits_of(out), case) < bound
    assert divergence(logits_of(out), golden(case)) < 0.003


@pytest.mark.parametrize("case", GGUF_CASES)
def test_drafts_do_not_change_what_is_written(tmp_path: Path, case: str) -> None:
    export_model(gguf_of(case, "Q8_0").write(tmp_path / "m.gguf"), tmp_path / "out")
    session = open_cpu(Bundle(tmp_path / "out"))
    whole = session.predict(TOKENS).logits.copy()
    for width in range(1, 10):
        session.rewind(0)
        passes = (TOKENS[at : at + width] for at in range(0, len(TOKENS), width))
        rows = [row for tokens in passes for row in session.predict(tokens).logits.copy()]
        np.testing.assert_array_equal(rows, whole)
    plain, _ = written(session, Silent())
    oracle = RandomDrafter(0, VOCAB, lambda tokens: np.eye(VOCAB, dtype=np.float32)[plain[len(tokens)]])
    for source in (oracle, CopyDrafter(ContextTree())):
        drafted, accepted = written(session, source)
        assert drafted == plain and (accepted > 4 or source is not oracle)
    session.close()


def written(session: Session, source: Extending) -> tuple[list[int], int]:
    """A greedy answer, and how many of its tokens were drafted."""
    session.rewind(0)
    tokens = list(TOKENS[:16])
    steps = decode(session, source, Verifier(GREEDY), tokens, max_new_tokens=24, max_draft=4)
    return tokens, sum(step.accepted for step in steps)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_half_precision_and_shards_give_the_same_logits(tmp_path: Path, dtype: str, shards: int) -> None:
    source = checkpoint(tmp_path / "m", "phi4", dtype=dtype, shards=shards)
    report = export_model(source, tmp_path / "out", options=FLOATS)
    assert {loss["source"] for loss in report["weights"]} == {dtype}
    assert distance(logits_of(tmp_path / "out"), "phi4") < 2e-5


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rounded_weights_stay_near(
    tmp_path: Path, case: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of large models take 4 bits, and the vocabulary 8."""
    monkeypatch.setattr(plan, "_LARGE", 1000 if large else 1_000_000_000)
    export_model(checkpoint(tmp_path / "m", case, dtype="BF16"), tmp_path / "out")
    manifest = Bundle(tmp_path / "out").manifest
    assert (manifest.weights, manifest.operators) == ("exact", "edgespec")
    formats = {"Q8_0", "MXFP4"} if case == "gpt_oss" else {"Q4_1", "Q8_0"} if large else {"Q8_0"}
    assert manifest.formats.keys() == formats
    assert manifest.bytes_by_class["lm_head"] == VOCAB * 64 * 34 // 32
    # In a random model 64 wide the rounding hardly averages out.
    near = np.corrcoef(logits_of(tmp_path / "out").ravel(), golden(case).ravel())[0, 1]
    # Rounding moves a choice of experts, and squares double an error.
    bounds = {"glm4_moe_lite_whole": (0.88, 0.995), "nemotron_h_moe": (0.78, 0.994), "laguna": (0.85, 0.995)}
    least, most = bounds.get(case, (0.9 if case in NATIVE else 0.95, 0.995))
    assert near > (least if large else most)


def test_widths_without_whole_blocks_are_of_portable_bundles(tmp_path: Path) -> None:
    config = {**config_of("llama"), "intermediate_size": 112}
    source, out = with_tokenizer(write_checkpoint(tmp_path / "m", config)), tmp_path / "out"
    for options in (ExportOptions(), ExportOptions(quantization=Quantization())):
        with pytest.raises(UnsupportedModelError, match=r"112 columns has no .* --weights portable"):
            export_model(source, out, options=options)
        assert not out.exists()
    assert export_model(source, out, options=FLOATS)["row_exact"]


def test_facts_that_change_the_graph_change_the_logits(tmp_path: Path) -> None:
    """The goldens can tell a window, a scaling and a NoPE layer from their absence."""
    changes: Mapping[str, Mapping[str, Any]] = {
        "llama3": {"rope_scaling": None},
        "llama_linear": {"rope_scaling": None},
        "mistral_window": {"sliding_window": None},
        "smollm3": {"no_rope_layers": [1, 1, 1, 1]},
        "gemma3": {"sliding_window_pattern": 2},
        "phi3": {"sliding_window": 8},
    }
    for case, change in changes.items():
        config = {**config_of(case), **change}
        source = with_tokenizer(write_checkpoint(tmp_path / case, config))
        export_model(source, tmp_path / f"{case}-out", options=FLOATS)
        assert distance(logits_of(tmp_path / f"{case}-out"), case) > 1e-3, case


@pytest.mark.parametrize("case", ["llama3", "gemma3", "phi4"])
def test_new_spelling_of_rotary_facts(tmp_path: Path, case: str) -> None:
    """What transformers 5 writes."""
    old = config_of(case)
    new = {key: value for key, value in old.items() if not key.startswith(("rope_", "partial_"))}
    full = {"rope_theta": old["rope_theta"], **old.get("rope_scaling", {})}
    if case == "gemma3":
        local = {"rope_type": "default", "rope_theta": old["rope_local_base_freq"]}
        new["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
        new["layer_types"] = [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")]
        del new["sliding_window_pattern"]
    else:
        share = {"partial_rotary_factor": old["partial_rotary_factor"]} if case == "phi4" else {}
        new["rope_parameters"] = full | share
    with (
        HFCheckpoint(write_checkpoint(tmp_path / "old", old)) as before,
        HFCheckpoint(write_checkpoint(tmp_path / "new", new)) as after,
    ):
        assert before.config == after.config


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_one_with_eyes(
    tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What Gemma 3 from 4B on and Ministral 3 are on the hub; transformers 5 has other names for tensors."""
    alone = config_of("gemma3_linear")
    stated = {key: value for key, value in alone.items() if key not in ("tie_word_embeddings", "vocab_size")}
    outer = {"model_type": "gemma3", "text_config": stated, "vision_config": {}, "vocab_size": VOCAB}
    eyes = "vision_tower.x", "model.multi_modal_projector.y"
    folder = write_with_tower(tmp_path / "eyes", alone, outer, eyes, prefix)
    with (
        HFCheckpoint(write_checkpoint(tmp_path / "alone", alone)) as expected,
        HFCheckpoint(folder) as opened,
    ):
        assert opened.config == expected.config and opened.tensors.keys() == expected.tensors.keys()
        name = "layers.1.post_mlp_norm"
        assert np.array_equal(opened.values(name), expected.values(name)) and opened.tied_head
    assert "eyes: only the text model is exported; it reads no images" in caplog.text


@pytest.mark.parametrize("case", ["qwen35", "qwen3"])
def test_a_text_models_facts_over_names_of_one_with_eyes(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    alone = config_of(case)
    folder = write_with_tower(tmp_path / "eyes", alone, alone, ("model.visual.x",))
    with (
        HFCheckpoint(write_checkpoint(tmp_path / "alone", alone)) as expected,
        HFCheckpoint(folder) as opened,
    ):
        assert opened.config == expected.config and opened.tensors.keys() == expected.tensors.keys()
    assert "eyes: only the text model is exported; it reads no images" in caplog.text


def test_a_share_of_rotated_elements_counts_where_the_family_has_one(tmp_path: Path) -> None:
    for case, share, rotated in (("qwen3", 0.5, False), ("llama3", 0.5, False), ("qwen35", 0.5, True)):
        facts = {**config_of(case), "partial_rotary_factor": share}
        facts.get("rope_parameters", {}).pop("partial_rotary_factor", None)
        with HFCheckpoint(write_checkpoint(tmp_path / case, facts)) as opened:
            rope = opened.config.rope
            assert rope.width == opened.config.head_dim * (share if rotated else 1)


def test_scaled_rotary_frequencies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scaling = {**config_of("llama3")["rope_scaling"], "original_max_position_embeddings": 48}
    config = {**config_of("llama3"), "rope_scaling": scaling, "head_dim": 64}
    with HFCheckpoint(write_checkpoint(tmp_path / "llama3", config)) as opened:
        factors = opened.config.rope.factors
    assert (factors[0], factors[-1]) == (1.0, 8.0)  # short waves are kept, long ones stretched
    assert list(factors) == sorted(factors) and any(1.0 < factor < 8.0 for factor in factors)
    with HFCheckpoint(write_checkpoint(tmp_path / "phi4", config_of("phi4"))) as opened:
        assert (opened.config.context_length, opened.config.rope.width) == (CONTEXT, 16)
    assert "exported for 96 tokens" in caplog.text  # longrope is exact within its original context


def test_facts_that_need_not_be_stated_are_those_of_transformers() -> None:
    def config(case: str, unstated: str) -> Transformer:
        facts = {key: value for key, value in config_of(case).items() if key != unstated}
        return read_config(Facts(facts, "config.json"))

    assert config("qwen3", "head_dim").head_dim == 128
    assert config("gemma3", "sliding_window").sliding_window == 4096
    long = {**config_of("phi4"), "max_position_embeddings": 9000}
    del long["original_max_position_embeddings"]
    assert read_config(Facts(long, "config.json")).context_length == 4096


@pytest.mark.parametrize("key", ["intermediate_size", "block_ff_dim"])
def test_the_width_of_an_lfm2_is_adjusted_once(tmp_path: Path, key: str) -> None:
    facts = config_of("lfm2") | {"block_ffn_dim_multiplier": 1.0, "intermediate_size": None, key: 384}
    facts = {name: value for name, value in facts.items() if value is not None}
    with HFCheckpoint(write_checkpoint(tmp_path / "m", facts)) as opened:
        assert opened.config.intermediate_size == 256
    _, named = model_of(Facts(facts, "config.json"))
    assert read_config(named) == read_config(Facts(facts, "config.json"))


def test_phis_fused_tensors_are_read_by_rows(tmp_path: Path) -> None:
    config = config_of("phi3")
    expected = weights(config)["model.layers.1.self_attn.qkv_proj.weight"]
    with HFCheckpoint(write_checkpoint(tmp_path, config)) as opened:
        q, k, v = (opened.values(f"layers.1.{name}") for name in "qkv")
        part = opened.read("layers.1.k", 3, 5)[1].view(np.float32)[..., 0]
    assert np.array_equal(np.concatenate([q, k, v]), expected)
    assert np.array_equal(part, k[3:5])


def test_a_snapshot_in_the_hubs_cache_has_its_repositorys_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--Tiny-1.5B" / "snapshots" / "0a1b2c"
    with HFCheckpoint(write_checkpoint(folder, config_of("llama"))) as opened:
        assert opened.model_name == "Tiny-1.5B"


def test_the_command_line_exports_a_directory(tmp_path: Path) -> None:
    source, out = checkpoint(tmp_path / "m", "qwen3"), tmp_path / "out"
    result = CliRunner().invoke(app, ["export", str(source), "-o", str(out), "--bits", "8"])
    assert result.exit_code == 0, result.output
    assert Bundle(out, verify_digests=True).manifest.name == "m"
    empty = CliRunner().invoke(app, ["export", str(tmp_path), "-o", str(tmp_path / "x")])
    assert empty.exit_code == 1
    assert "lacks config.json" in empty.stderr


def test_a_directory_is_loaded_through_the_cache(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "Tiny-1.5B", "llama")
    first = open_model(source, "target")
    assert first.manifest.name == "Tiny-1.5B"
    assert open_model(source, "target").path == first.path
    assert open_model(source, "target", weights="portable").path != first.path
    assert open_model(first.path, "target").path == first.path
    (source / "generation_config.json").write_text('{"eos_token_id": 5}', encoding="utf-8")
    changed = open_model(source, "target")
    assert changed.path != first.path
    assert 5 in changed.manifest.special_tokens.eos
    with edgespec.load(source, drafter="ngram") as engine:
        assert engine.generate("the", max_new_tokens=3).text is not None


def test_a_qwen35_whose_value_heads_lie_in_another_order_is_another_model(tmp_path: Path) -> None:
    """A file's order of heads is kept, and the operator goes by it: groups in directories, else tiles."""
    case = "qwen35"
    export_model(checkpoint(tmp_path / "m", case), tmp_path / "groups")
    assert distance(logits_of(tmp_path / "groups"), case) < 0.2
    export_model(gguf_of(case, "Q8_0").write(tmp_path / "m.gguf"), tmp_path / "tiles")
    content = (tmp_path / "tiles/model.onnx").read_bytes()
    tiled, grouped = (helper.make_attribute("tiled", number).SerializeToString() for number in (1, 0))
    assert content.count(tiled) == 3
    (tmp_path / "tiles/model.onnx").write_bytes(content.replace(tiled, grouped))
    session = open_cpu(Bundle(tmp_path / "tiles"))
    assert distance(session.predict(TOKENS).logits[list(ROWS)], case) > 0.3
    session.close()
