"""Which source drafts, and whether any does, on a clock that the tests turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.asking.request import Request
from edgespec.decoding.draft import NO_DRAFT, Draft, Passed, Round
from edgespec.drafting.policy import Policy
from edgespec.drafting.pricing import Guard, Pricing
from edgespec_runtimes.cost import CostCurve
from tests.kit.drafters import VOCAB, Timed, draft_of, policy_of
from tests.kit.models import answering
from tests.kit.toy import Deaf, markov_logits, round_of
from tools.replay import Clock

FLAT = CostCurve({1: 1.0, 16: 1.001})
"""A plain token takes a second; verifying more costs next to nothing."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@dataclass
class _Source(Deaf):
    """Proposes tokens of these confidences and takes its time."""

    clock: Clock
    confidence: tuple[float, ...] = ()
    seconds: float = 0.0
    name: str = "model"
    asked: list[int] = field(default_factory=list)
    beyond: tuple[float, ...] = ()

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        self.asked.append(len(tokens))
        self.clock.spend(self.seconds)
        confidence = self.confidence[:limit]
        return Draft(tuple(range(len(confidence))), (self.name,) * len(confidence), confidence)

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        more = self.beyond[: limit - len(draft.tokens)]
        return draft.then(Draft((99,) * len(more), (self.name,) * len(more), more))


class _Rounds:
    """A policy in a request whose first round is over, and rounds of it that lose nothing.

    They take no time, but for that of proposing.
    """

    def __init__(self, free: _Source, model: _Source | None, *, curve: CostCurve = FLAT) -> None:
        pricing = Pricing(curve)
        self.guard, self._curve, self.prices = Guard(pricing), curve, pricing.at()
        self.policy = Policy(free, model, pricing=pricing, guard=self.guard, clock=free.clock)
        self.policy.observe(round_of(1, 1))

    def propose(self, clock: Clock, tokens: list[int], limit: int) -> Draft:
        started = clock.now
        draft = draft_of(self.policy, tokens, limit, prices=self.prices)
        taken, pass_s = clock.now - started, self._curve.seconds(1 + len(draft.tokens))
        self.policy.observe(Round((99,), draft, 0, drafter_s=taken, target_s=pass_s))
        return draft


def _lose(guard: Guard, rounds: int = 11) -> None:
    for _ in range(rounds):
        guard.observe(1, 1.5)


def _paused(guard: Guard) -> int:
    """Rounds until drafting is allowed."""
    rounds = 0
    while not guard.allows:
        guard.rest()
        rounds += 1
    return rounds


class TestGuard:
    def test_each_failure_doubles_the_pause_up_to_a_bound_until_rounds_gain(self) -> None:
        guard, pauses = Guard(Pricing(FLAT)), list[int]()
        for _ in range(7):
            _lose(guard)
            assert not any(guard.allows for _ in range(100))  # asking changes nothing
            pauses.append(_paused(guard))
        assert pauses == [16, 32, 64, 128, 256, 256, 256]
        for _ in range(10):
            guard.observe(2, 1.5)
        assert guard.allows and guard.reason is None
        _lose(guard)
        assert guard.reason == "rounds with drafts ran at 0.67 times the speed of plain decoding"
        assert _paused(guard) == 16

    def test_proposals_answer_for_the_time_of_their_own_rows(self) -> None:
        guard = Guard(Pricing(CostCurve({1: 1.0, 8: 8.0})))
        draft = Draft((1, 2, 3, 4), ("model", "model", "history", "history"), (0.5,) * 4)
        for _ in range(100):
            guard.observe_source("history", Round((1, 2, 3, 4, 5), draft, accepted=4))
        assert guard.allows
        for _ in range(6):
            guard.observe_source("history", Round((1, 2, 3, 9), draft, accepted=3))
        assert not guard.allows

    def test_a_reason_is_of_the_losing_rounds_alone(self) -> None:
        guard = Guard(Pricing(CostCurve({1: 0.25})))
        for _ in range(3):
            guard.observe(8, 0.25)
        for _ in range(6):
            guard.observe(1, 0.5)
        assert (
            not guard.allows
            and guard.reason == "rounds with drafts ran at 0.50 times the speed of plain decoding"
        )

    def test_a_source_rests_for_rounds_and_pays_for_rows_behind_others(self) -> None:
        """Here the first two rows cost nothing, and the others as much as a pass."""
        guard = Guard(Pricing(CostCurve({1: 1.0, 3: 1.0, 4: 2.0, 5: 3.0})))
        behind = Draft((1, 2, 3, 4), ("model", "model", "history", "history"), (0.5,) * 4)
        ahead = Draft((1, 2), ("history", "history"), (0.5,) * 2)
        for _ in range(50):
            guard.observe_source("history", Round((9,), ahead, accepted=0))
        assert guard.allows
        for _ in range(2):
            guard.observe_source("history", Round((1, 2, 9), behind, accepted=2))
        assert guard.allows
        guard.observe_source("history", Round((1, 2, 9), behind, accepted=2))
        assert not guard.allows
        for _ in range(15):
            guard.observe_source("history", Round((9,), Draft((1,), ("model",), (0.5,)), accepted=0))
        assert not guard.allows
        guard.observe_source("history", Round((9,), Draft((1,), ("model",), (0.5,)), accepted=0))
        assert guard.allows


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.5, 3.0)), max_size=200),
    st.sampled_from([1.0, 0.25]),
    st.booleans(),
)
@example([(1, 1.05)] * 101, 1.0, True)
@example([(1, 1.5), (4, 1.5)] * 100, 1.0, False)
@example([(1, 99.0), *[(1, 1.5)] * 11], 1.0, False)  # nothing from before a pause counts after it
def test_drafting_pauses_where_the_stake_is_lost_and_nowhere_else(
    rounds: list[tuple[int, float]], token_s: float, fast: bool
) -> None:
    """Losses are counted in what this machine decodes plainly, however fast it drafted before."""
    pricing = Pricing(CostCurve({1: token_s}))
    for _ in range(100 * fast):
        pricing.observe_round(4, token_s)
    guard, lost, won = Guard(pricing), 0.0, 0.0
    for committed, tokens in rounds:
        guard.observe(committed, tokens * token_s)
        lost, won = max(0.0, lost + tokens - committed), won + committed - tokens
        if abs(lost - 5.0) > 1e-9:
            assert guard.allows == (lost < 5.0)
        if _paused(guard) or won >= 5.0:
            lost = won = 0.0


