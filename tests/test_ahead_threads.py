"""Drafting ahead with real threads: the same output, drafts ready in time, nothing left behind."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgespec
from edgespec import LoadOptions, Model
from edgespec.decoding.draft import Step
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.verifier import Verifier
from edgespec.drafting.ahead import Ahead, Beside
from edgespec.drafting.bridge import Bridge, ByteBridge
from edgespec.drafting.copies import CopyDrafter
from edgespec.drafting.ngram import ContextTree
from edgespec.drafting.pricing import Pricing
from edgespec.drafting.reading import Reader
from edgespec.requests.request import Request, RequestOptions
from edgespec.requests.stream import Stream
from edgespec_runtimes.cost import CostCurve
from tests.kit.drafters import (
    GREEDY,
    PROMPT,
    QUICK,
    VOCAB,
    ahead_of,
    draft_of,
    mixed,
    model_of,
    plain,
    policy_of,
    reader_of,
    stream_of,
    tokenizer,
)
from tests.kit.models import side_of
from tests.kit.toy import (
    COLUMNS,
    F32,
    INT4,
    LLAMA,
    QWEN,
    NextLogits,
    ToySession,
    decode,
    markov_logits,
    tiny_bundle,
)

NEXT_LOGITS = markov_logits(0, VOCAB, scale=200.0)
LONG = CostCurve({1: 1000.0, 16: 1000.1})
"""Passes so long that a drafter is never told to stop for time."""
NAME = "edgespec-ahead"


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def _is_ahead() -> bool:
    return threading.current_thread().name == NAME


class _Small(ToySession):
    """A drafter's session that knows who asks it, and that nobody else does meanwhile."""

    def __init__(self, next_logits: NextLogits, vocab_size: int = VOCAB) -> None:
        super().__init__(next_logits, vocab_size)
        self.read_ahead, self.waited_for = 0, 0
        self._busy = threading.Lock()
        self.reserve(1000)

    def forward(self, tokens: Sequence[int]) -> F32:
        assert self._busy.acquire(blocking=False), "two threads in one session"
        try:
            logits = super().forward(tokens)
        finally:
            self._busy.release()
        if _is_ahead():
            self.read_ahead += 1
        else:
            self.waited_for += 1
        return logits


class _Slow(ToySession):
    """A target whose pass takes until the drafter has nothing more to read beside it."""

    def forward(self, tokens: Sequence[int]) -> F32:
        for thread in _threads():
            thread.join(60)
        return super().forward(tokens)


def _ahead(reader: Reader, small: ToySession, bridge: Bridge | None = None) -> Ahead:
    return ahead_of(model_of(small, bridge, reader=reader), reader, Beside(QUICK))


def _written(
    target: ToySession, drafter: Ahead, count: int, max_draft: int = 4
) -> Iterator[tuple[Step, list[int]]]:
    """The rounds of a request that drafts ahead, each with all tokens so far."""
    tokens = list(PROMPT)
    verify = Verifier(GREEDY)
    prices = Pricing(LONG).at()
    for step in decode(
        target, drafter, verify, tokens, max_new_tokens=count, max_draft=max_draft, prices=prices
    ):
        yield step, tokens
    drafter.close()
    assert not _threads()


