"""Alignment: training of a drafter on its target's answers; the result is a small change of its weights.

Imports sources. Only the decoder and the training need PyTorch (extra ``align``).
"""
