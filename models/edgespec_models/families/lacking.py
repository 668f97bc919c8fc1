"""Families that edgespec lacks, and what to use instead."""

import re
from collections.abc import Collection, Mapping
from typing import Final

from edgespec_models.errors import UnsupportedModelError

_EXPERTS = "experts in this family's form"
_MAMBA = "Mamba layers"
_VISION = "images (M-RoPE, vision layers)"
_LACKING: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "Qwen3-30B-A3B": (_EXPERTS, ("qwen2moe", "qwen2_moe", "olmoe")),
    "GLM-4.7-Flash": ("latent attention in this family's form", ("deepseek_v2", "deepseek_v3")),
    "gpt-oss-20b or a dense Llama or Mistral": (_EXPERTS, ("mixtral", "llama4", "llama4_text")),
    "Phi-4-mini": (_EXPERTS, ("phimoe",)),
    "llama.cpp's file of gpt-oss": ("experts in ollama's own form", ("gptoss",)),
    "Qwen3.6-35B-A3B": ("delta nets in this family's form", ("qwen3next", "qwen3_next")),
    "Qwen3.5 of its size": (_MAMBA, ("mamba", "mamba2", "falcon-h1", "falcon_h1", "jamba")),
    "LFM2 of its size": ("RWKV layers", ("rwkv7",)),
    "the Qwen3 of its size": (_VISION, ("qwen2vl", "qwen2_vl", "qwen2_5_vl", "qwen3vl", "qwen3_vl")),
    "Gemma 4 of its size": ("AltUp and Laurel", ("gemma3n", "gemma3n_text")),
    "Phi-4-mini-instruct": ("parallel sublayers", ("phi2", "phi")),
    "a Llama of its size": ("parallel sublayers", ("command-r", "cohere", "cohere2", "falcon")),
}
"""By a model that works: the lacking features of similar models, under their names in GGUF and on the hub."""


_USELESS: Final = re.compile(
    r"^_|architectures|auto_map|bias|cache|dropout|dtype|hidden_act(ivation)?$|init|is_|label|^layer_types|"
    r"model_type|name|output_|pretrain|problem|quantiz|return_|rope|tie_|_token|version|vocab_size"
)
"""Keys of a ``config.json`` that do not say what a decoder computes, or that families share."""


def unknown(
    where: str, name: str, known: str, *, new: Collection[str] = (), kind: str = "tensors"
) -> UnsupportedModelError:
    """The error for an architecture outside the table.

    ``known`` says how it may be exported instead. No family has ``new``, which are some of its ``kind``
    (tensors, keys).
    """
    near = "; ".join(
        f"it needs {missing}, which edgespec lacks; use {model} instead"
        for model, (missing, names) in _LACKING.items()
        if name in names
    )
    few = [word for word in sorted(new) if not _USELESS.search(word)]
    rest = f" and {len(few) - 5} more" if len(few) > 5 else ""
    has = f". No known family has its {kind} {', '.join(few[:5])}{rest}" if few and not near else ""
    return UnsupportedModelError(
        f"{where} is of the architecture {name!r}{near and f': {near}'}{has}. {known}"
    )
