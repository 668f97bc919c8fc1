"""A GGUF file seen as a checkpoint."""

from contextlib import ExitStack
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import cast

from edgespec_export.sources import gguf_tokenizer
from edgespec_export.sources.blocks import Tensor
from edgespec_export.sources.checkpoint import Checkpoint, own_name
from edgespec_export.sources.gguf import GGUFFile
from edgespec_models.bundles.config import Architecture, ModelConfig
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.files.facts import Facts
from edgespec_models.text.tokenizer import SpecialTokens

_ARCHITECTURES = ("llama", "qwen2", "gemma3")
_GLOBAL = {
    "token_embd.weight": "embed",
    "output_norm.weight": "final_norm",
    "output.weight": "lm_head",
    "rope_freqs.weight": "rope_factors",
}
_LAYER = {
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "post_attention_norm.weight": "post_attn_norm",
    "ffn_norm.weight": "mlp_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "post_ffw_norm.weight": "post_mlp_norm",
}
_GEMMA3_27B_LAYERS = 62  # the one size whose attention scale is not 1 / sqrt(head_dim)


class GGUFCheckpoint(Checkpoint):
    """A model in a GGUF file, whose key-value pairs are its ``metadata``."""

    def __init__(self, path: Path) -> None:
        self.path, self.files, self.model_name = path, (path,), path.stem
        with ExitStack() as stack:
            file = stack.enter_context(GGUFFile(path))
            self.metadata = file.metadata
            self.tensors: dict[str, Tensor] = _named(file)
            self.config = self._read_config()
            self.check_shapes()
            self.stack = stack.pop_all()

    def tokenizer_json(self) -> str:
        """As the file's keys say."""
        return gguf_tokenizer.tokenizer_json(self.metadata, self.config.vocab_size)

    def special_tokens(self) -> SpecialTokens:
        """As the file's keys say."""
        return gguf_tokenizer.special_tokens(self.metadata)

    def chat_template(self) -> str | None:
        """As the file's keys say."""
        return gguf_tokenizer.chat_template(self.metadata)

    def _read_config(self) -> ModelConfig:
        architecture, where = self.metadata["general.architecture"], self.path.name
        own = ((key.partition("."), value) for key, value in self.metadata.items())
        facts = Facts({key: value for (prefix, _, key), value in own if prefix == architecture}, where)
        scaling = facts.text("rope.scaling.type", "none")
        if scaling != "none" and facts.number("rope.scaling.factor", 1.0) != 1.0:
            raise UnsupportedModelError(f"{where} scales its rotary embedding ({scaling}); not supported yet")
        hidden, heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
        if heads < 1 or "embed" not in self.tensors:
            raise ModelFileError(f"{where} has {heads} attention heads and no usable token embedding")
        head_dim = facts.integer("attention.key_length", hidden // heads)
        if head_dim < 1:
            raise ModelFileError(f"{where} has attention heads of width {head_dim}")
        if facts.integer("rope.dimension_count", head_dim) != head_dim:
            raise UnsupportedModelError(f"{where} rotates only a part of each head; not supported yet")
        common = ModelConfig(
            architecture=cast(Architecture, architecture),
            vocab_size=self.tensors["embed"].shape[0],
            hidden_size=hidden,
            intermediate_size=facts.integer("feed_forward_length"),
            num_layers=facts.integer("block_count"),
            num_heads=heads,
            num_kv_heads=facts.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            norm_epsilon=facts.number("attention.layer_norm_rms_epsilon"),
            context_length=facts.integer("context_length"),
            rope_theta=facts.number("rope.freq_base", 1e6 if architecture == "gemma3" else 1e4),
            rope_factors=self._take_rope_factors(),
            attention_scale=1 / sqrt(head_dim),
            # llama.cpp's conversion reorders the query and key rows of Llama for neighbouring pairs.
            rope_interleaved=architecture == "llama",
        )
        return _gemma3(facts, common) if architecture == "gemma3" else common

    def _take_rope_factors(self) -> tuple[float, ...]:
        """What Llama 3.1 and its successors divide their rotary frequencies by: a fact, not a weight."""
        if "rope_factors" not in self.tensors:
            return ()
        factors = self.values("rope_factors").ravel()
        del self.tensors["rope_factors"]
        return tuple(float(factor) for factor in factors)


def _named(file: GGUFFile) -> dict[str, Tensor]:
    """The file's tensors by edgespec's names."""
    architecture, where = file.metadata.get("general.architecture"), file.path.name
    known = ", ".join(_ARCHITECTURES)
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where} is of architecture {architecture!r}; edgespec exports {known} from GGUF"
        )
    names = {name: own_name(name, r"blk\.", _GLOBAL, _LAYER) for name in file.tensors}
    unknown = [name for name, own in names.items() if own is None]
    if unknown:
        raise UnsupportedModelError(
            f"{where} ({architecture}) has {len(unknown)} tensors that edgespec has no use for, such as "
            f"{unknown[0]!r}: it is not a plain {known} text model"
        )
    return {own: file.tensors[name] for name, own in names.items() if own is not None}


def _gemma3(facts: Facts, common: ModelConfig) -> ModelConfig:
    scale = common.attention_scale
    if common.num_layers == _GEMMA3_27B_LAYERS:
        scale = 1 / sqrt(common.hidden_size / common.num_heads)
    return replace(
        common,
        qk_norm=True,
        post_norms=True,
        activation="gelu_tanh",
        embedding_scale=sqrt(common.hidden_size),
        rope_local_theta=1e4,
        sliding_window=facts.integer("attention.sliding_window"),
        global_every=6,
        attention_scale=scale,
    )
