"""What an app asks and what it gets: options, prompts, streams, results, and the thread that writes answers.

Imports decoding, drafting, histories and loading; the engine, measuring, the server and commands import it.
"""
