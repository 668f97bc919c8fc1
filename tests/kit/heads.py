"""Tiny EAGLE-3 heads in every published form, written on the spot, and what they compute, in plain NumPy."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_export.export import ExportOptions, export_model
from edgespec_export.formats.quantization import Quantization
from edgespec_models.bundles.bundle import GRAPH, Bundle
from edgespec_models.decoders.kept import BLOCK
from tests.kit.gguf import TinyGGUF, random_raw, tokenizer_facts
from tests.kit.hf import config_of, write_checkpoint
from tests.kit.kernels import session
from tests.kit.tokenizers import byte_level_json

F32 = npt.NDArray[np.float32]
LAYERS, VOCAB, DRAFTED, CONTEXT = 8, 320, 96, 64
HIDDEN, TARGET_HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 64, 64, 96, 4, 2, 16
TOKENS = np.arange(3, VOCAB, 3)[:DRAFTED]
"""The target's tokens that tiny heads draft."""


def target(folder: Path, **facts: Any) -> Path:
    """A directory with a tiny Llama of eight layers, its tokenizer and a chat template."""
    write_checkpoint(folder, {**config_of("llama"), "num_hidden_layers": LAYERS, **facts})
    (folder / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    return folder


@dataclass
class Head:
    """A head: change it, then write it. ``facts`` and names of tensors are EAGLE's."""

    facts: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, F32] = field(default_factory=dict)
    offsets: npt.NDArray[np.int64] | None = None

    @classmethod
    def random(cls, seed: int = 0, **facts: Any) -> "Head":
        head = cls(
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                "vocab_size": VOCAB,
                "draft_vocab_size": DRAFTED,
                "hidden_size": HIDDEN,
                "intermediate_size": MLP,
                "num_hidden_layers": 1,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "head_dim": HEAD_DIM,
                "max_position_embeddings": CONTEXT,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500.0,
                **facts,
            },
            offsets=TOKENS - np.arange(DRAFTED),
        )
        rng, width, eagle = np.random.default_rng(seed), 3 * TARGET_HIDDEN, "midlayer."
        hidden, mlp, query, kv = HIDDEN, MLP, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        matrices = {"fc": (hidden, width), "lm_head": (DRAFTED, hidden)}
        for name, rows in {"q": query, "k": kv, "v": kv}.items():
            matrices[f"{eagle}self_attn.{name}_proj"] = rows, 2 * hidden
        matrices |= {f"{eagle}self_attn.o_proj": (hidden, query), f"{eagle}mlp.down_proj": (hidden, mlp)}
        matrices |= {f"{eagle}mlp.{name}_proj": (mlp, hidden) for name in ("gate", "up")}
        norms = dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), hidden)
        gains = {f"{eagle}{name}": length for name, length in norms.items()} | {"norm": hidden}
        gains |= {"input_norm": width} if facts.get("norm_before_fc") else {}
        for name, shape in matrices.items():
            head.tensors[f"{name}.weight"] = _rounded(rng.normal(0, shape[1] ** -0.5, shape))
        for name, length in gains.items():
            head.tensors[f"{name}.weight"] = _rounded(rng.uniform(0.5, 1.5, length))
        return head

    def own_embedding(self, seed: int = 9) -> "Head":
        self.tensors["embed_tokens.weight"] = _rounded(
            np.random.default_rng(seed).normal(0, 1, (VOCAB, HIDDEN))
        )
        return self

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All that files hold."""
        if self.offsets is None:
            return dict(self.tensors)
        return {"t2d": np.isin(np.arange(VOCAB), TOKENS), **self.tensors, "d2t": self.offsets}

    def write(self, folder: Path, dtype: str = "F32") -> Path:
        """As EAGLE, AngelSlim and SpecForge have it: ``config.json`` and safetensors."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.facts), encoding="utf-8")
        write_arrays(folder / "model.safetensors", self.arrays(), dtype)
        return folder

    def write_speculators(self, folder: Path) -> Path:
        """As the ``speculators`` package has it."""
        folder.mkdir()
        outer = (
            "norm_before_residual",
            "norm_before_fc",
            "eagle_aux_hidden_state_layer_ids",
            "draft_vocab_size",
        )
        layer = {key: value for key, value in self.facts.items() if key not in (*outer, "architectures")}
        facts = {key: self.facts[key] for key in outer if key in self.facts}
        facts |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        facts |= {"transformer_layer_config": layer, "target_hidden_size": None}
        (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
        named = {name.replace("midlayer.", "layers.0."): values for name, values in self.arrays().items()}
        write_arrays(folder / "model.safetensors", named)
        return folder

    def values(self) -> dict[str, F32]:
        """The weights by short names."""
        return {
            name.removesuffix(".weight").rpartition(".")[2]: tensor for name, tensor in self.tensors.items()
        }


def _rounded(values: npt.NDArray[np.float64]) -> F32:
    """Values that bfloat16 holds too."""
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


_KINDS = {"<f4": "F32", "<i8": "I64", "<i4": "I32", "|b1": "BOOL"}


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]], dtype: str = "F32") -> None:
    """A safetensors file; floats in ``dtype``."""
    header: dict[str, Any] = {}
    chunks, at = [], 0
    for name, values in arrays.items():
        data, kind = values.tobytes(), _KINDS[values.dtype.str]
        if kind == "F32" and dtype == "BF16":
            data, kind = (values.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes(), dtype
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [at, at + len(data)]}
        chunks.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


