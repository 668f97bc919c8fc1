"""Alignment: a drafter trained on what its target writes, kept as a small change of its weights.

Imports sources. Only the decoder and the training need PyTorch (extra ``align``).
"""
