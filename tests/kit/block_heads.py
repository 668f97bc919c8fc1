"""Tiny heads that draft blocks (DFlash, DSpark) with their target, a Qwen3, and what they compute, in NumPy.

Weights have seven bits, so files in F32 and Q8_0 hold the same values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import converted, q8_0
from tests.kit.heads import GGUF_LAYER
from tests.kit.hf import F32, VOCAB, Tensors, config_of, drawn, weights, write_with_tokenizer

LAYERS, READS, BLOCK, MASK, RANK = 5, (0, 2, 3), 6, 317, 32
"""Of the target; layers whose output a head reads; tokens of a block; the mask; width of the chain."""
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 4}
"""What heads of DFlash 2 state besides."""


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


def config(*, chained: bool = False, second: bool = False, **facts: Any) -> dict[str, Any]:
    """The ``config.json`` of a head, as z-lab's or, where it is ``chained``, as DeepSeek's DSpark.

    The ``second`` is DFlash 2.
    """
    made = {**config_of("qwen3"), "num_hidden_layers": 2, "block_size": BLOCK, "num_target_layers": LAYERS}
    block = {"mask_token_id": MASK, "target_layer_ids": list(READS)}
    if chained:
        return made | {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "vanilla"} | block | facts
    named = "DFlash2DraftModel" if second else "DFlashDraftModel"
    return made | {"architectures": [named], "dflash_config": block | (SELECTOR if second else {})} | facts


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


def tensors(*, chained: bool = False, second: bool = False, seed: int = 3) -> Tensors:
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
    if second:
        taps, groups = SELECTOR["conv_kernel_size"], hidden // SELECTOR["conv_group_size"]
        for name in (f"layers.{at}.{part}_conv" for at in range(2) for part in ("attention", "mlp")):
            shaped[f"{name}.base_kernel"] = 2, taps, hidden
            shaped[f"{name}.kernel_projection.weight"] = 2 * taps * groups, hidden
        selector = {f"{which}_codebook": (VOCAB, RANK) for which in ("predecessor", "successor")}
        selector["hidden_projection.weight"] = RANK, hidden
        shaped |= {f"candidate_selector.{name}": shape for name, shape in selector.items()}
    made = drawn(shaped, seed)
    for name in made:  # in published heads, too, a row counts most for itself
        if name.endswith("base_kernel"):
            made[name] /= 2
            made[name][:, 0] += 1
        elif name.endswith("kernel_projection.weight"):
            made[name] /= 4
        elif name.endswith("codebook"):
            made[name] *= 2
    return made


LFM2 = {**config_of("lfm2"), "eos_token_id": 2}
"""Another target, with as many layers, as wide, and with convolutions among them."""


def config_for_lfm2() -> dict[str, Any]:
    """The ``config.json`` of a DSpark head of LFM2.5: neighbouring elements are rotated."""
    made = config(chained=True)
    block = {"num_target_layers": LAYERS, "mask_token_id": MASK, "target_layer_ids": list(READS)}
    made = {key: value for key, value in made.items() if key not in block}
    made |= {"architectures": ["Lfm2DSparkDraftModel"], "block_size": 9, "markov_rank": RANK}
    return made | {"rope_is_neox_style": False, "enable_confidence_head": True, "dflash_config": block}


def in_halves(values: Tensors, head: int) -> Tensors:
    """What rotates neighbours with the rows as llama.cpp's converter orders them: even elements first."""
    rotated = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")

    def moved(rows: F32) -> F32:
        return rows.reshape(-1, head // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape).copy()

    return {name: moved(rows) if name.endswith(rotated) else rows for name, rows in values.items()}


_GGUF = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}
_WHOLE = {
    f"candidate_selector.{part}_codebook": f"selector_{part}.weight" for part in ("predecessor", "successor")
}
_LAYER = GGUF_LAYER | {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_LAYER |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
_CONV = {"attention_conv": "attn_conv", "mlp_conv": "ffn_conv"}


def gguf(
    kind: str = "Q8_0", *, chained: bool = False, second: bool = False, values: Tensors | None = None
) -> TinyGGUF:
    """A head as llama.cpp's converter writes it, with these ``values`` or its own."""
    model = TinyGGUF("dflash", dict(target_gguf().metadata))
    keys = {key.replace("qwen3.", "dflash."): value for key, value in model.metadata.items()}
    keys |= {"dflash.block_count": 2, "dflash.block_size": BLOCK}
    keys |= {"dflash.target_layers": [layer + 1 for layer in READS], "tokenizer.ggml.mask_token_id": MASK}
    if chained:
        keys |= {"dflash.sample_from_anchor": True, "dflash.has_confidence_head": True}
    if second:
        keys |= {f"dflash.{key}": value for key, value in SELECTOR.items()}
    model.metadata = keys
    for name, rows in (values or tensors(chained=chained, second=second)).items():
        stem, _, end = name.rpartition(".")
        if name in _WHOLE:
            renamed = _WHOLE[name]
        elif "_conv." in name:
            _, layer, part, *_ = name.split(".")
            renamed = f"blk.{layer}.{_CONV[part]}_{'base' if end == 'base_kernel' else 'proj.weight'}"
        elif stem in _GGUF:
            renamed = f"{_GGUF[stem]}.{end}"
        else:
            _, layer, *_, part = stem.split(".")
            renamed = f"blk.{layer}.{_LAYER[part]}.{end}"
        wide = rows.ndim == 2 and rows.shape[1] % 32 == 0 and len(rows) > 1
        model.tensors[renamed] = (kind, q8_0(rows)) if wide and kind == "Q8_0" else ("F32", rows)
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
            y = self.norm(x, part["input_layernorm.weight"])
            before, behind = self.convolutions(y, part, "attention_conv")
            x = x + behind(self.attended(known, before(y), part, causal))
            y = self.norm(x, part["post_attention_layernorm.weight"])
            before, behind = self.convolutions(y, part, "mlp_conv")
            y = before(y)
            gate = y @ part["mlp.gate_proj.weight"].T
            y = gate / (1 + np.exp(-gate)) * (y @ part["mlp.up_proj.weight"].T)
            x = x + behind(y @ part["mlp.down_proj.weight"].T)
        x = self.norm(x, of["norm.weight"])
        head = self.target.get("lm_head.weight", self.target["model.embed_tokens.weight"])
        return x, x @ head.T

    def convolutions(self, u: Any, of: Mapping[str, F32], name: str) -> Iterator[Callable[[Any], Any]]:
        """The convolutions before a sublayer that reads ``u`` and behind it; DFlash has none."""
        base = of.get(f"{name}.base_kernel")
        if base is None:
            yield from (lambda v: v, lambda v: v)
            return
        own = u @ of[f"{name}.kernel_projection.weight"].T
        own = own.reshape(len(u), *base.shape[:2], -1)  # rows, sides, taps, groups
        weights = base + np.repeat(own, base.shape[2] // own.shape[3], axis=3)
        for side in range(2):
            yield partial(self.convolved, weights[:, side])

    def convolved(self, weights: Any, v: Any) -> Any:
        taps = range(weights.shape[1])
        rows = np.concatenate([np.zeros((len(taps), v.shape[1])), v])
        return sum(weights[:, tap] * rows[len(taps) - tap :][: len(v)] for tap in taps)

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
        codes = self.values.get("candidate_selector.predecessor_codebook")
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
            if codes is not None:
                gate = self.values["candidate_selector.hidden_projection.weight"] @ state
                code = codes[drafted[-1] if drafted else known[-1]] * gate
                best = np.argsort(-row)[: SELECTOR["selector_top_k"] + 1]
                scores = row[best] + self.values["candidate_selector.successor_codebook"][kept[best]] @ code
                sure.append(float(np.exp(scores[:-1].max() - np.logaddexp.reduce(scores[:-1]))))
                first = scores[:-1].argmax()  # the last is no candidate, but may be one by rounding
                margin = min(np.diff(np.sort(scores)[-2:])[0], row[best[first]] - row[best[-1]])
                margin *= scores[first] == scores.max()
                drafted.append(int(kept[best[first]]))
                clear.append(float(margin / base.std()))
                continue
            second, best = np.sort(row)[-2:]
            drafted.append(int(kept[row.argmax()]))
            clear.append(float((best - second) / row.std()))
        return drafted, clear, sure
