"""What families with a target share: heads, which draft from its states."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import RequestError, UnsupportedModelError
from edgespec_models.families.family import Family
from edgespec_models.files.facts import Facts

Shapes = Mapping[str, tuple[int, ...]]
_OTHER_HEADS: Final = re.compile(r"eagle(?!\d)|domino|draft|medusa|speculator")
_LATER: Final = ("fc_norm", "norm_output", "parallel_drafting", "ptd_token_id")  # of EAGLE-3.1, of P-EAGLE
OTHER: Final = "Give the target that the head was trained for, or a head of this target"


@dataclass(frozen=True, slots=True)
class Target:
    """A target: its config, and the name of its file or directory."""

    config: Transformer
    name: str


def names_of(facts: Facts) -> list[str]:
    """The names of a model's classes and of a head's kind, in small letters."""
    classes, kinds = facts.value("architectures"), facts.value("dflash_config")
    names = [*classes] if isinstance(classes, list) else [classes]
    names += [facts.value("speculators_model_type")]
    names += [kinds.get("projector_type")] if isinstance(kinds, dict) else []
    return [str(name).lower() for name in names if name is not None]


def describes(facts: Facts, family: Family) -> bool:
    """Whether a ``config.json`` describes a head of ``family``."""
    named = any(part in name for name in names_of(facts) for part in family.classes)
    signed = bool(family.sign) and facts.value(family.sign) is not None
    return named or signed or facts.value("model_type") in family.hub


def refuse_others(facts: Facts, heads: tuple[Family, ...]) -> None:
    """UnsupportedModelError for a ``config.json`` of a head that is of none of these families."""
    known = [part for family in heads for part in family.classes]
    names = (name for name in names_of(facts) if not any(part in name for part in known))
    others = [name for name in names if _OTHER_HEADS.search(name)]
    others += [key for key in _LATER if facts.value(key)]
    if others:
        raise UnsupportedModelError(
            f"{facts.where} describes a head of another kind ({others[0]}); edgespec has those of EAGLE-3, "
            "DFlash and DSpark. Give one of these, or leave the drafter out"
        )


def of_decoder(facts: Facts) -> Facts:
    """The facts of a head's layers under the usual keys.

    The ``speculators`` package has the layer's facts in ``transformer_layer_config``, DFlash the block's
    facts in ``dflash_config``.
    """
    parts = facts, facts.section("transformer_layer_config"), facts.section("dflash_config")
    stated = {key: part.value(key) for part in parts for key in part.keys}
    if stated.get("use_swa"):
        stated |= {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
        stated["sliding_window"] = stated.get("swa_window_size")
    return Facts(stated, facts.where).over({"model_type": "llama", "rms_norm_eps": 1e-6})


def check_target(facts: Facts, target: Target) -> None:
    """RequestError if the head of these ``facts`` states another vocabulary or width of its target."""
    config = target.config
    for what, has in {"vocab_size": config.vocab_size, "target_hidden_size": config.hidden_size}.items():
        if facts.integer(what, has) != has:
            raise RequestError(
                f"{facts.where}: {what} is {facts.integer(what)}, of {target.name} it is {has}. {OTHER}"
            )


def fitting(facts: Facts, target: Target, ids: object) -> tuple[int, ...]:
    """The layers of ``target`` whose input a head reads, ``ids``; RequestError if it has others."""
    count = target.config.num_layers
    known = isinstance(ids, list) and all(type(i) is int and 0 <= i <= count for i in ids)
    if not isinstance(ids, list) or not known or len(set(ids)) < max(2, len(ids)):
        raise RequestError(
            f"{facts.where}: the head reads what enters the layers {ids!r:.80}; {target.name} has 0 to "
            f"{count - 1}, and {count} for what leaves the last. {OTHER}"
        )
    return tuple(ids)
