"""What compare.py and its workers say to each other: one JSON object a line, on stdin and stdout.

A worker loads its model, writes ``{"ready": NAME}``, then answers every request line with a reply line until
its stdin closes. Between requests it waits in a read, so it burns no CPU. It knows nothing of the others.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TextIO

__all__ = ["Reply", "Request", "reserve_stdout", "serve"]


@dataclass(frozen=True, slots=True)
class Request:
    """Continue ``prompt`` greedily by exactly ``max_new_tokens`` tokens, end-of-text ones ignored."""

    prompt: str
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What came out. ``tokens_per_s`` counts from the first new token to the last: prefill is not in it."""

    prompt_tokens: int
    new_tokens: int
    tokens_per_s: float
    text: str


def reserve_stdout() -> TextIO:
    """Keep stdout for the protocol; whatever else prints there, native code included, goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def serve(name: str, channel: TextIO, generate: Callable[[Request], Reply]) -> None:
    """Answer requests until stdin closes."""
    print(json.dumps({"ready": name}), file=channel, flush=True)
    for line in sys.stdin:
        reply = generate(Request(**json.loads(line)))
        print(json.dumps(asdict(reply)), file=channel, flush=True)