class TestPolicy:
    def test_without_a_model_the_free_draft_is_cut_where_it_stops_paying(self, clock: Clock) -> None:
        free = _Source(clock, (0.9, 0.8, 0.0, 0.9), name="ngram")
        draft = _Rounds(free, None).propose(clock, [1, 2], 8)
        assert draft == Draft((0, 1), ("ngram",) * 2, (0.9, 0.8))

    @pytest.mark.parametrize(("confidence", "source"), [((0.9, 0.9), "ngram"), ((0.3,), "model")])
    def test_the_higher_surplus_drafts(
        self, clock: Clock, confidence: tuple[float, ...], source: str
    ) -> None:
        free, model = _Source(clock, confidence, name="ngram"), _Source(clock, (0.9,) * 4, 0.1)
        chosen = _Rounds(free, model)
        for length in range(1, 20):
            assert set(chosen.propose(clock, [1] * length, 8).sources) == {source}
        assert bool(model.asked) == (source == "model")

    def test_a_model_that_gains_much_wins_over_free_drafts_that_gain_some(self, clock: Clock) -> None:
        free, model = _Source(clock, (0.3,), name="ngram"), _Source(clock, (0.95,) * 6, 0.1)
        chosen = _Rounds(free, model)
        for _ in range(40):
            chosen.propose(clock, [1], 8)
        free.confidence = (0.9, 0.9, 0.9)  # a surplus of 2.4; the model's is 4.5
        assert chosen.propose(clock, [1], 8).sources == ("model",) * 6
        free.confidence = (0.99,) * 8
        assert chosen.propose(clock, [1], 8).sources == ("ngram",) * 8

    def test_where_the_model_has_nothing_the_free_draft_is_taken(self, clock: Clock) -> None:
        free, model = _Source(clock, (0.4, 0.0), name="ngram"), _Source(clock)
        assert _Rounds(free, model).propose(clock, [1], 8).sources == ("ngram",)
        assert len(model.asked) == 1

    def test_rows_that_cost_nothing_are_filled_behind_the_model(self, clock: Clock) -> None:
        free, model = _Source(clock, beyond=(0.2,) * 9), _Source(clock, (0.9, 0.9), name="model")
        free.name = "ngram"
        curve = CostCurve({1: 1.0, 4: 1.0, 5: 2.0, 8: 2.0})  # passes are four rows wide
        chosen = _Rounds(free, model, curve=curve)
        assert chosen.propose(clock, [1], 8).sources == ("model", "model", "ngram")
        free.beyond = (0.95,) * 9  # a second pass of four rows pays too
        assert chosen.propose(clock, [1], 7).sources == ("model",) * 2 + ("ngram",) * 5

    def test_the_model_is_not_asked_before_its_token(self, clock: Clock) -> None:
        free, model, pricing = _Source(clock, name="ngram"), _Source(clock, (0.9,)), Pricing(FLAT)
        model.earliest = 2
        policy = Policy(free, model, pricing=pricing, guard=Guard(pricing))
        proposed = list[tuple[int, ...]]()
        for n in range(1, 4):
            policy.observe(round_of(1))
            proposed.append(draft_of(policy, [1] * n, 4, prices=pricing.at()).tokens)
        assert proposed == [(), (0,), (0,)]
        assert (free.asked, model.asked) == ([1, 2, 3], [2, 3])

    def test_a_first_round_is_drafted_behind_an_opening_alone(self, clock: Clock) -> None:
        free, model, pricing = _Source(clock, (0.9,)), _Source(clock, (0.9,)), Pricing(FLAT)
        free.beyond = (0.9,)
        openings = None, NO_DRAFT, Draft((5,), ("ngram",), (0.9,))
        policies = [
            Policy(free, model, pricing=pricing, guard=Guard(pricing), opening=opening)
            for opening in openings
        ]
        drafts = [draft_of(policy, [1], 4, prices=pricing.at()) for policy in policies]
        assert [draft.tokens for draft in drafts] == [(), (0,), (5, 99)] and not model.asked

    @pytest.mark.parametrize(("confidence", "seconds"), [((), 0.5), ((0.5,), 0.9)])
    def test_the_model_is_asked_only_while_it_pays(
        self, clock: Clock, confidence: tuple[float, ...], seconds: float
    ) -> None:
        """It drafts nothing and takes half a token's time; or what it drafts gains less than its time."""
        model = _Source(clock, confidence, seconds)
        chosen = _Rounds(_Source(clock), model)
        asked = list[bool]()
        for _ in range(2000):
            before = len(model.asked)
            chosen.propose(clock, [1], 8)
            asked.append(len(model.asked) > before)
        assert asked[0]
        assert 0 < sum(asked[1000:]) < 150  # a tenth of the rounds, to see whether it is still so

    def test_old_verdicts_fade(self, clock: Clock) -> None:
        model = _Source(clock, (), 0.5)
        chosen = _Rounds(_Source(clock), model)
        for _ in range(200):
            chosen.propose(clock, [1], 8)
        model.confidence, model.seconds = (0.9,) * 4, 0.1
        for _ in range(50):
            chosen.propose(clock, [1], 8)
        model.asked.clear()
        assert all(chosen.propose(clock, [1], 8).tokens for _ in range(20))
        assert len(model.asked) == 20

    def test_reading_the_prompt_is_not_held_against_the_model(self, clock: Clock) -> None:
        model = _Source(clock, (0.9,), 500.0)
        chosen = _Rounds(_Source(clock), model)
        chosen.propose(clock, [1], 8)
        model.seconds = 0.1
        for _ in range(10):
            assert chosen.propose(clock, [1], 8).tokens
        model.seconds = 500.0
        chosen.propose(clock, [1], 8)
        assert not chosen.propose(clock, [1], 8).tokens

    def test_a_draft_whose_pass_is_not_priced_is_not_judged_later(self, clock: Clock) -> None:
        model = _Source(clock, (0.9,), 0.1)
        chosen = _Rounds(_Source(clock), model)
        for _ in range(2):
            chosen.propose(clock, [1], 8)
        model.seconds = 500.0
        draft = draft_of(chosen.policy, [1], 8, prices=chosen.prices)
        reads = Passed(70, 2.0, 1.0, requests=2, reads=True)  # a piece of another request's prompt
        chosen.policy.observe(Round((99,), draft, 0, drafter_s=500.0, target_s=1.0, passed=reads))
        _lose(chosen.guard)  # in another request
        while not chosen.guard.allows:
            chosen.propose(clock, [1], 8)
        model.seconds = 0.1
        assert chosen.propose(clock, [1], 8).tokens

    def test_a_draft_is_at_most_twice_as_long_as_what_was_accepted_before(self, clock: Clock) -> None:
        rounds = _Rounds(_Source(clock, (0.999,) * 64, name="ngram"), None)
        lengths = []
        for accepted in (3, 8, 16, 20, 2, 0):
            draft = draft_of(rounds.policy, [1], 32, prices=rounds.prices)
            lengths.append(len(draft.tokens))
            tokens = (*draft.tokens[:accepted], 99)
            rounds.policy.observe(Round(tokens, draft, accepted, target_s=1.0))
        assert lengths == [8, 8, 16, 32, 32, 8]

    def test_nobody_is_asked_in_a_pause_or_without_room(self, clock: Clock) -> None:
        free, model = _Source(clock, (0.9,)), _Source(clock, (0.9,))
        chosen = _Rounds(free, model)
        assert draft_of(chosen.policy, [1], 0, prices=chosen.prices) is NO_DRAFT
        _lose(chosen.guard)
        for _ in range(16):
            assert chosen.propose(clock, [1], 8) is NO_DRAFT
        assert not free.asked and not model.asked
        assert chosen.propose(clock, [1], 8).tokens


