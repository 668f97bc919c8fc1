"""From the facts of a ``config.json`` to the config of a graph.

GGUF files state the same facts under other names (:mod:`edgespec_export.sources.gguf_checkpoint`).
"""

import re
from math import sqrt
from typing import Any

from edgespec_export.sources import gemma4
from edgespec_export.sources.architectures import FAMILIES, Family, unknown
from edgespec_export.sources.experts import experts_of
from edgespec_export.sources.nvfp4 import is_nvfp4
from edgespec_export.sources.rope import kind_of, scaled
from edgespec_models.bundles.config import DeltaNet, Mixer, ModelConfig
from edgespec_models.errors import ModelFileError, UnsupportedModelError, naming
from edgespec_models.files.facts import Facts

_MAX_COUNT = 4096  # there are lists with an entry for each; a damaged count may be huge
_LEAST = 1e-6  # the least factor: squares and quotients stay finite
_CHANGES_LOGITS = ("attn_logit_softcapping", "use_bidirectional_attention")
CLASSIFIES = "classifies texts and writes none; use a model that writes, such as its base model"
_LINEAR, _FULL = "linear_attention", "full_attention"
_HEADS = re.compile("eagle3|dflash|dspark")
_OTHER_HEADS = re.compile(r"eagle(?!\d)|domino|draft|medusa|speculator")
_LATER = ("fc_norm", "norm_output", "parallel_drafting", "ptd_token_id")  # of EAGLE-3.1, of P-EAGLE
_EXPERTS = ("expert_count", "num_experts", "num_local_experts")


def model_facts(facts: Facts) -> Facts:
    """The facts of a ``config.json`` about its text model; in multimodal models they are in ``text_config``.

    Raises:
        ModelFileError: ``text_config`` or ``model_type`` is malformed.
        UnsupportedModelError: another architecture.
    """
    head = head_facts(facts)
    if head is not None:
        return head
    text = facts.section("text_config")
    if text.keys:
        facts = text.over({key: facts.value(key) for key in facts.keys})
    family = _family(facts)
    if family.name == "lfm2":
        facts = _lfm2_facts(facts, adjusted=family.experts is None)
    if facts.value("model_type") in ("granitemoeshared", "granitemoehybrid"):
        facts = _granite_facts(facts)
    return facts.over({"rms_norm_eps": 1e-6, **family.defaults})


def head_facts(facts: Facts) -> Facts | None:
    """All facts of a head in a ``config.json``; None for other models."""
    return trained_facts(facts) or assistant_facts(facts)


