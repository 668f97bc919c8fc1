"""Decoders as functions over operations.

A decoder (:mod:`.transformer`, :mod:`.heads`) is written once, from the tokens to the logits. A backend
(:mod:`.operations`) computes its operations in a medium; :mod:`.record` writes down what they need.
"""
