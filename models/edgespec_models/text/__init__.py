"""Text to tokens and back: tokenizers, chat templates, and text that comes token by token.

Imports the room files.
"""
