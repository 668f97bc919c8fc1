"""Llama 2 and 3, and what others trained in its form; Mistral, whose window GGUF files do not state."""

from edgespec_models.families.family import Family

LLAMA = Family(name="llama", hub=("llama",), gguf="llama", neighbours=True)
MISTRAL = Family(name="mistral", hub=("mistral",), windowed=True)
