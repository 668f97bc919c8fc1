"""The tiny checkpoints of :mod:`tests.kit.hf` as the GGUF files that llama.cpp's converter makes."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from edgespec_export.sources.checkpoint import own_name
from edgespec_models.families import in_gguf
from edgespec_models.families.names import SHARED_EXPERT, Names, own_names
from tests.kit.gguf import F32, Raw, TinyGGUF, tokenizer_facts
from tests.kit.hf import CASES, Tensors, config_of, convolves, mlp_width, nemotron_kinds, weights

ARCHITECTURES = {"mistral": "llama", "ministral3": "mistral3", "gemma3_text": "gemma3", "olmo3": "olmo2"}
ARCHITECTURES |= {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "gemma4_text": "gemma4"}
ARCHITECTURES |= {
    "granitemoehybrid": "granitehybrid",
    "qwen3_moe": "qwen3moe",
    "lfm2_moe": "lfm2moe",
    "gpt_oss": "gpt-oss",
    "exaone_moe": "exaone-moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe_lite": "deepseek2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "muse_glimmer_text": "muse-glimmer",
}
"""By ``model_type``, where GGUF has another name."""
GGUF_CASES = tuple(
    case
    for case, facts in CASES.items()
    # GGUF cannot say: Mistral's window, which layers of SmolLM3 rotate, another attention scale of Gemma 3;
    # there a dense Granite 4 is of the same architecture as a Granite 3
    if case not in ("mistral_window", "smollm3_list", "gemma3", "granite4", "granite4_moe")
)
_ORDERED = (
    "llama",
    "smollm3",
    "granite",
    "granitemoe",
    "granitehybrid",
    "mistral3",
    "eagle3",
    "nemotron_h",
    "nemotron_h_moe",
    "nanbeige",
    "muse-glimmer",
)
_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_EXPERTS |= {"gate_up_proj": "gate_up"}
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "sliding_window": "attention.sliding_window",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "llama_4_scaling_beta": "attention.temperature_scale",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_dense_layers": "leading_dense_block_count",
}


def gguf_of(case: str, kind: str = "F32", **changed: Any) -> TinyGGUF:
    """The file of ``case``, its matrices in F32 or, with the same values, Q8_0.

    Keys of the architecture in ``changed`` have other values, and are absent where these are None.
    """
    config = config_of(case)
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    name += "_moe" if name == "nemotron_h" and "n_routed_experts" in config else ""
    model = converted(name, config, weights(config), kind)
    facts = {**model.metadata, **{f"{name}.{key}": value for key, value in changed.items()}}
    model.metadata = {key: value for key, value in facts.items() if value is not None}
    return model


def converted(
    name: str, config: Mapping[str, Any], tensors: Tensors, kind: str, *, tokens: int = 301
) -> TinyGGUF:
    """A checkpoint as a file of the architecture ``name``, with a tokenizer of so many tokens."""
    model = TinyGGUF(name, dict(tokenizer_facts(tokens - 1)))  # an added token comes on top
    model.metadata |= {
        key if key.startswith("xielu.") else f"{name}.{key}": value for key, value in _facts(config).items()
    }
    if name.startswith("nemotron"):
        tensors = {source.replace("backbone.", "model."): values for source, values in tensors.items()}
    if name.startswith(("granitehybrid", "nemotron")):
        mlp, groups = (
            "mlp.shared_expert." if config.get("num_local_experts") else "mlp.",
            config.get("n_groups", 1),
        )
        tensors = {
            part: rows
            for source, stored in tensors.items()
            for part, rows in _mamba(source, stored, mlp, groups)
        }
    if name == "deepseek2":
        tensors = _heads_of_latent(config, tensors)
    tensors = {source: values for source, values in tensors.items() if ".act_fn." not in source}
    tensors = _without_experts(model, tensors, kind)
    if name.startswith("qwen35"):
        tensors = {source: _tiled(source, values, config) for source, values in tensors.items()}
    for source, stored in tensors.items():
        ordered = name in _ORDERED and source.endswith(("q_proj.weight", "k_proj.weight"))
        values = _ordered(stored, _head(config)) if ordered else stored
        taps = values.ndim == 3 and values.shape[1] == 1
        values = values[:, 0] if taps else values
        if values.ndim == 3 and kind == "Q8_0":
            model.tensors[_renamed(source, name)] = kind, np.stack([q8_0(head) for head in values])
        elif values.ndim == 2 and kind == "Q8_0" and not taps and not source.endswith(_FLOATS):
            model.tensors[_renamed(source, name)] = kind, q8_0(values)
        else:
            less = in_gguf(name, name).less_one
            more = np.float32(bool(less and re.search(f"{less}$", _own(source, name))))
            values = values[0] if source.endswith("shared_expert_gate.weight") else values
            model.tensors[_renamed(source, name)] = "F32", values + more
    model.tensors |= {f"{n}.weight": ("F32", values) for n, values in _factors(config).items()}
    if name == "muse-glimmer":
        for layer in range(config["num_hidden_layers"]):
            for kind, gain in (("q", config["qk_scale_factor"]), ("k", 1)):
                gains = np.full(_head(config), gain, np.float32)
                model.tensors[f"blk.{layer}.attn_{kind}_norm.weight"] = "F32", gains
    return model


_FLOATS = (
    "e_score_correction_bias",
    "conv1d.weight",
    "A_log",
    "mamba.D",
    "mixer.D",
    "mamba.norm.weight",
    "mixer.norm.weight",
    "mixer.gate.weight",
    "mlp.gate.weight",
    "mlp.router.weight",
    "router.layer.weight",
    "feed_forward.gate.weight",
    "router.proj.weight",
    "shared_expert_gate.weight",
)
"""Matrices that llama.cpp's quantizer leaves as they are."""


