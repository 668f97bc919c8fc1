"""Qwen2 and Qwen2.5."""

from edgespec_models.families.family import Family

QWEN2 = Family(name="qwen2", hub=("qwen2",), gguf="qwen2")
