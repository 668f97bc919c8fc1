"""Tiny models with an MTP layer (arXiv 2412.19437), and what that layer computes, in plain NumPy.

The formulas are those of llama.cpp's graphs (``src/models/qwen35.cpp``, ``deepseek2.cpp`` and
``nemotron-h-moe.cpp``), but for Nemotron's last norm (:mod:`edgespec_models.families.nemotron`). Weights have
seven bits, so files in F32 and Q8_0 hold the same values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import ARCHITECTURES, converted
from tests.kit.hf import F32, VOCAB, Tensors, config_of, drawn, shapes, weights, write_with_tokenizer

LAYERS = 4
"""Of the Qwen3.5 without its MTP layer, which is block 4 of GGUF files."""
_NORMS = {"embed_norm": "enorm", "fuse_norm": "hnorm", "final_norm": "shared_head.norm"}
_PARTS: Mapping[str, Mapping[str, str]] = {
    "qwen": {
        "both": "mtp.fc",
        "embed_norm": "mtp.pre_fc_norm_embedding",
        "fuse_norm": "mtp.pre_fc_norm_hidden",
        "final_norm": "mtp.norm",
    },
    "nemotron": {
        "both": "mtp.layers.0.eh_proj",
        "embed_norm": "mtp.layers.0.enorm",
        "fuse_norm": "mtp.layers.0.hnorm",
        "final_norm": "mtp.layers.1.final_layernorm",
    },
    "glm": {"both": "model.layers.3.eh_proj"}
    | {name: f"model.layers.3.{theirs}" for name, theirs in _NORMS.items()},
}
"""The hub's names of what no other layer has."""


def config(case: str = "qwen35", **facts: Any) -> dict[str, Any]:
    """The ``config.json`` of a case of :mod:`tests.kit.hf`."""
    return {**config_of(case), "mtp_num_hidden_layers": 1, "eos_token_id": 2, **facts}


def kind_of(facts: Mapping[str, Any]) -> str:
    """The kind of model: ``qwen``, ``nemotron`` or ``glm``."""
    return next(kind for kind in _PARTS if facts["model_type"].startswith(kind))


def layer_weights(facts: Mapping[str, Any], seed: int = 5) -> Tensors:
    """The tensors of the MTP layer, by the names of the hub."""
    hidden, kind = facts["hidden_size"], kind_of(facts)
    # The layers that it is like, and where it lies.
    places = {
        "qwen": {f"model.layers.{LAYERS - 1}.": "mtp.layers.0."},
        "glm": {"model.layers.2.": "model.layers.3."},
        "nemotron": {"backbone.layers.3.": "mtp.layers.0.", "backbone.layers.4.": "mtp.layers.1."},
    }[kind]
    shaped = {
        name.replace(like, place): shape
        for like, place in places.items()
        for name, shape in shapes(facts).items()
        if name.startswith(like)
    }
    shaped |= {f"{name}.weight": (hidden,) for own, name in _PARTS[kind].items() if own != "both"}
    shaped |= {f"{_PARTS[kind]['both']}.weight": (hidden, 2 * hidden)}
    return drawn(shaped, seed, norm=int(kind != "qwen"))


def tensors(facts: Mapping[str, Any]) -> Tensors:
    """All tensors, by the names of the hub."""
    return weights(facts, 1) | layer_weights(facts)


def write_hf(folder: Path, **facts: Any) -> Path:
    """A directory with model, layer and tokenizer."""
    made = config(**facts)
    return write_with_tokenizer(folder, made, tensors(made))


