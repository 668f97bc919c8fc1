"""Clients at once: `python -m tools.clients URL... --prompts FILE [--clients 1] [--clients 4] [--tokens 64]`.

Asks OpenAI-compatible servers on this machine (`edgespec serve`, llama.cpp's `llama-server`) for streamed
chats, greedily, so many clients at a time, each of which takes the next prompt when its answer has ended.
Servers take turns. Prompts begin with the number of clients, so that none is in a cache of the run before.

Prints tokens a second over all, the time to the first token, and the gaps between pieces: the median, and the
longest of a hundred. A piece may have several tokens, whose number the server's usage says.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from edgespec.measuring.prompts import load_prompts
from edgespec_models.errors import RequestError
from tools.arguments import arguments

LOCAL = {"127.0.0.1", "localhost", "::1"}
WAIT_S = 600


@dataclass
class Run:
    """What one run showed, in seconds."""

    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def ask(url: str, model: str, prompt: str, tokens: int, run: Run) -> None:
    """One streamed chat; ``run`` is told."""
    body = {
        "model": model, "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    before = began = perf_counter()
    used, first = 0, True
    with urlopen(request, timeout=WAIT_S) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            used = (event.get("usage") or {}).get("completion_tokens", used)
            piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if piece:
                now = perf_counter()
                (run.firsts if first else run.gaps).append(now - (began if first else before))
                before, first = now, False
    run.tokens += used


def measure(url: str, prompts: Sequence[str], clients: int, tokens: int) -> Run:
    """So many clients, until all prompts are answered."""
    run, left, errors = Run(), list(reversed(prompts)), list[BaseException]()

    def client() -> None:
        try:
            while left and not errors:
                ask(url, model, left.pop(), tokens, run)
        except (OSError, IndexError, KeyError, ValueError) as error:
            errors.append(error)

    with urlopen(f"{url}/v1/models", timeout=WAIT_S) as response:
        model = json.load(response)["data"][0]["id"]
    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    began = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise RequestError(f"{url} failed: {errors[0]!r}; is a server of chats listening there?")
    run.seconds = perf_counter() - began
    return run


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, "urls...", prompts=Path, clients=[int], tokens=64, limit=16)
    if any(urlsplit(url).hostname not in LOCAL for url in options.urls):
        raise SystemExit(f"{options.urls} are to be on this machine: http://127.0.0.1:PORT")
    prompts = [prompt.turns[0] for prompt in load_prompts(options.prompts)[: options.limit]]
    print("| server | clients | tokens/s | first token, s | gap, ms | longest of 100, ms | tokens |")
    print("|---|---|---|---|---|---|---|")
    for clients in options.clients or [1, 2, 4, 8]:
        numbered = [f"({clients}) {prompt}" for prompt in prompts]
        for url in options.urls:
            run = measure(url, numbered, clients, options.tokens)
            gaps = sorted(run.gaps)
            longest = quantiles(gaps, n=100)[-1] if len(gaps) > 1 else 0.0
            print(
                f"| {url} | {clients} | {run.tokens / run.seconds:.1f} | {median(run.firsts):.2f} | "
                f"{median(gaps) * 1e3:.0f} | {longest * 1e3:.0f} | {run.tokens} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
