"""What was learned wrongly, or on purpose: it is put back, says so, costs a stake and changes no output.

On a clock that the tests turn: a target's pass takes a second and a quarter more for each further row.
"""

import logging

import numpy as np
import pytest

from edgespec.answering.results import Generation
from edgespec.asking.request import Request
from edgespec.decoding.draft import Draft, Remarks
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.copies import CopyDrafter
from edgespec.drafting.ngram import ContextTree
from edgespec.drafting.policy import Policy
from edgespec.drafting.pricing import STAKE, Guard, Pricing, Watch
from edgespec.drafting.rates import Rate
from edgespec.history.drafter import HistoryFinder
from edgespec.history.memory import Delta, Memory, Snapshot
from edgespec.history.passages import Entry, Passage
from edgespec.history.use import HistoryUse
from edgespec_runtimes.cost import CostCurve
from tests.kit.drafters import PROMPT, VOCAB, Timed, plain
from tests.kit.models import answering
from tests.kit.toy import markov_logits, round_of
from tools.replay import Clock

CURVE = CostCurve({1: 1.0, 17: 5.0})
NEW = 300
NEXT_LOGITS = markov_logits(5, VOCAB)
SAMPLED = SamplingParams(temperature=1.0, seed=3)
"""Of its likeliest tokens it would write the same few again and again."""
ANSWER = plain(NEXT_LOGITS, NEW, SAMPLED)
DRAFTER_S = 0.05
DRAFT_S = 8 * DRAFTER_S + CURVE.seconds(9) - CURVE.seconds(1)
"""A whole draft, for which nothing comes."""
CLASSES = [f"{kind} {bits}" for kind in ("unique", "agreed", "most", "split") for bits in range(1, 5)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


class _Machine:
    """A model with a history, its clock made up."""

    def __init__(self, clock: Clock, snapshot: Snapshot) -> None:
        self.pricing = Pricing(CURVE)
        self.guards = Guard(self.pricing), Guard(self.pricing, "proposals from the history brought tokens")
        self.use = HistoryUse(snapshot, None, None)
        self.target, self._clock = Timed(NEXT_LOGITS, VOCAB, clock, CURVE), clock

    def answer(self, new: int = NEW) -> Generation:
        request = Request(max_new_tokens=new, sampler=SAMPLED)
        return answering(self.target, self._begin, request, self._clock, pricing=self.pricing).run()

    def _begin(self) -> Policy:
        remarks = Remarks()
        free = CopyDrafter(ContextTree(), self.use.begin(self.guards[1], remarks))
        return Policy(free, pricing=self.pricing, guard=self.guards[0], remarks=remarks)


def _plain_s(new: int = NEW) -> float:
    """Of the tokens behind the first."""
    return (new - 1) * CURVE.seconds(1)


def _misleading(*, trusted: bool) -> Snapshot:
    """For every place of the answer a passage that goes on in another way; trusted as if it never failed."""
    random = np.random.default_rng(0)
    entries = []
    for at in range(len(PROMPT), len(ANSWER)):
        body = (np.array(ANSWER[at : at + 8]) + 1 + random.integers(0, 20)) % VOCAB
        passage = Passage(tuple(ANSWER[max(at - 8, 0) : at]), tuple(body.tolist()))
        entries.append(Entry(passage, 1.0))
        if trusted:
            entries[-1].right = bytearray([32] * len(body))
    tallies = {kind: Rate(256.0, 256.0) for kind in CLASSES} if trusted else {}
    return Snapshot(entries=entries, tallies=tallies)


@pytest.mark.parametrize(
    ("gains", "finding"),
    [
        ([-1.0] * 4, "failed"),
        ([2.0, -1.0, 1.0, 1.0], "proved"),
        ([*[1.0] * 102, *[-1.0] * 4], "failed"),  # what was gained long ago makes nothing good
    ],
)
def test_a_watch_finds_losses_that_nothing_makes_good_and_gains_in_all(
    gains: list[float], finding: str
) -> None:
    watch = Watch(3.0)
    findings = [watch.observe(gain) for gain in gains]
    assert findings[-1] == finding and "failed" not in findings[:-1]
    assert watch.lost == 0.0 and watch.observe(-1.0) is None


class TestMemory:
    @pytest.mark.parametrize("trusted", [False, True])
    def test_one_that_always_misleads_costs_a_stake_and_says_so(
        self, clock: Clock, trusted: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        machine = _Machine(clock, _misleading(trusted=trusted))
        with caplog.at_level(logging.WARNING, logger="edgespec"):
            result = machine.answer()
        assert [*PROMPT, *result.tokens] == ANSWER
        assert result.stats.decode_s <= _plain_s() + STAKE + DRAFT_S
        (reason,) = result.stats.rolled_back
        assert reason.startswith("n-grams of the history: proposals from the history brought tokens at 0.")
        assert result.stats.to_json()["rolled_back"] == [reason]
        assert reason in caplog.text
        # Every proposal costs a quarter of a token: 21 of them are a stake, and the last draft is whole.
        assert result.stats.by_source["history"].drafted <= STAKE / 0.25 + 8

    def test_the_next_requests_lose_less_and_less(self, clock: Clock) -> None:
        """Pauses double, across requests."""
        machine = _Machine(clock, _misleading(trusted=True))
        machine.use.memory.learn = lambda passages: None  # type: ignore[method-assign]  # it would know the answer
        results = [machine.answer(40) for _ in range(40)]
        rolled_back = sum(bool(result.stats.rolled_back) for result in results)
        assert 1 <= rolled_back <= 9
        taken = sum(result.stats.decode_s for result in results)
        assert taken <= 40 * _plain_s(40) + (rolled_back + 1) * (STAKE + DRAFT_S)

    def test_trust_begins_anew_with_what_was_found_since(self, clock: Clock) -> None:
        machine = _Machine(clock, _misleading(trusted=True))
        machine.answer(30)
        tallies = machine.use.memory.tallies
        assert max(tally.judged for tally in tallies.values()) < 64
        assert sum(tally.right for tally in tallies.values()) < 5

    def test_one_that_is_right_is_left_alone(self, clock: Clock) -> None:
        machine = _Machine(clock, Snapshot())
        first, second = machine.answer(), machine.answer()
        assert first.tokens == second.tokens
        assert second.stats.rolled_back == ()
        assert second.stats.by_source["history"].accepted > 100
        assert second.stats.decode_s < 0.6 * _plain_s()


class TestDistrust:
    def test_the_file_is_told_too_and_drops_what_waits_to_be_stored(self) -> None:
        told = Delta(verdicts={"split 1": (3, 3)})
        memory = Memory(
            Snapshot(tallies={"unique 1": Rate(256.0, 256.0)}), max_tokens=1000, tell=lambda note: note(told)
        )
        memory.distrust()
        assert (told.anew, told.verdicts, memory.tallies) == (True, {}, {}) and bool(told)

    def test_verdicts_from_before_a_proof_are_not_taken_back_for_good(self) -> None:
        passage = Passage((), (1, 2, 3, 4, 5, 6))
        memory = Memory(Snapshot(entries=[Entry(passage, 1.0)]), max_tokens=1000)
        guard, remarks = Guard(Pricing(CURVE)), Remarks()
        drafter, draft = (
            CopyDrafter(HistoryFinder(memory, guard, remarks=remarks)),
            Draft((1,), ("history",), (0.9,)),
        )
        for number in range(30):
            match = memory.find([1, 2])
            assert match is not None
            memory.judge(match, number < 10)
            drafter.observe(round_of(9, draft=draft, accepted=int(number < 10)))
        assert remarks.rolled_back == ()  # 20 losses of a quarter are no more than the stake
        drafter.observe(round_of(9, draft=draft))
        (tally,) = memory.tallies.values()
        assert remarks.rolled_back and (tally.judged, tally.right) == (pytest.approx(23, abs=2), 3.0)
