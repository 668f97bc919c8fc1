"""Hugging Face directories that cannot be exported: one clear error each, and nothing left behind."""

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from edgespec_export.export import ExportOptions, export_model
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_export.sources.hf_tokenizer import HFTokenizer
from edgespec_export.sources.safetensors_file import SafetensorsFile
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import (
    EdgespecError,
    ModelFileError,
    RequestError,
    TokenizerError,
    UnsupportedModelError,
)
from edgespec_models.families import read_config
from edgespec_models.files.facts import Facts
from edgespec_models.text.tokenizer import SpecialTokens
from edgespec_models.text.tokenizer_files import TokenizerFiles
from tests.kit.hf import CASES, VOCAB, config_of, weights, write_checkpoint, write_safetensors
from tests.kit.tokenizers import byte_level_json
from tests.kit.weights import config_of_json

_RICH = (
    "gemma3",
    "phi4",
    "granite",
    "ministral3",
    "qwen35",
    "lfm2_keys",
    "lfm2_moe",
    "gpt_oss",
    "gemma4_moe",
)
_YARN = tuple(CASES["ministral3"]["rope_parameters"])
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


GRANITE: dict[str, Any] = {"model_type": "granitemoe", "num_local_experts": 8}


def refused(
    folder: Path, change: dict[str, Any], kind: type[EdgespecError], message: str, case: str = "llama"
) -> None:
    """A sound checkpoint of ``case`` whose ``config.json`` is changed; "absent" takes a key away."""
    config = {key: value for key, value in {**config_of(case), **change}.items() if value != "absent"}
    write_checkpoint(folder, config_of(case))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(kind, match=message):
        HFCheckpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba'.*llama, mistral.*--via optimum"),
        ({"model_type": "absent"}, "architecture ''"),
        (
            {"model_type": "mixtral"},
            "'mixtral'.*needs experts in this family's form.*use gpt-oss-20b or a dense Llama",
        ),
        ({"num_local_experts": 8}, "num_local_experts is 8.*no mixtures of experts of the family llama"),
        ({"model_type": "qwen3", "residual_multiplier": 0.5}, "residual_multiplier is 0.5; qwen3"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized already .gptq.*GGUF"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized already .fp8"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantized already .an unknown method.*GGUF"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "'ntk'.*yarn"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"max_position_embeddings": 1 << 40}, "context_length"),
        ({"num_attention_heads": 3, "head_dim": 16}, "3 query heads cannot share 2"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        *(
            ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], **change}, message)
            for change, message in (
                ({"mamba_n_heads": 3}, "3 heads of Mamba-2 are None wide; allowed: 128 in all"),
                ({"mamba_n_heads": 4, "mamba_d_head": 16}, "4 heads of Mamba-2 are 16 wide"),
                ({"mamba_n_heads": 16}, "width is 8; allowed"),
                ({"mamba_n_heads": 4, "mamba_d_state": 24}, "their keys 24; allowed: multiples of 16"),
                ({"mamba_n_heads": 4, "mamba_n_groups": 2}, "mamba_n_groups is 2"),
                ({"mamba_n_heads": 4, "mamba_d_conv": 99}, "conv_taps is 99"),
                ({"layer_types": ["rwkv", "attention"]}, "layer_types must say full_attention or mamba"),
            )
        ),
        ({**GRANITE, "num_experts_per_tok": 9}, "uses 9 experts; there are 8"),
        ({**GRANITE, "num_local_experts": -1}, "count is -1"),
        ({**GRANITE, "n_group": 2}, "n_group is 2"),
        ({"is_causal": False}, "it encodes texts and writes none"),
        ({"use_bidirectional_attention": 30.0}, "use_bidirectional_attention"),
    ],
)
def test_what_edgespec_lacks_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    refused(tmp_path, change, UnsupportedModelError, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two', not a whole number"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rope_theta": [1]}, "rope_theta"),
        ({"rope_scaling": 3}, "rope_scaling is 3, not an object"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "not positive"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}},
            "original context is 0",
        ),
        ({"residual_multiplier": 1e-320}, "residual_multiplier is 1e-320; from 1e-06 to 1000000"),
        ({"text_config": 3}, "text_config is 3, not an object"),
        ({"vocab_size": VOCAB + 1}, r"has shape \(320, 64\).*\(321, 64\)"),
        ({"num_hidden_layers": 3}, "lacks a tensor for layers.2"),
        ({"tie_word_embeddings": "maybe"}, "not true or false"),
    ],
)
def test_wrong_facts_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    refused(tmp_path, change, ModelFileError, message)


