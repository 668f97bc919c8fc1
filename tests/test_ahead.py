"""Drafting ahead on a second device: the same output, drafts ready in time, no thread left behind."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec import decode as decoding
from edgespec import generation
from edgespec.decode import decode
from edgespec.drafting import ahead as drafting_ahead
from edgespec.drafting import choice, reading
from edgespec.drafting.ahead import Ahead
from edgespec.drafting.bridge import Bridge, ByteBridge, IdentityBridge
from edgespec.drafting.choice import Choice, Guard
from edgespec.drafting.draft import NO_DRAFT
from edgespec.drafting.model import Calibration, ModelDrafter, Vocabulary
from edgespec.drafting.ngram import NgramDrafter
from edgespec.generation import Job, TextStreamer
from edgespec.pricing import Pricing
from edgespec.request import Request
from edgespec.results import Generation
from edgespec.sampling import SamplingParams
from edgespec.verification import make_verifier
from edgespec_models.tokenizer import Tokenizer
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.devices import PROFILES
from edgespec_runtimes.discovery import Device
from edgespec_runtimes.placement import Placement, run_at_once
from tests.tokenizers_for_tests import byte_level_json
from tests.toy import F32, Law, ToySession, markov_law
from tools.replay import Clock, lane

VOCAB = 50
LAW = markov_law(0, VOCAB, scale=200.0)
LONG = CostCurve({1: 1000.0, 16: 1000.1})
"""Passes so long that a drafter is never told to stop for time."""
STEP = CostCurve({1: 1e-3})
PROMPT = [3, 1, 4]
NAME = "edgespec-ahead"


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def _is_ahead() -> bool:
    return threading.current_thread().name == NAME


def _plain(law: Law, count: int, params: SamplingParams | None = None) -> list[int]:
    tokens, verify = list(PROMPT), make_verifier(params or SamplingParams())
    for _ in range(count):
        tokens.append(verify(law(tokens)[None], NO_DRAFT, tokens).token)
    return tokens


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


def _drafter(
    session: ToySession,
    ahead: Ahead | None,
    pricing: Pricing,
    bridge: Bridge | None = None,
    curve: CostCurve = STEP,
) -> ModelDrafter:
    return ModelDrafter(
        session,
        bridge or IdentityBridge(VOCAB),
        Vocabulary(),
        pricing=pricing,
        calibration=Calibration(),
        curve=curve,
        ahead=ahead,
    )


def test_the_next_draft_is_there_when_verification_ends() -> None:
    pricing, small = Pricing(LONG), _Small(LAW)
    ahead, tokens = Ahead(Pricing(LONG), STEP), list(PROMPT)
    drafter, target = _drafter(small, ahead, pricing), _Slow(LAW, VOCAB)
    steps = decode(target, drafter, make_verifier(SamplingParams()), tokens, max_new_tokens=50, max_draft=4)
    for number, step in enumerate(steps):
        if number == 1:  # the first draft is the only one that anybody waits for: the prompt and three steps
            assert small.waited_for == 4
        if 1 <= number <= 8:
            assert step.accepted == 4
    assert small.waited_for == 4
    ahead.stop()
    assert tokens == _plain(LAW, 50)
    assert ahead.tally.drafted >= ahead.tally.used >= 5 * 8
    assert not _threads()


def test_a_rejected_draft_is_dropped_at_the_price_of_a_step() -> None:
    """The drafter is always wrong: each of its drafts begins anew, from the text."""
    wrong = markov_law(1, VOCAB, scale=200.0)
    pricing, small = Pricing(LONG), _Small(wrong)
    ahead, tokens = Ahead(pricing, STEP), list(PROMPT)
    drafter, target = _drafter(small, ahead, pricing), _Slow(LAW, VOCAB)
    for _ in decode(target, drafter, make_verifier(SamplingParams()), tokens, max_new_tokens=12, max_draft=4):
        pass
    ahead.stop()
    assert tokens == _plain(LAW, 12)
    assert ahead.tally.drafted >= 5 and ahead.tally.used <= ahead.tally.drafted // 2


def _mixed(law: Law, other: Law, right: float) -> Law:
    """``law`` in a share of all places, ``other`` elsewhere."""

    def mixed(tokens: Sequence[int]) -> F32:
        return (law if hash(tuple(tokens[-4:])) % 1000 < 1000 * right else other)(tokens)

    return mixed


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
    small = _Small(_mixed(law, markov_law(seed + 1, VOCAB), right))
    pricing = Pricing(LONG)
    ahead, tokens = Ahead(pricing, STEP), list(PROMPT)
    model = _drafter(small, ahead, pricing)
    drafter = Choice(NgramDrafter(), model, pricing=pricing, guard=Guard(pricing)) if with_ngrams else model
    target = ToySession(law, VOCAB)
    for _ in decode(
        target, drafter, make_verifier(params), tokens, max_new_tokens=count, max_draft=max_draft
    ):
        assert target.cache == tokens[:-1]
    ahead.stop()
    assert tokens == _plain(law, count, params)
    assert ahead.tally.used <= ahead.tally.drafted == small.read_ahead


def test_across_vocabularies() -> None:
    large = Tokenizer.from_json(byte_level_json(), vocab_size=404)
    other = Tokenizer.from_json(byte_level_json(size=300, specials=("<eos>",)))
    script = b"the quick brown fox jumps over the lazy dog. "
    before = other.encode("go on: ")
    small = ToySession.writing(other, script, len(before))
    small.reserve(1000)
    target, pricing = ToySession.writing(large, script, 3), Pricing(LONG)
    ahead, tokens = Ahead(pricing, STEP), list(PROMPT)
    bridge = ByteBridge(large, other, prompt_length=3, drafter_prompt=before)
    verify = make_verifier(SamplingParams())
    for step in decode(
        target, _drafter(small, ahead, pricing, bridge), verify, tokens, max_new_tokens=90, max_draft=5
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


def _job(target: ToySession, drafter: ModelDrafter, ahead: Ahead, pricing: Pricing, request: Request) -> Job:
    return Job(
        session=target,
        tokenizer=Tokenizer.from_json(byte_level_json()),
        drafter=drafter,
        tokens=list(PROMPT),
        request=request,
        eos=frozenset(),
        max_draft=4,
        pricing=pricing,
        guard=Guard(pricing),
        off_reason=None,
        ahead=ahead,
    )


def _held(error: BaseException | None = None) -> tuple[_Held, _After, Ahead, ModelDrafter, Pricing]:
    pricing, held = Pricing(LONG), _Held(LAW, error)
    ahead, target = Ahead(pricing, STEP), _After(LAW, VOCAB)
    target.held = held
    return held, target, ahead, _drafter(held, ahead, pricing), pricing


def test_a_request_that_is_cancelled_waits_for_the_step_that_runs() -> None:
    held, target, ahead, drafter, pricing = _held()

    def cancelled() -> bool:
        if held.entered.is_set():
            run = ahead._run
            assert run is not None
            threading.Thread(target=lambda: run.stop.wait(60) and held.let_go.set()).start()
        return held.entered.is_set()

    job = _job(target, drafter, ahead, pricing, Request(max_new_tokens=40, cancelled=cancelled))
    result = TextStreamer(job).run()
    assert result.finish_reason == "cancelled"
    assert not _threads()
    assert held.read_ahead == 1
    assert [*PROMPT, *result.tokens] == _plain(LAW, len(result.tokens))
    assert held.next_logits(PROMPT).argmax() == LAW(PROMPT).argmax()


@pytest.mark.parametrize("error", [RuntimeError("broken device"), KeyboardInterrupt()])
def test_what_fails_beside_a_pass_fails_the_round_behind_it(error: BaseException) -> None:
    held, target, ahead, drafter, pricing = _held(error)
    job = _job(target, drafter, ahead, pricing, Request(max_new_tokens=40))
    with pytest.raises(type(error)):
        TextStreamer(job).run()
    assert not _threads()
    assert job.tokens == _plain(LAW, len(job.tokens) - 3)
    assert len(job.tokens) >= 3 + 5 and target.cache == job.tokens[:-1]
    held.error, held.let_go = None, threading.Event()
    held.let_go.set()
    fresh = _drafter(held, ahead, pricing)
    assert fresh.propose(job.tokens, 4).tokens == tuple(_plain(LAW, len(job.tokens) + 1)[len(job.tokens) :])
    ahead.stop()


def test_what_fails_where_no_draft_is_wanted_any_more_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    _, target, ahead, drafter, pricing = _held(RuntimeError("broken device"))
    request = Request(max_new_tokens=40, cancelled=lambda: bool(ahead.tally.drafted or ahead._run))
    result = TextStreamer(_job(target, drafter, ahead, pricing, request)).run()
    assert result.finish_reason == "cancelled"
    assert "broken device" in caplog.text
    assert not _threads()


def test_an_interrupt_during_the_pass_ends_the_thread_too() -> None:
    held, target, ahead, drafter, pricing = _held()
    held.let_go.set()
    plain_pass = target.forward

    def interrupted(tokens: Sequence[int]) -> F32:
        if len(tokens) > 1:
            assert held.entered.wait(60)
            raise KeyboardInterrupt
        return plain_pass(tokens)

    target.forward = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        TextStreamer(_job(target, drafter, ahead, pricing, Request(max_new_tokens=40))).run()
    assert not _threads()


def test_a_stream_that_is_left_ends_its_thread_when_it_is_closed() -> None:
    held, target, ahead, drafter, pricing = _held()
    held.let_go.set()
    stream = TextStreamer(_job(target, drafter, ahead, pricing, Request(max_new_tokens=40)))
    for _ in stream:
        if ahead.tally.drafted:
            break
    ahead.begin()  # as the next request does
    assert not _threads() and ahead.tally.drafted == 0


def test_garbage_that_the_thread_collects_may_be_a_request() -> None:
    """The end of a request that was left early then comes from the thread that it would wait for."""
    ahead = Ahead(Pricing(LONG), STEP)

    def steps() -> Iterator[float]:
        yield 1.0
        ahead.stop()
        yield 1.0
        raise AssertionError("told to stop, it went on")

    ahead.start(steps(), rows=2, wanted=3)
    ahead.settle()
    assert not _threads()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """All time is made up; beside it, time of threads."""
    clock = Clock()
    for module in (reading, drafting_ahead, choice, decoding, generation):
        monkeypatch.setattr(module, "perf_counter", clock)
    monkeypatch.setattr(drafting_ahead, "Thread", lane(clock))
    return clock


@dataclass
class _Steps:
    """Steps of three seconds that are needed with a constant probability."""

    clock: Clock
    chance: float
    taken: int = 0
    seconds: float = 3.0

    def __iter__(self) -> Iterator[float]:
        while True:
            yield self.chance
            self.clock.spend(self.seconds)
            self.taken += 1


@pytest.mark.parametrize(("chance", "taken"), [(0.0, 0), (0.05, 3), (0.6, 3), (0.7, 4), (1.0, 4)])
def test_a_step_beyond_the_pass_is_begun_where_it_is_worth_the_waiting(
    clock: Clock, chance: float, taken: int
) -> None:
    """The fourth step would be two thirds beyond the pass."""
    ahead = Ahead(Pricing(CostCurve({1: 10.0})), CostCurve({1: 3.0}))
    steps = _Steps(clock, chance)
    ahead.start(iter(steps), rows=1, wanted=3)
    assert steps.taken == taken
    clock.spend(10.0)
    assert ahead.settle() == pytest.approx(2.0 if taken == 4 else 0.0)
    assert ahead.settle() == 0.0


def _passes(ahead: Ahead, clock: Clock, rounds: int, *, slowdown: float, chance: float = 0.9) -> int:
    """How many of so many passes the drafter read beside, each then taking longer by a factor."""
    beside = 0
    for _ in range(rounds):
        steps = _Steps(clock, chance)
        ahead.start(iter(steps), rows=1, wanted=3)
        taken = 10.0 * (slowdown if steps.taken else 1.0)
        beside += steps.taken > 0
        clock.spend(taken)
        assert ahead.observe_pass(1, taken) == pytest.approx(10.0, rel=slowdown - 1.0 + 1e-9)
        ahead.settle()
    return beside


def test_how_much_the_target_suffers_is_learned_and_ends_what_does_not_pay(clock: Clock) -> None:
    pricing = Pricing(CostCurve({1: 10.0}))
    harmless, harmful = (Ahead(pricing, CostCurve({1: 3.0})) for _ in range(2))
    assert _passes(harmless, clock, 160, slowdown=1.3) == 150  # every sixteenth pass is left alone
    assert harmless.slowdown == pytest.approx(1.3, rel=0.01)
    assert harmless.observe_pass(1, 10.0) == 10.0
    assert _passes(harmful, clock, 160, slowdown=3.0) < 20
    assert _passes(harmful, clock, 160, slowdown=3.0) > 0  # it is tried again
    assert _passes(harmful, clock, 400, slowdown=1.0) > 200


def test_a_machine_that_is_slower_than_measured_is_no_harm_of_the_drafter(clock: Clock) -> None:
    ahead = Ahead(Pricing(CostCurve({1: 10.0})), CostCurve({1: 3.0}))
    for _ in range(8):
        assert ahead.observe_pass(1, 15.0) == 15.0
    for _ in range(40):
        ahead.start(iter(_Steps(clock, 0.9)), rows=1, wanted=3)
        ahead.observe_pass(1, 15.0)
        ahead.settle()
    assert ahead.slowdown == pytest.approx(1.0, abs=0.07)


class _Timed(ToySession):
    """A toy whose passes take a given time."""

    def __init__(self, law: Law, clock: Clock, seconds: float) -> None:
        super().__init__(law, VOCAB)
        self._clock, self._seconds = clock, seconds
        self.reserve(1000)

    def forward(self, tokens: Sequence[int]) -> F32:
        self._clock.spend(self._seconds)
        return super().forward(tokens)


def _answer(clock: Clock, *, right: float, side_by_side: bool) -> tuple[Generation, ModelDrafter]:
    """128 tokens, a drafter's step taking a quarter of the target's pass."""
    pricing, law = Pricing(CostCurve({1: 1.0, 16: 1.02})), markov_law(5, VOCAB)
    curve = CostCurve({1: 0.25})
    ahead = Ahead(pricing, curve) if side_by_side else None
    small = _Timed(_mixed(law, markov_law(6, VOCAB), right), clock, 0.25)
    target = _Timed(law, clock, 1.0)
    drafter = _drafter(small, ahead, pricing, curve=curve)
    job = _job(target, drafter, Ahead(pricing, curve), pricing, Request(max_new_tokens=128))
    result = TextStreamer(replace(job, ahead=ahead)).run()
    assert [*PROMPT, *result.tokens] == _plain(law, 128)
    return result, drafter


@pytest.mark.parametrize("right", [1.0, 0.9, 0.6, 0.0])
def test_two_devices_are_faster_than_one_and_never_much_slower(clock: Clock, right: float) -> None:
    (one, _), (two, drafter) = (_answer(clock, right=right, side_by_side=both) for both in (False, True))
    assert (one.stats.drafted_ahead, one.stats.used_ahead) == (0, 0)
    gained = one.stats.decode_s / two.stats.decode_s
    if right == 1.0:
        assert gained > 1.3 and two.stats.used_ahead > 60
    assert gained > (1.05 if right == 0.9 else 0.97)
    assert two.stats.used_ahead <= two.stats.drafted_ahead
    assert two.stats.to_json()["drafted_ahead"] == two.stats.drafted_ahead
    assert drafter.gain_s is not None
    # What the drafter believes to have saved is what was saved.
    saved_s = 127 * 1.0 - two.stats.decode_s
    assert drafter.gain_s == pytest.approx(saved_s, abs=6.0)


def _at(name: str, state: str = "ready") -> Placement:
    return Placement(Device(PROFILES[name], state), "made up")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "drafter", "expected"),
    [
        (_at("cuda"), _at("cpu"), True),
        (_at("qnn:htp"), _at("cpu"), True),
        (_at("cpu"), _at("openvino:npu"), True),
        (_at("cpu"), _at("cpu"), False),
        (_at("cuda"), _at("cuda"), False),
        (_at("openvino:cpu"), _at("cpu"), False),
        (_at("qnn:htp", "emulated"), _at("cpu"), False),
    ],
)
def test_two_devices_compute_at_once_where_they_are_of_two_kinds(
    target: Placement, drafter: Placement, expected: bool
) -> None:
    assert run_at_once(target, drafter) is expected is run_at_once(drafter, target)
