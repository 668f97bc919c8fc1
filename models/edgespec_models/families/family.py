"""What edgespec knows of a family of models. The defaults are a Llama's."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from edgespec_models.decoders.transformer import Transformer
from edgespec_models.families.names import LAYER, OUTER, Names
from edgespec_models.files.facts import Facts
from edgespec_models.files.tensors import Tensor

Tensors = Mapping[str, Tensor]
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def _as_stated(facts: Facts) -> Facts:
    return facts


def _unchanged(keys: Facts, tensors: Collection[str]) -> Mapping[str, object]:
    return _NOTHING


def _both(config: Transformer, tensors: Tensors) -> tuple[Transformer, Tensors]:
    return config, tensors


class Family(NamedTuple):
    """A family: its names, its keys, its facts, and what is its own in reading them.

    Attributes:
        name: the family in manifests.
        hub: its names on the hub: ``model_type`` in ``config.json``.
        gguf: its name in GGUF files (``general.architecture``); empty if it has none of its own.
        defaults: transformers' defaults of a ``config.json``.
        keys: its keys in GGUF files, by those of a ``config.json``, beyond ``KEYS``.
        fixed: keys whose models edgespec computes with this value alone.
        unstated: values of keys that some GGUF files lack.
        outer: the names of tensors outside of layers.
        layer: the names of tensors in a layer.
        mtp: the names of an MTP layer's other tensors; empty where a model has no such layer.
        decoder: its facts, and its pass over the operations of a backend.
        theta: default base of the rotary embedding.
        partial: whether ``partial_rotary_factor`` counts; others have it of a model that they came from.
        neighbours: whether GGUF files have the rows of queries and keys in the order for rotations of
            neighbouring elements.
        interleaved: whether neighbouring elements rotate together in directories too, and so the rows have
            one order everywhere.
        windowed: whether a sliding window needs no switch.
        pattern: with a sliding window, by default every n-th layer sees the whole context; 0 for no pattern.
        local_theta: default base of the rotary embedding in windowed layers, which is never scaled; 0 for the
            base of the other layers, None if all layers rotate alike.
        grows: whether token embeddings are multiplied by the root of their width.
        less_one: a pattern in the ends of names of norms whose weights directories store less 1.
        experts: fields of :class:`Experts` that no file states; None where layers have none. With
            ``beside_mlp`` some models have none.
        dense: the family of its models without experts, if there are some.
        alternating: whether directories have the experts' gates and their factors in alternating rows, in
            floats or MXFP4.
        cut: the name of its cut of texts, where files of ollama call it ``default``.
        takes_space: whether tokens of SentencePiece's kind that were added take the whitespace behind them.
        one_vocabulary: whether all its models have the same tokens.
        reranker: a pattern of the names of its models that score texts by the words yes and no.
        kind: heads and assistants draft for a target.
        classes: parts of the names of a head's classes.
        sign: a key that only its ``config.json`` has.
        keeps_rows: whether the rows of a head's LM head were chosen when it was trained.
        usual: from the facts of a ``config.json`` to the same facts under the usual keys.
        from_gguf: from a GGUF file's keys and its tensors' names to keys that change.
        from_hub: from the config and a directory's tensors to both, for tensors that hold facts, or lack.
        read: from the usual facts to the config; None for
            :func:`~edgespec_models.families.reading.trunk`. Families with a target also take ``shapes``, the
            shapes of their tensors, and ``target``.
    """

    name: str
    hub: tuple[str, ...] = ()
    gguf: str = ""
    defaults: Mapping[str, Any] = _NOTHING
    keys: Mapping[str, str] = _NOTHING
    fixed: Mapping[str, Any] = _NOTHING
    unstated: Mapping[str, Any] = _NOTHING
    outer: Names = OUTER
    layer: Names = LAYER
    mtp: Names = _NOTHING
    decoder: type[Transformer] = Transformer
    theta: float = 1e4
    partial: bool = False
    neighbours: bool = False
    interleaved: bool = False
    windowed: bool = False
    pattern: int = 0
    local_theta: float | None = None
    grows: bool = False
    less_one: str = ""
    experts: Mapping[str, Any] | None = None
    dense: "Family | None" = None
    alternating: bool = False
    cut: str = "default"
    takes_space: bool = False
    one_vocabulary: bool = False
    reranker: str = ""
    kind: Literal["model", "head", "assistant"] = "model"
    classes: tuple[str, ...] = ()
    sign: str = ""
    keeps_rows: bool = False
    usual: Callable[[Facts], Facts] = _as_stated
    from_gguf: Callable[[Facts, Collection[str]], Mapping[str, object]] = _unchanged
    from_hub: Callable[[Transformer, Tensors], tuple[Transformer, Tensors]] = _both
    read: Callable[..., Transformer] | None = None
