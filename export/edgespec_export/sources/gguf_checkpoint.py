"""A GGUF file seen as a checkpoint."""

import re
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import cast

from edgespec_export.sources import gguf_tokenizer
from edgespec_export.sources.blocks import Tensor
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.gguf import GGUFFile
from edgespec_models.bundles.config import Architecture, ModelConfig
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.text.tokenizer import SpecialTokens

__all__ = ["GGUFCheckpoint"]

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
    """A model in a GGUF file.

    Attributes:
        metadata: the file's key-value pairs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        try:
            self.metadata = self._file.metadata
            self.tensors: dict[str, Tensor] = self._rename()
            self.config = self._read_config()
            self.check_shapes()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def files(self) -> tuple[Path, ...]:
        """The file."""
        return (self.path,)

    @property
    def model_name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem

    def tokenizer_json(self) -> str:
        """As the file's keys say."""
        return gguf_tokenizer.tokenizer_json(self.metadata)

    def special_tokens(self) -> SpecialTokens:
        """As the file's keys say."""
        return gguf_tokenizer.special_tokens(self.metadata)

    def chat_template(self) -> str | None:
        """As the file's keys say."""
        return gguf_tokenizer.chat_template(self.metadata)

    def _rename(self) -> dict[str, Tensor]:
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"{self.path.name} is of architecture {architecture!r}; edgespec exports "
                f"{', '.join(_ARCHITECTURES)} from GGUF"
            )
        renamed, unknown = {}, []
        for name, tensor in self._file.tensors.items():
            layer = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)", name)
            if name in _GLOBAL:
                renamed[_GLOBAL[name]] = tensor
            elif layer and layer[2] in _LAYER:
                renamed[f"layers.{int(layer[1])}.{_LAYER[layer[2]]}"] = tensor
            else:
                unknown.append(name)
        if unknown:
            raise UnsupportedModelError(
                f"{self.path.name} ({architecture}) has {len(unknown)} tensors that edgespec has no use for, "
                f"such as {unknown[0]!r}: it is not a plain {', '.join(_ARCHITECTURES)} text model"
            )
        return renamed

    def _key(self, key: str, kind: type, default: object = None) -> object:
        full = f"{self.metadata['general.architecture']}.{key}"
        value = self.metadata.get(full, default)
        if value is None:
            raise ModelFileError(f"{self.path.name} lacks the metadata key {full!r}")
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ModelFileError(f"{self.path.name}: {full} is {value!r}, not one {kind.__name__}")
        return value

    def _int(self, key: str, default: int | None = None) -> int:
        return cast(int, self._key(key, int, default))

    def _float(self, key: str, default: float | None = None) -> float:
        return cast(float, self._key(key, float, default))

    def _read_config(self) -> ModelConfig:
        architecture = self.metadata["general.architecture"]
        scaling = self._key("rope.scaling.type", str, "none")
        if scaling != "none" and self._float("rope.scaling.factor", 1.0) != 1.0:
            raise UnsupportedModelError(
                f"{self.path.name} scales its rotary embedding ({scaling}); not supported yet"
            )
        hidden, heads = self._int("embedding_length"), self._int("attention.head_count")
        if heads < 1 or "embed" not in self.tensors:
            raise ModelFileError(
                f"{self.path.name} has {heads} attention heads and no usable token embedding"
            )
        head_dim = self._int("attention.key_length", hidden // heads)
        if head_dim < 1:
            raise ModelFileError(f"{self.path.name} has attention heads of width {head_dim}")
        common = ModelConfig(
            architecture=cast(Architecture, architecture),
            vocab_size=self.tensors["embed"].shape[0],
            hidden_size=hidden,
            intermediate_size=self._int("feed_forward_length"),
            num_layers=self._int("block_count"),
            num_heads=heads,
            num_kv_heads=self._int("attention.head_count_kv", heads),
            head_dim=head_dim,
            norm_epsilon=self._float("attention.layer_norm_rms_epsilon"),
            context_length=self._int("context_length"),
            rope_theta=self._float("rope.freq_base", 1e6 if architecture == "gemma3" else 1e4),
            rope_factors=self._take_rope_factors(),
            attention_scale=1 / sqrt(head_dim),
            # llama.cpp's conversion reorders the query and key rows of Llama for neighbouring pairs.
            rope_interleaved=architecture == "llama",
        )
        if self._int("rope.dimension_count", head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{self.path.name} rotates only a part of each head; not supported yet"
            )
        return self._gemma3(common) if architecture == "gemma3" else common

    def _take_rope_factors(self) -> tuple[float, ...]:
        """What Llama 3.1 and its successors divide their rotary frequencies by: a fact, not a weight."""
        if "rope_factors" not in self.tensors:
            return ()
        factors = self.values("rope_factors").ravel()
        del self.tensors["rope_factors"]
        return tuple(float(factor) for factor in factors)

    def _gemma3(self, common: ModelConfig) -> ModelConfig:
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
            sliding_window=self._int("attention.sliding_window"),
            global_every=6,
            attention_scale=scale,
        )
