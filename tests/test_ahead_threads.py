"""Drafting ahead with real threads: the same output, drafts ready in time, nothing left behind."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec import LoadOptions, Model
from edgespec.decode import decode
from edgespec.drafting.ahead import Ahead
from edgespec.drafting.bridge import ByteBridge
from edgespec.drafting.choice import Choice
from edgespec.drafting.guard import Guard
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import NgramDrafter
from edgespec.generation import TextStreamer
from edgespec.pricing import Pricing
from edgespec.request import Request, RequestOptions
from edgespec.sampling import SamplingParams
from edgespec.verification import make_verifier
from edgespec_models.tokenizer import Tokenizer
from edgespec_runtimes.cost import CostCurve
from tests.ahead_for_tests import PROMPT, QUICK, VOCAB, drafter_of, job_of, mixed, placed, plain
from tests.tokenizers_for_tests import byte_level_json
from tests.toy import COLUMNS, F32, INT4, LLAMA, QWEN, Law, ToySession, markov_law, tiny_bundle

LAW = markov_law(0, VOCAB, scale=200.0)
LONG = CostCurve({1: 1000.0, 16: 1000.1})
"""Passes so long that a drafter is never told to stop for time."""
NAME = "edgespec-ahead"


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def _is_ahead() -> bool:
    return threading.current_thread().name == NAME


class _Small(ToySession):
    """A drafter's session that knows who asks it, and that nobody else does meanwhile."""

    def __init__(self, law: Law, vocab_size: int = VOCAB) -> None:
        super().__init__(law, vocab_size)
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


def test_the_next_draft_is_there_when_verification_ends() -> None:
    pricing, small = Pricing(LONG), _Small(LAW)
    ahead, tokens = Ahead(Pricing(LONG), QUICK), list(PROMPT)
    drafter, target = drafter_of(small, ahead, pricing), _Slow(LAW, VOCAB)
    steps = decode(target, drafter, make_verifier(SamplingParams()), tokens, max_new_tokens=50, max_draft=4)
    for number, step in enumerate(steps):
        if number == 1:  # the first draft is the only one that anybody waits for: the prompt and three steps
            assert small.waited_for == 4
        if 1 <= number <= 8:
            assert step.accepted == 4
    assert small.waited_for == 4
    ahead.stop()
    assert tokens == plain(LAW, 50)
    assert ahead.tally.drafted >= ahead.tally.used >= 5 * 8
    assert not _threads()


def test_a_rejected_draft_is_dropped_at_the_price_of_a_step() -> None:
    """The drafter is always wrong: each of its drafts begins anew, from the text."""
    wrong = markov_law(1, VOCAB, scale=200.0)
    pricing, small = Pricing(LONG), _Small(wrong)
    ahead, tokens = Ahead(pricing, QUICK), list(PROMPT)
    drafter, target = drafter_of(small, ahead, pricing), _Slow(LAW, VOCAB)
    for _ in decode(target, drafter, make_verifier(SamplingParams()), tokens, max_new_tokens=12, max_draft=4):
        pass
    ahead.stop()
    assert tokens == plain(LAW, 12)
    assert ahead.tally.drafted >= 5 and ahead.tally.used <= ahead.tally.drafted // 2


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
    law = markov_law(seed, VOCAB)
    params = SamplingParams(temperature=temperature, seed=seed if temperature else None)
    small = _Small(mixed(law, markov_law(seed + 1, VOCAB), right))
    pricing = Pricing(LONG)
    ahead, tokens = Ahead(pricing, QUICK), list(PROMPT)
    model = drafter_of(small, ahead, pricing)
    drafter = Choice(NgramDrafter(), model, pricing=pricing, guard=Guard(pricing)) if with_ngrams else model
    target = ToySession(law, VOCAB)
    for _ in decode(
        target, drafter, make_verifier(params), tokens, max_new_tokens=count, max_draft=max_draft
    ):
        assert target.cache == tokens[:-1]
    ahead.stop()
    assert tokens == plain(law, count, params)
    assert ahead.tally.used <= ahead.tally.drafted == small.read_ahead


def test_across_vocabularies() -> None:
    large = Tokenizer.from_json(byte_level_json(), vocab_size=404)
    other = Tokenizer.from_json(byte_level_json(size=300, specials=("<eos>",)))
    script = b"the quick brown fox jumps over the lazy dog. "
    before = other.encode("go on: ")
    small = ToySession.writing(other, script, len(before))
    small.reserve(1000)
    target, pricing = ToySession.writing(large, script, 3), Pricing(LONG)
    ahead, tokens = Ahead(pricing, QUICK), list(PROMPT)
    bridge = ByteBridge(large, other, prompt_length=3, drafter_prompt=before)
    verify = make_verifier(SamplingParams())
    for step in decode(
        target, drafter_of(small, ahead, pricing, bridge), verify, tokens, max_new_tokens=90, max_draft=5
    ):
        assert step.accepted <= len(step.draft.tokens)
    ahead.stop()
    assert large.bytes_of(tokens[3:]) == (script * 9)[: len(large.bytes_of(tokens[3:]))]
    assert ahead.tally.drafted > 0


class _Held(_Small):
    """Reading ahead, it does not come back from a step until it is let go; or it fails."""

    def __init__(self, law: Law, error: BaseException | None = None) -> None:
        super().__init__(law)
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


