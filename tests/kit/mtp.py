"""A tiny Qwen3.5 with its MTP layer (arXiv 2412.19437), and what that layer computes, in plain NumPy.

Weights have seven bits, so files in F32 and Q8_0 hold the same values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import converted
from tests.kit.hf import F32, VOCAB, Tensors, config_of, drawn, shapes, weights, write_with_tokenizer

LAYERS = 4
"""Of the model without its MTP layer, which is block 4 of GGUF files."""
_PARTS = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
"""What llama.cpp's converter calls the tensors that lie in no layer."""


def config(case: str = "qwen35", **facts: Any) -> dict[str, Any]:
    """The ``config.json`` of a case of :mod:`tests.kit.hf`."""
    return {**config_of(case), "mtp_num_hidden_layers": 1, "eos_token_id": 2, **facts}


def layer_weights(facts: Mapping[str, Any], seed: int = 5) -> Tensors:
    """The tensors of the MTP layer."""
    whole, hidden = {**facts, "num_hidden_layers": LAYERS}, facts["hidden_size"]
    attends = f"model.layers.{LAYERS - 1}."
    shaped = {
        f"mtp.layers.0.{name.removeprefix(attends)}": shape
        for name, shape in shapes(whole).items()
        if name.startswith(attends)
    }
    shaped |= {"mtp.fc.weight": (hidden, 2 * hidden)}
    shaped |= {f"mtp.{name}.weight": (hidden,) for name in _PARTS if name != "fc"}
    return drawn(shaped, seed, norm=0)


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
    for name, values in tensors(made).items():
        renamed = name.replace("mtp.layers.0.", f"model.layers.{LAYERS}.")
        for part, theirs in _PARTS.items():
            renamed = renamed.replace(f"mtp.{part}.", f"model.layers.{LAYERS}.{theirs}.")
        named[renamed] = values
    name = "qwen35" if made["model_type"] == "qwen3_5_text" else "qwen35moe"
    model = converted(name, made, named, kind, tokens=VOCAB)
    model.metadata |= {f"{name}.block_count": LAYERS + 1, f"{name}.nextn_predict_layers": 1}
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
        named = tensors(self.facts)
        known = self.norm(streams, named["model.norm.weight"]) if self.is_normed else streams
        known = np.concatenate([known, self.norm(states, named["mtp.norm.weight"])])
        embedded = named["model.embed_tokens.weight"][list(ids)].astype(np.float64)
        both = [
            self.norm(embedded, named["mtp.pre_fc_norm_embedding.weight"]),
            self.norm(known, named["mtp.pre_fc_norm_hidden.weight"]),
        ]
        x = np.concatenate(both[:: -1 if self.swapped else 1], axis=1) @ named["mtp.fc.weight"].T
        of = {name.removeprefix("mtp.layers.0."): values for name, values in named.items()}
        x = x + self.attended(self.norm(x, of["input_layernorm.weight"]), of)
        x = x + self.mixed(self.norm(x, of["post_attention_layernorm.weight"]), of)
        head = named.get("lm_head.weight", named["model.embed_tokens.weight"])
        return x, self.norm(x, named["mtp.norm.weight"]) @ head.T

    def mixed(self, x: Any, of: Mapping[str, F32]) -> Any:
        """The MLP; or those of the experts that are most likely, by their shares, and the shared one."""

        def mlp(rows: Any, gate: F32, up: F32, down: F32) -> Any:
            gates = rows @ gate.T
            return (gates / (1 + np.exp(-gates)) * (rows @ up.T)) @ down.T

        names = ("gate", "up", "down")
        if "num_experts" not in self.facts:
            return mlp(x, *(of[f"mlp.{name}_proj.weight"] for name in names))
        shares = np.exp(x @ of["mlp.gate.weight"].T)
        shares /= shares.sum(-1, keepdims=True)
        mixed, width = np.zeros_like(x), self.facts["moe_intermediate_size"]
        for row, share in enumerate(shares):
            chosen = np.argsort(-share)[: self.facts["num_experts_per_tok"]]
            for expert in chosen:
                both, down = of["mlp.experts.gate_up_proj"][expert], of["mlp.experts.down_proj"][expert]
                mixed[row] += (
                    share[expert] / share[chosen].sum() * mlp(x[row], both[:width], both[width:], down)
                )
        shared = mlp(x, *(of[f"mlp.shared_expert.{name}_proj.weight"] for name in names))
        return mixed + shared / (1 + np.exp(-x @ of["mlp.shared_expert_gate.weight"].T))

    def attended(self, x: Any, of: Mapping[str, F32]) -> Any:
        """Gated attention: the gate of each head lies behind its query."""
        width, heads = self.facts["head_dim"], self.facts["num_attention_heads"]
        both = (x @ of["self_attn.q_proj.weight"].T).reshape(len(x), heads, 2 * width)
        key, value = (
            (x @ of[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, width).swapaxes(0, 1)
            for name in "kv"
        )
        query, gate = both[..., :width].swapaxes(0, 1), both[..., width:]
        query = self.turned(self.norm(query, of["self_attn.q_norm.weight"]))
        key = self.turned(self.norm(key, of["self_attn.k_norm.weight"]))
        shared = heads // len(key)
        scores = query @ np.repeat(key, shared, 0).swapaxes(1, 2) / np.sqrt(width)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = shares / shares.sum(-1, keepdims=True) @ np.repeat(value, shared, 0)
        gated = mixed.swapaxes(0, 1) / (1 + np.exp(-gate))
        return gated.reshape(len(x), -1) @ of["self_attn.o_proj.weight"].T

    def turned(self, heads: Any) -> Any:
        """The first quarter of each head, by halves."""
        parameters = self.facts["rope_parameters"]
        width = int(heads.shape[-1] * parameters["partial_rotary_factor"])
        frequencies = parameters["rope_theta"] ** (-np.arange(0, width, 2) / width)
        angles = np.outer(np.arange(heads.shape[1]), frequencies)
        first, second, rest = np.split(heads, [width // 2, width], axis=-1)
        turned = (
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        )
        return np.concatenate([*turned, rest], -1)

    def norm(self, x: Any, weight: F32) -> Any:
        """RMSNorm; files of the hub have the weights less 1."""
        x = np.asarray(x, np.float64)
        epsilon = self.facts["rms_norm_eps"]
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon) * (1.0 + weight)

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


def streams_of(session: Any, text: Sequence[int]) -> npt.NDArray[np.float32]:
    """What leaves the last layer of a target, of each token."""
    session.rewind(0)
    found: F32 = session.predict(text).hidden
    return found
