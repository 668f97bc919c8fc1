"""One request: rounds of the decoding loop turned into text and statistics."""

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from edgespec.decode import Step, decode
from edgespec.drafting.ahead import Ahead
from edgespec.drafting.draft import Draft, Drafter
from edgespec.drafting.guard import Guard
from edgespec.drafting.reading import Tally
from edgespec.pricing import Pricing
from edgespec.request import Request
from edgespec.results import FinishReason, Generation, GenerationStats, SourceStats
from edgespec.verification import make_verifier
from edgespec_models.errors import Cancelled, RequestError
from edgespec_models.text_stream import TextStream
from edgespec_models.tokenizer import Tokenizer
from edgespec_runtimes.session import Session

__all__ = ["Job", "Learner", "TextStreamer"]

_NOTICEABLE = 0.03


class Learner(Protocol):
    """Told of an answer as it is written."""

    @property
    def problem(self) -> str | None:
        """What keeps it from learning or from remembering; None if nothing."""

    @property
    def rolled_back(self) -> tuple[str, ...]:
        """What was put back, since the request before, because it misled, and why."""

    def observe(self, draft: Draft, accepted: int) -> None:
        """This was verified, and the first ``accepted`` tokens of it were right."""

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens of the answer are final."""

    def finish(self) -> None:
        """The answer has ended, or the caller wants no more of it."""


class Student(Protocol):
    """Learns from answers while no request runs."""

    def begin(self) -> None:
        """A request runs from now on."""

    def end(self, tokens: Sequence[int]) -> None:
        """It has ended; ``tokens`` are its prompt and its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one request runs on. ``tokens`` is the prompt and grows."""

    session: Session
    tokenizer: Tokenizer
    drafter: Drafter | None
    tokens: list[int]
    request: Request
    eos: frozenset[int]
    max_draft: int
    pricing: Pricing
    guard: Guard
    off_reason: str | None
    placement: str = ""
    learner: Learner | None = None
    ahead: Ahead | None = None
    student: Student | None = None


class TextStreamer:
    """Iterate over the text as it is generated; afterwards ``result`` is the whole :class:`Generation`.

    Pieces are never half a character and never text that a stop string takes back. Leaving the loop
    early ends the request, as the model's next request does; the model stays usable.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._result: Generation | None = None
        self._pieces = self._generate()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        for piece in self._pieces:
            return piece
        _ = self.result  # an error where something else has ended it
        raise StopIteration

    @property
    def result(self) -> Generation:
        """The finished generation.

        Raises:
            RequestError: the stream was not read to its end.
        """
        if self._result is None:
            raise RequestError(
                "the generation is not finished; read the stream to its end, before the model is asked again "
                "or closed"
            )
        return self._result

    def close(self) -> None:
        """End the request: what is not generated yet never will be.

        Raises:
            RequestError: it is being read just now, by another thread or by whoever calls this.
        """
        try:
            self._pieces.close()
        except ValueError as error:
            raise RequestError(
                "the model is writing another answer; it answers one request at a time"
            ) from error

    def run(self) -> Generation:
        """Generate to the end."""
        for _ in self:
            pass
        return self.result

    def _generate(self) -> Generator[str, None, None]:
        job, request = self._job, self._job.request
        prompt_tokens = len(job.tokens)
        stream, meter, text = TextStream(job.tokenizer, stop=request.stop), _Meter(job), []
        reason: FinishReason = "length"
        try:
            with closing(self._rounds(meter)) as rounds:
                for step in rounds:
                    piece = stream.push(step.tokens)
                    if step.tokens[-1] in job.eos or stream.stopped:
                        reason = "stop"
                    if piece:
                        text.append(piece)
                        left = perf_counter()
                        yield piece
                        meter.pause(perf_counter() - left)
                    if stream.stopped:
                        break
        except Cancelled:
            reason = "cancelled"
        if reason == "length" and request.cancelled():
            reason = "cancelled"
        rest = stream.finish()
        new = tuple(job.tokens[prompt_tokens:])
        if rest:
            text.append(rest)
        self._result = Generation("".join(text), new, reason, meter.stats(prompt_tokens, len(new)))
        if rest:
            yield rest

    def _rounds(self, meter: "_Meter") -> Generator[Step, None, None]:
        job, request = self._job, self._job.request
        try:
            if job.student is not None:
                job.student.begin()
            for step in decode(
                job.session,
                job.drafter,
                make_verifier(request.sampling),
                job.tokens,
                max_new_tokens=request.max_new_tokens,
                max_draft=job.max_draft,
                stop=job.eos,
                cancelled=request.cancelled,
            ):
                meter.observe(step)
                if job.learner is not None:
                    job.learner.observe(step.draft, step.accepted)
                    job.learner.commit(step.tokens)
                yield step
        finally:
            if job.ahead is not None:
                job.ahead.stop()
            if job.learner is not None:
                job.learner.finish()
            if job.student is not None:
                job.student.end(job.tokens)


