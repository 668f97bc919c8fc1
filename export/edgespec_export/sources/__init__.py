"""Checkpoints in GGUF files and Hugging Face directories, and their tokenizers.

Imports no other room.
"""