def trained_facts(facts: Facts) -> Facts | None:
    """All facts of an EAGLE-3 head, or of a head that drafts blocks; None for other models.

    The ``speculators`` package has the layer's facts in ``transformer_layer_config``, DFlash the block's
    facts in ``dflash_config``. UnsupportedModelError names a head of another kind.
    """
    blocks, names = drafts_blocks(facts), _names(facts)
    others = [name for name in names if _OTHER_HEADS.search(name) and not _HEADS.search(name)]
    others += [key for key in _LATER if facts.value(key)]
    if others:
        raise UnsupportedModelError(
            f"{facts.where} describes a head of another kind ({others[0]}); edgespec has those of EAGLE-3, "
            "DFlash and DSpark. Give one of these, or leave the drafter out"
        )
    if not any(map(_HEADS.search, names)) and facts.value("draft_vocab_size") is None:
        return None
    parts = facts, facts.section("transformer_layer_config"), facts.section("dflash_config")
    stated = {key: part.value(key) for part in parts for key in part.keys}
    if blocks:
        causal = stated.pop("is_causal", None)
        stated["model_type"] = "qwen3"
        stated["sees_behind"] = not (stated.get("causal") if causal is None else causal)
    if stated.get("use_swa"):
        stated |= {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
        stated["sliding_window"] = stated.get("swa_window_size")
    return Facts(stated, facts.where).over({"model_type": "llama", "rms_norm_eps": 1e-6})


def drafts_blocks(facts: Facts) -> bool:
    """Whether a ``config.json`` describes a head that drafts blocks."""
    return any("dflash" in name or "dspark" in name for name in _names(facts))


def _names(facts: Facts) -> list[str]:
    """The names of a model's classes and of a head's kind, in small letters."""
    classes, kinds = facts.value("architectures"), facts.value("dflash_config")
    names = [*classes] if isinstance(classes, list) else [classes]
    names += [facts.value("speculators_model_type")]
    names += [kinds.get("projector_type")] if isinstance(kinds, dict) else []
    return [str(name).lower() for name in names if name is not None]


def assistant_facts(facts: Facts) -> Facts | None:
    """All that the ``config.json`` of one of Gemma 4's assistants says; None for other models.

    The decoder that it is made of is stated as a Gemma 4, all of whose layers share keys and values.
    """
    if facts.value("model_type") not in ("gemma4_assistant", "gemma4_unified_assistant"):
        return None
    text = facts.section("text_config")
    own = {"num_kv_shared_layers": 0, "final_logit_softcapping": None, "hidden_size_per_layer_input": 0}
    stated = {key: part.value(key) for part in (facts, text) for key in part.keys}
    named = Facts(stated | own, facts.where)
    return named.over({"rms_norm_eps": 1e-6, **_family(named).defaults})


def _granite_facts(facts: Facts) -> Facts:
    """The facts of a Granite with an MLP that all tokens share, with the keys of other models.

    Without experts this is the MLP of a Granite 3.
    """
    hybrid = facts.value("model_type") == "granitemoehybrid"
    shared = facts.integer("shared_intermediate_size", 1024 if hybrid else 0)
    stated = {key: facts.value(key) for key in facts.keys} | {"shared_expert_intermediate_size": shared}
    if hybrid:
        types = facts.value("layer_types") or facts.value("layers_block_type")
        if not isinstance(types, list) or not {*map(str, types)} <= {"attention", "full_attention"}:
            raise UnsupportedModelError(
                f"{facts.where}: layer_types says that some layers have a recurrent state (Mamba-2), which "
                "edgespec lacks; a Granite 4 without them, such as Granite-4.0-Micro, works"
            )
        rotates = facts.value("position_embedding_type") == "rope"
        stated |= {"layer_types": ["full_attention"] * len(types), "rotates": rotates}
    if facts.integer("num_local_experts", 8) == 0:
        stated["intermediate_size"] = shared
    return Facts(stated, facts.where)


def _lfm2_facts(facts: Facts, *, adjusted: bool) -> Facts:
    """The facts of an LFM2's ``config.json`` with the usual keys; its older keys take precedence.

    ``adjusted``: the default for whether its MLP has another width than the stated one.
    """
    names = {"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"}
    changed = {name: facts.value(key) for name, key in names.items() if facts.value(key) is not None}
    width = facts.integer("block_ff_dim", facts.integer("intermediate_size", 12_288 if adjusted else 7168))
    multiplier = facts.value("block_ffn_dim_multiplier")
    if facts.boolean("block_auto_adjust_ff_dim", default=adjusted):
        width = int(2 * width / 3)
        if multiplier is not None or "block_ffn_dim_multiplier" not in facts.keys:
            multiple = max(facts.integer("block_multiple_of", 256), 1)
            width = int(facts.positive("block_ffn_dim_multiplier", 1.0) * width)
            width = -(-width // multiple) * multiple
    if facts.value("layer_types") is None and facts.value("full_attn_idxs") is not None:
        layers = min(max(facts.integer("num_hidden_layers", 32), 0), _MAX_COUNT)
        attention = facts.value("full_attn_idxs")
        places = attention if isinstance(attention, list) else []
        changed["layer_types"] = ["full_attention" if n in places else "conv" for n in range(layers)]
    changed |= {"intermediate_size": width, "block_ff_dim": None, "block_auto_adjust_ff_dim": False}
    return Facts({key: facts.value(key) for key in facts.keys} | changed, facts.where)


def read_config(facts: Facts) -> ModelConfig:
    """The config of a checkpoint with this ``config.json``.

    Raises:
        ModelFileError: facts are missing or malformed.
        UnsupportedModelError: another architecture, or a feature that edgespec lacks.
    """
    facts = model_facts(facts)
    return config_of(facts, _family(facts))


def config_of(facts: Facts, family: Family) -> ModelConfig:
    """The config of a model of ``family`` with these facts. Raises as read_config does.

    The context is the one with exact rotary frequencies: with ``longrope`` scaling the original one, because
    longer texts change the frequencies of every token.
    """
    _check_features(facts, family)
    hidden, heads = facts.integer("hidden_size"), facts.integer("num_attention_heads")
    layers = facts.integer("num_hidden_layers")
    head_dim = facts.integer("head_dim", hidden // max(heads, 1))
    for name, count in (("layers", layers), ("elements a head", head_dim)):
        if not 0 < count <= _MAX_COUNT:
            raise UnsupportedModelError(f"{facts.where} says {count} {name}; 1 to {_MAX_COUNT} are supported")
    global_every, window = _window(facts, family, layers)
    widths: dict[str, Any] = {
        "head_dim": head_dim,
        "num_kv_heads": facts.integer("num_key_value_heads", heads),
    }
    if family.name == "gemma4":
        sliding = _sliding_layers(facts, family, layers)
        widths = gemma4.of_layers(facts, [window is None or not is_sliding for is_sliding in sliding])
    rope = _rope(facts, family, widths["head_dim"])
    unrotated = _unrotated(facts, layers) if family.name == "smollm3" else ()
    if family.name == "exaone4" and window is not None:  # then layers without a window are not rotated
        sliding = _sliding_layers(facts, family, layers)
        unrotated = tuple(layer for layer, is_sliding in enumerate(sliding) if not is_sliding)
    if not facts.boolean("rotates", default=True):
        unrotated = tuple(range(layers))
    block = family.fixed.get("block")
    says_more = family.pattern or (block is not None and block.causal_windows)  # than how far layers see
    if window is not None and window >= rope["context_length"] and not says_more:
        window = None
    if window is None:
        rope["rope_local_theta"] = None  # there are no such layers
    scalar = 1.0 if family.name == "gemma4" else float(head_dim)
    scale = 1 / sqrt(facts.positive("query_pre_attn_scalar", scalar))
    grown = sqrt(max(hidden, 0)) if family.name.startswith("gemma") else 1.0
    embedding = _multiplier(facts, "embedding_multiplier", grown)
    experts = experts_of(facts, family) or {"intermediate_size": facts.integer("intermediate_size")}
    residual = _residual_factor(facts, family)
    with naming(facts.where):
        return ModelConfig(
            architecture=family.name,
            vocab_size=facts.integer("vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            norm_epsilon=facts.number("rms_norm_eps") / residual**2,
            **_mixers(facts, family, layers),
            unrotated_layers=unrotated,
            attention_scale=facts.positive("attention_multiplier", scale),
            embedding_scale=embedding / residual,
            sliding_window=window,
            global_every=1 if window is None else global_every,
            attention_cap=_cap(facts, "attn_logit_softcapping"),
            logit_cap=_cap(facts, "final_logit_softcapping"),
            **widths,
            **_delta_nets(facts, family, layers),
            **family.fixed,
            **rope,
            **experts,
        )


def _residual_factor(facts: Facts, family: Family) -> float:
    """The factor of a model on what it adds to the residual stream.

    The graph keeps the stream divided by this factor. Then sublayers add their outputs unchanged, and a
    normalization with its epsilon divided by the square gives the same result.
    """
    factor = _multiplier(facts, "residual_multiplier", 1.0)
    if factor != 1 and (family.fixed.get("qk_norm") or family.fixed.get("post_norms")):
        raise UnsupportedModelError(
            f"{facts.where}: residual_multiplier is {factor}; {family.name} is supported without"
        )
    return factor


def logits_factor(facts: Facts) -> float:
    """The factor on logits."""
    return 1 / _multiplier(facts, "logits_scaling", 1.0)


def _cap(facts: Facts, key: str) -> float | None:
    return None if facts.value(key) is None else facts.positive(key)


def _multiplier(facts: Facts, key: str, default: float) -> float:
    value = facts.positive(key, default)
    if not _LEAST <= value <= 1 / _LEAST:
        raise ModelFileError(f"{facts.where}: {key} is {value}; from {_LEAST} to {1 / _LEAST:.0f} are known")
    return value


def _family(facts: Facts) -> Family:
    model_type = facts.text("model_type", "")
    if model_type not in FAMILIES:
        known = (
            f"edgespec exports these model types from Hugging Face checkpoints: {', '.join(FAMILIES)}. Other "
            "decoders go through Optimum: edgespec export SOURCE -o OUT --via optimum."
        )
        raise unknown(facts.where, model_type, known)
    return FAMILIES[model_type]


def _check_features(facts: Facts, family: Family) -> None:
    """Refuse features that a plain model of ``family`` lacks."""
    keys = ("quantization_config", "compression_config", "quantization")  # the last is MLX's
    method = facts.section("quantization_config").text("quant_method", "an unknown method")
    own = is_nvfp4(facts) or (family.name == "gpt-oss" and method == "mxfp4")
    if not own and any(facts.value(key) is not None for key in keys):
        raise UnsupportedModelError(
            f"{facts.where} says that the checkpoint is quantized already ({method}). edgespec quantizes by "
            "itself: use the model's unquantized checkpoint (F32, F16 or BF16), or a GGUF file."
        )
    labels = len(facts.section("id2label").keys) or facts.integer("num_labels", 2)
    if "Classification" in str(facts.value("architectures")) and labels != 1:  # one is a reranker's score
        raise UnsupportedModelError(f"{facts.where} says that the model {CLASSIFIES}")
    gelu = family.fixed.get("activation") == "gelu_tanh"
    key, expected = ("hidden_activation", "gelu_pytorch_tanh") if gelu else ("hidden_act", "silu")
    activation = facts.text(key, expected)
    if activation != expected:
        raise UnsupportedModelError(
            f"{facts.where}: {key} is {activation!r}; {family.name} is supported with {expected!r}"
        )
    if family.fixed.get("gated_attention") and not facts.boolean("attn_output_gate", default=True):
        raise UnsupportedModelError(
            f"{facts.where}: attn_output_gate is False; {family.name} is supported with True"
        )
    for key in _CHANGES_LOGITS:
        vision = (key, facts.value(key)) == ("use_bidirectional_attention", "vision")
        if facts.value(key) and key not in family.defaults and not vision:
            raise UnsupportedModelError(
                f"{facts.where}: {key} is {facts.value(key)!r}; {family.name} is supported without"
            )
    if not facts.boolean("is_causal", default=True):
        raise UnsupportedModelError(
            f"{facts.where} has attention in both directions: it encodes texts and writes none. Use a model "
            f"of the family {family.name} that writes"
        )
    for key in _EXPERTS if family.experts is None else ():
        if facts.value(key):
            raise UnsupportedModelError(
                f"{facts.where}: {key} is {facts.value(key)!r}, and edgespec runs no mixtures of experts of "
                f"the family {family.name}. Use a dense model of it."
            )


def _unrotated(facts: Facts, layers: int) -> tuple[int, ...]:
    """SmolLM3's layers without a rotary embedding: a 0 in ``no_rope_layers``, or every n-th."""
    rotated = facts.numbers("no_rope_layers", layers)
    if rotated:
        return tuple(layer for layer, flag in enumerate(rotated) if not flag)
    interval = facts.integer("no_rope_layer_interval", 4)
    return tuple(range(interval - 1, layers, interval)) if interval > 0 else ()


def _delta_nets(facts: Facts, family: Family, layers: int) -> dict[str, Any]:
    """The layers that are delta nets, by a list or else the interval of attention layers, and their heads."""
    if family.name != "qwen35":
        return {}
    types = facts.value("layer_types")
    if types is None:
        interval = facts.integer("full_attention_interval", 4)
        if interval < 1:
            raise ModelFileError(f"{facts.where}: full_attention_interval is {interval}; allowed: above 0")
        types = [_LINEAR if (layer + 1) % interval else _FULL for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {_LINEAR, _FULL}:
        raise UnsupportedModelError(
            f"{facts.where}: layer_types must say {_LINEAR} or {_FULL} for each of {layers} layers"
        )
    if _LINEAR not in types:
        return {}
    with naming(facts.where):
        net = DeltaNet(
            key_heads=facts.integer("linear_num_key_heads"),
            value_heads=facts.integer("linear_num_value_heads"),
            key_width=facts.integer("linear_key_head_dim"),
            value_width=facts.integer("linear_value_head_dim"),
            tiled=facts.boolean("linear_tiled", default=False),
        )
    mixers: tuple[Mixer, ...] = tuple("delta_net" if kind == _LINEAR else "attention" for kind in types)
    return {"mixers": mixers, "conv_taps": facts.integer("linear_conv_kernel_dim"), "delta": net}


def _mixers(facts: Facts, family: Family, layers: int) -> dict[str, Any]:
    """The layers that are short convolutions, and the number of tokens that they see."""
    types = facts.value("layer_types")
    if family.name != "lfm2" or types is None:
        return {}
    known = {"full_attention": "attention", "conv": "short_conv"}
    if not isinstance(types, list) or len(types) != layers or not known.keys() >= {*map(str, types)}:
        raise UnsupportedModelError(
            f"{facts.where}: layer_types, or heads of keys and values, must say attention or convolution for "
            f"each of {layers} layers"
        )
    mixers = tuple(known[kind] for kind in types)
    if "short_conv" not in mixers:
        return {}
    if facts.boolean("conv_bias", default=False):
        raise UnsupportedModelError(f"{facts.where}: conv_bias is true; allowed: false")
    return {"mixers": mixers, "conv_taps": facts.integer("conv_L_cache")}


def _window(facts: Facts, family: Family, layers: int) -> tuple[int, int | None]:
    """The interval of layers that see the whole context, and the number of tokens that the others see."""
    sliding = _sliding_layers(facts, family, layers)
    if facts.value("sliding_window") is None or not (
        family.windowed or facts.boolean("use_sliding_window", default=False)
    ):
        return 1, None
    window = facts.integer("sliding_window")
    if True not in sliding:
        return 1, None
    if False not in sliding:
        return 0, window
    every = sliding.index(False) + 1
    if sliding != [(layer + 1) % every != 0 for layer in range(layers)]:
        raise UnsupportedModelError(
            f"{facts.where} mixes layers with and without a sliding window in no regular order; allowed: "
            "every n-th layer without"
        )
    return every, window


def _sliding_layers(facts: Facts, family: Family, layers: int) -> list[bool]:
    types = None if family.name in ("qwen35", "lfm2") else facts.value("layer_types")
    if types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(types, list) or len(types) != layers or not known.keys() >= {*map(str, types)}:
            raise UnsupportedModelError(
                f"{facts.where}: layer_types must say full_attention or sliding_attention for each of "
                f"{layers} layers"
            )
        return [known[kind] for kind in types]
    stated = facts.value("sliding_window_pattern")
    if family.name == "exaone4" and stated is not None:
        if isinstance(stated, str) and stated and set(stated) <= {"L", "G"}:  # such as LLLG, over and over
            return [stated[layer % len(stated)] == "L" for layer in range(layers)]
        every = facts.integer("sliding_window_pattern")
        return [every == 0 or (layer + 1) % every != 0 for layer in range(layers)]
    if family.pattern:
        pattern = facts.integer("sliding_window_pattern", family.pattern)
        return [pattern == 0 or (layer + 1) % pattern != 0 for layer in range(layers)]
    if family.name == "smollm3":
        unrotated = _unrotated(facts, layers)
        return [layer in unrotated for layer in range(layers)]
    first = 0 if family.windowed else facts.integer("max_window_layers", 28)
    return [layer >= first for layer in range(layers)]


def _rope(facts: Facts, family: Family, head_dim: int) -> dict[str, Any]:
    """The rotary embedding, as fields of :class:`ModelConfig`.

    Both spellings are read: ``rope_theta`` with ``rope_scaling``, and the ``rope_parameters`` that
    transformers 5 writes.
    """
    parameters = facts.section("rope_parameters")
    local = parameters.section("sliding_attention")
    if kind_of(local) != "default":
        raise UnsupportedModelError(
            f"{local.where} scales the local rotary embedding by {kind_of(local)!r}; allowed: 'default'"
        )
    if "full_attention" in parameters.keys:
        parameters = parameters.section("full_attention")
    proportional = kind_of(parameters) == "proportional"
    share = 1.0
    if proportional or family.partial:
        share = parameters.positive("partial_rotary_factor", facts.positive("partial_rotary_factor", share))
    if share > 1:
        raise ModelFileError(f"{facts.where}: partial_rotary_factor is {share}; allowed: above 0 to 1")
    pairs = int(head_dim * share // 2) if proportional else None
    width = facts.integer("rotary_dim", head_dim if proportional else int(head_dim * share))
    context = facts.integer("max_position_embeddings")
    theta = parameters.positive("rope_theta", facts.positive("rope_theta", family.theta))
    local_theta = facts.positive("rope_local_base_freq", family.local_theta or theta)
    old_style = facts.section("rope_scaling")
    scaling = old_style if kind_of(old_style) != "default" else parameters
    original = facts.value("original_max_position_embeddings")
    apart = family.pattern and not family.alike
    fields = {
        "rope_theta": theta,
        "rotary_dim": None if width == head_dim else width,
        "rotary_pairs": pairs,
        "context_length": context,
        "rope_local_theta": local.positive("rope_theta", local_theta) if apart else None,
    }
    if proportional:
        return fields
    return fields | scaled(scaling, theta, width, context, original if isinstance(original, int) else context)
