"""Gemma 4's facts of single layers: widths, and the layers whose keys and values they read.

The keys of a ``config.json`` without a prefix give heads of windowed layers and their width. Layers that see
the whole context have others (``global_head_dim``, ``num_global_key_value_heads``, or an entry for each layer
of ``per_layer_config``). The last ``num_kv_shared_layers`` have no keys and values.
"""

from collections.abc import Collection, Mapping
from typing import Any

from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.files.facts import Facts

_LONGEST = 4096  # lists have an entry for each layer
_STILL = 1e20  # a frequency that is divided by more does not turn
_AGAIN = "download or convert it again"


def of_layers(facts: Facts, full: list[bool]) -> dict[str, Any]:
    """Fields of :class:`ModelConfig`; ``full`` are the layers that see the whole context.

    Raises:
        ModelFileError: facts contradict each other.
        UnsupportedModelError: layers of one kind differ.
    """
    layers, tied = len(full), facts.boolean("attention_k_eq_v", default=False)
    head_dim, heads = facts.integer("head_dim"), facts.integer("num_key_value_heads")
    whole = {"head_dim": facts.integer("global_head_dim", 512), "num_key_value_heads": heads}
    if tied:
        whole["num_key_value_heads"] = facts.integer("num_global_key_value_heads", heads)
    apart = facts.section("per_layer_config")
    for key in apart.keys:
        own = apart.section(key)
        if not (key.isdecimal() and int(key) < layers and full[int(key)]):
            raise UnsupportedModelError(f"{own.where}: only layers that see the whole context may differ")
        stated = {name: own.integer(name, value) for name, value in whole.items()}
        if key != apart.keys[0] and stated != whole:
            raise UnsupportedModelError(
                f"{own.where} says {stated}, and those before it {whole}; allowed: the same for all"
            )
        whole = stated
    if apart.keys and len(apart.keys) != sum(full):
        raise ModelFileError(
            f"{apart.where} has {len(apart.keys)} layers, and {sum(full)} layers see the whole context; "
            f"{_AGAIN}"
        )
    shared, width = facts.integer("num_kv_shared_layers", 0), facts.integer("intermediate_size")
    widths = tuple(map(int, facts.numbers("mlp_widths", layers)))
    if facts.boolean("use_double_wide_mlp", default=False):
        widths = tuple(width * (1 + (layer >= layers - shared)) for layer in range(layers))
    rows, inputs = facts.integer("vocab_size"), facts.integer("hidden_size_per_layer_input", 0)
    if inputs and facts.integer("vocab_size_per_layer_input", rows) != rows:
        raise UnsupportedModelError(
            f"{facts.where}: vocab_size_per_layer_input is {facts.value('vocab_size_per_layer_input')}; "
            f"supported is vocab_size, {rows}"
        )
    return {
        "head_dim": whole["head_dim"],
        "num_kv_heads": whole["num_key_value_heads"],
        "local_head_dim": head_dim,
        "local_kv_heads": heads,
        "shared_layers": shared,
        "mlp_widths": () if set(widths) <= {width} else widths,
        "layer_inputs": inputs,
        "tied_values": tied,
    }


def in_words(own: Mapping[str, object], tensors: Collection[str], where: str) -> dict[str, object]:
    """The facts of a GGUF file's keys, under the names of a ``config.json``."""
    keys = Facts(own, where)
    layers, windowed = keys.integer("block_count"), own.get("attention.sliding_window_pattern")
    if not 0 < layers <= _LONGEST or not isinstance(windowed, list) or len(windowed) != layers:
        raise ModelFileError(
            f"{where}: attention.sliding_window_pattern must have an entry for each of {layers} "
            f"layers; {_AGAIN}"
        )
    local, whole = (_heads(keys, windowed, kind) for kind in (True, False))
    for suffix in ("", "_swa"):
        width = keys.integer(f"attention.key_length{suffix}")
        for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
            if keys.integer(key, width) != width:
                raise UnsupportedModelError(
                    f"{where}: {key} is {own[key]}; allowed: {width}, the width of heads"
                )
    mlp, changed = own.get("feed_forward_length"), dict[str, object]()
    if isinstance(mlp, list):
        changed |= {"mlp_widths": mlp, "feed_forward_length": next(iter(mlp), 0)}
    first = layers - keys.integer("attention.shared_kv_layers", 0)
    own_values = [f"layers.{n}.v" in tensors for n in range(min(max(first, 0), layers)) if not windowed[n]]
    if len({*own_values}) > 1:
        raise ModelFileError(f"{where} has values in some layers and none in others; {_AGAIN}")
    return changed | {
        "attention.head_count_kv": local,
        "num_global_key_value_heads": whole,
        "attention.key_length": own["attention.key_length_swa"],
        "attention.value_length": own["attention.key_length"],
        "global_head_dim": own["attention.key_length"],
        "rope.dimension_count": own["attention.key_length"],
        "attention_k_eq_v": False in own_values,
        "enable_moe_block": keys.integer("expert_count", 0) > 0,
    }


def _heads(keys: Facts, windowed: list[object], kind: bool) -> int:
    """Heads of keys and values in layers with a window, or in layers without one."""
    stated = keys.value("attention.head_count_kv")
    if not isinstance(stated, list):
        return keys.integer("attention.head_count_kv")
    if len(stated) != len(windowed):
        raise ModelFileError(
            f"{keys.where}: attention.head_count_kv has {len(stated)} entries for {len(windowed)} layers; "
            f"{_AGAIN}"
        )
    counts = {heads for heads, has_window in zip(stated, windowed, strict=True) if bool(has_window) == kind}
    if len(counts) > 1 or not all(type(heads) is int for heads in counts):
        raise UnsupportedModelError(
            f"{keys.where}: attention.head_count_kv has {sorted(map(str, counts))} for layers "
            f"{'with' if kind else 'without'} a window; one number is supported"
        )
    return next((heads for heads in counts if isinstance(heads, int)), 1)


def turning(factors: tuple[float, ...]) -> dict[str, Any]:
    """Fields for divisors of frequencies; large ones mean that a pair does not turn."""
    pairs = sum(factor < _STILL for factor in factors)
    rest = factors[:pairs]
    if any(factor >= _STILL for factor in rest):
        raise UnsupportedModelError("rope_freqs.weight has pairs that turn behind some that do not")
    return {
        "rotary_pairs": None if pairs == len(factors) else pairs,
        "rope_factors": () if set(rest) <= {1.0} else rest,
    }