def _held(error: BaseException | None = None) -> tuple[_Held, _After, Ahead, ModelDrafter, Pricing]:
    pricing, held = Pricing(LONG), _Held(LAW, error)
    ahead, target = Ahead(pricing, QUICK), _After(LAW, VOCAB)
    target.held = held
    return held, target, ahead, drafter_of(held, ahead, pricing), pricing


def test_a_request_that_is_cancelled_waits_for_the_step_that_runs() -> None:
    held, target, ahead, drafter, pricing = _held()

    def cancelled() -> bool:
        run = ahead._run
        if run is not None and held.entered.is_set():
            threading.Thread(target=held.let_go_when, args=(run.stop,)).start()
        return held.entered.is_set()

    job = job_of(target, drafter, ahead, pricing, Request(max_new_tokens=40, cancelled=cancelled))
    result = TextStreamer(job).run()
    assert result.finish_reason == "cancelled"
    assert not _threads()
    assert held.read_ahead == 1
    assert [*PROMPT, *result.tokens] == plain(LAW, len(result.tokens))
    assert held.next_logits(PROMPT).argmax() == LAW(PROMPT).argmax()


@pytest.mark.parametrize("error", [RuntimeError("broken device"), KeyboardInterrupt()])
def test_what_fails_beside_a_pass_fails_the_round_behind_it(error: BaseException) -> None:
    held, target, ahead, drafter, pricing = _held(error)
    job = job_of(target, drafter, ahead, pricing, Request(max_new_tokens=40))
    with pytest.raises(type(error)):
        TextStreamer(job).run()
    assert not _threads()
    assert job.tokens == plain(LAW, len(job.tokens) - 3)
    assert len(job.tokens) >= 3 + 5 and target.cache == job.tokens[:-1]
    held.error, held.let_go = None, threading.Event()
    held.let_go.set()
    fresh = drafter_of(held, ahead, pricing)
    assert fresh.propose(job.tokens, 4).tokens == tuple(plain(LAW, len(job.tokens) + 1)[len(job.tokens) :])
    ahead.stop()


def test_what_fails_where_no_draft_is_wanted_any_more_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    held, target, ahead, drafter, pricing = _held(RuntimeError("broken device"))
    request = Request(max_new_tokens=40, cancelled=held.entered.is_set)
    result = TextStreamer(job_of(target, drafter, ahead, pricing, request)).run()
    assert result.finish_reason == "cancelled"
    assert "broken device" in caplog.text
    assert not _threads()


def test_an_interrupt_during_the_pass_ends_the_thread_too() -> None:
    held, target, ahead, drafter, pricing = _held()
    held.let_go.set()
    plain_pass = target.forward

    def interrupted(tokens: Sequence[int]) -> F32:
        if len(tokens) > 2:  # not the prompt
            assert held.entered.wait(60)
            raise KeyboardInterrupt
        return plain_pass(tokens)

    target.forward = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        TextStreamer(job_of(target, drafter, ahead, pricing, Request(max_new_tokens=40))).run()
    assert not _threads()


def test_a_stream_that_is_left_ends_its_thread_when_it_is_closed() -> None:
    held, target, ahead, drafter, pricing = _held()
    held.let_go.set()
    stream = TextStreamer(job_of(target, drafter, ahead, pricing, Request(max_new_tokens=40)))
    for _ in stream:
        if ahead.tally.drafted:
            break
    ahead.begin()  # as the next request does
    assert not _threads() and ahead.tally.drafted == 0


def test_garbage_that_the_thread_collects_may_be_a_request() -> None:
    """The end of a request that was left early then comes from the thread that it would wait for."""
    ahead = Ahead(Pricing(LONG), QUICK)

    def steps() -> Iterator[float]:
        yield 1.0
        ahead.stop()
        yield 1.0
        raise AssertionError("told to stop, it went on")

    ahead.start(steps(), rows=2, wanted=3)
    ahead.settle()
    assert not _threads()


@pytest.mark.parametrize("drafter", ["same", "other"])
def test_models_on_two_devices_write_what_one_writes_alone(tmp_path: Path, drafter: str) -> None:
    target = tiny_bundle(tmp_path / "target", LLAMA, COLUMNS).bundle
    config, form, seed = (LLAMA, COLUMNS, 0) if drafter == "same" else (QWEN, INT4, 5)
    small = tiny_bundle(tmp_path / "drafter", config, form, seed=seed).bundle
    options = LoadOptions(threads=1)

    def written(model: Model) -> list[tuple[int, ...]]:
        for _ in model.stream("def add(a, b):", max_new_tokens=60, stop_at_eos=False):
            break  # left early, and not closed
        asked = [
            RequestOptions(max_new_tokens=60, stop_at_eos=False, seed=3, temperature=temperature)
            for temperature in (0.0, 0.9)
        ]
        return [model.generate("def add(a, b):", **options).tokens for options in asked]

    with Model(target, None, options=options, drafts=False) as alone:
        expected = written(alone)
    places = placed("cuda"), placed("cpu")
    with Model(target, small, options=options, drafts=True, placements=places) as model:
        assert written(model) == expected
        assert not _threads()
        for _ in model.stream("def add(a, b):", max_new_tokens=60, stop_at_eos=False):
            break
    assert not _threads()
