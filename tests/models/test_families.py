"""Families whose layers are special: files that contradict themselves, other backends, and texts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import LoadOptions
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.downloads.catalog import hub_names
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.families import HEADS, MODELS, named, read_config
from edgespec_models.files.facts import Facts
from edgespec_runtimes.cpu import open_cpu
from tests.kit.drafters import draft_eagerly
from tests.kit.gguf_cases import converted, gguf_of
from tests.kit.hf import TOKENS, config_of, weights, write_with_tokenizer
from tests.kit.native import tiny_native

CASES = ("gemma2", "gemma4", "gemma4_tied", "gemma4_moe", "gpt_oss", "qwen35", "qwen35_moe", "lfm3")


@pytest.fixture(scope="module", params=CASES)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    export_model(gguf_of(request.param, "Q8_0").write(folder / "m.gguf"), folder / "bundle")
    return folder / "bundle"


GEMMA4: list[tuple[dict[str, Any], str]] = [
    ({"attention.shared_kv_layers": 4}, "layer 2 reads the keys and values .* sees the whole context"),
    ({"attention.shared_kv_layers": 6}, "shared_layers is 6 of 6 layers"),
    ({"attention.shared_kv_layers": 2}, r"lacks a tensor for layers\.3\.k"),
    ({"feed_forward_length": [96] * 5}, "feed_forward_length is .*, not a list of 6 numbers|mlp_widths"),
    ({"feed_forward_length": [96] * 6}, r"ffn_gate.*shape \(192, 64\)"),
    ({"attention.head_count_kv": [2, 2, 1, 2, 2]}, "head_count_kv has 5 entries for 6 layers"),
    ({"attention.head_count_kv": [2, 1, 2, 2, 2, 2]}, r"head_count_kv has \['1', '2'\] .* with a window"),
    ({"attention.head_count_kv": [3, 3, 2, 3, 3, 2]}, "4 query heads cannot share 3"),
    (
        {"attention.sliding_window_pattern": [True] * 5},
        "sliding_window_pattern must have an entry for each of 6 layers",
    ),
    ({"attention.sliding_window_pattern": [True, False] * 3}, "shape|lacks a tensor"),
    ({"attention.key_length_swa": None}, "key_length_swa"),
    ({"attention.key_length_swa": 15, "attention.value_length_swa": 15}, "swa is 16|head_dim is 15"),
    ({"attention.value_length": 16}, "value_length is 16; allowed: 32"),
    ({"rope.dimension_count_swa": 8}, "dimension_count_swa is 8; allowed: 16"),
    ({"embedding_length_per_layer_input": 64}, "shape"),
    ({"embedding_length_per_layer_input": 0}, "has tensors that a gemma4 model does not have"),
    ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0, not positive"),
    ({"block_count": 7}, "sliding_window_pattern must have an entry for each of 7 layers"),
    ({"expert_count": 8}, r"lacks 'expert_used_count'"),
    ({"expert_count": 8, "expert_used_count": 2}, r"lacks a tensor for layers\.0\.router"),
]
QWEN35: list[tuple[dict[str, Any], str]] = [
    ({"full_attention_interval": 2}, "delta_qkv|lacks a tensor"),
    ({"full_attention_interval": 0}, "full_attention_interval is 0"),
    ({"attention.recurrent_layers": [True, False, True, False]}, "has tensors|lacks a tensor"),
    ({"attention.recurrent_layers": [True, True, True]}, "layer_types must say"),
    ({"ssm.group_count": 3}, "4 value heads of a delta net cannot share 3 key heads"),
    ({"ssm.group_count": 0}, "key_heads"),
    ({"ssm.state_size": 24}, "multiples of 16"),
    ({"ssm.inner_size": 130}, "inner_size is 130, which 4 heads"),
    ({"ssm.time_step_rank": 0}, "which 0 heads"),
    ({"ssm.conv_kernel": 3}, r"conv1d.*shape \(192, 4\)"),
    ({"ssm.conv_kernel": 1 << 20}, "conv_taps"),
    ({"ssm.time_step_rank": 2}, "shape"),
    ({"nextn_predict_layers": 4}, "4 blocks, 4 of them for MTP"),
    ({"block_count": 5}, "lacks a tensor|layers"),
    ({"ssm.inner_size": None}, "lacks 'ssm.inner_size'"),
    ({"ssm.group_count": None}, "lacks 'ssm.group_count'"),
]

LFM3: list[tuple[dict[str, Any], str]] = [
    ({"attention.causal": False}, "in both directions and writes by diffusion"),
    ({"attention.sliding_window_pattern": None}, "true or false for each layer"),
    ({"attention.sliding_window_pattern": [True] * 4}, "true or false for each layer"),
    ({"attention.sliding_window_pattern": [0.5] * 5}, "true or false for each layer"),
    ({"attention.head_count_kv": 2}, "must have a number"),
    ({"attention.head_count_kv": [0, 0, 2, 0, 4]}, "head_count_kv is .* not a whole"),
    ({"attention.head_count_kv": [0, 0, 2, 0, 0]}, r"lacks a tensor for layers\.4\.conv"),
    ({"attention.sliding_window": None}, "sliding_window"),
    ({"attention.sliding_window": 0}, "sliding_window"),
    ({"attention.value_length": 16}, "values 16 wide and keys 32 wide"),
    ({"block_count": 6}, "layer_types must say .* for each of 6 layers"),
    ({"rope.dimension_count": 16}, "rope.dimension_count is 16; allowed: 32"),
    ({"shortconv.l_cache": 3}, r"shortconv\.conv.*\(64, 7\).*\(64, 3\)"),
    ({"shortconv.l_cache": 17}, "conv_taps is 17"),
]

LATENT: list[tuple[dict[str, Any], str]] = [
    ({"attention.kv_lora_rank": 32}, "kv_lora_rank 32 .* ask for 48 and 32"),
    ({"attention.kv_lora_rank": 0}, "kv_lora_rank 0"),
    ({"attention.kv_lora_rank": None}, "lacks 'attention.kv_lora_rank'"),
    ({"attention.q_lora_rank": 64}, r"attn_q_a.*\(96, 64\).*\(64, 64\)"),
    ({"attention.q_lora_rank": None}, r"lacks a tensor for layers\.0\.q"),
    ({"attention.head_count_kv": 4}, "in 4 heads; .* in one"),
    ({"attention.head_count": 2}, r"attn_k_b.*\(4, 64, 32\).*\(2, 64, 32\)"),
    ({"attention.key_length": 96}, "96 and 64 wide"),
    ({"attention.value_length": 48}, "80 and 48 wide"),
    ({"attention.key_length_mla": 16}, "qk_nope_head_dim 0"),
    ({"attention.key_length_mla": 80}, r"attn_k_b.*\(4, 64, 32\).*\(4, 64, 64\)"),
    ({"attention.key_length_mla": 40}, "qk_nope_head_dim 24"),
    ({"attention.value_length_mla": 64}, r"attn_v_b.*\(4, 48, 64\).*\(4, 64, 64\)"),
    ({"attention.value_length_mla": 40}, "v_head_dim 40"),
    ({"rope.dimension_count": 32}, "rope.dimension_count 32 ask for 96"),
    (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 40.0},
        "'yarn'; glm4_moe_lite is supported without",
    ),
    ({"expert_group_count": 8}, "expert_group_count is 8"),
    ({"expert_count": 9}, r"shape \(8, 32, 64\)|\(9, "),
    ({"expert_used_count": 9}, "uses 9 experts; there are 8"),
    ({"expert_shared_count": 1}, r"shexp.*shape \(64, 64\).*\(32, 64\)"),
    ({"leading_dense_block_count": 0}, r"lacks a tensor for layers\.0\."),
    ({"leading_dense_block_count": 2}, r"lacks a tensor for layers\.1\.gate"),
    ({"nextn_predict_layers": 3}, "3 blocks, 3 of them for MTP"),
]


@pytest.mark.parametrize(
    ("case", "changed", "words"),
    [
        (case, *wrong)
        for case, cases in (
            ("gemma4", GEMMA4),
            ("qwen35", QWEN35),
            ("lfm3", LFM3),
            ("glm4_moe_lite", LATENT),
        )
        for wrong in cases
    ],
)
def test_keys_that_contradict_each_other_are_named(
    tmp_path: Path, case: str, changed: dict[str, Any], words: str
) -> None:
    model = gguf_of(case, **changed)
    with pytest.raises((ModelFileError, UnsupportedModelError), match=words):
        export_model(model.write(tmp_path / "m.gguf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


REFUSED = {
    "gemma4": "this gemma4 model has layer_inputs, which",
    "gemma4_moe": r"layers\.0 of this gemma4 model is experts, which",
    "gpt_oss": r"layers\.0 of this gpt-oss model is experts",
    "qwen3_moe": r"layers\.0 of this qwen3 model is experts",
    "qwen35": r"layers\.0 of this qwen35 model is delta_net",
    "lfm3": r"layers\.0 of this lfm3 model is short_conv",
    "glm4_moe_lite": r"layers\.0 of this glm4_moe_lite model is head_linear",
    "hunyuan": r"layers\.0 of this hunyuan model is attention with norms_behind_rotation",
    "apertus": r"layers\.0 of this apertus model is gated with xielu",
    "laguna": r"layers\.0 of this laguna model is head_gate",
    "nanbeige": "this nanbeige model has normalized, which",
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("options", [ExportOptions(weights="portable"), ExportOptions(device="cuda")])
def test_other_backends_refuse_by_name(tmp_path: Path, options: ExportOptions, case: str) -> None:
    source = gguf_of(case, "Q8_0").write(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match=REFUSED[case]):
        export_model(source, tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()


def _lfm3_of(full: Mapping[str, Any], **changed: Any) -> Transformer:
    """The config of a directory whose layers without a window rotate in another way."""
    facts = config_of("lfm3")
    ropes = facts["rope_parameters"]
    facts["rope_parameters"] = {**ropes, "full_attention": ropes["full_attention"] | full}
    return read_config(Facts(facts | changed, "config.json"))


def test_a_part_of_a_head_is_rotated_whatever_lfm3s_files_call_it() -> None:
    config = _lfm3_of({})
    assert (config.rope.pairs, config.rope.width) == (8, 32)
    assert config == _lfm3_of({"rope_type": "proportional"})
    whole = _lfm3_of({"partial_rotary_factor": None})
    assert whole.rope.pairs == 16 and whole == _lfm3_of({"partial_rotary_factor": 1.0})
    ropes = {rope.name: (rope.theta, rope.pairs) for rope in record(config).ropes.values()}
    assert ropes == {"rope": (100.0, 8), "rope_local": (50.0, 16)}
    assert config == _lfm3_of({}, layer_types=None)  # as the published model's
    local = _lfm3_of({}, sliding_window=500).local_rope
    assert local is not None and local.theta == 50.0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"causal_attn": False}, "in both directions and writes by diffusion"),
        ({"use_attention_gate": False}, "use_attention_gate is False; lfm3 is supported with True"),
        ({"use_sandwich_norm": False}, "use_sandwich_norm is False"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"conv_bias": True}, "conv_bias is True"),
        ({"layer_types": ["conv"] * 6}, "layer_types must say .* for each of 5 layers"),
        ({"layer_types": ["mamba"] * 5}, "layer_types must say full_attention, sliding_attention, conv"),
        ({"full": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"full": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5"),
        ({"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}}, "with a window: 1"),
    ],
)
def test_an_lfm3_that_edgespec_does_not_compute_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises((ModelFileError, UnsupportedModelError), match=words):
        _lfm3_of(changed.pop("full", {}), **changed)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop("rope_freqs.weight"), "lacks rope_freqs.weight"),
        (lambda tensors: tensors.pop("blk.2.attn_gate.weight"), r"lacks a tensor for layers\.2\.head_gate"),
        (
            lambda tensors: tensors.update({"blk.2.attn_swiftness.weight": tensors["output_norm.weight"]}),
            r"unknown tensors, such as 'blk\.2\.attn_swiftness",
        ),
    ],
)
def test_an_lfm3_with_other_tensors_is_refused(
    tmp_path: Path, edit: Callable[[Any], Any], words: str
) -> None:
    model = gguf_of("lfm3")
    edit(model.tensors)
    with pytest.raises((ModelFileError, UnsupportedModelError), match=words):
        open_checkpoint(model.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("case", ["llama3", "gemma4", "lfm3"])
def test_divisors_for_a_part_of_the_frequencies_are_refused(tmp_path: Path, case: str) -> None:
    """Else all pairs would turn where a file has the divisors of those alone that do."""
    model = gguf_of(case)
    kind, divisors = model.tensors["rope_freqs.weight"]
    model.tensors["rope_freqs.weight"] = kind, divisors[: len(divisors) // 2]
    with pytest.raises(UnsupportedModelError, match=r"rope_factors .* for .* frequencies"):
        open_checkpoint(model.write(tmp_path / "m.gguf"))


def test_drafts_do_not_change_what_is_written(bundle: Path, tmp_path: Path) -> None:
    """Greedy and seeded, by n-grams of a text that repeats itself, and by a model of another vocabulary."""
    prompt, texts, drafted = "one two one two one two one two", list[list[str]](), 0
    for drafter in (None, "ngram", tiny_native(tmp_path / "drafter", role="drafter").path):
        with edgespec.load(bundle, drafter, options=LoadOptions(threads=1)) as model:
            draft_eagerly(model)
            sampling: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}]
            answers = [
                model.generate(prompt, max_new_tokens=40, stop_at_eos=False, **more) for more in sampling
            ]
        assert all(answer.stats.new_tokens == 40 for answer in answers)
        texts.append([answer.text for answer in answers])
        drafted += sum(answer.stats.drafted for answer in answers)
    assert texts[0] == texts[1] == texts[2] and drafted > 0


def test_a_conversation_that_goes_on_or_turns_back_is_as_if_read_alone(bundle: Path) -> None:
    """What a session holds of an earlier prompt is of use only as far as its states go back."""
    first = "one two three four five six seven"
    prompts = (first, first, f"{first} eight nine", "one two three zero", first[:9], first)
    with edgespec.load(bundle, "ngram", options=LoadOptions(threads=1, parallel=2)) as model:
        answers = [model.generate(prompt, max_new_tokens=12, stop_at_eos=False).text for prompt in prompts]
    for prompt, answer in {*zip(prompts, answers, strict=True)}:
        with edgespec.load(bundle, None, options=LoadOptions(threads=1)) as model:
            assert model.generate(prompt, max_new_tokens=12, stop_at_eos=False).text == answer


def test_every_name_belongs_to_one_family() -> None:
    families = (*MODELS, *HEADS)
    for names in (
        [name for family in families for name in family.hub],
        [family.gguf for family in families if family.gguf],
    ):
        assert len(names) == len({*names})
    for family in families:
        assert {"embed", "final_norm", "lm_head"} <= family.outer.keys()
    planned = {model.architecture for model in hub_names().values() if model.config}
    assert planned <= {family.name for family in MODELS}
    assert named("a family that nobody has") is None


def test_facts_over_others_are_read_as_they_were() -> None:
    class Keys(Facts):
        """Of a GGUF file, in which a section is none."""

    assert isinstance(Keys({}, "m.gguf").over({"head_dim": 64}), Keys)


def test_files_of_a_glm4_that_sees_are_refused(tmp_path: Path) -> None:
    """Their converter moves the rows of queries and keys."""
    model = gguf_of("glm4")
    model.metadata["glm4.rope.dimension_sections"] = [4, 2, 2, 0]
    path = model.write(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf has rope\.dimension_sections.* GLM-4-0414"):
        open_checkpoint(path)


def test_what_no_family_has_is_named(tmp_path: Path) -> None:
    model = gguf_of("qwen3")
    model.metadata["general.architecture"] = "later"
    for name in ("conv_base", "attn_gate_inp.weight"):
        model.tensors[f"blk.1.{name}"] = model.tensors["blk.1.attn_norm.weight"]
    with pytest.raises(
        UnsupportedModelError, match=r"'later'\. .* tensors attn_gate_inp\.weight, conv_base\. edgespec"
    ):
        open_checkpoint(model.write(tmp_path / "m.gguf"))
    config = {
        **config_of("qwen3"),
        "model_type": "later",
        "num_turns": 2,
        "use_loops": False,
        "hidden_act": "xielu",
    }
    with pytest.raises(
        UnsupportedModelError, match=r"'later'\. .* keys hidden_act 'xielu', num_turns\. edgespec exports"
    ):
        read_config(Facts(config, "config.json"))


def test_experts_behind_others_of_exaone_are_refused() -> None:
    kinds = ["dense", "sparse", "dense", "sparse"]
    with pytest.raises(UnsupportedModelError, match=r"mlp_layer_types is .*'dense' in the first layers"):
        read_config(Facts({**config_of("exaone_moe"), "mlp_layer_types": kinds}, "config.json"))


def test_layers_without_experts_behind_others_of_ernie_are_refused() -> None:
    config = config_of("ernie45_moe")
    assert read_config(Facts({**config, "moe_layer_end_index": 2}, "config.json")).experts is not None
    for key, value in {"moe_layer_end_index": 1, "moe_layer_interval": 2}.items():
        with pytest.raises(UnsupportedModelError, match=f"{key} is {value}"):
            read_config(Facts({**config, key: value}, "config.json"))


def test_a_glm4_rotates_half_a_head_unless_it_states_another_part() -> None:
    config = {key: value for key, value in config_of("glm4").items() if key != "partial_rotary_factor"}
    stated = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
    for more, width in ((dict[str, Any](), 16), (stated, 32)):
        assert read_config(Facts({**config, **more}, "config.json")).rope.width == width


@pytest.mark.parametrize("stated", [{"granitemoe.expert_count": 0}, {}])
def test_a_dense_granite_may_bear_the_name_of_those_with_experts(
    stated: dict[str, int], tmp_path: Path
) -> None:
    config = config_of("granite")
    model = converted("granitemoe", config, weights(config), "F32")
    model.metadata |= stated
    with (
        open_checkpoint(model.write(tmp_path / "m.gguf")) as file,
        open_checkpoint(gguf_of("granite").write(tmp_path / "n.gguf")) as plain,
    ):
        assert file.config == plain.config and file.tensors.keys() == plain.tensors.keys()


@pytest.mark.parametrize(
    ("case", "changed", "words"),
    [
        ("apertus", {"hidden_act": "silu"}, "hidden_act is 'silu'; apertus is supported with 'xielu'"),
        ("laguna", {"gating": "per-element"}, "gating is 'per-element'; allowed: 'per-head'"),
        ("laguna", {"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping is 30.0"),
        ("laguna", {"num_attention_heads_per_layer": [4, 6, 5]}, r"layer_heads are \(4, 6, 5\)"),
        ("laguna", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types is"),
        ("nanbeige", {"loop_share_kv": True}, "loop_share_kv is True; nanbeige is supported with False"),
        ("nanbeige", {"num_loops": 0}, "says 0 layers in all runs"),
        ("muse_glimmer", {"layer_rope_theta": [0, 1.0, 2.0, 1.0, 0]}, "allowed: one base, and 0"),
        ("muse_glimmer", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    ],
)
def test_variants_that_no_published_model_has_are_refused(
    case: str, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_config(Facts({**config_of(case), **changed}, "config.json"))


def test_a_base_of_hunyuan_is_stretched_by_alpha_alone() -> None:
    config = config_of("hunyuan")
    stretched = 1e4 * 50 ** (32 / 30)
    for scaling, theta in (({"type": "dynamic", "factor": 1.0}, 1e4), (config["rope_scaling"], stretched)):
        rope = read_config(Facts({**config, "rope_scaling": scaling}, "config.json")).rope
        assert rope.theta == pytest.approx(theta) and not rope.factors


def test_runs_of_nanbeiges_layers_share_weights_and_not_keys(tmp_path: Path) -> None:
    """Without norms between the runs it is a Llama that has each layer as often, on other backends too."""
    config = {**config_of("nanbeige"), "skip_loop_final_norm": True, "num_loops": 3}
    tensors, layers = weights(config), config["num_hidden_layers"]
    more = {
        name.replace(f"layers.{layer}.", f"layers.{layer + run * layers}."): values
        for name, values in tensors.items()
        for layer in range(layers)
        for run in range(3)
    }
    plain = {**config, "model_type": "llama", "num_hidden_layers": 3 * layers}
    rows = []
    for facts, stored in ((config, tensors), (plain, more)):
        source = write_with_tokenizer(tmp_path / facts["model_type"], facts, stored)
        for name, options in (("native", ExportOptions()), ("portable", ExportOptions(weights="portable"))):
            out = tmp_path / f"{facts['model_type']}-{name}"
            export_model(source, out, options=options)
            made = Bundle(out)
            session = open_cpu(made)
            rows.append((session.predict(TOKENS).logits.copy(), made.manifest))
            session.close()
    (own, once), (portable, _), (llama, thrice), (other, _) = rows
    np.testing.assert_array_equal(own, llama)
    np.testing.assert_allclose(portable, other, atol=1e-5)
    assert once.bytes_by_class["mlp"] * 3 == thrice.bytes_by_class["mlp"]
    assert once.bytes_per_pass == thrice.bytes_per_pass and once.kept == thrice.kept
