"""The decoding loop, and what decides the tokens of an answer: verification, sampling and grammars.

The loop asks a source for drafts and knows no kind of source. This room imports no other room.
"""