def test_the_next_draft_is_there_when_verification_ends() -> None:
    small = _Small(NEXT_LOGITS)
    reader = reader_of(small)
    rounds = list(_written(_Slow(NEXT_LOGITS, VOCAB), _ahead(reader, small), 50))
    assert small.waited_for == 4  # for the first draft alone: the prompt and three steps
    assert all(step.accepted == 4 for step, _ in rounds[1:9])
    assert rounds[-1][1] == plain(NEXT_LOGITS, 50)
    assert reader.drafted_ahead >= reader.used_ahead >= 5 * 8


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    right=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    max_draft=st.integers(1, 9),
    count=st.integers(1, 40),
    with_ngrams=st.booleans(),
)
def test_output_is_that_of_plain_decoding(
    seed: int, right: float, temperature: float, max_draft: int, count: int, with_ngrams: bool
) -> None:
    next_logits = markov_logits(seed, VOCAB)
    params = SamplingParams(temperature=temperature, seed=seed if temperature else None)
    small = _Small(mixed(next_logits, markov_logits(seed + 1, VOCAB), right))
    pricing, tokens = Pricing(LONG), list(PROMPT)
    reader = reader_of(small)
    source = _ahead(reader, small)
    drafter = policy_of(CopyDrafter(ContextTree()), source, pricing=pricing) if with_ngrams else source
    target = ToySession(next_logits, VOCAB)
    limits: dict[str, Any] = {"max_new_tokens": count, "max_draft": max_draft, "prices": pricing.at()}
    for _ in decode(target, drafter, Verifier(params), tokens, **limits):
        assert target.cache == tokens[:-1]
    drafter.close()
    assert tokens == plain(next_logits, count, params)
    assert reader.used_ahead <= reader.drafted_ahead == small.read_ahead


def test_across_vocabularies() -> None:
    large, other = tokenizer("byte"), tokenizer("small byte")
    script = b"the quick brown fox jumps over the lazy dog. "
    before = other.encode("go on: ")
    bridge = ByteBridge(large, other, prompt_length=3, drafter_prompt=before)
    small = ToySession.writing(other, script, len(before))
    reader = reader_of(small)
    drafter = _ahead(reader, small, bridge)
    *_, (_, tokens) = _written(ToySession.writing(large, script, 3), drafter, 90, max_draft=5)
    assert large.bytes_of(tokens[3:]) == (script * 9)[: len(large.bytes_of(tokens[3:]))]
    assert reader.drafted_ahead > 0


class _Held(_Small):
    """Reading ahead, it does not come back from a step until it is let go; or it fails."""

    def __init__(self, next_logits: NextLogits, error: BaseException | None = None) -> None:
        super().__init__(next_logits)
        self.entered, self.let_go, self.error = threading.Event(), threading.Event(), error

    def let_go_when(self, happened: threading.Event) -> None:
        assert happened.wait(60)
        self.let_go.set()

    def forward(self, tokens: Sequence[int]) -> F32:
        if _is_ahead():
            self.entered.set()
            if self.error is not None:
                raise self.error
            assert self.let_go.wait(60)
        return super().forward(tokens)


class _After(ToySession):
    """A target whose pass ends when the drafter is in the middle of a step."""

    held: _Held

    def forward(self, tokens: Sequence[int]) -> F32:
        if len(tokens) > 1 and _threads():
            assert self.held.entered.wait(60)
        return super().forward(tokens)


