"""A GGUF file seen as a checkpoint: architecture facts, and tensors under edgespec's own names.

Names: ``embed``, ``final_norm``, ``lm_head``; per layer L ``layers.L.`` + ``q k v o gate up down``,
``q_bias k_bias v_bias``, ``attn_norm mlp_norm post_attn_norm post_mlp_norm q_norm k_norm``.
"""

import re
from math import sqrt
from pathlib import Path
from typing import Self, cast

import numpy as np

from edgespec_export.blocks import F32, Blocks, unpack
from edgespec_export.gguf import GGMLType, GGUFFile, GGUFTensor
from edgespec_models.config import Architecture, ModelConfig
from edgespec_models.errors import ModelFileError, UnsupportedModelError

__all__ = ["Checkpoint"]

_ARCHITECTURES = ("llama", "qwen2", "gemma3")
_GLOBAL = {"token_embd.weight": "embed", "output_norm.weight": "final_norm", "output.weight": "lm_head"}
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


class Checkpoint:
    """A model to export; a context manager over its open file.

    Attributes:
        path: the file.
        metadata: the file's key-value pairs.
        config: what the graph has to compute.

    Raises:
        ModelFileError: damaged file, missing tensors or tensors of a wrong shape.
        UnsupportedModelError: an architecture, feature or weight format that edgespec does not know.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        try:
            self.metadata = self._file.metadata
            self.tensors = self._rename()
            self.config = self._read_config()
            self._check_shapes()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def tied_head(self) -> bool:
        """Whether the LM head is the token embedding."""
        return "lm_head" not in self.tensors

    def tensor(self, name: str) -> GGUFTensor:
        """The tensor called ``name``; ``lm_head`` of a tied model is its embedding."""
        return self.tensors["embed" if name == "lm_head" and self.tied_head else name]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> tuple[GGMLType, np.ndarray]:
        """Raw blocks of rows ``start`` to ``stop``, to be unpacked in another thread."""
        tensor = self.tensor(name)
        return tensor.type, self._file.blocks(tensor, start, stop)

    def values(self, name: str) -> F32:
        """A small tensor whole, as float32."""
        tensor = self.tensor(name)
        unpacked = unpack(tensor.type, self._file.blocks(tensor))
        values = unpacked.values() if isinstance(unpacked, Blocks) else unpacked
        if not np.isfinite(values).all():
            raise ModelFileError(
                f"tensor {tensor.name!r} of {self.path.name} holds weights that are not finite numbers; "
                "download or convert it again"
            )
        return values.reshape(tensor.shape)

    def _rename(self) -> dict[str, GGUFTensor]:
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
            attention_scale=1 / sqrt(head_dim),
            # llama.cpp's conversion reorders the query and key rows of Llama for neighbouring pairs.
            rope_interleaved=architecture == "llama",
        )
        if self._int("rope.dimension_count", head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{self.path.name} rotates only a part of each head; not supported yet"
            )
        return self._gemma3(common) if architecture == "gemma3" else common

    def _gemma3(self, common: ModelConfig) -> ModelConfig:
        facts = common.to_json()
        facts |= {
            "qk_norm": True,
            "post_norms": True,
            "activation": "gelu_tanh",
            "embedding_scale": sqrt(common.hidden_size),
            "rope_local_theta": 1e4,
            "sliding_window": self._int("attention.sliding_window"),
            "global_every": 6,
        }
        if common.num_layers == _GEMMA3_27B_LAYERS:
            facts["attention_scale"] = 1 / sqrt(common.hidden_size / common.num_heads)
        return ModelConfig.from_json(facts)

    def _check_shapes(self) -> None:
        config = self.config
        expected: dict[str, tuple[int, ...]] = {
            "embed": (config.vocab_size, config.hidden_size),
            "final_norm": (config.hidden_size,),
        }
        if not self.tied_head:
            expected["lm_head"] = (config.vocab_size, config.hidden_size)
        for layer in range(min(config.num_layers, len(self.tensors) + 1)):  # a damaged count may be huge
            expected |= {f"layers.{layer}.{name}": shape for name, shape in self._layer_shapes().items()}
        for name, shape in expected.items():
            if name not in self.tensors:
                raise ModelFileError(
                    f"{self.path.name} lacks a tensor for {name} ({config.architecture}); "
                    "download or convert it again"
                )
            if self.tensors[name].shape != shape:
                found = self.tensors[name]
                raise ModelFileError(
                    f"tensor {found.name!r} of {self.path.name} has shape {found.shape}; "
                    f"its metadata ask for {shape}. Download or convert it again."
                )
        surplus = self.tensors.keys() - expected.keys()
        if surplus:
            names = ", ".join(sorted(self.tensors[name].name for name in surplus)[:3])
            raise UnsupportedModelError(
                f"{self.path.name} has tensors a {config.architecture} model lacks: {names}"
            )

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        hidden, mlp = c.hidden_size, c.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "mlp_norm": (hidden,),
            "q": (c.query_width, hidden),
            "k": (c.kv_width, hidden),
            "v": (c.kv_width, hidden),
            "o": (hidden, c.query_width),
            "gate": (mlp, hidden),
            "up": (mlp, hidden),
            "down": (hidden, mlp),
        }
        if "layers.0.q_bias" in self.tensors:
            shapes |= {"q_bias": (c.query_width,), "k_bias": (c.kv_width,), "v_bias": (c.kv_width,)}
        if c.qk_norm:
            shapes |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
        if c.post_norms:
            shapes |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}
        return shapes
