"""From the facts of a file to the config of a graph: what most families share.

GGUF files state the facts of a ``config.json`` under other names (``KEYS`` in
:mod:`edgespec_models.families.names`).
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any

from edgespec_models.decoders.transformer import FULL, SLIDING, Transformer
from edgespec_models.errors import ModelFileError, UnsupportedModelError, naming
from edgespec_models.families.experts import COUNTS, experts_of
from edgespec_models.families.family import Family
from edgespec_models.families.rope import GROWTH, rope_of, scaling_of
from edgespec_models.families.windows import counted, layer_count, sliding_layers, window_of
from edgespec_models.files.facts import Facts

_LEAST = 1e-6  # the least factor: squares and quotients stay finite
_CHANGES_LOGITS = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
CLASSIFIES = "classifies texts and writes none; use a model that writes, such as its base model"


def config_of(facts: Facts, family: Family, **more: Any) -> Transformer:
    """The decoder of a model of ``family`` with these facts.

    ``more`` has what families with a target need besides (:attr:`Family.read`). The context is the one with
    exact rotary frequencies: with ``longrope`` scaling the original one, because longer texts change the
    frequencies of every token.

    Raises:
        ModelFileError: facts are missing or malformed.
        UnsupportedModelError: a feature that edgespec lacks.
        RequestError: a head for another target.
    """
    _check_features(facts, family)
    return (family.read or trunk)(facts, family, **more)


def trunk(
    facts: Facts, family: Family, *, sliding: Sequence[bool] | None = None, **fields: Any
) -> Transformer:
    """The decoder of most families, with the ``fields`` that are the family's own.

    ``sliding``: whether each layer has a sliding window, if there is one; None to read this as most do.
    """
    hidden, heads = facts.integer("hidden_size"), facts.integer("num_attention_heads")
    layers = layer_count(facts)
    head_dim = counted(facts, "elements a head", facts.integer("head_dim", hidden // max(heads, 1)))
    sliding = sliding_layers(facts, family) if sliding is None else sliding
    window = window_of(facts, family, sliding)
    rope = rope_of(facts, family, fields.get("head_dim", head_dim), fields.get("local_head_dim"))
    if not facts.boolean("rotates", default=True):
        fields["unrotated_layers"] = tuple(range(layers))
    block = fields.get("block")
    says_more = family.pattern or (block is not None and block.causal_windows)  # than how far layers see
    if window is not None and window >= rope["context_length"] and not says_more:
        window = None
    if window is None:
        rope["local_rope"] = None  # there are no such layers
    else:
        rope["layer_types"] = tuple(SLIDING if is_sliding else FULL for is_sliding in sliding)
    scale = 1 / sqrt(facts.positive("query_pre_attn_scalar", float(head_dim)))
    embedding = multiplier(facts, "embedding_multiplier", sqrt(max(hidden, 0)) if family.grows else 1.0)
    experts = experts_of(facts, family) or {"intermediate_size": facts.integer("intermediate_size")}
    residual = _residual_factor(facts, family)
    own: dict[str, Any] = {
        "architecture": family.name,
        "vocab_size": facts.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": facts.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "norm_epsilon": facts.number("rms_norm_eps") / residual**2,
        "attention_scale": facts.positive("attention_multiplier", scale),
        "embedding_scale": embedding / residual,
        "sliding_window": window,
    }
    with naming(facts.where):
        return family.decoder(**own | rope | experts | fields)


def _residual_factor(facts: Facts, family: Family) -> float:
    """The factor of a model on what it adds to the residual stream.

    The graph keeps the stream divided by this factor. Then sublayers add their outputs unchanged, and a
    normalization with its epsilon divided by the square gives the same result.
    """
    factor, decoder = multiplier(facts, "residual_multiplier", 1.0), family.decoder
    if factor != 1 and (decoder.norms or decoder.layer is not Transformer.layer):
        raise UnsupportedModelError(
            f"{facts.where}: residual_multiplier is {factor}; {family.name} is supported without"
        )
    return factor


def logits_factor(facts: Facts) -> float:
    """The factor on logits."""
    return 1 / multiplier(facts, "logits_scaling", 1.0)


def multiplier(facts: Facts, key: str, default: float) -> float:
    """A factor; ModelFileError if it is out of range."""
    value = facts.positive(key, default)
    if not _LEAST <= value <= 1 / _LEAST:
        raise ModelFileError(f"{facts.where}: {key} is {value}; from {_LEAST} to {1 / _LEAST:.0f} are known")
    return value


def is_nvfp4(facts: Facts) -> bool:
    """Whether a ``config.json`` says that weights are in this format."""
    config = facts.section("quantization_config")
    method, form = (config.text(key, "") for key in ("quant_method", "format"))
    if method == "compressed-tensors":
        return form == "nvfp4-pack-quantized"
    return method == "modelopt" and config.text("quant_algo", "") in ("NVFP4", "W4A16_NVFP4")


def expect(facts: Facts, family: Family, key: str, value: object) -> None:
    """UnsupportedModelError if ``key`` has another value."""
    if facts.value(key) not in (None, value):
        raise UnsupportedModelError(
            f"{facts.where}: {key} is {facts.value(key)!r}; {family.name} is supported with {value!r}"
        )


def _check_features(facts: Facts, family: Family) -> None:
    """Refuse features that a plain model of ``family`` lacks."""
    keys = ("quantization_config", "compression_config", "quantization")  # the last is MLX's
    method = facts.section("quantization_config").text("quant_method", "an unknown method")
    is_read = is_nvfp4(facts) or (family.alternating and method == "mxfp4")
    if not is_read and any(facts.value(key) is not None for key in keys):
        raise UnsupportedModelError(
            f"{facts.where} says that the checkpoint is quantized already ({method}). edgespec quantizes by "
            "itself: use the model's unquantized checkpoint (F32, F16 or BF16), or a GGUF file."
        )
    labels = len(facts.section("id2label").keys) or facts.integer("num_labels", 2)
    if "Classification" in str(facts.value("architectures")) and labels != 1:  # one is a reranker's score
        raise UnsupportedModelError(f"{facts.where} says that the model {CLASSIFIES}")
    gelu = family.decoder.activation == "gelu_tanh"
    activation = {"hidden_activation": "gelu_pytorch_tanh"} if gelu else {"hidden_act": "silu"}
    for key, value in {**activation, **family.fixed}.items():
        expect(facts, family, key, value)
    for key in _CHANGES_LOGITS:
        vision = (key, facts.value(key)) == ("use_bidirectional_attention", "vision")
        if facts.value(key) and key not in family.defaults and not vision:
            raise UnsupportedModelError(
                f"{facts.where}: {key} is {facts.value(key)!r}; {family.name} is supported without"
            )
    growth = scaling_of(facts).number(GROWTH, 0.0)
    if growth and not hasattr(family.decoder, "query_growth"):
        raise UnsupportedModelError(
            f"{facts.where}: {GROWTH} is {growth}; {family.name} is supported without"
        )
    if not facts.boolean("is_causal", default=True):
        raise UnsupportedModelError(
            f"{facts.where} has attention in both directions: it encodes texts and writes none. Use a model "
            f"of the family {family.name} that writes"
        )
    for key in COUNTS if family.experts is None else ():
        if facts.value(key):
            raise UnsupportedModelError(
                f"{facts.where}: {key} is {facts.value(key)!r}, and edgespec runs no mixtures of experts of "
                f"the family {family.name}. Use a dense model of it."
            )