class _Request:
    """A request whose drafter is held, or fails."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.pricing, self.beside = Pricing(LONG), Beside(QUICK)
        self.held, self.target = _Held(NEXT_LOGITS, error), _After(NEXT_LOGITS, VOCAB)
        self.target.held = self.held
        self.reader = reader_of(self.held)

    def drafter(self) -> Ahead:
        return ahead_of(model_of(self.held, reader=self.reader), self.reader, self.beside)

    def stream(self, cancelled: Callable[[], bool] = lambda: False) -> Stream:
        request = Request(max_new_tokens=40, cancelled=cancelled)
        return stream_of(self.target, self.drafter(), self.pricing, request)


def test_a_request_that_is_cancelled_waits_for_the_step_that_runs() -> None:
    it = _Request()

    def cancelled() -> bool:
        run = it.beside._run
        if run is not None and it.held.entered.is_set():
            threading.Thread(target=it.held.let_go_when, args=(run.stop,)).start()
        return it.held.entered.is_set()

    result = it.stream(cancelled).run()
    assert result.finish_reason == "cancelled"
    assert not _threads()
    assert it.held.read_ahead == 1
    assert [*PROMPT, *result.tokens] == plain(NEXT_LOGITS, len(result.tokens))
    assert it.held.predict_next(PROMPT).best(0) == NEXT_LOGITS(PROMPT).argmax()


@pytest.mark.parametrize("error", [RuntimeError("broken device"), KeyboardInterrupt()])
def test_what_fails_beside_a_pass_ends_drafting_and_interrupts_end_the_answer(
    error: BaseException,
) -> None:
    it = _Request(error)
    stream = it.stream()
    with suppress(KeyboardInterrupt):
        stream.run()
    assert not _threads()
    tokens = [*PROMPT, *stream.result.tokens]
    fails = isinstance(error, RuntimeError)
    assert stream.result.finish_reason == ("length" if fails else "error")
    assert ("broken device" in str(stream.result.stats.speculation_off_reason)) == fails
    assert tokens == plain(NEXT_LOGITS, len(tokens) - 3)
    assert len(tokens) >= 3 + 5 and it.target.cache == tokens[:-1]
    it.held.error, it.held.let_go = None, threading.Event()
    it.held.let_go.set()
    pricing = Pricing(LONG)  # the request's knows by now that its passes take no time
    it.reader = reader_of(it.held)
    fresh, expected = it.drafter(), plain(NEXT_LOGITS, len(tokens) + 1)[len(tokens) :]
    assert draft_of(fresh, tokens, 4, prices=pricing.at()).tokens == tuple(expected)
    fresh.close()


def test_what_fails_where_no_draft_is_wanted_any_more_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    it = _Request(RuntimeError("broken device"))
    result = it.stream(it.held.entered.is_set).run()
    assert result.finish_reason == "cancelled"
    assert "broken device" in caplog.text
    assert not _threads()


def test_an_interrupt_during_the_pass_ends_the_thread_too() -> None:
    it = _Request()
    it.held.let_go.set()
    plain_pass = it.target.forward

    def interrupted(tokens: Sequence[int]) -> F32:
        if len(tokens) > 2 and it.target.cache:  # not the prompt
            assert it.held.entered.wait(60)
            raise KeyboardInterrupt
        return plain_pass(tokens)

    it.target.forward = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        it.stream().run()
    assert not _threads()


def test_a_stream_that_is_left_ends_its_thread_when_it_is_closed() -> None:
    it = _Request()
    it.held.let_go.set()
    with it.stream() as stream:
        for _ in stream:
            if it.reader.drafted_ahead:
                break
    assert not _threads()


def test_garbage_that_the_thread_collects_may_be_a_request() -> None:
    """The end of a request that was left early then comes from the thread that it would wait for."""
    beside = Beside(QUICK)

    def steps() -> Iterator[float]:
        yield 1.0
        beside.stop()
        yield 1.0
        raise AssertionError("told to stop, it went on")

    beside.start(steps(), pass_s=1000.0, wanted=3)
    beside.stop()
    assert not _threads()


@pytest.mark.parametrize("drafter", ["same", "other"])
def test_models_on_two_devices_write_what_one_writes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    target = tiny_bundle(tmp_path / "target", LLAMA, COLUMNS).bundle
    config, form, seed = (LLAMA, COLUMNS, 0) if drafter == "same" else (QWEN, INT4, 5)
    small = tiny_bundle(tmp_path / "drafter", config, form, seed=seed).bundle
    options = LoadOptions(threads=1)

    def written(model: Model) -> list[tuple[int, ...]]:
        for _ in model.stream("def add(a, b):", max_new_tokens=60, stop_at_eos=False):
            break  # left early, and not closed
        requests = [
            RequestOptions(max_new_tokens=60, stop_at_eos=False, seed=3, temperature=temperature)
            for temperature in (0.0, 0.9)
        ]
        return [model.generate("def add(a, b):", **options).tokens for options in requests]

    with edgespec.load(target.path, None, options=options) as alone:
        expected = written(alone)
    # As if they ran on two devices.
    monkeypatch.setattr("edgespec.engine.run_at_once", lambda *placements: True)
    with edgespec.load(target.path, small.path, options=options) as model:
        assert side_of(model)._beside is not None
        assert written(model) == expected
        assert not _threads()
        for _ in model.stream("def add(a, b):", max_new_tokens=60, stop_at_eos=False):
            break
    assert not _threads()
