"""What decoders are made of: operations, which backends compute, and the decoder of most families.

A decoder is a class of facts whose ``decode`` is written once, from the tokens to the logits. Backends are in
:mod:`edgespec_models.graphs`; one more only records what a decoder needs
(:mod:`edgespec_models.decoders.record`).
"""