def gguf(kind: str = "Q8_0", **facts: Any) -> TinyGGUF:
    """The same as llama.cpp's converter writes it into one file."""
    made, named = config(**facts), dict[str, F32]()
    layers = made["num_hidden_layers"]
    parts = {name: own for own, name in _PARTS[kind_of(made)].items()}
    for name, values in tensors(made).items():
        own = parts.get(name.removesuffix(".weight"))
        if own is not None:
            renamed = f"model.layers.{layers}.{_NORMS.get(own, 'eh_proj')}.weight"
        else:
            renamed = name.replace("mtp.layers.1.norm", f"model.layers.{layers}.post_attention_layernorm")
            renamed = renamed.replace("mtp.layers.1.", "mtp.layers.0.")
            renamed = renamed.replace("mtp.layers.0.", f"model.layers.{layers}.")
        named[renamed] = values
    name = ARCHITECTURES.get(made["model_type"], f"{made['model_type']}_moe")
    model = converted(name, made, named, kind, tokens=VOCAB)
    model.metadata |= {f"{name}.block_count": layers + 1, f"{name}.nextn_predict_layers": 1}
    if kind_of(made) == "nemotron":  # which has attention and experts there
        for key in (f"{name}.attention.head_count_kv", f"{name}.feed_forward_length"):
            counts = model.metadata[key]
            assert isinstance(counts, list)
            model.metadata[key] = [*counts, max(counts)]
    return model


def without(model: TinyGGUF, block: str) -> TinyGGUF:
    """The file without the tensors of blocks whose names begin so."""
    model.tensors = {name: tensor for name, tensor in model.tensors.items() if not name.startswith(block)}
    return model


def layer_alone(kind: str = "Q8_0", **facts: Any) -> TinyGGUF:
    """As the converter's option ``--mtp`` writes it: the layer, embedding, last norm and LM head."""
    model = gguf(kind, **facts)
    for block in range(LAYERS):
        without(model, f"blk.{block}.")
    return model


def model_alone(kind: str = "Q8_0", **facts: Any) -> TinyGGUF:
    """As the converter's option ``--no-mtp`` writes it."""
    model = without(gguf(kind, **facts), f"blk.{LAYERS}.")
    model.metadata["qwen35.block_count"] = LAYERS
    del model.metadata["qwen35.nextn_predict_layers"]
    return model