GGUF = {"fc": "fc", "norm": "output_norm", "lm_head": "output", "input_norm": "enc.output_norm"}
GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
"""llama.cpp's names of EAGLE's tensors."""
WIDE = 256  # of GGUF heads, whose blocks may be as wide
WIDE_MLP, WIDE_DIM = 256, 32


def gguf_head(kind: str, seed: int = 0, **facts: Any) -> TinyGGUF:
    """A random head as llama.cpp's converter writes it, of :func:`tests.kit.gguf.tiny_gguf`'s width."""
    rng, query, kv = np.random.default_rng(seed), HEADS * WIDE_DIM, KV_HEADS * WIDE_DIM
    keys = {
        "block_count": 1,
        "context_length": CONTEXT,
        "embedding_length": WIDE,
        "feed_forward_length": WIDE_MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": WIDE_DIM,
        "attention.value_length": WIDE_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500.0,
        "target_layers": [1, 4, 6],
        "target_hidden_size": WIDE,
        "norm_before_residual": False,
        "norm_before_fc": False,
        **facts,
    }
    model = TinyGGUF(
        "eagle3", {f"eagle3.{key}": value for key, value in keys.items()} | dict(tokenizer_facts())
    )
    shapes = {"fc": (WIDE, 3 * WIDE), "lm_head": (DRAFTED, WIDE), "o_proj": (WIDE, query)}
    shapes |= {"q_proj": (query, 2 * WIDE), "k_proj": (kv, 2 * WIDE), "v_proj": (kv, 2 * WIDE)}
    shapes |= {"gate_proj": (WIDE_MLP, WIDE), "up_proj": (WIDE_MLP, WIDE), "down_proj": (WIDE, WIDE_MLP)}
    for name, (rows, columns) in shapes.items():
        form = kind if columns % 256 == 0 or not kind.endswith("_K") else "Q8_0"
        model.tensors[gguf_name(name)] = form, random_raw(rng, rows, columns, form)
    gains = dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"), WIDE)
    gains |= {"input_norm": 3 * WIDE} if keys["norm_before_fc"] else {}
    for name, width in gains.items():
        model.tensors[gguf_name(name)] = "F32", rng.uniform(0.5, 1.5, width).astype(np.float32)
    model.tensors["d2t"] = "I64", TOKENS.astype(np.int64)
    return model


def gguf_name(name: str) -> str:
    return f"{GGUF.get(name) or 'blk.0.' + GGUF_LAYER[name]}.weight"


def gguf_values(model: TinyGGUF) -> dict[str, F32]:
    """The weights by EAGLE's short names, de-quantized by the ``gguf`` package."""
    return {n: model.values(gguf_name(n)) for n in (*GGUF, *GGUF_LAYER) if gguf_name(n) in model.tensors}


