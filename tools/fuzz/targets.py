"""All targets, by name; what one needs is imported when it is asked for."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tools.fuzz.rules import Target

__all__ = ["TARGETS", "target_of"]

TARGETS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gguf": "checkpoints",
        "safetensors": "checkpoints",
        "tokenizer": "vocabularies",
        "sentencepiece": "vocabularies",
        "bundle": "bundles",
        "foreign": "bundles",
        "onnx": "bundles",
        "template": "texts",
        "grammar": "texts",
        "tools": "texts",
        "exchange": "histories",
        "history": "histories",
        "server": "serving",
    }
)
"""The module of each."""


def target_of(name: str) -> "Target":
    """The target ``name``."""
    found: Target = importlib.import_module(f"tools.fuzz.{TARGETS[name]}").TARGETS[name]
    return found
