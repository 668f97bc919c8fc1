"""The life of a request: its sources begin when it is read and end with it, once, however that comes."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import pytest

from edgespec.asking.request import Request
from edgespec.decoding.draft import Clock, Round
from edgespec.drafting.policy import Policy
from edgespec.drafting.pricing import Guard, Pricing
from edgespec.running.stream import Stream
from edgespec_models.errors import RequestError
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.predictions import Predictions
from tests.kit.models import answering
from tests.kit.toy import Silent, ToySession, settle

NAMES = ["free", "model"]


@dataclass
class _Source(Silent):
    """Tells what happens to it; fails where it is told to."""

    name: str
    log: list[str]
    fails: str = ""
    observed: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.log.append(f"{self.name} begins")

    def observe(self, round_: Round) -> None:
        self.observed()
        if self.fails == "observe":
            raise RuntimeError(f"{self.name} fails")

    def close(self) -> None:
        self.log.append(f"{self.name} is closed")
        if self.fails == "close":
            raise RuntimeError(f"{self.name} fails")


@dataclass
class _Requests:
    """Streams whose sources all tell :attr:`log`."""

    log: list[str] = field(default_factory=list)
    fails: str = ""
    cancelled: bool = False
    session: ToySession = field(default_factory=lambda: ToySession.markov(0, 404))
    clock: Clock = perf_counter
    observed: Callable[[], None] = lambda: None

    def stream(self) -> Stream:
        request = Request(max_new_tokens=40, cancelled=lambda: self.cancelled)
        return answering(self.session, self._begin, request, self.clock, max_draft=4)

    def _begin(self) -> Policy:
        free, model = (_Source(name, self.log, self.fails, self.observed) for name in NAMES)
        pricing = Pricing(CostCurve({1: 1.0}))
        return Policy(free, model, pricing=pricing, guard=Guard(pricing))


def _read(requests: _Requests) -> None:
    assert requests.stream().run().finish_reason == ("cancelled" if requests.cancelled else "length")


def _failing(requests: _Requests) -> None:
    with pytest.raises(RuntimeError, match="fails"):
        requests.stream().run()


class _Broken(ToySession):
    def predict(self, tokens: Sequence[int]) -> Predictions:
        raise RuntimeError("a pass fails")


def _told_to_end(requests: _Requests) -> None:
    stream = requests.stream()
    next(stream)
    stream.cancel()
    stream.cancel()
    assert stream.run() is stream.result


def _left(requests: _Requests) -> None:
    for _ in requests.stream():
        break
    gc.collect()
    settle()


@pytest.mark.parametrize(
    ("end", "how"),
    [
        *((_read, {}), (_told_to_end, {}), (_left, {})),
        (_failing, {"fails": "predict"}),
        *((_read, {"fails": where}) for where in ("observe", "close")),
    ],
)
def test_however_a_request_ends_each_source_is_closed_once(
    end: Callable[[_Requests], None], how: dict[str, Any]
) -> None:
    requests = _Requests(**how)
    if requests.fails == "predict":
        requests.session = _Broken.markov(0, 404)
    end(requests)
    assert sorted(requests.log[:2]) == [f"{name} begins" for name in NAMES]
    order = NAMES if requests.fails == "observe" else ("model", "free")
    assert requests.log[2:] == [f"{name} is closed" for name in order]


def test_a_stream_that_nobody_reads_or_that_is_cancelled_begins_nothing() -> None:
    requests = _Requests()
    unread = requests.stream()
    requests.stream().cancel()
    stream = requests.stream()
    del stream
    gc.collect()
    settle()
    assert requests.log == []
    with pytest.raises(RequestError, match="not finished"):
        _ = unread.result
    requests.cancelled = True
    _read(requests)
    assert requests.log == []


def test_decoding_is_charged_the_work_between_rounds() -> None:
    now = [0.0]

    def learn() -> None:
        now[0] += 1.0  # each of two, in each round

    requests = _Requests(clock=lambda: now[0], observed=learn)
    stats = requests.stream().run().stats
    assert stats.rounds > 1
    assert (stats.ttft_s, stats.decode_s) == (2.0, 2.0 * (stats.rounds - 1))