class _Meter:
    """Times and counts of one request; tells the pricing what rounds cost.

    Its clock stands while the caller does something with a piece of text: that is no round's time.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._cached_tokens = job.session.shared_prefix(job.tokens[:-1])  # the last is always read
        self._paused_s = 0.0
        self._started = perf_counter()
        self._first = self._last = self._started
        self._rounds = self._decode_tokens = 0
        self._has_asked = False
        self._target_s = self._drafter_s = 0.0
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._drafted_at: Counter[int] = Counter()
        self._accepted_at: Counter[int] = Counter()

    def pause(self, seconds: float) -> None:
        """For so long the caller kept the last piece."""
        self._paused_s += seconds

    def observe(self, step: Step) -> None:
        now = perf_counter() - self._paused_s
        if self._rounds == 0:
            self._first = now
        else:
            self._decode_tokens += len(step.tokens)
            seconds = now - self._last
            self._observe_pass(1 + len(step.draft.tokens), step.target_s)
            # A drafter that is asked costs time whether it proposes or not. Once a request that is the
            # reading of the prompt, which says nothing about the rounds to come.
            asked = bool(step.draft.tokens) or step.drafter_s > _NOTICEABLE * step.target_s
            reads_prompt = asked and not self._has_asked and step.drafter_s > step.target_s
            self._has_asked |= asked
            if not reads_prompt:
                self._job.pricing.observe_round(len(step.tokens), seconds)
                if asked:
                    self._job.guard.observe(len(step.tokens), seconds)
        self._last = now
        self._rounds += 1
        self._target_s += step.target_s
        self._drafter_s += step.drafter_s
        for position, source in enumerate(step.draft.sources):
            self._drafted[source] += 1
            self._drafted_at[position] += 1
            if position < step.accepted:
                self._accepted[source] += 1
                self._accepted_at[position] += 1

    def _observe_pass(self, rows: int, seconds: float) -> None:
        ahead = self._job.ahead
        self._job.pricing.observe_pass(rows, seconds if ahead is None else ahead.observe_pass(rows, seconds))

    def stats(self, prompt_tokens: int, new_tokens: int) -> GenerationStats:
        drafted = sum(self._drafted.values())
        off = self._job.off_reason or self._job.guard.reason
        if off is None and not drafted and self._rounds > 1:
            off = "no proposal was expected to pay"
        ahead = Tally() if self._job.ahead is None else self._job.ahead.tally
        positions = range(max(self._drafted_at, default=-1) + 1)
        return GenerationStats(
            prompt_tokens=prompt_tokens,
            cached_tokens=self._cached_tokens,
            new_tokens=new_tokens,
            ttft_s=self._first - self._started,
            decode_s=self._last - self._first,
            decode_tokens=self._decode_tokens,
            rounds=self._rounds,
            drafted=drafted,
            accepted=sum(self._accepted.values()),
            by_source={s: SourceStats(n, self._accepted[s]) for s, n in self._drafted.items()},
            drafted_by_position=tuple(self._drafted_at[i] for i in positions),
            accepted_by_position=tuple(self._accepted_at[i] for i in positions),
            target_s=self._target_s,
            drafter_s=self._drafter_s,
            speculation_off_reason=off,
            placement=self._job.placement,
            drafted_ahead=ahead.drafted,
            used_ahead=ahead.used,
            profile_problem=None if self._job.learner is None else self._job.learner.problem,
            rolled_back=() if self._job.learner is None else self._job.learner.rolled_back,
        )
