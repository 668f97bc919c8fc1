"""A server's counters for Prometheus, and its log: a line for each request, without any of its text."""

import logging
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.answering.results import GenerationStats

CLIENT_LEFT = 499
"""Status of requests whose client left. Other servers use it too; HTTP does not define it."""
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LOG = logging.getLogger("edgespec.serve")


@dataclass(slots=True)
class RequestCount:
    """The figures of one request.

    ``stats`` has the statistics of each answer that ended; ``prompt_tokens`` counts texts without answers.
    ``left`` says whether the client left first.
    """

    tokens: int = 0
    prompt_tokens: int = 0
    stats: list[GenerationStats] = field(default_factory=list)
    left: bool = False


def count_of(request: Request) -> RequestCount:
    """The count of a request that :meth:`Metrics.watch` handles."""
    count: RequestCount = request.scope["edgespec.count"]
    return count


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_SECONDS)
        self._requests = counter("edgespec_requests", "Requests by path and status.", ("path", "status"))
        self._seconds = histogram(
            "edgespec_request_seconds", "Seconds of a request, waiting included.", ("path",)
        )
        self._running = Gauge(
            "edgespec_requests_in_progress", "Requests that wait or run.", registry=registry
        )
        self._tokens = counter("edgespec_tokens", "Tokens generated.")
        self._prompt_tokens = counter("edgespec_prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = counter(
            "edgespec_cached_prompt_tokens", "Tokens of prompts that the KV cache held."
        )
        self._drafted = counter("edgespec_drafted_tokens", "Tokens proposed, by source.", ("source",))
        self._accepted = counter("edgespec_accepted_tokens", "Proposed tokens kept, by source.", ("source",))
        self._passes = counter(
            "edgespec_target_passes",
            "Passes of the target after prefill, counted for each request that shares one.",
        )
        self._decoding = counter(
            "edgespec_decode_seconds", "Seconds of decoding after the first token, of each request."
        )
        self._first = histogram(
            "edgespec_time_to_first_token_seconds", "Seconds to the first token, prefill included."
        )

    def text(self) -> bytes:
        """All counters in Prometheus' text format."""
        return generate_latest(self._registry)

    async def watch(
        self, app: ASGIApp, paths: Collection[str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Have ``app`` answer a request, and count and log it when it ends.

        ``paths`` are counted by name, and all others as one.
        """
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        count, started, status = RequestCount(), perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope["edgespec.count"] = count
        working = scope["method"] == "POST"
        self._running.inc(working)
        try:
            async with AsyncExitStack() as scope["edgespec.held"]:  # models, for as long as it runs
                await app(scope, receive, watched)
        finally:
            self._running.dec(working)
            status, seconds = CLIENT_LEFT if count.left else status, perf_counter() - started
            path = scope["path"] if scope["path"] in paths else "other"
            self._requests.labels(path, str(status)).inc()
            self._seconds.labels(path).observe(seconds)
            self._over(scope, status, seconds, count)

    def _over(self, scope: Scope, status: int, seconds: float, count: RequestCount) -> None:
        self._tokens.inc(count.tokens)
        self._prompt_tokens.inc(count.prompt_tokens)
        line = f"{scope['method']} {quote(scope['path'])[:200]} {status} {seconds * 1e3:.0f} ms"
        if count.tokens:
            line += f" {count.tokens} tokens"
        decoded = sum(stats.decode_tokens for stats in count.stats)
        decoding = sum(stats.decode_s for stats in count.stats)
        if decoding > 0:
            line += f" {decoded / decoding:.1f} tokens/s"
        for stats in count.stats:
            self._answered(stats)
        _LOG.info("%s", line)

    def _answered(self, stats: GenerationStats) -> None:
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._cached_tokens.inc(stats.cached_tokens)
        self._passes.inc(stats.rounds)
        self._decoding.inc(stats.decode_s)
        self._first.observe(stats.ttft_s)
        for name, source in stats.by_source.items():
            self._drafted.labels(name).inc(source.drafted)
            self._accepted.labels(name).inc(source.accepted)
