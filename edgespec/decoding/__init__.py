"""What decides the tokens of an answer: sampling, grammars and schemas; and what a draft is.

This room imports no other room.
"""