_GRANITE_EXPERTS = {"input_linear.weight": "experts.gate_up_proj"}
_GRANITE_EXPERTS |= {"output_linear.weight": "experts.down_proj"}


def _without_experts(model: TinyGGUF, tensors: Tensors, kind: str) -> Tensors:
    """What is left of ``tensors`` when those of experts are in the file, all of a layer in one."""
    rest, apart = Tensors(), dict[str, list[F32]]()
    for named, values in tensors.items():
        source = named
        for name, usual in _GRANITE_EXPERTS.items():
            source = source.replace(name, usual)
        _, _, behind = source.removesuffix("e_score_correction_bias").partition(".experts.")
        layer = f"blk.{source.split('.')[2]}" if behind else ""
        if not behind:
            rest[source] = values
        elif behind.startswith(("gate_up_proj_", "down_proj_")):
            _take_gpt_oss(model, layer, behind, tensors, source)
        elif behind == "gate_up_proj" and model.architecture != "gemma4":
            gates, ups = np.split(values, 2, axis=1)
            apart |= {f"{layer}.ffn_gate_exps": [*gates], f"{layer}.ffn_up_exps": [*ups]}
        else:
            part = _EXPERTS[behind.removesuffix(".weight").rpartition(".")[2]]
            name = f"{layer}.ffn_{part}_exps"
            apart.setdefault(name, []).extend(values if values.ndim == 3 else [values])
    for name, experts in apart.items():
        stacked = np.stack([q8_0(expert) if kind == "Q8_0" else expert for expert in experts])
        model.tensors[f"{name}.weight"] = kind, stacked
    return rest


def _take_gpt_oss(model: TinyGGUF, layer: str, kind: str, tensors: Tensors, source: str) -> None:
    """Put gpt-oss's experts into the file: rows of gates apart, codes of a block's halves in a byte."""
    parts = ("gate", "up") if kind.startswith("gate_up") else ("down",)
    for place, part in enumerate(parts):
        if kind.endswith("_bias"):
            model.tensors[f"{layer}.ffn_{part}_exps.bias"] = (
                "F32",
                tensors[source][:, place :: len(parts)].copy(),
            )
        elif kind.endswith("_blocks"):
            pairs = tensors[source][:, place :: len(parts)]
            scales = tensors[source.replace("_blocks", "_scales")][:, place :: len(parts), :, None]
            codes = np.stack([pairs & 15, pairs >> 4], axis=-1)  # type: ignore[operator]
            codes = codes.reshape(*pairs.shape[:3], 32)
            raw = np.concatenate([scales, codes[..., :16] | codes[..., 16:] << 4], axis=-1).astype(np.uint8)
            model.tensors[f"{layer}.ffn_{part}_exps.weight"] = "MXFP4", raw.reshape(*raw.shape[:2], -1)


def _renamed(source: str, architecture: str) -> str:
    """A tensor's name in GGUF files, by its name on the hub and the tables of its family.

    The goldens have the names that llama.cpp's converter writes.
    """
    family, own = in_gguf(architecture, architecture), _own(source, architecture)
    place, _, kind = own.rpartition(".")
    table = {**_OTHERS, **family.layer} if place else family.outer
    first, *_ = table[kind][1].split() or _OTHERS[kind][1].split()
    return f"{place.replace('layers', 'blk')}.{first}" if place else first


