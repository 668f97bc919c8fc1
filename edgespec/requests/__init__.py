"""Requests: their options, prompts, streams and results, and the thread that answers them.

This room imports decoding, drafting, histories and loading. The engine, measuring, the server and the
commands import it.
"""
