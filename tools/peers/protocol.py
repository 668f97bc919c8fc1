"""What compare.py and its workers say to each other: one JSON object a line, on stdin and stdout.

A worker loads its model, writes ``{"ready": FACTS}``, then answers every request line with a reply line until
its stdin closes. Between requests it waits in a read, so it burns no CPU. What goes wrong is an answer too:
``{"error": TEXT}``, after which the worker ends. It knows nothing of the others.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Request:
    """Continue ``prompt`` greedily by exactly ``max_new_tokens`` tokens, end-of-text ones ignored.

    Attributes:
        prompt: the text as the model reads it; control tokens spelled out are control tokens.
        max_new_tokens: how many tokens to make.
        chat: the user's message that ``prompt`` is the chat template of; None for a plain text. For runtimes
            that apply templates themselves: the tokens must come out the same.
        options: what makes this mode, for runtimes that take it by request.
    """

    prompt: str
    max_new_tokens: int
    chat: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came out.

    Attributes:
        prompt_tokens: how many tokens the prompt was.
        tokens: the new ones, in the target's vocabulary.
        text: the same as text.
        tokens_per_s: tokens made after the first, which prefill gives, over the seconds they took.
        drafted: proposed tokens; None where the runtime does not say.
        accepted: proposed tokens that were kept.
        request_s: seconds of the whole request, prefill included; :func:`serve` measures them.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    tokens_per_s: float
    drafted: int | None = None
    accepted: int | None = None
    request_s: float = 0.0


@contextmanager
def reporting() -> Iterator[TextIO]:
    """Keep stdout for the protocol, and let an exception be the worker's last line there.

    Whatever else prints to stdout, native code included, goes to stderr.
    """
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        yield channel
    except Exception as error:
        _say(channel, {"error": f"{type(error).__name__}: {error}"})
        raise


def serve(channel: TextIO, facts: Mapping[str, Any], generate: Callable[[Request], Reply]) -> None:
    """Say what was loaded, then answer requests until stdin closes."""
    _say(channel, {"ready": facts})
    for line in sys.stdin:
        request = Request(**json.loads(line))
        start = time.perf_counter()
        reply = generate(request)
        _say(channel, asdict(replace(reply, request_s=time.perf_counter() - start)))


def _say(channel: TextIO, message: Mapping[str, Any]) -> None:
    print(json.dumps(message), file=channel, flush=True)
