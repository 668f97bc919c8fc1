"""Checkpoints in, bundles out."""
