"""Requests at once, by any script of events: each is answered as if alone, in the order of the queue."""

import gc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgespec import Busy, Choice, Closed, Conversation, EdgespecError, Generation, LoadOptions, RequestError
from edgespec.decoding.draft import Draft
from edgespec.decoding.grammar import GrammarConstraint
from edgespec.drafting.copies import CopyDrafter
from edgespec.drafting.model import ModelDrafter
from edgespec.running import ticket
from edgespec.running.stream import Stream
from edgespec.running.ticket import Stage
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import TokenizerError
from edgespec_runtimes.kv_cache import Stretch
from tests.kit.models import VOCAB, queue_of, runner_of, toy_bundle, toy_model, toy_tokenizer
from tests.kit.several import LAW, LONG, NEW, OTHER, PROMPTS, Driven, Own, alone, facts
from tests.kit.toy import F32, KV_BYTES, NextLogits, ToyModel

MANY = 1 << 62
PASS_BROKE, NO_MEMORY = "a pass broke", "not enough memory"


class Fragile(ToyModel):
    """A toy whose next pass fails, or the next time it makes room.

    Attributes:
        fails: what is to fail: ``pass``, ``room`` or nothing.
        lacks: how often there was no room.
    """

    def __init__(self, law: NextLogits, *, several: bool, chunk: int = 8) -> None:
        super().__init__(self._logits, VOCAB, chunk=chunk, several=several)
        self.fails, self._law, self.lacks = "", law, 0

    def _logits(self, tokens: Sequence[int]) -> F32:
        if self.fails == "pass":
            self.fails = ""
            raise EdgespecError(PASS_BROKE)
        return self._law(tokens)

    def make_room(self, stretch: Stretch, capacity: int) -> None:
        if self.fails == "room":
            self.fails = ""
            self.lacks += 1
            raise MemoryError


@dataclass(eq=False)
class Entry:
    """A request of the script, and why it may end otherwise than alone."""

    stream: Stream | None
    prompt: str
    options: dict[str, Any]
    own: Own | None = None
    talk: int | None = None
    may_end: set[str] = field(default_factory=set)
    leaves: bool = False
    is_checked: bool = False
    until: float = inf  # its timeout

    @property
    def ended(self) -> bool:
        return self.stream is None or self.stream.ended

    def excludes(self, other: "Entry") -> bool:
        same_talk = self.talk is not None and self.talk == other.talk
        return same_talk or (self.own is not None and self.own is other.own)


options = st.fixed_dictionaries(
    {"max_new_tokens": st.sampled_from([60, 24, 9, 2, 1, 0])},
    optional={
        "temperature": st.just(0.9),
        "stop": st.sampled_from(["A", "BC", "Q"]),
        "logprobs": st.just(True),
        "logit_bias": st.just({70: 3.0}),
        "repetition_penalty": st.just(1.2),
        "response_format": st.just(Choice(["AN ANSWER", "AN OTHER ONE", "NO"])),
    },
)