class _Failing(_Source):
    """Raises once, in the method of that name."""

    fails, closed = "", 0

    def _may_fail(self, at: str) -> None:
        if self.fails == at:
            self.fails = ""
            raise OSError("a page cannot be read")

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        self._may_fail("propose")
        return super().propose(tokens, limit)

    def extend(self, tokens: Sequence[int], draft: Draft, limit: int) -> Draft:
        self._may_fail("extend")
        return super().extend(tokens, draft, limit)

    def observe(self, round_: Round) -> None:
        self._may_fail("observe")

    def close(self) -> None:
        self.closed += 1
        self._may_fail("close")


@pytest.mark.parametrize("who", ["free", "model"])
@pytest.mark.parametrize("at", ["propose", "extend", "observe", "close"])
def test_a_source_that_fails_is_closed_once_and_the_others_go_on(clock: Clock, who: str, at: str) -> None:
    free, model = _Failing(clock, name="ngram", beyond=(0.9,)), _Failing(clock, (0.9,) * 2, 0.1)
    rounds = _Rounds(free, model)
    failing = free if who == "free" else model
    failing.fails = at
    drafted = [rounds.propose(clock, [1], 8).tokens for _ in range(6)]
    rounds.policy.close()
    assert (free.closed, model.closed) == (1, 1)
    assert drafted[-1] == {
        ("free", "close"): (0, 1, 99),
        ("model", "close"): (0, 1, 99),
        ("model", "extend"): (0, 1, 99),  # nobody calls it
    }.get((who, at), (0, 1) if who == "free" else ())
    reason = "the drafter failed: a page cannot be read"
    assert (rounds.policy.remarks.speculation_off_reason == reason) == (not failing.fails)