@dataclass(frozen=True)
class Reference:
    """The formula in float64, over a whole sequence.

    Of the first rows it knows the target's stream of the token before, of the others what it wrote itself.
    """

    facts: Mapping[str, Any]
    is_normed: bool = True  # what the target knew, by its last norm
    swapped: bool = False  # embedding and state

    def __call__(self, ids: Sequence[int], streams: F32, states: F32) -> tuple[Any, Any]:
        """What leaves the layer, and logits, ``(n, ...)``; ``ids`` are the tokens behind what is known."""
        named, parts = tensors(self.facts), _PARTS[kind_of(self.facts)]
        own = {name: named[f"{place}.weight"] for name, place in parts.items()}
        first, last = _OUTER[kind_of(self.facts)]
        known = self.norm(streams, named[last]) if self.is_normed else streams
        known = np.concatenate([known, self.norm(states, own["final_norm"])])
        embedded = named[first][list(ids)].astype(np.float64)
        both = [self.norm(embedded, own["embed_norm"]), self.norm(known, own["fuse_norm"])]
        x = np.concatenate(both[:: -1 if self.swapped else 1], axis=1) @ own["both"].T
        x = _LAYERS[kind_of(self.facts)](self, x, named)
        return x, self.norm(x, own["final_norm"]) @ named.get("lm_head.weight", named[first]).T

    def qwen(self, x: Any, named: Mapping[str, F32]) -> Any:
        """Gated attention, and an MLP or experts."""
        of = _under("mtp.layers.0.", named)
        x = x + self.gated_attention(self.norm(x, of["input_layernorm.weight"]), of)
        h = self.norm(x, of["post_attention_layernorm.weight"])
        return x + self.qwens_experts(h, of) if "num_experts" in self.facts else x + mlp(h, "mlp.", of)

    def nemotron(self, x: Any, named: Mapping[str, F32]) -> Any:
        """Attention without positions, and experts, each with a norm."""
        of, then = (_under(f"mtp.layers.{n}.", named) for n in (0, 1))
        h = self.norm(x, of["norm.weight"])
        width = self.facts["head_dim"]
        query, key, value = (
            (h @ of[f"mixer.{n}_proj.weight"].T).reshape(len(h), -1, width).swapaxes(0, 1) for n in "qkv"
        )
        x = x + attended(query, key, value, width**-0.5) @ of["mixer.o_proj.weight"].T
        h = self.norm(x, then["norm.weight"])
        return x + self.experts(h, "mixer.", then, squared_mlp)

    def glm(self, x: Any, named: Mapping[str, F32]) -> Any:
        """Latent attention, not absorbed, and experts."""
        of, facts = _under("model.layers.3.", named), self.facts
        h = self.norm(x, of["input_layernorm.weight"])
        still, rank, heads = facts["qk_nope_head_dim"], facts["kv_lora_rank"], facts["num_attention_heads"]
        query = self.norm(h @ of["self_attn.q_a_proj.weight"].T, of["self_attn.q_a_layernorm.weight"])
        query = (query @ of["self_attn.q_b_proj.weight"].T).reshape(len(h), heads, -1).swapaxes(0, 1)
        known = h @ of["self_attn.kv_a_proj_with_mqa.weight"].T
        latent = self.norm(known[:, :rank], of["self_attn.kv_a_layernorm.weight"])
        both = (latent @ of["self_attn.kv_b_proj.weight"].T).reshape(len(h), heads, -1).swapaxes(0, 1)
        turned = np.repeat(self.neighbours_turned(known[None, :, rank:]), heads, 0)
        key = np.concatenate([both[..., :still], turned], -1)
        query = np.concatenate([query[..., :still], self.neighbours_turned(query[..., still:])], -1)
        y = attended(query, key, both[..., still:], key.shape[-1] ** -0.5)
        x = x + y @ of["self_attn.o_proj.weight"].T
        return x + self.experts(self.norm(x, of["post_attention_layernorm.weight"]), "mlp.", of, mlp)

    def experts(self, x: Any, place: str, of: Mapping[str, F32], one: "MLP") -> Any:
        """The experts with the highest biased sigmoids, by their shares, and one for all tokens."""
        scores = 1 / (1 + np.exp(-x @ of[f"{place}gate.weight"].T))
        biased = scores + of[f"{place}gate.e_score_correction_bias"]
        y = one(x, f"{place}shared_experts.", of)
        for row, chosen in enumerate(np.argsort(-biased)[:, : self.facts["num_experts_per_tok"]]):
            shares = scores[row, chosen] / (scores[row, chosen].sum() + 1e-20)
            for expert, share in zip(chosen, shares * self.facts["routed_scaling_factor"], strict=True):
                y[row] += share * one(x[row], f"{place}experts.{expert}.", of)
        return y

    def qwens_experts(self, x: Any, of: Mapping[str, F32]) -> Any:
        """The experts that are most likely, by their shares, and the shared one."""
        shares = np.exp(x @ of["mlp.gate.weight"].T)
        shares /= shares.sum(-1, keepdims=True)
        mixed, width = np.zeros_like(x), self.facts["moe_intermediate_size"]
        for row, share in enumerate(shares):
            chosen = np.argsort(-share)[: self.facts["num_experts_per_tok"]]
            for expert in chosen:
                both, down = of["mlp.experts.gate_up_proj"][expert], of["mlp.experts.down_proj"][expert]
                named = {"gate_proj": both[:width], "up_proj": both[width:], "down_proj": down}
                named = {f"{name}.weight": values for name, values in named.items()}
                mixed[row] += share[expert] / share[chosen].sum() * mlp(x[row], "", named)
        shared = mlp(x, "mlp.shared_expert.", of)
        return mixed + shared / (1 + np.exp(-x @ of["mlp.shared_expert_gate.weight"].T))

    def gated_attention(self, x: Any, of: Mapping[str, F32]) -> Any:
        """Gated attention: the gate of each head lies behind its query."""
        width, heads = self.facts["head_dim"], self.facts["num_attention_heads"]
        both = (x @ of["self_attn.q_proj.weight"].T).reshape(len(x), heads, 2 * width)
        key, value = (
            (x @ of[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, width).swapaxes(0, 1)
            for name in "kv"
        )
        query, gate = both[..., :width].swapaxes(0, 1), both[..., width:].reshape(len(x), -1)
        query = self.turned(self.norm(query, of["self_attn.q_norm.weight"]))
        key = self.turned(self.norm(key, of["self_attn.k_norm.weight"]))
        y = attended(query, key, value, width**-0.5)
        return y / (1 + np.exp(-gate)) @ of["self_attn.o_proj.weight"].T

    def turned(self, heads: Any) -> Any:
        """The first quarter of each head, by halves."""
        parameters = self.facts["rope_parameters"]
        width = int(heads.shape[-1] * parameters["partial_rotary_factor"])
        first, second, rest = np.split(heads, [width // 2, width], axis=-1)
        return np.concatenate([*pairs_turned(first, second, parameters["rope_theta"]), rest], -1)

    def neighbours_turned(self, heads: Any) -> Any:
        """All elements of each head, neighbouring ones together."""
        pairs = pairs_turned(heads[..., ::2], heads[..., 1::2], self.facts["rope_theta"])
        return np.stack(pairs, -1).reshape(heads.shape)

    def norm(self, x: Any, weight: F32) -> Any:
        """RMSNorm; files of the hub of Qwen3.5 have the weights less 1."""
        x, more = np.asarray(x, np.float64), float(kind_of(self.facts) == "qwen")
        epsilon = self.facts.get("layer_norm_epsilon", self.facts["rms_norm_eps"])
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon) * (more + weight)

    def draft(self, streams: F32, text: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """Tokens behind ``text``, with margins: how far each logit is above the second, in deviations.

        ``streams`` are the target's of all tokens of the text but the last.
        """
        drafted, clear = list[int](), list[float]()
        states = np.empty((0, self.facts["hidden_size"]), np.float32)
        while len(drafted) < count:
            left, logits = self([*text[1:], *drafted], streams, states)
            second, best = np.sort(logits[-1])[-2:]
            drafted.append(int(logits[-1].argmax()))
            clear.append(float((best - second) / logits[-1].std()))
            states = np.concatenate([states, left[-1:].astype(np.float32)])
        return drafted, clear


MLP = Callable[[Any, str, Mapping[str, F32]], Any]
_OUTER = dict.fromkeys(("qwen", "glm"), ("model.embed_tokens.weight", "model.norm.weight"))
_OUTER["nemotron"] = "backbone.embeddings.weight", "backbone.norm_f.weight"
_LAYERS = {"qwen": Reference.qwen, "nemotron": Reference.nemotron, "glm": Reference.glm}


def mlp(x: Any, place: str, of: Mapping[str, F32]) -> Any:
    """An MLP with gates."""
    gates, ups = (x @ of[f"{place}{name}_proj.weight"].T for name in ("gate", "up"))
    return gates / (1 + np.exp(-gates)) * ups @ of[f"{place}down_proj.weight"].T


def squared_mlp(x: Any, place: str, of: Mapping[str, F32]) -> Any:
    """An MLP without gates, of squares of what is positive."""
    return np.square(np.maximum(x @ of[f"{place}up_proj.weight"].T, 0)) @ of[f"{place}down_proj.weight"].T


def attended(query: Any, key: Any, value: Any, scale: float) -> Any:
    """Causal attention of ``(heads, n, width)``, all heads side by side."""
    shared = len(query) // len(key)
    scores = query @ np.repeat(key, shared, 0).swapaxes(1, 2) * scale
    scores = np.where(np.tri(query.shape[1], dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = shares / shares.sum(-1, keepdims=True) @ np.repeat(value, shared, 0)
    return mixed.swapaxes(0, 1).reshape(query.shape[1], -1)


def pairs_turned(first: Any, second: Any, theta: float) -> tuple[Any, Any]:
    """The elements of pairs ``(heads, n, pairs)``, turned by their positions."""
    frequencies = theta ** (-np.arange(first.shape[-1]) / first.shape[-1])
    angles = np.outer(np.arange(first.shape[1]), frequencies)
    cos, sin = np.cos(angles), np.sin(angles)
    return first * cos - second * sin, second * cos + first * sin


def _under(place: str, named: Mapping[str, F32]) -> dict[str, F32]:
    return {name.removeprefix(place): values for name, values in named.items() if name.startswith(place)}


def streams_of(session: Any, text: Sequence[int]) -> npt.NDArray[np.float32]:
    """What leaves the last layer of a target, of each token."""
    session.rewind(0)
    found: F32 = session.predict(text).hidden
    return found
