"""Families of models: a file a family, what they share, and how one is recognized.

A file has a family's names, its keys with their defaults, its tensors' names, and what is its own in reading
them, in one :class:`~edgespec_models.families.family.Family` or a few. May import ``decoders`` and ``files``.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from edgespec_models.decoders.transformer import Transformer
from edgespec_models.families.apertus import APERTUS
from edgespec_models.families.dflash import DFLASH, DFLASH2
from edgespec_models.families.eagle3 import EAGLE3
from edgespec_models.families.ernie45 import ERNIE45, ERNIE45_MOE
from edgespec_models.families.exaone4 import EXAONE4, EXAONE_MOE
from edgespec_models.families.family import Family
from edgespec_models.families.gemma2 import GEMMA2
from edgespec_models.families.gemma3 import GEMMA3
from edgespec_models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from edgespec_models.families.gemma4_assistant import ASSISTANT, GEMMA4_ASSISTANT
from edgespec_models.families.gemma4_vision import GEMMA4_EMBEDDER, GEMMA4_VISION
from edgespec_models.families.glm4 import GLM4
from edgespec_models.families.glm4_moe_lite import GLM4_MOE_LITE
from edgespec_models.families.glm4_moe_lite import MTP_LAYER as LATENT_MTP
from edgespec_models.families.gpt_oss import GPT_OSS
from edgespec_models.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE
from edgespec_models.families.heads import describes, refuse_others
from edgespec_models.families.hunyuan import HUNYUAN
from edgespec_models.families.lacking import unknown
from edgespec_models.families.laguna import LAGUNA
from edgespec_models.families.lfm2 import LFM2, LFM2_MOE
from edgespec_models.families.lfm2_vision import LFM2_VISION
from edgespec_models.families.lfm3 import LFM3
from edgespec_models.families.llama import LLAMA, MISTRAL
from edgespec_models.families.ministral3 import MINISTRAL3
from edgespec_models.families.muse_glimmer import MUSE_GLIMMER
from edgespec_models.families.names import KEYS
from edgespec_models.families.nanbeige import NANBEIGE
from edgespec_models.families.nemotron import MTP_LAYER as NEMOTRON_MTP
from edgespec_models.families.nemotron import NEMOTRON_H, NEMOTRON_H_MOE
from edgespec_models.families.olmo2 import OLMO2, OLMO3
from edgespec_models.families.phi3 import PHI3
from edgespec_models.families.qwen2 import QWEN2
from edgespec_models.families.qwen3 import QWEN3, QWEN3_MOE
from edgespec_models.families.qwen3_5_vision import QWEN35_VISION
from edgespec_models.families.qwen35 import MTP_LAYER, QWEN35, QWEN35_MOE
from edgespec_models.families.reading import config_of
from edgespec_models.families.seed_oss import SEED_OSS
from edgespec_models.families.smollm3 import SMOLLM3
from edgespec_models.families.towers import Tower
from edgespec_models.files.facts import Facts

MODELS: Final = (
    *(LLAMA, MISTRAL, SMOLLM3, MINISTRAL3, PHI3),
    *(QWEN2, QWEN3, QWEN3_MOE, QWEN35, QWEN35_MOE),
    *(GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED),
    *(GRANITE, GRANITE_MOE, GRANITE_HYBRID, EXAONE4, GPT_OSS, OLMO2, OLMO3, LFM2, LFM2_MOE, LFM3),
    *(SEED_OSS, ERNIE45, ERNIE45_MOE, GLM4, GLM4_MOE_LITE, EXAONE_MOE, NEMOTRON_H, NEMOTRON_H_MOE),
    *(HUNYUAN, APERTUS, LAGUNA, NANBEIGE, MUSE_GLIMMER),
)
HEADS: Final = (DFLASH, EAGLE3, GEMMA4_ASSISTANT)
"""Families with a target."""
TOWERS: Final = (GEMMA4_VISION, GEMMA4_EMBEDDER, LFM2_VISION, QWEN35_VISION)
_CAPS: Final = "attn_logit_softcapping", "final_logit_softcapping"
NEEDS_TARGET: Final = (
    "is a head, which drafts for one target: give it as the drafter, or export it with --target and its "
    "target's source"
)


def head_of(facts: Facts) -> tuple[Family, Facts] | None:
    """The family of the head in a ``config.json``, and its usual facts; None for other models.

    UnsupportedModelError names a head of another kind.
    """
    refuse_others(facts, HEADS)
    head = next((family for family in HEADS if describes(facts, family)), None)
    return None if head is None else (head, head.usual(facts))


def model_of(facts: Facts) -> tuple[Family, Facts]:
    """The family of the model in a ``config.json``, and its usual facts with defaults.

    In multimodal models the facts of the text model are in ``text_config``. Of a head it is the family of its
    layers.

    Raises:
        ModelFileError: ``text_config`` or ``model_type`` is malformed.
        UnsupportedModelError: another family.
    """
    head = head_of(facts)
    if head is not None:
        return _of_type(head[1]), head[1]
    text = facts.section("text_config")
    off: dict[str, object] = dict.fromkeys({*facts.keys, *text.keys}.intersection(_CAPS))  # null is no cap
    if text.keys:
        facts = text.over({key: facts.value(key) for key in facts.keys})
    family = _of_type(facts)
    facts = family.usual(facts).over({"rms_norm_eps": 1e-6, **family.defaults, **off})
    if family.dense is not None and facts.integer("num_local_experts") == 0:
        family = family.dense
    return family, facts


def read_config(facts: Facts) -> Transformer:
    """The config of a checkpoint with this ``config.json``.

    Raises:
        ModelFileError: facts are missing or malformed.
        UnsupportedModelError: another family, or a feature that edgespec lacks.
    """
    family, facts = model_of(facts)
    return config_of(facts, family)


def in_gguf(architecture: object, where: str, tensors: Iterable[str] = ()) -> Family:
    """The family of this name in GGUF files, also of a head; UnsupportedModelError for others.

    The error names those of the file's ``tensors`` that no family has.
    """
    family = of_gguf(architecture)
    if family is not None:
        return family
    names = ", ".join(family.gguf for family in MODELS if family.gguf)
    how = f"edgespec exports these architectures from GGUF: {names}."
    tables = (table for family in MODELS for table in (family.outer, family.layer, family.mtp))
    common = {name for table in tables for _, named in table.values() for name in named.split()}
    new = {re.sub(r"^blk\.\d+\.", "", name) for name in tensors}.difference(common)
    raise unknown(where, str(architecture), how, new=new)


def of_gguf(architecture: object) -> Family | None:
    """The same, but None for others."""
    name = str(architecture)
    return next((family for family in (*MODELS, *HEADS) if family.gguf and family.gguf == name), None)


def named(name: str) -> Family | None:
    """The first family that manifests call ``name``; None without one."""
    return next((family for family in MODELS if family.name == name), None)


def tower_of(facts: Facts, ids: Callable[[], Mapping[str, int]]) -> Tower | None:
    """The tower in a ``config.json``; None without one, and for those that edgespec does not run.

    ``ids`` returns those of the special tokens.
    """
    kind = facts.section("vision_config").value("model_type")
    return next((family.read(facts, ids()) for family in TOWERS if kind in family.hub), None)


def has_tower_in_gguf(architecture: object) -> bool:
    """Whether models that GGUF files call ``architecture`` may have a tower that edgespec runs."""
    return any(architecture in family.models for family in TOWERS)


def tower_named(name: object) -> type[Tower] | None:
    """The towers that manifests call ``name``; None without such."""
    return next((family.tower for family in TOWERS if family.name == name), None)


def decoder_named(name: object) -> type[Transformer] | None:
    """The decoders that manifests call ``name``; None without such."""
    families = (*MODELS, *HEADS, DFLASH2, ASSISTANT, MTP_LAYER, LATENT_MTP, NEMOTRON_MTP)
    return next((family.decoder for family in families if family.name == name), None)


def _of_type(facts: Facts) -> Family:
    model_type = facts.text("model_type", "")
    known = {name: family for family in MODELS for name in family.hub}
    if model_type not in known:
        how = (
            f"edgespec exports these model types from Hugging Face checkpoints: {', '.join(known)}. Other "
            "decoders go through Optimum: edgespec export SOURCE -o OUT --via optimum."
        )
        common = {*KEYS, *(key for family in MODELS for key in (*family.keys, *family.defaults))}
        new = {key for key in facts.keys if facts.value(key) not in (None, False)}.difference(common)
        activation = facts.value("hidden_act")
        new |= (
            {f"hidden_act {activation!r}"} if activation not in (None, "silu", "gelu_pytorch_tanh") else set()
        )
        raise unknown(facts.where, model_type, how, new=new, kind="keys")
    return known[model_type]