def test_wrong_facts_of_single_families_are_named(tmp_path: Path) -> None:
    shape = r"qkv_proj.*\(128, 64\).*\(96, 64\)"
    refused(tmp_path / "phi3", {"num_key_value_heads": 1}, ModelFileError, shape, "phi3")
    scaling = {**config_of("phi4")["rope_scaling"], "short_factor": [1.0, 2.0]}
    refused(tmp_path / "phi4", {"rope_scaling": scaling}, ModelFileError, r"short_factor.*8 numbers", "phi4")
    lfm2: list[tuple[dict[str, Any], type[EdgespecError], str]] = [
        ({"layer_types": ["conv"] * 4}, UnsupportedModelError, "attention or convolution for each of 5"),
        ({"layer_types": ["conv"] * 4 + ["mamba"]}, UnsupportedModelError, "attention or convolution"),
        ({"layer_types": ["conv"] * 5}, ModelFileError, r"lacks a tensor for layers\.2\.conv"),
        ({"conv_L_cache": 4}, ModelFileError, r"conv\.conv.*\(64, 3\).*\(64, 4\)"),
        ({"conv_L_cache": 1}, UnsupportedModelError, "conv_taps is 1"),
        ({"conv_L_cache": [3]}, ModelFileError, "conv_L_cache is "),
        ({"conv_bias": True}, UnsupportedModelError, "conv_bias is true"),
        ({"block_multiple_of": 256}, ModelFileError, r"w1.*\(96, 64\).*\(256, 64\)"),
        ({"num_key_value_heads": 1}, ModelFileError, r"k_proj.*\(32, 64\).*\(16, 64\)"),
        ({"norm_eps": "x"}, ModelFileError, "rms_norm_eps is 'x'"),
    ]
    for number, (change, kind, message) in enumerate(lfm2):
        refused(tmp_path / f"lfm2-{number}", change, kind, message, "lfm2")
    tied = {"tie_word_embeddings": False}
    refused(tmp_path / "tied", tied, ModelFileError, "tie_word_embeddings", "llama_tied")


@settings(max_examples=300, deadline=None)
@given(
    case=st.sampled_from(
        [
            *("llama3", "smollm3", "gemma3", "phi4", "qwen3_yarn", "granite", "ministral3", "qwen35"),
            *("lfm2", "lfm3", "qwen3_moe", "qwen35_moe", "lfm2_moe", "gpt_oss", "gemma2", "gemma4_moe"),
        ]
    ),
    key=st.sampled_from(
        [
            *sorted({key for case in _RICH for key in config_of(case)}),
            *("layer_types", "no_rope_layers", "text_config", "expert_gating_func", "mlp_only_layers"),
            *("num_experts", "shared_expert_intermediate_size", *_YARN),
        ]
    ),
    value=st.sampled_from(
        [None, 0, -1, 1, 7, 1 << 40, 10**400, 1.5, -0.5, 1e308, "x", [], [0], {}, {"type": 1}, True]
    ),
)
def test_any_fact_may_be_wrong(case: str, key: str, value: object) -> None:
    facts = config_of(case)
    (facts.get("rope_parameters", facts.get("rope_scaling", {})) if key in _YARN else facts)[key] = value
    try:
        config = read_config(Facts(facts, "config.json"))
    except EdgespecError:
        return
    assert config_of_json(json.loads(json.dumps(asdict(config)))) == config


def test_missing_parts_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config_of("llama"), shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    kept = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ModelFileError, match=r"lacks model-00002-of-00003\.safetensors"):
        HFCheckpoint(folder)
    shard.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(ModelFileError, match=r"model-00002.*truncated"):
        HFCheckpoint(folder)
    write_safetensors(shard, {"other": np.zeros((2, 2), np.float32)})
    with pytest.raises(ModelFileError, match="lacks"):
        HFCheckpoint(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": "../b"}}', encoding="utf-8")
    with pytest.raises(ModelFileError, match="outside the directory"):
        HFCheckpoint(folder)
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"neither.*pytorch_model\.bin.*safetensors"):
        HFCheckpoint(folder)


