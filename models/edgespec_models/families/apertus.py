"""Apertus: an MLP without a gate, whose activation xIELU has numbers of each layer (arXiv 2411.13010)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, expm1, log, log1p
from typing import Any, Final

from edgespec_models.decoders.config import Factor
from edgespec_models.decoders.operations import XIELU, Backend
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.families.family import Family, Tensors
from edgespec_models.families.names import LAYER
from edgespec_models.families.qwen3 import Qwen3
from edgespec_models.families.reading import trunk
from edgespec_models.families.windows import layer_count
from edgespec_models.files.blocks import Blocks, unpack
from edgespec_models.files.facts import Facts

_KINDS: Final = ("alpha_p", "alpha_n", "beta")
_START: Final = (log(expm1(0.8)), log(expm1(0.3)), 0.5)


@dataclass(frozen=True, kw_only=True)
class Apertus(Qwen3):
    """``above``, ``below`` and ``slope`` are the numbers of each layer's xIELU."""

    above: tuple[Factor, ...]
    below: tuple[Factor, ...]
    slope: tuple[Factor, ...]

    def mlp(self, b: Backend, index: int, h: Any) -> Any:
        xielu = XIELU(self.above[index], self.below[index], self.slope[index])
        y = b.gated(h, "up", ("up",), self.intermediate_size, xielu)
        return b.linear(y, "down", self.hidden_size, part="mlp")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        counts = {len(numbers) for numbers in (self.above, self.below, self.slope)}
        if counts != {self.num_layers}:
            yield f"xIELU has numbers of {sorted(counts)} layers; there are {self.num_layers}"


def _numbers(positive: Sequence[float], rest: Sequence[float], slope: Sequence[float]) -> dict[str, Any]:
    """The fields. Files have the inverse of softplus of the first, and of the second less the third."""
    return {
        "above": tuple(map(_softplus, positive)),
        "below": tuple(_softplus(x) + beta for x, beta in zip(rest, slope, strict=True)),
        "slope": tuple(slope),
    }


def _softplus(x: float) -> float:
    return max(x, 0.0) + log1p(exp(-abs(x)))


def _read(facts: Facts, family: Family) -> Transformer:
    """GGUF files have a list of each number; directories have tensors."""
    layers = layer_count(facts)
    lists = [facts.numbers(f"xielu.{kind}", layers) for kind in _KINDS]
    if not all(lists):  # as training begins
        lists = [(value,) * layers for value in _START]
    return trunk(facts, family, **_numbers(*lists))


def _from_hub(config: Transformer, tensors: Tensors) -> tuple[Transformer, Tensors]:
    def number(layer: int, kind: str, otherwise: float) -> float:
        tensor = tensors.get(f"layers.{layer}.{kind}")
        if tensor is None:
            return otherwise
        values = unpack(tensor.type, tensor.read())
        return otherwise if isinstance(values, Blocks) else float(values.ravel()[0])

    layers = range(config.num_layers)
    lists = [[number(n, kind, value) for n in layers] for kind, value in zip(_KINDS, _START, strict=True)]
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith((*_KINDS, "xielu_eps"))}
    return replace(config, **_numbers(*lists)), rest


APERTUS = Family(
    name="apertus",
    hub=("apertus",),
    gguf="apertus",
    theta=1.2e7,
    decoder=Apertus,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 65_536,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    layer={
        **LAYER,
        "attn_norm": ("attention_layernorm.weight", "attn_norm.weight"),
        "mlp_norm": ("feedforward_layernorm.weight", "ffn_norm.weight"),
        "alpha_p": ("mlp.act_fn.alpha_p", ""),
        "alpha_n": ("mlp.act_fn.alpha_n", ""),
        "beta": ("mlp.act_fn.beta", ""),
        "xielu_eps": ("mlp.act_fn.eps", ""),
    },
    fixed={"hidden_act": "xielu"},
    read=_read,
    from_hub=_from_hub,
)
