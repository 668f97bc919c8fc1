"""A running request: its decoding, its answer, and the seat that it has."""

from collections import abc
from dataclasses import replace

from edgespec.decoding.draft import Clock, Passed, Progress
from edgespec.decoding.grammar import Constraint
from edgespec.decoding.sampling import RowStep, Spelled, Suppressed
from edgespec.decoding.verifier import Verifier
from edgespec.drafting.policy import Policy
from edgespec.requests.answer import Answer
from edgespec.requests.loop import Decoding
from edgespec.requests.request import Prompt, Request
from edgespec.requests.results import FinishReason, Generation, Record
from edgespec.requests.seats import Seat
from edgespec.requests.ticket import Ticket
from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.predictions import Predictions


class Sequence:
    """One sequence of tokens from a request's turn to its end. The model's thread alone uses it.

    The ``request`` has as many new tokens as fit the context. At the lengths ``checkpoints`` of the prompt
    the target's states are kept. ``started`` is the time of its turn by the clock.

    Attributes:
        ticket: what the request's threads share.
        decoding: the tokens, the target's session, and the round that runs.
        answer: the text.
    """

    def __init__(
        self,
        ticket: Ticket,
        target: Bundle,
        seat: Seat,
        policy: Policy,
        prompt: Prompt,
        request: Request,
        constraint: Constraint | None = None,
        *,
        max_draft: int,
        clock: Clock,
        started: float = 0.0,
        queued_s: float = 0.0,
        checkpoints: abc.Sequence[int] = (),
    ) -> None:
        tokens, hole, special = prompt.target.copy(), prompt.hole, target.manifest.special_tokens
        masks: list[RowStep] = [] if constraint is None else [constraint]
        ends, excluded = special.eos, special.suppressed or special.suppressed_first or special.bad_words
        if hole is not None:
            ends = (*ends, *hole.ends)
            if hole.held:
                masks.append(Spelled(target.tokenizer, hole.held, len(tokens)))
        suppressed = Suppressed(special, len(tokens)) if excluded else None
        self.ticket, self._seat, self._policy, self._checkpoints = ticket, seat, policy, checkpoints
        self.clock, self._started = clock, started
        self.decoding = Decoding(
            seat.target,
            policy,
            Verifier(request.sampler, masks, suppressed),
            tokens,
            max_new_tokens=request.max_new_tokens,
            max_draft=max_draft,
            stop=frozenset(ends) if request.stop_at_eos else (),
            top_logprobs=request.top_logprobs if request.logprobs else None,
            prompt_logprobs=request.top_logprobs if request.prompt_logprobs else None,
            checkpoints=checkpoints,
            clock=clock,
        )
        self.answer = Answer(
            target,
            prompt,
            request,
            self.decoding,
            constraint,
            remarks=policy.remarks,
            clock=clock,
            started=started,
            queued_s=queued_s,
        )
        ticket.running = self
        self._progress: Progress | None = None  # of a prompt that takes several passes
        if self.decoding.unread >= seat.target.model.piece:
            held = seat.target.length
            self._progress = Progress(len(tokens), held, held, 0.0)
            ticket.put(Record("", (), progress=self._progress))

    @property
    def is_live(self) -> bool:
        """Whether the request goes on."""
        return self.ticket.result is None

    def advance(self, predictions: Predictions, passed: Passed) -> None:
        """Put the records of a pass onto the ticket, and end the request if it is complete."""
        decoding, session = self.decoding, self.decoding.session
        step = decoding.take(predictions, passed)
        if self._progress is not None:
            seconds = self.clock() - self._started
            self._progress = replace(self._progress, read=session.length, seconds=seconds)
            self.ticket.put(Record("", (), progress=self._progress))
        is_over = decoding.reason is not None and decoding.unread <= 0
        if not self.answer.rounds and (step or is_over or session.length in self._checkpoints):
            self._seat.caches.checkpoint(session)
        if step is not None:
            self._progress = None
            self.ticket.put(self.answer.push(step, decoding.reason))
            if self.answer.reason is not None:
                self.ticket.finish()
        elif is_over:
            self.stop("length")

    def stop(self, reason: FinishReason) -> None:
        """End the request early."""
        self.ticket.put(self.answer.stop(reason))
        self.ticket.finish()

    @property
    def result(self) -> Generation:
        """The result so far."""
        return self.answer.result

    @property
    def prompt(self) -> tuple[int, int]:
        """The tokens of the prompt, and how many of them the KV cache held at the request's turn."""
        return self.answer.prompt_tokens, self.answer.cached_tokens

    def close(self) -> None:
        """Close the sources and free the seat, once, however the request ended."""
        try:
            self._policy.close()
        finally:
            self._seat.free()
