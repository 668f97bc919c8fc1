"""Models with latent attention over edgespec's kernels: what is kept, and rows as those of one plain run."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.loading.footprint import footprint_of
from edgespec_export.export import export_model
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.kept import BLOCK
from edgespec_models.decoders.operations import Experts, Rope
from edgespec_models.decoders.record import record
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.families import read_config
from edgespec_models.families.glm4_moe_lite import Latent
from edgespec_models.files.facts import Facts
from edgespec_runtimes.block_files import BlockFiles
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.kv_store import KvStore
from edgespec_runtimes.session import Session
from tests.kit.drafters import same_with_drafts
from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import gguf_of, q8_0
from tests.kit.hf import config_of, shapes, weights, write_directory
from tests.kit.kernels import sets
from tests.kit.native import tiny_native
from tests.kit.states import check_rows, rows_in_one_pass
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import LLAMA

LATENT = LLAMA.become(
    Latent,
    architecture="glm4_moe_lite",
    num_kv_heads=1,
    head_dim=80,
    rope=Rope(theta=10_000.0, width=16, pairs=8, interleaved=True),
    query_rank=64,
    key_width=32,
    value_width=48,
)
EXPERTS = Experts(count=6, used=2, width=32, dense_layers=1, gating="sigmoid", scale=1.8, selection_bias=True)
CONFIGS = {"dense": replace(LATENT, query_rank=None), "experts": replace(LATENT, experts=EXPERTS)}
TEXT = [(7 * i * i + 3 * i) % 250 for i in range(300)]


@pytest.fixture(scope="module", params=CONFIGS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_native(tmp_path_factory.mktemp("latent") / "m", CONFIGS[request.param]).bundle


@pytest.fixture(scope="module")
def opened(bundle: Bundle) -> Iterator[Session]:
    session = open_cpu(bundle, CpuOptions(threads=2))
    yield session
    session.close()


@pytest.fixture(scope="module")
def plain(bundle: Bundle) -> Iterator[Session]:
    """A model of its own, which reads every text in one pass."""
    session = open_cpu(bundle, CpuOptions(threads=1))
    yield session
    session.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_have_the_bits_of_one_plain_run(opened: Session, plain: Session, data: st.DataObject) -> None:
    """Of several sequences: pieces of prompts, drafts and what is kept of them, rewinds, copies."""
    check_rows(data, opened.model, partial(rows_in_one_pass, plain), place_behind=lambda length: length)


def test_every_set_gives_the_same_bits(bundle: Bundle, plain: Session) -> None:
    whole = rows_in_one_pass(plain, TEXT[:84]).copy()
    for name in sets():
        session = open_cpu(bundle, CpuOptions(threads=2, instructions=name))
        rows = [session.predict(TEXT[at : at + 7]).logits.copy() for at in range(0, 84, 7)]
        session.close()
        np.testing.assert_array_equal(np.concatenate(rows), whole)


def test_caches_put_aside_and_a_restart_give_the_same_rows(
    bundle: Bundle, plain: Session, tmp_path: Path
) -> None:
    texts = [TEXT[:200], [*TEXT[:150], *TEXT[250:300]], TEXT[100:180], TEXT[:131]]
    expected = [rows_in_one_pass(plain, text)[-1].copy() for text in texts]
    for start in range(2):
        session = open_cpu(bundle, CpuOptions(threads=1))
        caches = KvStore(1 << 22, BlockFiles(tmp_path / "prompts"))
        seats = [session, session.model.session()]
        for at, (text, row) in enumerate(zip(texts * 2, expected * 2, strict=True)):
            seat = seats[at % 2]
            caches.fetch(seat, text, [seats[1 - at % 2]])
            if start or at >= len(texts):
                assert seat.shared_prefix(text) >= (len(text) - 1) // BLOCK * BLOCK
            np.testing.assert_array_equal(seat.predict_next(text).logits[0], row)
            caches.write_behind()
        for seat in seats:
            seat.close()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
def test_texts_are_those_without_drafts(tmp_path: Path, options: dict[str, Any]) -> None:
    """With n-grams, a drafter with latent attention itself, and one of another vocabulary."""
    target = tiny_native(tmp_path / "target", LATENT).path
    alike = tiny_native(tmp_path / "alike", LATENT, role="drafter").path
    other = byte_level_json(size=330)
    bridged = tiny_native(tmp_path / "bridged", LLAMA, role="drafter", tokenizer_json=other).path
    prompts = ("one two three " * 6, "one two three " * 6 + "four", "one two three " * 3, "x")
    counts = same_with_drafts(target, ("ngram", alike, bridged), prompts, max_new_tokens=48, **options)
    assert all(drafted > 20 for drafted, _ in counts[1:])
    drafted, accepted = counts[1]
    assert options or accepted > 0.9 * drafted  # n-grams draft a few of them


def test_a_token_keeps_one_row_a_layer(bundle: Bundle) -> None:
    token = bundle.config.num_layers * 80 * 2
    assert bundle.manifest.kv_bytes_per_token == token
    assert footprint_of(bundle, exact_rows=True).cache.bytes(100) == 128 * token
    session = open_cpu(bundle, CpuOptions(threads=1))
    session.predict(TEXT[:20])
    assert session.model.kv_bytes == BLOCK * token
    session.close()


def test_the_published_models_token_takes_1152_bytes_a_layer() -> None:
    facts = {"model_type": "glm4_moe_lite", "hidden_size": 2048, "num_attention_heads": 20}
    facts |= {"num_hidden_layers": 47, "intermediate_size": 10_240}
    config = read_config(Facts(facts, "config.json"))
    assert isinstance(config, Latent)
    assert {tensor.nbytes for tensor in record(config).kept} == {1152}
    assert config.attention_scale == 1 / 16
    assert config.experts == replace(EXPERTS, count=64, used=4, width=1536, shared_width=1536)


def _whole(kind: str) -> TinyGGUF:
    """The file of older converters: keys and values of heads in one matrix, widths of that form."""
    model, config = gguf_of("glm4_moe_lite", kind), config_of("glm4_moe_lite")
    for layer in range(3):
        for part in "kv":
            del model.tensors[f"blk.{layer}.attn_{part}_b.weight"]
        values = weights(config)[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        stored = (kind, q8_0(values)) if kind == "Q8_0" else (kind, values)
        model.tensors[f"blk.{layer}.attn_kv_b.weight"] = stored
    stated = {"key_length": 48, "value_length": 48, "head_count_kv": 4}
    model.metadata |= {f"deepseek2.attention.{key}": value for key, value in stated.items()}
    for part in ("key", "value"):
        del model.metadata[f"deepseek2.attention.{part}_length_mla"]
    return model


def test_older_files_hold_the_same_model(tmp_path: Path) -> None:
    logits = []
    for name, model in (("new", gguf_of("glm4_moe_lite")), ("old", _whole("F32"))):
        export_model(model.write(tmp_path / f"{name}.gguf"), tmp_path / name)
        session = open_cpu(Bundle(tmp_path / name), CpuOptions(threads=1))
        logits.append(session.predict(TEXT[:20]).logits.copy())
        session.close()
    np.testing.assert_array_equal(logits[0], logits[1])


def test_blocks_of_older_files_are_turned(tmp_path: Path) -> None:
    new, old = (
        open_checkpoint(model.write(tmp_path / f"{name}.gguf"))
        for name, model in (("new", gguf_of("glm4_moe_lite", "Q8_0")), ("old", _whole("Q8_0")))
    )
    with new, old:
        assert new.config == old.config
        assert old.tensor("layers.1.v_b").type == new.tensor("layers.1.v_b").type
        for name, rows in (("layers.1.k_b", (70, 200)), ("layers.1.v_b", (40, 190))):
            np.testing.assert_array_equal(old.values(name, *rows), new.values(name, *rows))


def test_matrices_of_heads_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = _whole("F32")
    model.tensors["blk.1.attn_k_b.weight"] = gguf_of("glm4_moe_lite").tensors["blk.1.attn_k_b.weight"]
    with pytest.raises(ModelFileError, match=r"rows of 'blk\.1\.attn_kv_b\.weight' in 'blk\.1\.attn_k_b"):
        open_checkpoint(model.write(tmp_path / "m.gguf"))
    model = gguf_of("glm4_moe_lite")
    kind, values = model.tensors["blk.1.attn_k_b.weight"]
    model.tensors["blk.1.attn_k_b.weight"] = kind, values.reshape(2, 128, 32)
    with pytest.raises(ModelFileError, match=r"attn_k_b.*\(2, 128, 32\).*\(4, 64, 32\)"):
        open_checkpoint(model.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"n_group": 4, "topk_group": 2}, "n_group is 4"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_layer_types": ["dense", "sparse", "dense"]}, "mlp_layer_types is"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "3 in all"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "'yarn'"),
        ({"kv_lora_rank": 40}, "kv_lora_rank is 40"),
        ({"v_head_dim": 0}, "v_head_dim 0"),
    ],
)
def test_what_is_not_computed_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises((ModelFileError, UnsupportedModelError), match=words):
        read_config(Facts(config_of("glm4_moe_lite") | changed, "config.json"))


def test_a_layer_behind_the_last_is_left_out(tmp_path: Path) -> None:
    """Published checkpoints hold their MTP layer so."""
    config = config_of("glm4_moe_lite")
    tensors = weights(config)
    last = {name: values for name, values in tensors.items() if name.startswith("model.layers.2.")}
    more = {name.replace("layers.2.", "layers.3."): values for name, values in last.items()}
    more["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    assert len(tensors) == len(shapes(config))
    with open_checkpoint(write_directory(tmp_path / "m", config, tensors | more)) as checkpoint:
        assert checkpoint.changes == {"left_out": "mtp"}
        assert not any("layers.3." in name for name in checkpoint.tensors)
