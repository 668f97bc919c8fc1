"""From a Hugging Face ``config.json`` to architecture facts.

Keys and their defaults: ``configuration_*.py`` of github.com/huggingface/transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import log, pi, sqrt
from types import MappingProxyType
from typing import Any

from edgespec_models.bundles.config import Architecture, ModelConfig
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.files.facts import Facts

HF_ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": "llama",
        "mistral": "mistral",
        "smollm3": "smollm3",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "gemma3_text": "gemma3",
        "phi3": "phi3",
    }
)
"""``model_type`` in ``config.json`` to the family."""

_MAX_COUNT = 4096  # there are lists with an entry for each; a damaged count may be huge
_ALWAYS_SLIDING = ("mistral", "phi3")  # where a window is given, it holds without a switch
_LONG = ("longrope", "su")
_CHANGES_LOGITS = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def read_config(facts: Facts) -> ModelConfig:
    """What the graph of a checkpoint with these facts has to compute.

    The context is the one the rotary frequencies are exact for: with ``longrope`` scaling that of the
    original model, since longer texts change the frequencies of every token.

    Raises:
        ModelFileError: facts are missing or malformed.
        UnsupportedModelError: another architecture, or a feature that edgespec lacks.
    """
    architecture = _architecture(facts)
    gemma = architecture == "gemma3"
    hidden, heads = facts.integer("hidden_size"), facts.integer("num_attention_heads")
    layers = facts.integer("num_hidden_layers")
    head_dim = facts.integer("head_dim", 256 if gemma else hidden // max(heads, 1))
    for name, count in (("layers", layers), ("elements a head", head_dim)):
        if not 0 < count <= _MAX_COUNT:
            raise UnsupportedModelError(f"{facts.where} says {count} {name}; 1 to {_MAX_COUNT} are supported")
    rope = _rope(facts, architecture, head_dim)
    global_every, window = _window(facts, architecture, layers)
    if window is not None and window >= rope["context_length"] and not gemma:
        window = None  # Gemma's window also says which layers have the local rotary embedding
    common = ModelConfig(
        architecture=architecture,
        vocab_size=facts.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=facts.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=facts.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        norm_epsilon=facts.number("rms_norm_eps", 1e-5 if architecture == "phi3" else 1e-6),
        unrotated_layers=_unrotated(facts, layers) if architecture == "smollm3" else (),
        attention_scale=head_dim**-0.5,
        sliding_window=window,
        global_every=1 if window is None else global_every,
        qk_norm=architecture in ("qwen3", "gemma3"),
        **rope,
    )
    return _gemma3(facts, common) if gemma else common


def _gemma3(facts: Facts, common: ModelConfig) -> ModelConfig:
    return replace(
        common,
        attention_scale=facts.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        post_norms=True,
        activation="gelu_tanh",
        embedding_scale=sqrt(common.hidden_size),
    )


def _architecture(facts: Facts) -> Architecture:
    found = facts.text("model_type", "")
    if found not in HF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{facts.where} is of the model type {found!r}. edgespec exports these from Hugging Face "
            f"checkpoints: {', '.join(HF_ARCHITECTURES)}. Other decoders go through Optimum: edgespec export "
            "SOURCE -o OUT --via optimum."
        )
    if facts.value("quantization_config") is not None or facts.value("compression_config") is not None:
        method = facts.section("quantization_config").text("quant_method", "an unknown method")
        raise UnsupportedModelError(
            f"{facts.where} says that the checkpoint is quantized already ({method}). edgespec quantizes by "
            "itself: use the model's unquantized checkpoint (F32, F16 or BF16), or a GGUF file."
        )
    architecture = HF_ARCHITECTURES[found]
    gemma = architecture == "gemma3"
    key, expected = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    activation = facts.text(key, expected)
    if activation != expected:
        raise UnsupportedModelError(
            f"{facts.where}: {key} is {activation!r}; {found} is supported with {expected!r}"
        )
    for key in _CHANGES_LOGITS:
        if facts.value(key):
            raise UnsupportedModelError(f"{facts.where}: {key} is {facts.value(key)!r}; not supported yet")
    return architecture


def _unrotated(facts: Facts, layers: int) -> tuple[int, ...]:
    """SmolLM3's layers without a rotary embedding: a 0 in ``no_rope_layers``, or every n-th."""
    rotated = facts.numbers("no_rope_layers", layers)
    if rotated:
        return tuple(layer for layer, flag in enumerate(rotated) if not flag)
    interval = facts.integer("no_rope_layer_interval", 4)
    return tuple(range(interval - 1, layers, interval)) if interval > 0 else ()


def _window(facts: Facts, architecture: Architecture, layers: int) -> tuple[int, int | None]:
    """Every how many layers one sees all, and how many tokens the others see."""
    sliding = _sliding_layers(facts, architecture, layers)
    always = architecture in (*_ALWAYS_SLIDING, "gemma3")
    if facts.value("sliding_window") is None or not (
        always or facts.boolean("use_sliding_window", default=False)
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
            f"{facts.where} mixes layers with and without a sliding window in no regular order; "
            "not supported yet"
        )
    return every, window


