"""A GGUF file seen as a checkpoint.

Its keys state the facts of a ``config.json`` under other names: github.com/ggml-org/llama.cpp,
``src/llama-arch.cpp`` and, for their meaning, ``conversion/``.
"""

import logging
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from edgespec_export.sources import gemma4
from edgespec_export.sources.architectures import (
    ASSISTANT,
    BLOCKS,
    GGUF_FAMILIES,
    HEAD,
    NEEDS_TARGET,
    Family,
    unknown,
)
from edgespec_export.sources.checkpoint import Checkpoint, own_name
from edgespec_export.sources.gguf import GGUFFile, open_parts
from edgespec_export.sources.gguf_tokenizer import chat_templates, special_tokens, tokenizer_json
from edgespec_export.sources.hf_config import CLASSIFIES, config_of, logits_factor
from edgespec_export.sources.ranking import ranking_of
from edgespec_models.bundles.bundle import Embedding, Ranking, Sampling
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.errors import ModelFileError, RequestError, UnsupportedModelError, naming
from edgespec_models.files.blocks import F32
from edgespec_models.files.facts import Facts
from edgespec_models.files.gguf_parts import parts_of, stem_of
from edgespec_models.files.tensors import Tensor
from edgespec_models.schema import shown

GLOBAL = {
    "token_embd.weight": "embed",
    "per_layer_token_embd.weight": "inputs",
    "per_layer_model_proj.weight": "inputs_in",
    "per_layer_proj_norm.weight": "inputs_norm",
    "output_norm.weight": "final_norm",
    "output.weight": "lm_head",
    "cls.output.weight": "score",
    "rope_freqs.weight": "rope_factors",
    "rope_factors_short.weight": "short_factors",
    "rope_factors_long.weight": "long_factors",
}
LAYER = {
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_qkv.weight": "qkv",
    "attn_output.weight": "o",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "shortconv.in_proj.weight": "conv_in",
    "shortconv.conv.weight": "conv",
    "shortconv.out_proj.weight": "conv_out",
    "post_attention_norm.weight": "post_attn_norm",
    "ffn_norm.weight": "mlp_norm",
    "ssm_alpha.weight": "delta_decay",
    "ssm_beta.weight": "delta_strength",
    "ssm_conv1d.weight": "conv",
    "ssm_a": "delta_a",
    "ssm_dt.bias": "delta_bias",
    "ssm_dt": "delta_bias",
    "ssm_norm.weight": "delta_norm",
    "ssm_out.weight": "delta_out",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "post_ffw_norm.weight": "post_mlp_norm",
    "inp_gate.weight": "input_gate",
    "proj.weight": "input_out",
    "post_norm.weight": "post_input_norm",
    "layer_output_scale.weight": "scale",
    "ffn_gate_inp.weight": "router",
    "ffn_gate_inp.scale": "router_norm",
    "ffn_down_exps.scale": "expert_scale",
    "ffn_gate_inp.per_expert_scale": "expert_scale",
    "post_ffw_norm_1.weight": "post_dense_norm",
    "pre_ffw_norm_2.weight": "pre_experts_norm",
    "post_ffw_norm_2.weight": "post_experts_norm",
    "exp_probs_b.bias": "selection_bias",
    "ffn_gate_exps.weight": "experts_gate",
    "ffn_up_exps.weight": "experts_up",
    "ffn_gate_up_exps.weight": "experts_gate_up",
    "ffn_down_exps.weight": "experts_down",
    "ffn_gate_inp_shexp.weight": "shared_router",
    "ffn_gate_shexp.weight": "shared_gate",
    "ffn_up_shexp.weight": "shared_up",
    "ffn_down_shexp.weight": "shared_down",
    "ffn_gate_inp.bias": "router_bias",
    "ffn_gate_exps.bias": "experts_gate_bias",
    "ffn_up_exps.bias": "experts_up_bias",
    "ffn_down_exps.bias": "experts_down_bias",
    "attn_sinks.weight": "sinks",
    "attn_output.bias": "o_bias",
}
_OTHERS = re.compile(r"(v|a|mm|mtp|model\.vision_tower)\.")
"""Eyes, ears and MTP layers, which ollama's files hold besides the text model."""
_SCALING = "rope.scaling."
_LAST: Final = 3  # llama.cpp's LLAMA_POOLING_TYPE_LAST
_RANK: Final = 4
_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "max_position_embeddings": "context_length",
        "is_causal": "attention.causal",
        "sliding_window": "attention.sliding_window",
        "sliding_window_pattern": "attention.sliding_window_pattern",
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "rope_theta": "rope.freq_base",
        "rope_local_base_freq": "rope.freq_base_swa",
        "rotary_dim": "rope.dimension_count",
        "rotates": f"{_SCALING}finetuned",
        "rope_type": f"{_SCALING}type",
        "factor": f"{_SCALING}factor",
        "original_max_position_embeddings": f"{_SCALING}original_context_length",
        "beta_fast": f"{_SCALING}yarn_beta_fast",
        "beta_slow": f"{_SCALING}yarn_beta_slow",
        "mscale_all_dim": f"{_SCALING}yarn_log_multiplier",
        "llama_4_scaling_beta": "attention.temperature_scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "conv_L_cache": "shortconv.l_cache",
        "logits_scaling": "logit_scale",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "top_k_experts": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "num_dense_layers": "leading_dense_block_count",
        "norm_topk_prob": "expert_weights_norm",
        "routed_scaling_factor": "expert_weights_scale",
    }
)
"""The facts of a ``config.json``, and their keys here, without the architecture's prefix."""

