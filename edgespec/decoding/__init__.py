"""The decoding loop, and all that decides which tokens an answer has: verification, sampling and grammars.

It asks a source for drafts and knows none of them; it imports no other room.
"""
