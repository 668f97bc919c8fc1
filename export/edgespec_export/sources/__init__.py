"""Checkpoints, whatever files they lie in: GGUF, Hugging Face directories, and their tokenizers.

Imports no other room.
"""