@dataclass(frozen=True)
class Reference:
    """The equations of EAGLE-3, in float64, over a whole sequence."""

    weights: Mapping[str, F32]
    embedding: F32
    heads: tuple[int, int] = (HEADS, KV_HEADS)
    theta: float = 500.0
    divisors: Sequence[float] | float = 1.0
    epsilon: float = 1e-5
    neighbours: bool = False
    normed_features: bool = False
    normed_residual: bool = False

    def norm(self, x: Any, name: str) -> Any:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.epsilon) * self.weights[name]

    def __call__(self, ids: Sequence[int], features: F32, states: F32) -> tuple[Any, Any]:
        """States and logits ``(n, ...)``; ``features`` of the first tokens, ``states`` of the others."""
        weights, read = self.weights, features.astype(np.float64)
        if self.normed_features:
            read = self.norm(read, "input_norm")
        x = np.concatenate([read @ weights["fc"].T, states])
        both = [
            self.norm(self.embedding[list(ids)].astype(np.float64), "input_layernorm"),
            self.norm(x, "hidden_norm"),
        ]
        n = np.concatenate(both, axis=1)
        query, key, value = (
            self._apart(n @ weights[f"{w}_proj"].T, h) for w, h in zip("qkv", (0, 1, 1), strict=True)
        )
        mixed = self._attend(self._turn(query), self._turn(key), value)
        y = (both[1] if self.normed_residual else x) + mixed @ weights["o_proj"].T
        n = self.norm(y, "post_attention_layernorm")
        gate = n @ weights["gate_proj"].T
        state = y + (gate / (1 + np.exp(-gate)) * (n @ weights["up_proj"].T)) @ weights["down_proj"].T
        return state, self.norm(state, "norm") @ weights["lm_head"].T

    def _apart(self, flat: Any, which: int) -> Any:
        return flat.reshape(len(flat), self.heads[which], -1).swapaxes(0, 1)

    def _turn(self, heads: Any) -> Any:
        n, width = heads.shape[1:]
        frequencies = self.theta ** (-np.arange(0, width, 2) / width) / self.divisors
        angles = np.outer(np.arange(n), frequencies)
        if self.neighbours:
            first, second = heads[..., ::2], heads[..., 1::2]
        else:
            first, second = heads[..., : width // 2], heads[..., width // 2 :]
        turned = (
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        )
        return np.stack(turned, -1).reshape(heads.shape) if self.neighbours else np.concatenate(turned, -1)

    def _attend(self, query: Any, key: Any, value: Any) -> Any:
        shared = self.heads[0] // self.heads[1]
        scores = query @ np.repeat(key, shared, 0).swapaxes(1, 2) / np.sqrt(query.shape[-1])
        scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = shares / shares.sum(-1, keepdims=True) @ np.repeat(value, shared, 0)
        return mixed.swapaxes(0, 1).reshape(query.shape[1], -1)


class Running:
    """The graph of a head's bundle, fed by hand."""

    def __init__(self, bundle: Path) -> None:
        self.session = session(str(bundle / GRAPH))
        shapes = {value.name: value.shape for value in self.session.get_inputs()}
        kv, self.hidden = shapes["past_key_values.0.key"], shapes["states"][2]
        self.width, self.length = shapes["features"][2], 0
        self.cache = [np.zeros((1, *kv[1:]), np.float16) for _ in range(2)]

    def __call__(
        self, ids: Sequence[int], features: F32, states: F32, rows: Sequence[int] | None = None
    ) -> list[Any]:
        """Logits, states, most likely columns and their probabilities of a pass behind the last one."""
        wanted = np.arange(len(ids)) if rows is None else rows
        feeds = {
            "input_ids": np.array([ids], np.int64).reshape(1, -1),
            "sequences": np.array([[self.length, len(ids)]], np.int64),
            "blocks": np.arange(-(-(self.length + len(ids)) // BLOCK)),
            "logits_rows": np.array(wanted, np.int64),
            "features": features[None],
            "states": states[None],
            "past_key_values.0.key": self.cache[0],
            "past_key_values.0.value": self.cache[1],
        }
        names = [
            "logits",
            "new_states",
            "best_columns",
            "best_probabilities",
            "present.0.key",
            "present.0.value",
        ]
        *outputs, self.cache[0], self.cache[1] = self.session.run(names, feeds)
        self.length += len(ids)
        return [each[0] for each in outputs]


EIGHT = Quantization(bits=8)


def drafts_for(target: Path, **more: Any) -> ExportOptions:
    return ExportOptions(role="drafter", target=target, **more)


def export(head: Path, target: Path, out: Path, **more: Any) -> Bundle:
    """Floats become eight bits, not four, so that a head that is read wrongly shows."""
    if head.is_dir():
        more = {"quantization": EIGHT, **more}
    export_model(head, out, options=drafts_for(target, **more))
    return Bundle(out, verify_digests=True)