def test_of_an_index_only_the_names_of_files_count(tmp_path: Path) -> None:
    """As in transformers: tensors are what the files hold, the last of several counts."""
    config = config_of("llama") | {"tie_word_embeddings": True}
    folder = write_checkpoint(tmp_path, config, shards=2)
    with HFCheckpoint(folder) as opened:
        plain = {name: opened.values(name) for name in opened.tensors}
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    first, second = sorted({*index["weight_map"].values()})
    again = next(name for name, file in index["weight_map"].items() if file == first and "down" in name)
    stored = {name: values for name, values in weights(config).items() if index["weight_map"][name] == second}
    stored |= {again: weights(config)[again] * 2, "model.layers.0.mlp.extra": np.ones((2, 2), np.float32)}
    write_safetensors(folder / second, stored)
    index["weight_map"] |= {"lm_head.weight": second, "model.layers.0.rotary_emb.inv_freq": first}
    index["weight_map"].pop("model.embed_tokens.weight")
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with HFCheckpoint(folder) as opened:
        assert opened.tied_head and opened.tensors.keys() == plain.keys()
        changed = [name for name in plain if not np.array_equal(opened.values(name), plain[name])]
        assert changed == ["layers.0.down"]
    index["weight_map"]["model.layers.0.mlp.extra"] = second
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(
        UnsupportedModelError, match=r"1 unknown tensors, such as 'model\.layers\.0\.mlp\.extra'"
    ):
        HFCheckpoint(folder)


@pytest.mark.parametrize("differs", [False, True])
def test_a_head_that_is_stored_beside_a_tied_configuration_is_taken_where_it_differs(
    tmp_path: Path, differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = weights(config_of("llama_tied"))
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += differs
    tensors |= {
        "lm_head.weight": head,
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    folder = write_checkpoint(tmp_path, config_of("llama_tied"))
    write_safetensors(folder / SINGLE, tensors)
    with HFCheckpoint(folder) as opened:
        assert opened.tied_head is not differs
        assert np.array_equal(opened.values("lm_head"), head)
        assert np.array_equal(opened.values("embed"), tensors["model.embed_tokens.weight"])
    assert ("is not tied, because its lm_head.weight is stored" in caplog.text) is differs


def test_unknown_tensors_and_other_dtypes_are_named(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, config_of("llama")) / SINGLE
    sound = file.read_bytes()
    extra = {"model.layers.0.self_attn.o_proj.bias": np.zeros(64, np.float32)}
    write_safetensors(file, weights(config_of("llama")) | extra)
    with pytest.raises(UnsupportedModelError, match=r"o_proj\.bias"):
        HFCheckpoint(tmp_path)
    file.write_bytes(sound.replace(b'"dtype": "F32"', b'"dtype": "I32"', 1))
    with pytest.raises(UnsupportedModelError, match=r"I32.*F32, F16, BF16"):
        HFCheckpoint(tmp_path)


def test_a_tensor_of_another_size_than_its_shape_is_named(tmp_path: Path) -> None:
    values = {name: np.ones((4, 8), np.float32) for name in ("first", "second")}
    path = write_safetensors(tmp_path / SINGLE, values)
    data = path.read_bytes().replace(b'"data_offsets": [128, 256]', b'"data_offsets": [128, 252]')
    path.write_bytes(data)
    with (
        closing(SafetensorsFile(path)) as file,
        pytest.raises(ModelFileError, match=r"second.*4, 8.*takes 124 bytes"),
    ):
        file.tensor("second")


def test_weights_that_are_no_numbers_leave_nothing(tmp_path: Path) -> None:
    tensors = weights(config_of("llama"))
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.inf
    folder = write_checkpoint(tmp_path / "m", config_of("llama"))
    write_safetensors(folder / SINGLE, tensors)
    (folder / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"up_proj.*not finite"):
        export_model(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_the_tokenizer_must_fit_the_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", config_of("llama"))
    (folder / "tokenizer.json").write_text(byte_level_json(size=400), encoding="utf-8")
    with pytest.raises(TokenizerError, match="320 rows"):
        export_model(folder, tmp_path / "out")
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"m.tokenizer\.json"):
        export_model(folder, tmp_path / "out")


def test_special_tokens_come_from_every_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {**config_of("llama"), "eos_token_id": 7})
    (folder / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 7]}', encoding="utf-8")
    facts = {
        "eos_token": "<|im_end|>",
        "bos_token": None,
        "chat_template": [{"name": "default", "template": "x"}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts), encoding="utf-8")
    with HFCheckpoint(folder) as opened:
        special = opened.special_tokens()
        assert special.eos == (2, 9, 7, 0)  # <|im_end|>, the lists, <|endoftext|>
        assert (special.bos, special.add_bos) == (1, False)
        assert opened.chat_templates() == {"default": "x"}
        (folder / "chat_template.jinja").write_text("y", encoding="utf-8")
        assert opened.chat_templates() == {"default": "y"}
    with HFCheckpoint(folder) as opened:
        assert {file.name for file in opened.files} == {file.name for file in folder.iterdir()}


