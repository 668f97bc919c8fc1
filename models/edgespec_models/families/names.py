"""The names that most families share: of tensors, and of keys.

A row has edgespec's name of a tensor (:mod:`edgespec_models.decoders.transformer`), its name on the hub and
its name in GGUF files. Several names stand side by side; ``*`` is an expert's number.
"""

import re
from collections.abc import Mapping
from typing import Final, Literal

Names = Mapping[str, tuple[str, str]]
"""By edgespec's name, the names on the hub and in GGUF files."""

OUTER: Final[Names] = {
    "embed": ("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm": ("model.norm.weight", "output_norm.weight"),
    "lm_head": ("lm_head.weight", "output.weight"),
    "score": ("score.weight", "cls.output.weight"),
    "rope_factors": ("", "rope_freqs.weight"),
    "short_factors": ("", "rope_factors_short.weight"),
    "long_factors": ("", "rope_factors_long.weight"),
}
LAYER: Final[Names] = {
    "attn_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "q": ("self_attn.q_proj.weight", "attn_q.weight"),
    "k": ("self_attn.k_proj.weight", "attn_k.weight"),
    "v": ("self_attn.v_proj.weight", "attn_v.weight"),
    "qkv": ("self_attn.qkv_proj.weight", "attn_qkv.weight"),
    "o": ("self_attn.o_proj.weight", "attn_output.weight"),
    "q_bias": ("self_attn.q_proj.bias", "attn_q.bias"),
    "k_bias": ("self_attn.k_proj.bias", "attn_k.bias"),
    "v_bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    "q_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "mlp_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "up": ("mlp.up_proj.weight", "ffn_up.weight"),
    "gate_up": ("mlp.gate_up_proj.weight", ""),
    "down": ("mlp.down_proj.weight", "ffn_down.weight"),
}
POST_NORMS: Final[Names] = {
    "post_attn_norm": ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    "mlp_norm": ("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    "post_mlp_norm": ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
}
"""Of layers with norms on the outputs of attention and the MLP."""
EXPERTS: Final[Names] = {
    "router": ("mlp.gate.weight", "ffn_gate_inp.weight"),
    "experts_gate": ("mlp.experts.*.gate_proj.weight", "ffn_gate_exps.weight"),
    "experts_up": ("mlp.experts.*.up_proj.weight", "ffn_up_exps.weight"),
    "experts_gate_up": ("mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight"),
    "experts_down": ("mlp.experts.*.down_proj.weight mlp.experts.down_proj", "ffn_down_exps.weight"),
}
SHARED_EXPERT: Final[Names] = {
    f"shared_{part}": (
        f"mlp.shared_experts.{part}_proj.weight mlp.shared_expert.{part}_proj.weight",
        f"ffn_{part}_shexp.weight",
    )
    for part in ("gate", "up", "down")
} | {
    "selection_bias": (
        "mlp.gate.e_score_correction_bias mlp.e_score_correction_bias mlp.experts.e_score_correction_bias",
        "exp_probs_b.bias",
    )
}
"""Of an expert that all tokens use, and of a bias for the choice of the others."""
KEYS: Final[Mapping[str, str]] = {
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
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "rotary_dim": "rope.dimension_count",
    "rotates": "rope.scaling.finetuned",
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "llama_4_scaling_beta": "attention.temperature_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_dense_layers": "leading_dense_block_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
}
"""The keys of a ``config.json``, and those of GGUF files, without the architecture's prefix."""
OTHERS: Final = re.compile(r"(v|a|mm|mtp|model\.vision_tower)\.")
"""Eyes, ears and MTP layers, which ollama's files hold besides the text model."""


def own_names(names: Names, source: Literal["hub", "gguf"]) -> dict[str, str]:
    """edgespec's names by those of a source. Of two rows with one name the later counts."""
    column = ("hub", "gguf").index(source)
    return {name: own for own, columns in names.items() for name in columns[column].split()}
