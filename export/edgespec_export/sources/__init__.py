"""Checkpoints, whatever files they lie in: GGUF files, Hugging Face directories, and their tokenizers.

Imports no other room.
"""