class _Reading(_Source):
    """Takes long for the prompt, and nothing behind it."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        self.seconds = 0.02 if self.asked else 50.0
        return super().propose(tokens, limit)


LOSING = "rounds with drafts ran at 0.67 times"


@pytest.mark.parametrize(
    ("make", "confidence", "seconds", "rounds", "asked", "reason"),
    [
        # Rounds that propose nothing count where asking took time; two pauses.
        (_Source, (), 0.5, 11 + 16 + 11 + 32, 22, LOSING),
        (_Source, (), 0.01, 64, 64, "no proposal was expected to pay"),
        (_Reading, (), 0.0, 64, 64, "no proposal was expected to pay"),
        (_Source, (0.9, 0.9), 0.5, 24, 10, LOSING),  # drafts that are never right
    ],
)
def test_what_a_request_draws_from_its_rounds(
    clock: Clock,
    make: type[_Source],
    confidence: tuple[float, ...],
    seconds: float,
    rounds: int,
    asked: int,
    reason: str,
) -> None:
    """A request whose rounds but the first and the last, so many, may draft."""
    drafter, pricing = make(clock, confidence, seconds), Pricing(FLAT)
    target = Timed(markov_logits(0, VOCAB), VOCAB, clock, CostCurve({1: 1.0}))
    request = Request(max_new_tokens=rounds + 2)
    stats = (
        answering(target, lambda: policy_of(drafter, pricing=pricing), request, clock, pricing=pricing)
        .run()
        .stats
    )
    assert len(drafter.asked) == asked
    assert reason in str(stats.speculation_off_reason)
    assert stats.drafted == asked * len(confidence)
    assert stats.drafted_by_position == (asked,) * len(confidence)


def test_without_sources_nothing_is_drafted_passes_are_priced_and_pauses_stay() -> None:
    pricing = Pricing(FLAT)
    guard = Guard(pricing)
    _lose(guard)
    policy = Policy(pricing=pricing, guard=guard)
    policy.observe(Round((1,), target_s=50.0, seconds=50.0))
    assert pricing.at().pass_seconds(1) == 1.0  # the first round is not priced
    for _ in range(200):
        assert draft_of(policy, [1, 2, 3], 8) is NO_DRAFT
        policy.observe(Round((1,), target_s=2.0, seconds=2.0))
    assert pricing.at().pass_seconds(1) == pytest.approx(2.0, rel=0.02)
    assert _paused(guard) == 16
