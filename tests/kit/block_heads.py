"""Tiny heads that draft blocks (DFlash, DSpark) with their target, a Qwen3, and what they compute, in NumPy.

Weights have seven bits, so files in F32 and Q8_0 hold the same values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import converted, q8_0
from tests.kit.heads import GGUF_LAYER
from tests.kit.hf import F32, VOCAB, Tensors, config_of, drawn, weights, write_with_tokenizer

LAYERS, READS, BLOCK, MASK, RANK = 5, (0, 2, 3), 6, 317, 32
"""Of the target; layers whose output a head reads; tokens of a block; the mask; width of the chain."""


def target_config(**facts: Any) -> dict[str, Any]:
    """The target's ``config.json``."""
    return {**config_of("qwen3"), "num_hidden_layers": LAYERS, "eos_token_id": 2, **facts}


def target_tensors(facts: Mapping[str, Any]) -> Tensors:
    return weights(facts, 1)


def write_target(folder: Path, **facts: Any) -> Path:
    """A directory with the target and its tokenizer."""
    made = target_config(**facts)
    return write_with_tokenizer(folder, made, target_tensors(made))


def target_gguf(kind: str = "Q8_0") -> TinyGGUF:
    """The same in one file."""
    facts = target_config()
    return converted("qwen3", facts, target_tensors(facts), kind, tokens=VOCAB)


def config(*, chained: bool = False, **facts: Any) -> dict[str, Any]:
    """The ``config.json`` of a head, as z-lab's or, where it is ``chained``, as DeepSeek's DSpark."""
    made = {**config_of("qwen3"), "num_hidden_layers": 2, "block_size": BLOCK, "num_target_layers": LAYERS}
    block = {"mask_token_id": MASK, "target_layer_ids": list(READS)}
    if chained:
        return made | {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "vanilla"} | block | facts
    return made | {"architectures": ["DFlashDraftModel"], "dflash_config": block} | facts