def _own(source: str, architecture: str) -> str:
    """edgespec's name of a tensor of the hub."""
    family = in_gguf(architecture, architecture)
    for layer in (family.layer, _OTHERS):
        own = own_name(source, r"model\.layers\.", own_names(family.outer, "hub"), own_names(layer, "hub"))
        if own is not None:
            return own
    raise AssertionError(source)


_OTHERS: Names = {
    **SHARED_EXPERT,
    "k_b": ("self_attn.k_b_proj.weight", "attn_k_b.weight"),
    "v_b": ("self_attn.v_b_proj.weight", "attn_v_b.weight"),
    "both": ("eh_proj.weight", "nextn.eh_proj.weight"),
    "embed_norm": ("enorm.weight", "nextn.enorm.weight"),
    "fuse_norm": ("hnorm.weight", "nextn.hnorm.weight"),
    "final_norm": ("shared_head.norm.weight", "nextn.shared_head_norm.weight"),
    "second_norm": ("post_attention_layernorm.weight", "post_attention_norm.weight"),
}
"""Of latent attention that is taken apart, of MTP layers, and of a shared MLP that is."""


def _tiled(source: str, values: F32, config: Mapping[str, Any]) -> F32:
    """A delta net's tensor, of whose value heads the first of each key head come first."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    start = 2 * keys * config["linear_key_head_dim"] * source.endswith(("qkv.weight", "conv1d.weight"))
    if "linear_attn." not in source or source.endswith("norm.weight"):
        return values
    if source.endswith("out_proj.weight"):
        return np.ascontiguousarray(_heads_apart(values.T, keys, heads).T)
    changed = np.concatenate([values[:start], _heads_apart(values[start:], keys, heads)])
    return (
        -np.exp(changed, dtype=np.float64).astype(np.float32)
        if source.endswith("A_log")
        else changed.reshape(len(changed), *values.shape[-1:] * (values.ndim > 1))
    )


def _mamba(source: str, values: F32, mlp: str, groups: int) -> Iterator[tuple[str, F32]]:
    """A tensor of a Granite 4 H, or the two that become of it; ``mlp`` is the place of the shared MLP."""
    if source.endswith("A_log"):
        values = -np.exp(values, dtype=np.float64).astype(np.float32)
    if source.endswith(("A_log", "mamba.D", "mixer.D")):
        values = values[:, None]
    elif source.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        values = values.reshape(groups, -1)
    elif source.endswith("shared_mlp.input_linear.weight"):
        for part, rows in zip(("gate", "up"), np.split(values, 2), strict=True):
            yield source.replace("shared_mlp.input_linear", f"{mlp}{part}_proj"), rows
        return
    yield source.replace("shared_mlp.output_linear", f"{mlp}down_proj"), values


def _heads_apart(rows: F32, keys: int, heads: int) -> F32:
    apart = rows.reshape(keys, heads // keys, -1)
    return np.ascontiguousarray(apart.swapaxes(0, 1)).reshape(rows.shape)


def _head(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]))


def _ordered(values: F32, head: int) -> F32:
    """Rows whose elements rotate together side by side, as llama.cpp has them for some architectures."""
    halves = values.reshape(-1, 2, head // 2, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def q8_0(values: F32) -> Raw:
    """Blocks that hold exactly ``values``: at most seven bits, times a power of two."""
    step = np.exp2(np.floor(np.log2(np.abs(values).max())) - 6)
    codes = np.rint(values / step).astype(np.int8).reshape(len(values), -1, 32)
    scales = np.full((*codes.shape[:2], 1), step, np.float16).view(np.uint8).reshape(*codes.shape[:2], 2)
    raw: Raw = np.concatenate([scales, codes.view(np.uint8)], axis=-1).reshape(len(values), -1)
    return raw


def _facts(config: Mapping[str, Any]) -> dict[str, object]:
    parameters = config.get("rope_parameters", {})
    scaling = {**config.get("rope_scaling", {}), **parameters.get("full_attention", parameters)}
    stated = {**config, **scaling}
    if config["model_type"] == "qwen2":  # whose window is off
        del stated["sliding_window"]
    if "low_freq_factor" in scaling:  # of which a tensor says everything
        del stated["original_max_position_embeddings"]
    if config["model_type"] == "gemma2":  # of which no file states it
        del stated["rope_theta"]
    facts = {key: stated[name] for name, key in _KEYS.items() if stated.get(name) is not None}
    head = _head(config)
    if config["model_type"] == "gpt_oss":
        facts["expert_feed_forward_length"] = config["intermediate_size"]
    if "head_dim" in config and config["model_type"] != "phi3":
        facts |= {"attention.key_length": head, "attention.value_length": head}
    if config["model_type"] == "exaone_moe":
        shared = config["num_shared_experts"] * config["moe_intermediate_size"]
        facts |= {"expert_shared_feed_forward_length": shared, "expert_weights_scale": 2.5}
    if config["model_type"] == "ernie4_5_moe":
        facts |= {"expert_shared_feed_forward_length": 64, "interleave_moe_layer_step": 1}
    if config["model_type"].startswith("qwen3_5"):
        facts["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    if config["model_type"] == "nemotron_h":
        return _nemotron_facts(facts, config)
    if "mamba_n_heads" in config:
        kv, layers = config["num_key_value_heads"], config["layer_types"]
        facts["ssm.inner_size"] = config["mamba_n_heads"] * config["mamba_d_head"]
        facts["attention.head_count_kv"] = [kv * (kind == "attention") for kind in layers]
        facts |= {"ssm.group_count": 1, "rope.scaling.finetuned": False}
        dense = not config["num_local_experts"]
        shared = config["shared_intermediate_size"]
        facts["feed_forward_length"] = shared if dense else config["intermediate_size"]
        facts |= {} if dense else {"expert_shared_feed_forward_length": shared}
        return facts
    if config["model_type"] == "gemma4_text":
        facts |= _gemma4_facts(config)
    if "kv_lora_rank" in config:
        return facts | _latent_facts(config)
    if config["model_type"].startswith("lfm"):
        kv, layers = config["num_key_value_heads"], range(config["num_hidden_layers"])
        facts |= {
            "attention.head_count_kv": [0 if convolves(config, layer) else kv for layer in layers],
            "attention.layer_norm_rms_epsilon": config["norm_eps"],
            "feed_forward_length": mlp_width(config),
            "shortconv.l_cache": config["conv_L_cache"],
            "vocab_size": config["vocab_size"],
        } | ({"expert_gating_func": 2} if "num_experts" in config else {})
        if config["model_type"] == "lfm3":
            facts["attention.sliding_window_pattern"] = [
                kind == "sliding_attention" for kind in config["layer_types"]
            ]
            facts["rope.freq_base_swa"] = config["rope_parameters"]["sliding_attention"]["rope_theta"]
            facts["rope.dimension_count"] = head
    elif "layer_types" in config and config["model_type"] == "qwen3_5_text":
        facts["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config["layer_types"]]
    elif "layer_types" in config and config["model_type"] not in ("gpt_oss", "laguna"):
        windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
        facts["attention.sliding_window_pattern"] = windowed
    if config["model_type"] not in _WITHOUT_ROTARY_DIM:
        facts["rope.dimension_count"] = int(head * stated.get("partial_rotary_factor", 1))
    if config["model_type"] in _FACTS:
        facts |= _FACTS[config["model_type"]](config)
    if (kind := scaling.get("rope_type", scaling.get("type"))) in ("linear", "yarn"):
        facts |= {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
    if "short_factor" in scaling:
        whole, original = config["max_position_embeddings"], config["original_max_position_embeddings"]
        facts["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(whole / original) / np.log(original)))
    return facts


def _laguna_facts(config: Mapping[str, Any]) -> dict[str, object]:
    local = config["rope_parameters"]["sliding_attention"]
    return {
        "attention.head_count": config["num_attention_heads_per_layer"],
        "rope.dimension_count_swa": _head(config),
        "rope.freq_base_swa": local["rope_theta"],
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": config["moe_routed_scaling_factor"],
    }


def _apertus_facts(config: Mapping[str, Any]) -> dict[str, object]:
    tensors, facts = weights(config), dict[str, object]()
    for kind in ("alpha_p", "alpha_n", "beta", "eps"):
        layers = (f"model.layers.{n}.mlp.act_fn.{kind}" for n in range(config["num_hidden_layers"]))
        facts[f"xielu.{kind}"] = [float(tensors[name].item()) for name in layers]
    return facts


def _hunyuan_facts(config: Mapping[str, Any]) -> dict[str, object]:
    head, scaling = _head(config), config["rope_scaling"]
    return {
        "rope.freq_base": config["rope_theta"] * scaling["alpha"] ** (head / (head - 2)),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1,
    }


_FACTS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, object]]] = {
    "laguna": _laguna_facts,
    "apertus": _apertus_facts,
    "hunyuan_v1_dense": _hunyuan_facts,
    "nanbeige": lambda config: {key: config[key] for key in ("num_loops", "skip_loop_final_norm")},
    "muse_glimmer_text": lambda config: {"logit_scale": config["output_multiplier"]},
}
"""What some families state besides."""


def _nemotron_facts(facts: dict[str, object], config: Mapping[str, Any]) -> dict[str, object]:
    kv, kinds, moe = config["num_key_value_heads"], nemotron_kinds(config), "n_routed_experts" in config
    width = config["moe_intermediate_size" if moe else "intermediate_size"]
    names = {"conv_kernel": "conv_kernel", "ssm_state_size": "state_size", "n_groups": "group_count"}
    facts |= {
        f"ssm.{key}": config[name] for name, key in (names | {"mamba_num_heads": "time_step_rank"}).items()
    }
    facts |= {
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "attention.head_count_kv": [kv * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in kinds],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "rope.scaling.finetuned": False,
    }
    if not moe:
        return facts
    return facts | {
        "expert_count": config["n_routed_experts"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
    }


def _latent_facts(config: Mapping[str, Any]) -> dict[str, object]:
    names = "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
    rank, turned, still, values = (config[key] for key in names)
    facts: dict[str, object] = {
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": still + turned,
        "attention.value_length_mla": values,
        "attention.head_count_kv": 1,
        "rope.dimension_count": turned,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
    }
    return facts | ({"attention.q_lora_rank": rank} if (rank := config["q_lora_rank"]) is not None else {})


def _heads_of_latent(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The tensors with the matrices of heads apart, those for keys turned."""
    made, heads = Tensors(), config["num_attention_heads"]
    for name, values in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            apart = values.reshape(heads, -1, values.shape[1])
            still = config["qk_nope_head_dim"]
            turned = np.ascontiguousarray(apart[:, :still].swapaxes(1, 2))
            made[name.replace("kv_b", "k_b")] = turned
            made[name.replace("kv_b", "v_b")] = apart[:, still:].copy()
        else:
            made[name] = values
    return made