_SHORT = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_SAMPLING = {name: f"general.sampling.{_SHORT.get(name, name)}" for name in Sampling.__annotations__}
_NO_MODELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "adapter": "an adapter (LoRA); give its base model, and this as --adapter",
        "mmproj": "a projector for images or sound; give the model's own file",
        "imatrix": "an importance matrix for quantization; give the model's own file",
    }
)
"""Files that are no models, by their ``general.type``, and the remedy."""
_MOST_BLOCKS: Final = 1 << 16
_LOG = logging.getLogger("edgespec")
_27B = {"gemma2": 46, "gemma3": 62}  # layers of the one size whose attention scale is not 1 / sqrt(head_dim)
_UNSTATED = {  # by some files, such as the first of Gemma 2, and ollama's
    "gemma2": {
        "attention.sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {"attention.layer_norm_rms_epsilon": 1e-6},
}
_OLLAMA: Final[Mapping[str, str]] = MappingProxyType(
    {
        "rope.global.freq_base": "rope.freq_base",
        "rope.local.freq_base": "rope.freq_base_swa",
        "rope.scaling_beta": "attention.temperature_scale",
        f"{_SCALING}beta_fast": f"{_SCALING}yarn_beta_fast",
        f"{_SCALING}beta_slow": f"{_SCALING}yarn_beta_slow",
        f"{_SCALING}mscale_all_dim": f"{_SCALING}yarn_log_multiplier",
    }
)
"""Keys of ollama's files, and those of llama.cpp's."""


class _Keys(Facts):
    """The keys of a GGUF file: one table, in which the scaling of rotary embeddings is no section.

    A list of a number for each layer, the same for all, is that number.
    """

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.value(key)
        if isinstance(value, list) and len({*map(repr, value)}) == 1:
            return _Keys({self._names.get(key, key): value[0]}, self.where, self._names).integer(key)
        return super().integer(key, default)

    def section(self, key: str) -> Facts:
        return self if key == "rope_scaling" else Facts({}, self.where)


class GGUFCheckpoint(Checkpoint):
    """A model in a GGUF file or in several, whose key-value pairs are its ``metadata``."""

    def __init__(self, path: Path) -> None:
        with ExitStack() as stack:
            file = self._open_file(path, stack)
            family = family_of(file)
            own = file.facts(family.gguf)
            drafter = tuple(f"blk.{block}." for block in take_mtp(file, own))
            if any(".nextn." in name for name in file.tensors):
                if not has_trunk(file):
                    raise RequestError(f"{path} {NEEDS_TARGET}")
                self.leave_out_mtp()
            names, others = dict(family.tensors), [*filter(_OTHERS.match, file.tensors)]
            if others:
                _LOG.warning("%s: only the text model is exported, without %s", path.name, shown(others))
                own |= _with_eyes(own, family)
            self.tensors = named(file, family, GLOBAL | names, LAYER | names, left_out=drafter)
            if "score" in self.tensors and self._pooling != _RANK:
                raise UnsupportedModelError(f"{path.name} {CLASSIFIES}")
            self.config = self._read_config(family, own)
            self.split_stacked()
            self.check_shapes()
            self.stack = stack.pop_all()
        # Cached, so that they warn once.
        self.tokenizer_json = cache(partial(tokenizer_json, self.metadata, self.config.vocab_size))
        self.special_tokens = cache(partial(special_tokens, self.metadata))
        self.chat_templates = partial(chat_templates, self.metadata)
        self.sampling = Sampling.advised(Facts(self.metadata, path.name, _SAMPLING))

    def _open_file(self, path: Path, stack: ExitStack) -> GGUFFile:
        """The file with the tensors of all parts, which ``stack`` closes."""
        self.path, self.files, self.model_name = path, tuple(parts_of(path)), stem_of(path)
        file = open_parts(path, stack)
        self.metadata = file.metadata
        return file

    def embedding(self) -> Embedding | None:
        """By the file's keys."""
        if self._pooling != _LAST:
            return None
        keys, ends = Facts(self.metadata, self.path.name), self.special_tokens().eos
        ended = keys.boolean("tokenizer.ggml.add_eos_token", default=False) and ends
        return Embedding(end=ends[0] if ended else None)

    @property
    def _pooling(self) -> object:
        return self.metadata.get(f"{self.metadata['general.architecture']}.pooling_type")

    def ranking(self) -> tuple[Ranking, F32] | None:
        """By its head, or by its name."""
        return ranking_of(self, f"{self.model_name} {self.metadata.get('general.name')}", self._template)

    def _template(self) -> str:
        """The text of a query and a document, as in llama.cpp's server."""
        stated, special = self.metadata.get("tokenizer.chat_template.rerank"), self.special_tokens()
        if isinstance(stated, str):
            return stated
        keys, tokens = Facts(self.metadata, self.path.name), self.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)  # as the tokenizer's reader checked
        ends = keys.boolean("tokenizer.ggml.add_eos_token", default=False) and special.eos
        begin = str(tokens[special.bos]) if special.add_bos and special.bos is not None else ""
        end = str(tokens[special.eos[0]]) if ends else ""
        return f"{begin}{{query}}{end}{{document}}{end}"

    def _read_config(self, family: Family, own: dict[str, object]) -> ModelConfig:
        where = self.path.name
        if "embed" not in self.tensors:
            raise ModelFileError(f"{where} has no usable token embedding; download or convert it again")
        rows = self.tensors["embed"].shape[0]
        if own.get("vocab_size", rows) != rows:
            raise ModelFileError(f"{where} says {own['vocab_size']} tokens, its embedding has {rows} rows")
        own |= gemma4.in_words(own, self.tensors, where) if family.name == "gemma4" else {}
        own |= {key: own[other] for other, key in _OLLAMA.items() if other in own and key not in own}
        own |= {key: value for key, value in _UNSTATED.get(family.name, {}).items() if key not in own}
        own |= {"vocab_size": rows, **self._scaling(own, family)} | _windows(own)
        if family.name == "qwen35":
            own |= _states(own, where)
        own |= _mixers(own) if family.name == "lfm2" else {}
        if own.get("block_count") == _27B.get(family.name, -1):
            keys = _Keys(own, where, _NAMES)
            heads = max(keys.integer("num_attention_heads"), 1)
            own["query_pre_attn_scalar"] = float(keys.integer("hidden_size") // heads)
        facts = _Keys(own, where, _NAMES)
        config, self.logits_factor = config_of(facts, family), logits_factor(facts)
        self.warn_if_shorter(config, facts.integer("max_position_embeddings"))
        if facts.integer("attention.value_length", config.head_dim) != config.head_dim:
            width = facts.integer("attention.value_length")
            raise UnsupportedModelError(
                f"{where} has values {width} wide and keys {config.head_dim} wide; allowed: one width"
            )
        if family.neighbours and config.rotary_dim is not None:
            raise UnsupportedModelError(
                f"{where} rotates {config.rotary_dim} of the {config.head_dim} elements of a head; allowed "
                f"for {family.gguf}: all"
            )
        factors = self._taken("rope_factors")
        if factors and config.rope_factors:
            raise ModelFileError(f"{where} has rope_freqs.weight and scales its rotary embedding besides")
        with naming(where):
            return replace(
                config,
                rope_interleaved=family.neighbours,
                **gemma4.turning(tuple(factors) or config.rope_factors),
            )

    def _scaling(self, own: Mapping[str, object], family: Family) -> dict[str, object]:
        """The scaling of rotary embeddings, with the keys of a ``config.json``."""
        short, long = self._taken("short_factors"), self._taken("long_factors")
        factor = own.get(f"{_SCALING}factor", own.get("rope.scale_linear"))
        kind = own.get(f"{_SCALING}type", "linear")
        if short or long:
            kind = "longrope"
        elif kind == "none" or (kind == "linear" and factor is None):
            kind = "default"
        attention = own.get(f"{_SCALING}{'yarn_' * (kind == 'yarn')}attn_factor")
        for key in ("yarn_ext_factor", "attn_factor"):
            if own.get(f"{_SCALING}{key}", 1.0) != 1.0 and (kind, key) != ("longrope", "attn_factor"):
                raise UnsupportedModelError(
                    f"{self.path.name}: {_SCALING}{key} is {own[f'{_SCALING}{key}']!r} beside {kind!r}; "
                    "allowed: 1.0"
                )
        return {
            f"{_SCALING}type": kind,
            f"{_SCALING}factor": factor,
            "truncate": family.name != "gpt-oss",
            "short_factor": short,
            "attention_factor": attention,
            "mscale": 1.0,
        }

    def _taken(self, name: str) -> list[float]:
        """A tensor that holds facts instead of weights: the divisors of frequencies."""
        if name not in self.tensors:
            return []
        values = self.values(name).ravel()
        self.tensors = {other: tensor for other, tensor in self.tensors.items() if other != name}
        return [float(value) for value in values]


def _with_eyes(own: Mapping[str, object], family: Family) -> dict[str, object]:
    """What all Gemma 3 with eyes have, and ollama's files do not state."""
    stretched = own.get("context_length") == 131_072 and own.get(f"{_SCALING}factor") is None
    return {f"{_SCALING}factor": 8.0} if family.name == "gemma3" and stretched else {}


def _windows(own: Mapping[str, object]) -> dict[str, object]:
    """Sliding windows with the keys of a ``config.json``; 0 is no window, a list has one for each layer."""
    changed: dict[str, object] = {}
    if own.get("attention.sliding_window") == 0:
        changed["attention.sliding_window"] = None
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        kinds = [f"{'sliding' if windowed else 'full'}_attention" for windowed in pattern]
        changed |= {"attention.sliding_window_pattern": None, "layer_types": kinds}
    return changed


def take_mtp(file: GGUFFile, own: dict[str, object]) -> range:
    """Take the blocks of MTP layers out of ``block_count``, and return them."""
    where = file.path.name
    keys = Facts(own, where)
    blocks, drafters = keys.integer("block_count", 0), keys.integer("nextn_predict_layers", 0)
    if not 0 <= drafters < max(blocks, 1):
        raise ModelFileError(
            f"{where} has {blocks} blocks, {drafters} of them for MTP; download or convert it again"
        )
    if drafters:
        own["block_count"] = blocks - drafters
    taken = range(blocks - drafters, min(blocks, _MOST_BLOCKS))
    for name in file.tensors:
        block, _, kind = name.removeprefix("blk.").partition(".")
        if kind.startswith("nextn.") and block not in map(str, taken):
            raise ModelFileError(
                f"{where} has {name!r}, but block_count {blocks} and nextn_predict_layers {drafters} say "
                f"that block {block} is none for MTP; download or convert it again"
            )
    return taken


def has_trunk(file: GGUFFile) -> bool:
    """Whether the file has a model, and not its MTP layer alone."""
    return "blk.0.attn_norm.weight" in file.tensors


def _states(own: Mapping[str, object], where: str) -> dict[str, object]:
    """Delta nets with the keys of a ``config.json``."""
    keys, changed = Facts(own, where), dict[str, object]()
    recurrent = own.get("attention.recurrent_layers")
    if isinstance(recurrent, list):
        kinds = [f"{'linear' if is_linear else 'full'}_attention" for is_linear in recurrent]
        changed["layer_types"] = kinds[: keys.integer("block_count")]
    inner, heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    if heads < 1 or inner % heads:
        raise ModelFileError(
            f"{where}: ssm.inner_size is {inner}, which {heads} heads (ssm.time_step_rank) cannot share; "
            "download or convert it again"
        )
    tiled = keys.boolean("ssm.v_head_reordered", default=True)  # as ollama's files state
    return changed | {"linear_value_head_dim": inner // heads, "linear_tiled": tiled}


def _mixers(own: Mapping[str, object]) -> dict[str, object]:
    """Convolutions with the keys of a ``config.json``: layers without heads of keys and values."""
    heads = own.get("attention.head_count_kv")
    if not isinstance(heads, list) or any(type(count) is not int for count in heads):
        return {}
    counts, kinds = {*heads} - {0}, ["full_attention" if count else "conv" for count in heads]
    return {"attention.head_count_kv": counts.pop() if len(counts) == 1 else heads, "layer_types": kinds}


def family_of(file: GGUFFile) -> Family:
    """The family of a file; UnsupportedModelError or RequestError if edgespec cannot export it."""
    architecture, kind = (file.metadata.get(f"general.{key}") for key in ("architecture", "type"))
    instead = _NO_MODELS.get("mmproj" if architecture == "clip" else str(kind))
    if instead is not None:
        raise UnsupportedModelError(f"{file.path} is {instead}")
    if architecture in (HEAD.gguf, BLOCKS.gguf, ASSISTANT.gguf):
        raise RequestError(f"{file.path} {NEEDS_TARGET}")
    if not isinstance(architecture, str) or architecture not in GGUF_FAMILIES:
        known = f"edgespec exports these architectures from GGUF: {', '.join(GGUF_FAMILIES)}."
        raise unknown(file.path.name, str(architecture), known)
    return GGUF_FAMILIES[architecture]


def named(
    file: GGUFFile,
    family: Family,
    whole: Mapping[str, str],
    of_layer: Mapping[str, str],
    *,
    left_out: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """The file's tensors by edgespec's names; UnsupportedModelError for unknown ones. ``whole`` has names
    outside layers.

    Tensors whose names begin with one of ``left_out`` are left out.
    """
    kept = (name for name in file.tensors if not (name.startswith(left_out) or _OTHERS.match(name)))
    names = {name: own_name(name, r"blk\.", whole, of_layer) for name in kept}
    names |= dict.fromkeys(file.integers)
    surplus = [name for name, own in names.items() if own is None]
    if any(name.startswith("cls.") for name in surplus):
        raise UnsupportedModelError(f"{file.path.name} {CLASSIFIES}")
    if surplus:
        raise UnsupportedModelError(
            f"{file.path.name} ({family.gguf}) has {len(surplus)} unknown tensors, such "
            f"as {surplus[0]!r}: it is not a plain text model of this architecture"
        )
    return {own: file.tensors[name] for name, own in names.items() if own is not None}
