"""The decoding loop, with all that decides which tokens an answer has: verification, sampling and grammars.

Imports no other room: whoever drafts imports this one.
"""