def _sliding_layers(facts: Facts, architecture: Architecture, layers: int) -> list[bool]:
    types = facts.value("layer_types")
    if types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(types, list) or len(types) != layers or not known.keys() >= {*map(str, types)}:
            raise UnsupportedModelError(
                f"{facts.where}: layer_types must say full_attention or sliding_attention for each of "
                f"{layers} layers"
            )
        return [known[kind] for kind in types]
    if architecture == "gemma3":
        pattern = max(facts.integer("sliding_window_pattern", 6), 1)
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    if architecture == "smollm3":
        unrotated = _unrotated(facts, layers)
        return [layer in unrotated for layer in range(layers)]
    first = 0 if architecture in _ALWAYS_SLIDING else facts.integer("max_window_layers", 28)
    return [layer >= first for layer in range(layers)]


def _rope(facts: Facts, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """What the configuration says of the rotary embedding, as fields of :class:`ModelConfig`.

    Both spellings are read: ``rope_theta`` with ``rope_scaling``, and the ``rope_parameters`` that
    transformers 5 writes. Scaling follows ``modeling_rope_utils.py``. Every kind comes down to a divisor for
    each frequency and a factor on the tables.
    """
    parameters, local_theta = facts.section("rope_parameters"), None
    if architecture == "gemma3":
        local = parameters.section("sliding_attention")
        local_theta = local.positive("rope_theta", facts.positive("rope_local_base_freq", 1e4))
        if _kind(local) != "default":
            raise UnsupportedModelError(f"{local.where} scales the local rotary embedding; not supported yet")
        parameters = parameters.section("full_attention")
    default = {"gemma3": 1e6, "smollm3": 2e6}.get(architecture, 1e4)
    share = parameters.positive("partial_rotary_factor", facts.positive("partial_rotary_factor", 1.0))
    if share > 1:
        raise ModelFileError(f"{facts.where}: partial_rotary_factor is {share}; it is a share of a head")
    width, context = int(head_dim * share), facts.integer("max_position_embeddings")
    theta = parameters.positive("rope_theta", facts.positive("rope_theta", default))
    old_style = facts.section("rope_scaling")
    scaling = old_style if _kind(old_style) != "default" else parameters
    fields = {
        "rope_theta": theta,
        "rotary_dim": None if width == head_dim else width,
        "context_length": context,
        "rope_local_theta": local_theta,
    }
    kind = _kind(scaling)
    if kind in ("default", "dynamic"):  # dynamic scaling begins beyond the context
        return fields
    if kind == "linear":
        return fields | {"rope_factors": (scaling.positive("factor"),) * (width // 2)}
    if kind == "llama3":
        return fields | {"rope_factors": _llama3_factors(scaling, theta, width, context)}
    if kind in _LONG:
        original = facts.value("original_max_position_embeddings")
        return fields | _longrope(scaling, width, context, original if isinstance(original, int) else context)
    raise UnsupportedModelError(
        f"{scaling.where} scales the rotary embedding by {kind!r}, which is not supported yet; "
        "supported are default, dynamic, linear, llama3 and longrope"
    )


def _kind(scaling: Facts) -> str:
    return scaling.text("rope_type", scaling.text("type", "default"))


def _llama3_factors(scaling: Facts, theta: float, width: int, context: int) -> tuple[float, ...]:
    """Long waves are stretched by ``factor``, short ones not, those between by something between."""
    factor = scaling.positive("factor")
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    original = scaling.integer("original_max_position_embeddings", context)
    if high <= low:
        raise ModelFileError(f"{scaling.where}: high_freq_factor must exceed low_freq_factor")
    factors = []
    for pair in range(width // 2):
        turns = original * theta ** (-2 * pair / width) / (2 * pi)  # within the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - kept) / factor + kept))
    return tuple(factors)


def _longrope(scaling: Facts, width: int, whole: int, original: int) -> dict[str, Any]:
    """Up to the original context: beyond it every token's frequencies change (Ding et al. 2024).

    A cache of keys that were rotated before the change is of no use after it.
    """
    context = scaling.integer("original_max_position_embeddings", original)
    if context < 2 or whole < 1:
        raise ModelFileError(f"{scaling.where}: the original context is {context}")
    stretch = scaling.positive("factor", whole / context)
    by_stretch = sqrt(1 + log(stretch) / log(context)) if stretch > 1 else 1.0
    factors = scaling.numbers("short_factor", width // 2)
    if not factors:
        raise ModelFileError(f"{scaling.where} lacks 'short_factor'")
    return {
        "context_length": min(context, whole),
        "rope_factors": factors,
        "rope_magnitude": scaling.positive("attention_factor", by_stretch),
    }