class Turns(RuleBasedStateMachine):
    """A plain model of the queue beside the real one, whose passes the script takes."""

    @initialize(
        parallel=st.integers(1, 4),
        most_waiting=st.integers(0, 4),
        drafter=st.sampled_from([None, LAW, OTHER]),
        one_text=st.booleans(),
        chunk=st.sampled_from([8, 16]),
    )
    def load(self, parallel: int, most_waiting: int, drafter: Any, one_text: bool, chunk: int) -> None:
        self.target = Fragile(LAW, several=True, chunk=chunk)
        self.drafter = None if drafter is None else Fragile(drafter, several=not one_text)
        self.kept_bytes = KV_BYTES
        self.parallel, self.most = parallel, parallel + most_waiting
        passes, self.now = self.target.passes, 0.0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ticket, "monotonic", lambda: self.now)
        self.tidy_fails = self.copies_fail = False
        self.without_memory = 0
        self.patch.setattr(CopyDrafter, "propose", self.copying(CopyDrafter.propose))
        self.model = toy_model(
            self.target.session(),
            None if self.drafter is None else self.drafter.session(),
            options=LoadOptions(parallel=parallel, max_waiting=most_waiting),
            clock=lambda: len(passes) + 0.01 * sum(passes),
            bundle=self.toy,
        )
        self.driven = Driven(self.model)
        self.patch.setattr(runner_of(self.model), "write_behind", self.tidy)
        self.entries, self.shared = list[Entry](), Own()
        self.other = Driven(
            toy_model(Fragile(LAW, several=True).session(), options=LoadOptions(parallel=2), bundle=self.toy)
        )
        self.of_other = list[Entry]()
        self.talks: list[Conversation] = [self.model.conversation() for _ in range(2)]
        self.said: list[list[dict[str, str]]] = [[], []]
        self.is_held = self.is_closed = self.has_dropped = False
        self.lacking: tuple[Entry, list[Entry]] | None = None  # who lacks room, and who ran then

    def tidy(self, stop: Any) -> None:
        if self.tidy_fails:
            self.tidy_fails = False
            raise MemoryError

    def copying(self, propose: Any) -> Any:
        def may_fail(*args: Any) -> Draft:
            if self.copies_fail:
                self.copies_fail = False
                raise KeyError("a table is broken")
            return cast(Draft, propose(*args))

        return may_fail

    def toy(self, name: str, context: int) -> Bundle:
        made = toy_bundle(name, context)
        manifest = made.manifest
        cast(Any, made).manifest = SimpleNamespace(
            name=manifest.name,
            special_tokens=manifest.special_tokens,
            sampling=manifest.sampling,
            kept_bytes=lambda tokens: tokens * self.kept_bytes,
        )
        return made

    # ---- Events --------------------------------------------------------------------------------------------

    @rule(
        prompt=st.sampled_from(PROMPTS),
        options=options,
        speculate=st.booleans(),
        law=st.sampled_from([None, None, LAW, OTHER]),
        fault=st.sampled_from([*[""] * 5, "propose", "observe", "close", "cancelled", "shared"]),
        talk=st.sampled_from([None] * 4 + [0, 1]),
        timeout=st.sampled_from([None, None, 5.0]),
        turns=st.integers(0, 3),
    )
    def ask(self, turns: int, **drawn: Any) -> None:
        self.queue(**drawn)
        self.turn_on(turns)

    def queue(
        self,
        prompt: str,
        options: dict[str, Any],
        speculate: bool,
        law: Any,
        fault: str,
        talk: int | None,
        timeout: float | None,
    ) -> None:
        if "temperature" in options:
            options = {**options, "seed": 3}
        request, entry = {**options, "speculate": speculate}, Entry(None, prompt, options, talk=talk)
        if fault in ("propose", "observe", "close"):
            entry.own, request["speculate"] = Own(law or LAW, raises_at=fault), True
        elif fault == "shared":
            entry.own, request["speculate"] = self.shared, True
        elif law is not None and speculate:
            entry.own = Own(law)
        if entry.own is not None:
            request["drafter"] = entry.own
        if timeout is not None:
            request["timeout"], entry.until = timeout, self.now + timeout
            entry.may_end.add("timeout")
        if fault == "cancelled":
            request["cancelled"] = self.raising(after=len(prompt) % 5)
        if fault not in ("", "shared"):
            entry.may_end.add(fault)
        stream = (
            self.model.stream(prompt, **request)
            if talk is None
            else self.talks[talk].stream(prompt, **request)
        )
        entry.stream = stream
        self.sweep()
        if self.is_closed or len(self.live) >= self.most:
            with pytest.raises(Closed if self.is_closed else Busy):
                self.driven.queue(stream)
            return
        leaving = any(ticket.result or ticket.interruption for ticket in queue_of(self.model).running)
        try:
            self.driven.queue(stream)
        except Busy:
            assert leaving  # they have their places until the next turn
            return
        entry.may_end |= self.failing
        self.entries.append(entry)

    def raising(self, after: int) -> Any:
        calls = list[int]()

        def cancelled() -> bool:
            calls.append(len(calls))
            if len(calls) > after:
                raise ZeroDivisionError("cancelled")
            return False

        return cancelled

    @rule(prompt=st.sampled_from(PROMPTS), options=options, count=st.integers(0, 4), shares=st.booleans())
    def ask_another_model(self, prompt: str, options: dict[str, Any], count: int, shares: bool) -> None:
        """Of the same process; it may have the same drafter of an app. No event of the first concerns it."""
        options = {**options, "seed": 3}
        more: dict[str, Any] = {"drafter": self.shared} if shares else {}
        stream = self.other.queue(self.other.model.stream(prompt, **options, **more))
        self.of_other.append(Entry(stream, prompt, options))
        self.turn_other(count)

    def turn_of(self, driven: Driven) -> int:
        """A turn: without memory none begins beside those that run, and one does where none runs."""
        before = sum(driven.taken)
        ran = driven.turn()
        if self.kept_bytes == MANY:
            assert sum(driven.taken) <= max(1, before)
        return ran

    def turn_other(self, count: int) -> None:
        for _ in range(count):
            waiting = [entry for entry in self.of_other if not entry.ended]
            assert self.turn_of(self.other) > 0 or not waiting
            for entry in waiting:
                if entry.stream is not None and entry.stream.ended:
                    self.check(entry, entry.stream)

    @precondition(lambda self: self.live)
    @rule(count=st.integers(1, 6))
    def turn(self, count: int) -> None:
        self.turn_on(count)

    def turn_on(self, count: int) -> None:
        for _ in range(count):
            if self.is_held and not any(map(self.has_to_end, self.running)):
                return  # it would wait
            before, written = self.expected(), {id(a): self.length(a) for a in self.entries}
            leaving, live = [entry for entry in self.running if self.has_to_end(entry)], self.live
            ran, self.has_dropped = self.turn_of(self.driven), False
            self.see_who_lacks_room(live)
            if before is not None and not self.is_held:
                assert ran == before
            assert all(entry.ended for entry in leaving)  # within a pass
            if self.is_held:
                for entry in self.entries:
                    assert entry.ended or self.length(entry) == written[id(entry)]
            self.check_ends()

    @precondition(lambda self: any(self.now < entry.until < inf for entry in self.live))
    @rule(seconds=st.sampled_from([1.0, 4.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not self.tidy_fails)
    @rule()
    def tidy_fault(self) -> None:
        self.tidy_fails = True

    @precondition(lambda self: self.running)
    @rule()
    def copies_fault(self) -> None:
        self.copies_fail = True

    @precondition(lambda self: self.live)
    @rule(data=st.data(), drops=st.booleans())
    def leave(self, data: st.DataObject, drops: bool) -> None:
        entry = data.draw(st.sampled_from(self.live))
        entry.leaves = True
        entry.may_end.add("cancelled")
        assert entry.stream is not None
        if drops and entry.talk is None:  # else what it has written stays in the conversation
            entry.stream, self.has_dropped = None, True
            gc.collect()
        else:
            waits = entry.stream.place > 0
            entry.stream.cancel()
            assert entry.stream.ended or not waits
            self.check_ends()

    @precondition(lambda self: self.running)
    @rule(who=st.sampled_from(["target", "drafter"]), what=st.sampled_from(["pass", "room"]))
    def fail(self, who: str, what: str) -> None:
        model = self.target if who == "target" else self.drafter
        if model is not None:
            model.fails = what
            for entry in self.entries:
                entry.may_end |= self.failing

    @precondition(lambda self: self.running or self.kept_bytes == MANY)
    @rule()
    def lack_room_or_have_it(self) -> None:
        self.kept_bytes = KV_BYTES if self.kept_bytes == MANY else MANY

    @precondition(lambda self: self.running)
    @rule()
    def trim(self) -> None:
        runner_of(self.model).trim()

    @precondition(lambda self: self.live and not (self.is_closed or self.is_held))
    @rule()
    def hold(self) -> None:
        with self.driven.within():
            self.model.pause()
        self.is_held = True

    @precondition(lambda self: self.is_held)
    @rule()
    def resume(self) -> None:
        self.model.resume()
        self.is_held = False

    @precondition(lambda self: len(self.entries) > 6)
    @rule()
    def close(self) -> None:
        with self.driven.within():
            self.model.close()
        self.is_closed, self.is_held = True, False
        for entry in self.entries:
            entry.may_end.add("closed")
        self.check_ends()

    def see_who_lacks_room(self, live: list[Entry]) -> None:
        """Who found none waits until one of those that run beside it ends."""
        if any(entry.ended for entry in live):
            self.lacking = None
            return
        for entry in self.live:
            ticket = None if entry.stream is None else entry.stream._ticket
            if ticket is not None and ticket is queue_of(self.model).lacks_room:
                known = self.lacking is not None and self.lacking[0] is entry
                self.lacking = self.lacking if known else (entry, self.running)

    @property
    def is_full(self) -> bool:
        if self.lacking is None or self.lacking[0].ended:
            return False
        return not any(other.ended for other in self.lacking[1])

    def has_to_end(self, entry: Entry) -> bool:
        return entry.leaves or self.now >= entry.until

    # ---- What holds ----------------------------------------------------------------------------------------

    @property
    def live(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.ended]

    @property
    def running(self) -> list[Entry]:
        return [a for a in self.entries if a.stream and a.stream._ticket.stage is Stage.RUNNING]

    @property
    def failing(self) -> set[str]:
        """What the next pass may raise. A drafter's faults end nothing."""
        return {"pass": {PASS_BROKE}, "room": {NO_MEMORY}}.get(self.target.fails, set())

    def sweep(self) -> None:
        """What was dropped while it waited is let go when somebody asks."""
        self.entries = [entry for entry in self.entries if entry.stream is not None or entry.is_checked]

    def length(self, entry: Entry) -> int:
        return 0 if entry.stream is None else len(entry.stream._ticket._records)

    def expected(self) -> int | None:
        """How many run in the next turn; None where what was dropped decides that."""
        if self.has_dropped:
            return None
        running = self.running
        if self.is_full:
            return len(running)
        for entry in self.entries:
            if entry.ended or entry in running or len(running) == self.parallel:
                continue
            if not any(entry.excludes(other) for other in running):
                running.append(entry)
        return len(running)

    @invariant()
    def places_are_in_the_order_of_asking(self) -> None:
        if not hasattr(self, "entries"):
            return
        waiting = [a for a in self.entries if a.stream is not None and not a.ended and a.stream.place > 0]
        places = [entry.stream.place for entry in waiting if entry.stream is not None]
        assert places == sorted(set(places))
        assert sum(self.driven.taken) <= self.parallel

    def check_ends(self) -> None:
        for entry in self.entries:
            if entry.stream is not None and entry.ended and not entry.is_checked:
                entry.is_checked = True
                self.check(entry, entry.stream)

    def check(self, entry: Entry, stream: Stream) -> None:
        """An answer is the one that it would be alone, or its beginning, and ended for a reason."""
        answer, error = stream.result, ""
        with suppress(Closed):
            try:
                stream.run()
            except (ZeroDivisionError, EdgespecError) as raised:
                error = str(raised)
        whole = self.alone(entry, answer)
        if error:
            assert any(reason in error for reason in entry.may_end), error
            self.without_memory += NO_MEMORY in error
            assert self.without_memory <= self.target.lacks  # a lack ends one request
        elif answer.finish_reason in ("cancelled", "closed", "timeout"):
            assert answer.finish_reason in entry.may_end
        else:
            assert facts(answer) == facts(whole)
            return
        assert answer.tokens == whole.tokens[: len(answer.tokens)]
        assert whole.text.startswith(answer.text)

    def alone(self, entry: Entry, answer: Generation) -> Generation:
        if entry.talk is None:
            return alone(entry.prompt, **entry.options)
        said = self.said[entry.talk]
        whole = alone([*said, {"role": "user", "content": entry.prompt}], **entry.options)
        if answer.text:
            said += [{"role": "user", "content": entry.prompt}, answer.message]
        assert self.talks[entry.talk].messages == said
        return whole

    def teardown(self) -> None:
        if not hasattr(self, "entries"):
            return
        self.kept_bytes = KV_BYTES
        self.model.resume()
        self.is_held, self.target.fails = False, ""
        if self.drafter is not None:
            self.drafter.fails = ""
        while self.driven.turn():
            self.check_ends()
        while not all(entry.ended for entry in self.of_other):
            self.turn_other(1)
        self.other.close()
        assert all(entry.ended for entry in self.entries)
        assert not any(self.driven.taken)
        if not self.is_closed:
            again = self.driven.queue(self.model.stream(LONG, max_new_tokens=NEW))
            self.driven.run()
            assert facts(again.result) == facts(alone(LONG, max_new_tokens=NEW))
        runner_of(self.model).close()
        self.patch.undo()
        assert self.target.closed
        for own in {id(a.own): a.own for a in self.entries if a.own and a.own is not self.shared}.values():
            assert own.closed <= 1 and (own.closed == 1 or not own.rounds)


TestTurns = Turns.TestCase
TestTurns.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink a script takes minutes
)


@pytest.mark.parametrize("what", ["pass", "room", "observe"])
@pytest.mark.parametrize("law", [LAW, OTHER])
def test_a_drafter_that_fails_is_left_out_and_answers_go_on(
    what: str, law: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, target = Fragile(law, several=True), Fragile(LAW, several=True)
    with toy_model(target.session(), drafter.session(), options=LoadOptions(parallel=2)) as model:
        driven = Driven(model)
        if what == "room":
            drafter.fails = what
        streams = [driven.queue(model.stream(text, max_new_tokens=60)) for text in (PROMPTS[0], PROMPTS[3])]
        driven.turn()
        if what == "observe":
            monkeypatch.setattr(ModelDrafter, "observe", Mock(side_effect=[OSError("gone")]))
        elif what == "pass":
            drafter.fails = what
        driven.run()
        for stream, text in zip(streams, (PROMPTS[0], PROMPTS[3]), strict=True):
            assert facts(stream.result) == facts(alone(text, max_new_tokens=60))
        reasons = [str(stream.result.stats.speculation_off_reason) for stream in streams]
        assert any(reason.startswith("the drafter failed: ") for reason in reasons)
        assert "the answer goes on without it" in caplog.text
        assert not any(driven.taken)
        monkeypatch.undo()
        again = driven.queue(model.stream(PROMPTS[0], max_new_tokens=60))
        driven.run()
        assert "failed" not in str(again.result.stats.speculation_off_reason)


@pytest.mark.parametrize("fails", ["propose", "observe", "close"])
def test_answers_go_on_where_ngrams_fail(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with toy_model(Fragile(LAW, several=True).session(), options=LoadOptions(parallel=2)) as model:
        driven = Driven(model)
        monkeypatch.setattr(CopyDrafter, fails, Mock(side_effect=KeyError("gone")), raising=False)
        streams = [driven.queue(model.stream(text, max_new_tokens=30)) for text in (PROMPTS[0], PROMPTS[3])]
        driven.run()
        for stream, text in zip(streams, (PROMPTS[0], PROMPTS[3]), strict=True):
            assert facts(stream.result) == facts(alone(text, max_new_tokens=30))
            assert "the drafter failed" in str(stream.result.stats.speculation_off_reason)


def test_an_answer_goes_on_where_the_drafter_cannot_read_a_text() -> None:
    target, small = Fragile(LAW, several=True), Fragile(LAW, several=True)
    lacking = Mock(wraps=toy_tokenizer())
    lacking.encode = Mock(side_effect=TokenizerError("a byte has no token"))
    with toy_model(
        target.session(),
        small.session(),
        bundle=lambda name, context: toy_bundle(name, context, lacking if name == "small" else None),
        same_vocabulary=False,
    ) as model:
        answer = model.generate(PROMPTS[0], max_new_tokens=20)
        assert facts(answer) == facts(alone(PROMPTS[0], max_new_tokens=20))
        assert "a byte has no token" in str(answer.stats.speculation_off_reason)


def test_an_answer_that_its_grammar_ends_leaves_the_prompt_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Fragile(LAW, several=True)
    with toy_model(target.session(), options=LoadOptions(parallel=1)) as model:
        driven = Driven(model)
        monkeypatch.setattr(GrammarConstraint, "begin", Mock(side_effect=RequestError("no token is allowed")))
        failing = driven.queue(model.stream(LONG, max_new_tokens=8, response_format=Choice(["NO"])))
        driven.run()
        with pytest.raises(RequestError, match="no token"):
            failing.run()
        again = driven.queue(model.stream(LONG, max_new_tokens=8))
        driven.run()
        assert again.result.stats.cached_tokens > len(LONG) // 2
