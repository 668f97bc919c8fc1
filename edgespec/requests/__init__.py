"""What an app asks, and what it gets: options, prompts, answers, streams, and the thread that writes them.

Imports decoding, drafting, histories and loading; nothing of the command line or the server.
"""
