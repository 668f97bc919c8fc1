"""Load a running server with many clients at once: is every question answered, and does nobody starve?

    python -m tools.serve_load http://127.0.0.1:8642 --clients 50 --seconds 120

Each client streams one short answer after another, and asks again a second later where it is told that too
many wait. An answer has to end as OpenAI's format says; greedy answers to one question have to be equal.
"""

import argparse
import http.client
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

QUESTIONS = ("Name a colour.", "What is 7 times 8?", "Add two numbers in Python.")
HEADERS = {
    "Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('EDGESPEC_API_KEY', '')}"
}  # fmt: skip


@dataclass
class Client:
    """What one client saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    tokens: int = 0


def ask(address: str, model: str, question: str, tokens: int) -> tuple[str, float, int]:
    """The streamed answer, seconds to its first piece, and its tokens; HTTP's status where it is refused."""
    connection = http.client.HTTPConnection(address, timeout=600)
    body: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": question}], "stream": True,
        "max_tokens": tokens, "stream_options": {"include_usage": True},
    }  # fmt: skip
    started, first, text, written = monotonic(), 0.0, "", 0
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), HEADERS)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(str(response.status))
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                return text, first, written
            chunk = json.loads(data) if data else {"choices": []}
            for choice in chunk["choices"]:
                text += choice["delta"].get("content", "")
                first = first or (monotonic() - started if text else 0.0)
            written = (chunk.get("usage") or {}).get("completion_tokens", written)
        raise ValueError("cut off")
    finally:
        connection.close()


def run(client: Client, number: int, options: argparse.Namespace, answers: dict[str, set[str]]) -> None:
    """Ask until the time is over."""
    address, ends = urlsplit(options.url).netloc, monotonic() + options.seconds
    while monotonic() < ends:
        question, started = QUESTIONS[number % len(QUESTIONS)], monotonic()
        try:
            text, first, written = ask(address, options.model, question, options.tokens)
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            client.outcomes[str(error) or type(error).__name__] += 1
            sleep(1.0)
            continue
        client.outcomes["answered"] += 1
        client.first_s.append(first)
        client.whole_s.append(monotonic() - started)
        client.tokens += written
        answers.setdefault(question, set()).add(text)


def quantiles(values: Sequence[float]) -> str:
    """Median, 95th percentile and most, in seconds."""
    ordered = sorted(values) or [0.0]
    points = (0.5, 0.95, 1.0)
    return " / ".join(f"{ordered[min(len(ordered) - 1, int(p * len(ordered)))]:.2f} s" for p in points)


def report(clients: Sequence[Client], answers: dict[str, set[str]], seconds: float) -> bool:
    """Print how it went; whether something was wrong."""
    outcomes = sum((client.outcomes for client in clients), Counter[str]())
    counts = [client.outcomes["answered"] for client in clients]
    rate = sum(client.tokens for client in clients) / seconds
    print(f"{len(clients)} clients, {seconds:.0f} s: {dict(outcomes)}")
    print(f"answers a client: {min(counts)} to {max(counts)}; {rate:.1f} tokens/s")
    print(f"first piece after (median / 95 % / most): {quantiles([s for c in clients for s in c.first_s])}")
    print(f"whole answer after: {quantiles([s for c in clients for s in c.whole_s])}")
    differing = sum(len(texts) > 1 for texts in answers.values())
    print(f"questions with differing answers: {differing} of {len(answers)}")
    lost = sum(count for outcome, count in outcomes.items() if outcome not in ("answered", "429"))
    return lost > 0 or min(counts) == 0 or differing > 0


def main() -> None:
    """Load the server; exit code 1 if an answer was lost, two differ, or a client starved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="for example http://127.0.0.1:8642")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=16, help="most tokens of an answer")
    options = parser.parse_args()
    listing = http.client.HTTPConnection(urlsplit(options.url).netloc, timeout=30)
    listing.request("GET", "/v1/models", headers=HEADERS)
    options.model = json.load(listing.getresponse())["data"][0]["id"]
    clients = [Client() for _ in range(options.clients)]
    answers: dict[str, set[str]] = {}
    threads = [threading.Thread(target=run, args=(c, n, options, answers)) for n, c in enumerate(clients)]
    started = monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(report(clients, answers, monotonic() - started))


if __name__ == "__main__":
    main()