def _gemma4_facts(config: Mapping[str, Any]) -> dict[str, object]:
    layers, head, whole = range(config["num_hidden_layers"]), config["head_dim"], config["global_head_dim"]
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    shared, mlp, kv = (
        config[key] for key in ("num_kv_shared_layers", "intermediate_size", "num_key_value_heads")
    )
    facts: dict[str, object] = {"attention.shared_kv_layers": shared}
    for key, width in (("", whole), ("_swa", head)):
        names = (f"attention.key_length{key}", f"attention.value_length{key}", f"rope.dimension_count{key}")
        facts |= dict.fromkeys(names, width)
    if config["use_double_wide_mlp"]:
        facts["feed_forward_length"] = [mlp * (1 + (n >= len(layers) - shared)) for n in layers]
    if "num_global_key_value_heads" in config:
        few = config["num_global_key_value_heads"]
        facts["attention.head_count_kv"] = [kv if has_window else few for has_window in windowed]
    return facts | {
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }


_WITHOUT_ROTARY_DIM = (
    "hunyuan_v1_dense",
    "muse_glimmer_text",
    "seed_oss",
    "ernie4_5",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "exaone_moe",
    "ernie4_5_moe",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "gpt_oss",
)


def _factors(config: Mapping[str, Any]) -> dict[str, F32]:
    """What frequencies are divided by, as tensors."""
    if config["model_type"] in ("gemma4_text", "lfm3"):
        pairs = config.get("global_head_dim", config["head_dim"]) // 2
        share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        return {
            "rope_freqs": np.array([1.0 if n < pairs * share else 1e30 for n in range(pairs)], np.float32)
        }
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        width, original = _head(config), scaling["original_max_position_embeddings"]
        waves = 2 * np.pi * config["rope_theta"] ** (np.arange(0, width, 2) / width)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = np.clip((original / waves - low) / (high - low), 0, 1)
        return {"rope_freqs": (1 / ((1 - kept) / scaling["factor"] + kept)).astype(np.float32)}
    kinds = ("long", "short") if "short_factor" in scaling else ()
    return {f"rope_factors_{kind}": np.array(scaling[f"{kind}_factor"], np.float32) for kind in kinds}