def speculators(drafted: int, *, chained: bool) -> dict[str, Any]:
    """The same as the ``speculators`` package has it, of a head that drafts so many tokens."""
    layer, kind = config(), "dspark" if chained else "dflash"
    block = layer.pop("dflash_config")
    del layer["architectures"], layer["block_size"], layer["num_target_layers"]
    return {
        "architectures": [f"{kind.title()}Speculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in READS],
        "mask_token_id": block["mask_token_id"],
        "block_size": BLOCK,
        "draft_vocab_size": drafted,
    }


def tensors(*, chained: bool = False, seed: int = 3) -> Tensors:
    """A head's tensors, by the names of the hub."""
    facts = target_config()
    attends = "model.layers.0."
    shapes = {name: values.shape for name, values in target_tensors(facts).items()}
    layer = {n.removeprefix(attends): shape for n, shape in shapes.items() if n.startswith(attends)}
    hidden = facts["hidden_size"]
    shaped: dict[str, tuple[int, ...]] = {
        f"layers.{at}.{name}": shape for at in range(2) for name, shape in layer.items()
    }
    shaped |= {"fc.weight": (hidden, len(READS) * hidden), "hidden_norm.weight": (hidden,)}
    shaped |= {"norm.weight": (hidden,)}
    if chained:
        shaped |= {f"markov_head.markov_w{which}.weight": (VOCAB, RANK) for which in (1, 2)}
        shaped |= {"confidence_head.proj.weight": (1, hidden + RANK), "confidence_head.proj.bias": (1,)}
    return drawn(shaped, seed)


_GGUF = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
_LAYER = GGUF_LAYER | {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_LAYER |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}


def gguf(kind: str = "Q8_0", *, chained: bool = False) -> TinyGGUF:
    """A head as llama.cpp's converter writes it."""
    model = TinyGGUF("dflash", dict(target_gguf().metadata))
    keys = {key.replace("qwen3.", "dflash."): value for key, value in model.metadata.items()}
    keys |= {"dflash.block_count": 2, "dflash.block_size": BLOCK}
    keys |= {"dflash.target_layers": [layer + 1 for layer in READS], "tokenizer.ggml.mask_token_id": MASK}
    if chained:
        keys |= {"dflash.sample_from_anchor": True, "dflash.has_confidence_head": True}
    model.metadata = keys
    for name, values in tensors(chained=chained).items():
        stem, _, end = name.rpartition(".")
        if stem in _GGUF:
            renamed = f"{_GGUF[stem]}.{end}"
        else:
            _, layer, *_, part = stem.split(".")
            renamed = f"blk.{layer}.{_LAYER[part]}.{end}"
        wide = values.ndim == 2 and values.shape[1] % 32 == 0 and len(values) > 1
        model.tensors[renamed] = (kind, q8_0(values)) if wide and kind == "Q8_0" else ("F32", values)
    return model


@dataclass(frozen=True)
class Reference:
    """The formula in float64. A block ``shifted`` by some positions is what it is not."""

    facts: Mapping[str, Any]
    values: Mapping[str, F32]
    target: Mapping[str, F32]
    causal: bool | Sequence[int] = False  # or the layers that are
    shifted: int = 0
    anchored: bool = False
    kept: Sequence[int] | None = None  # tokens that the LM head has

    def __call__(self, features: F32, ids: Sequence[int]) -> tuple[Any, Any]:
        """What leaves the last norm, and logits of a block's rows ``(n, ...)``, behind ``features`` of all
        tokens before it."""
        of, read = self.values, features.astype(np.float64)
        known = self.norm(read @ of["fc.weight"].T, of["hidden_norm.weight"])
        x = self.target["model.embed_tokens.weight"][list(ids)].astype(np.float64)
        for layer in range(self.facts["num_hidden_layers"]):
            part = {name.removeprefix(f"layers.{layer}."): each for name, each in of.items()}
            causal = self.causal if isinstance(self.causal, bool) else layer in self.causal
            x = x + self.attended(known, self.norm(x, part["input_layernorm.weight"]), part, causal)
            y = self.norm(x, part["post_attention_layernorm.weight"])
            gate = y @ part["mlp.gate_proj.weight"].T
            y = gate / (1 + np.exp(-gate)) * (y @ part["mlp.up_proj.weight"].T)
            x = x + y @ part["mlp.down_proj.weight"].T
        x = self.norm(x, of["norm.weight"])
        head = self.target.get("lm_head.weight", self.target["model.embed_tokens.weight"])
        return x, x @ head.T

    def attended(self, known: Any, x: Any, of: Mapping[str, F32], causal: bool) -> Any:
        count, every = len(known), np.concatenate([known, x])
        query = self.apart(x @ of["self_attn.q_proj.weight"].T)
        key, value = (self.apart(every @ of[f"self_attn.{name}_proj.weight"].T) for name in "kv")
        query = self.turned(self.norm(query, of["self_attn.q_norm.weight"]), count + self.shifted)
        key = self.turned(self.norm(key, of["self_attn.k_norm.weight"]), 0)
        shared = len(query) // len(key)
        scores = query @ np.repeat(key, shared, 0).swapaxes(1, 2) / np.sqrt(query.shape[-1])
        if causal:
            scores = np.where(np.tri(len(x), len(every), count, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = shares / shares.sum(-1, keepdims=True) @ np.repeat(value, shared, 0)
        return mixed.swapaxes(0, 1).reshape(len(x), -1) @ of["self_attn.o_proj.weight"].T

    def apart(self, flat: Any) -> Any:
        return flat.reshape(len(flat), -1, self.facts["head_dim"]).swapaxes(0, 1)

    def turned(self, heads: Any, start: int) -> Any:
        count, width = heads.shape[1:]
        frequencies = self.facts["rope_theta"] ** (-np.arange(0, width, 2) / width)
        angles = np.outer(start + np.arange(count), frequencies)
        first, second = heads[..., : width // 2], heads[..., width // 2 :]
        turned = (
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        )
        return np.concatenate(turned, -1)

    def norm(self, x: Any, weight: F32) -> Any:
        x = np.asarray(x, np.float64)
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.facts["rms_norm_eps"]) * weight

    def draft(
        self, features: F32, known: Sequence[int], count: int
    ) -> tuple[list[int], list[float], list[float]]:
        """``count`` tokens behind the ``known`` ones, whose features are not known; margins to the second in
        deviations, and confidences of a chain."""
        chain = self.values.get("markov_head.markov_w1.weight")
        ids = [*known, *[MASK] * (count - 1 if self.anchored else count)]
        states, logits = (rows[-count:] for rows in self(features, ids))
        drafted, clear, sure = list[int](), list[float](), list[float]()
        kept = np.arange(VOCAB) if self.kept is None else np.array(self.kept)
        for state, base in zip(states, logits, strict=True):
            bias: Any = 0.0
            if chain is not None:
                before = chain[drafted[-1] if drafted else known[-1]]
                bias = self.values["markov_head.markov_w2.weight"] @ before
                weight = self.values["confidence_head.proj.weight"][0]
                score = weight @ np.concatenate([state, before])
                sure.append(1 / (1 + np.exp(-score - self.values["confidence_head.proj.bias"][0])))
            row = (base + bias)[kept]
            second, best = np.sort(row)[-2:]
            drafted.append(int(kept[row.argmax()]))
            clear.append(float((best - second) / row.std()))
        return drafted, clear, sure