def test_chat_templates_come_from_the_first_place_that_has_any(tmp_path: Path) -> None:
    beside = TokenizerFiles(tmp_path, Facts({}, "config.json"), VOCAB)
    assert beside.chat_templates() == {}

    def write(name: str, value: object) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")

    def found() -> dict[str, str]:
        return TokenizerFiles(tmp_path, Facts({}, "config.json"), VOCAB).chat_templates()

    write("chat_template.json", {"chat_template": "a"})
    assert found() == {"default": "a"}
    write("additional_chat_templates/rag.jinja", "b")
    assert found() == {"default": "a", "rag": "b"}
    named = [{"name": "tool_use", "template": "c"}, {"name": "else", "template": "d"}]
    write("tokenizer_config.json", {"chat_template": named})
    assert found() == {"default": "c", "tool_use": "c", "rag": "b"}  # none is called default
    write("tokenizer_config.json", {"chat_template": [*named, {"name": "default", "template": "e"}]})
    assert found() == {"default": "e", "tool_use": "c", "rag": "b"}
    write("chat_template.jinja", "f")
    assert found() == {"default": "f", "rag": "b"}
    write("tokenizer_config.json", {"chat_template": [{"name": "default", "template": 3}]})
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelFileError, match="chat template 'default' is int"):
        found()


def test_ids_that_no_token_has_are_said_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = {"bos_token_id": -1, "eos_token_id": [2, VOCAB], "pad_token_id": "nobody reads it"}
    folder = write_checkpoint(tmp_path, config_of("llama") | ids)
    (folder / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
    with HFCheckpoint(folder) as opened:
        assert (
            opened.special_tokens() == opened.special_tokens() == SpecialTokens(None, (2, 0), add_bos=False)
        )
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "no token has the bos_token_id -1",
        f"no token has the eos_token_id {VOCAB}",
    ]
    (folder / "generation_config.json").write_text('{"eos_token_id": "2"}', encoding="utf-8")
    with HFCheckpoint(folder) as opened, pytest.raises(ModelFileError, match="allowed: ids"):
        opened.special_tokens()


def test_no_tokenizer_config_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
    special = HFTokenizer(tmp_path, Facts({}, "config.json"), VOCAB).special_tokens()
    assert (special.bos, special.add_bos) == (None, False)


def test_places_and_sources_that_cannot_be(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", config_of("llama"))
    (folder / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
    for out in (folder, tmp_path):  # a directory is not overwritten by its own bundle
        with pytest.raises(RequestError):
            export_model(folder, out, options=ExportOptions(overwrite=True))
    assert (folder / SINGLE).is_file()
    export_model(folder, tmp_path / "out")
    with pytest.raises(ModelFileError, match="is a bundle, or runs"):
        export_model(Bundle(tmp_path / "out").path, tmp_path / "again")


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_the_safetensors_package_reads_the_same(tmp_path: Path, dtype: str) -> None:
    path = write_safetensors(tmp_path / SINGLE, weights(config_of("qwen2")), dtype)
    file = SafetensorsFile(path)
    with safe_open(path, "numpy") as theirs:
        assert file.names == set(theirs.keys())
        for name in file.names:
            expected = theirs.get_tensor(name)
            raw = file.tensor(name).read()
            assert np.array_equal(raw.view(expected.dtype).reshape(expected.shape), expected)
    file.close()


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 400), byte=st.integers(0, 255), length=st.integers(0, 700))
def test_damaged_headers_meet_one_kind_of_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, length: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / SINGLE
    tensors = {"a": np.ones((3, 2), np.float32), "b": np.ones(5, np.float32)}
    data = bytearray(write_safetensors(path, tensors).read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(data[:length])
    try:
        file = SafetensorsFile(path)
    except EdgespecError:
        return
    try:
        for name in file.names:
            file.tensor(name).read()
    except EdgespecError:
        pass
    finally:
        file.close()
