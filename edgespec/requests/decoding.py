"""A request that is answered: passes in, records out, and the result as far as it came."""

import json
from contextlib import suppress
from dataclasses import replace
from time import perf_counter

from edgespec.decoding.draft import Clock, Passed, Progress, Step
from edgespec.decoding.grammar import Constraint
from edgespec.decoding.sampling import RowStep, Spelled, Suppressed
from edgespec.decoding.verifier import Verifier
from edgespec.drafting.policy import Policy
from edgespec.requests.answer_reading import AnswerReader
from edgespec.requests.request import Prompt, Request, call_reader
from edgespec.requests.results import FinishReason, Generation, Record, TokenRecord, statistics, token_records
from edgespec.requests.seats import Seat
from edgespec.requests.sequence import Decoding
from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.predictions import Predictions


class RequestDecoding(Decoding):
    """The decoding of a request: committed tokens of its rounds become the answer's text.

    At its end the ``policy`` is closed and the ``seat`` is freed. The ``request`` has as many new tokens as
    fit the context. ``started`` is the time of its turn by the clock. ``cached_tokens`` are tokens of the
    prompt that the KV cache held then.
    """

    def __init__(
        self,
        target: Bundle,
        seat: Seat,
        policy: Policy,
        prompt: Prompt,
        request: Request,
        constraint: Constraint | None = None,
        *,
        max_draft: int,
        clock: Clock = perf_counter,
        started: float = 0.0,
        queued_s: float = 0.0,
    ) -> None:
        tokens, hole, tokenizer = prompt.target.copy(), prompt.hole, target.tokenizer
        masks: list[RowStep] = [] if constraint is None else [constraint]
        fill, special = None, target.manifest.special_tokens
        ends, excluded = special.eos, special.suppressed or special.suppressed_first or special.bad_words
        if hole is not None:
            from edgespec.requests.fill_reading import FillReader

            fill, ends = FillReader(hole, request.max_lines), (*ends, *hole.ends)
            if hole.held:
                masks.append(Spelled(tokenizer, hole.held, len(tokens)))
        super().__init__(
            seat.target,
            policy,
            Verifier(request.sampler, masks, Suppressed(special, len(tokens)) if excluded else None),
            tokens,
            max_new_tokens=request.max_new_tokens,
            max_draft=max_draft,
            stop=frozenset(ends) if request.stop_at_eos else (),
            top_logprobs=request.top_logprobs if request.logprobs else None,
            prompt_logprobs=request.top_logprobs if request.prompt_logprobs else None,
            checkpoints=seat.checkpoints,
            clock=clock,
        )
        self.prompt_tokens, self.cached_tokens = len(tokens), self.session.length
        self._seat, self._remarks = seat, policy.remarks
        self._constraint, self._tokenizer = constraint, tokenizer
        self._calls = call_reader(target, request, tokens)
        if prompt.place is not None and prompt.place.tags.channels:
            from edgespec.requests.channel_reading import ChannelReader

            self._reader: AnswerReader = ChannelReader(tokenizer, self._calls, stop=request.stop)
        else:
            self._reader = AnswerReader(tokenizer, prompt.place, self._calls, fill, stop=request.stop)
        self._again = 0 if fill is None else fill.skip  # bytes of a cut word to come
        self._steps, self._records = list[Step](), list[Record]()
        self._reason: FinishReason | None = None
        self._started, self._queued_s = started, queued_s
        self._first_at = self._decode_s = 0.0
        self._progress: Progress | None = None  # of a prompt that takes several passes
        if self.unread >= self.session.model.piece:
            self._progress = Progress(len(tokens), self.session.length, self.session.length, 0.0)

    @property
    def progress(self) -> Record | None:
        """The progress of a prompt that takes several passes; None for other prompts."""
        return None if self._progress is None else Record("", (), progress=self._progress)

    def advance(self, predictions: Predictions, passed: Passed) -> list[Record]:
        """Add the records of a pass: the prompt's progress, committed tokens, and at last the reason."""
        step, now, records = self.take(predictions, passed), self.clock(), list[Record]()
        if self._progress is not None:
            self._progress = replace(self._progress, read=self.session.length, seconds=now - self._started)
            records.append(Record("", (), progress=self._progress))
        is_over = self.ended and self.unread <= 0
        if not self._steps and (step or is_over or self.session.length in self._seat.checkpoints):
            self._seat.checkpoint()
        if step is None:
            return [*records, self.stop("length")] if is_over else records
        self._progress = None
        if not self._steps:
            self._first_at = now
        return [*records, self._record(step)]

    def stop(self, reason: FinishReason) -> Record:
        """End the request early, and return its last records."""
        self._reason = reason
        return self._shown(Record("", ()))

    def close(self) -> None:
        """Close the request after its end; called once."""
        try:
            super().close()
        finally:
            self._seat.free()

    @property
    def result(self) -> Generation:
        """The result so far."""
        thoughts = tuple(self._reader.thoughts)
        tokens = tuple(token for record in self._records for token in record.tokens)
        stats = replace(
            statistics(self._steps, self._remarks),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            queued_s=self._queued_s,
            ttft_s=self._first_at - self._started if self._steps else 0.0,
            decode_s=self._decode_s,
            reasoning_tokens=len(thoughts),
            schema_problems=self._schema_problems(),
        )
        return Generation(
            "".join(record.text for record in self._records),
            tuple(token.id for token in tokens),
            self._reason or "error",
            stats,
            self._reader.stop_string,
            tokens,
            tuple(self._reader.called),
            "".join(record.content for record in self._records),
            thoughts=thoughts,
            prompt=self._records[0].prompt if self._records else (),
        )

    def _schema_problems(self) -> tuple[str, ...]:
        """The rules of schemas, beyond the grammar, that a complete answer or its calls break."""
        schemas = {} if self._constraint is None else self._constraint.schemas
        if self._constraint is not None and self._constraint.broken:
            return (self._constraint.broken,)
        if self._reason not in ("stop", "tool_calls") or not any(s.unheld for s in schemas.values()):
            return ()
        values = [(call.name, call.arguments) for call in self._reader.called]
        if not values:
            with suppress(ValueError, RecursionError):  # a stop string may have ended it
                values = [("", json.loads("".join(record.text for record in self._records)))]
        held = [(schemas[name], value) for name, value in values if name in schemas]
        return tuple(dict.fromkeys(problem for schema, value in held for problem in schema.problems(value)))

    def _record(self, step: Step) -> Record:
        """The record of a round."""
        self._steps.append(step)
        tokens = tuple(map(self._with_again, token_records(step)))
        record = replace(self._reader.push(step.tokens), tokens=tokens)
        if self._constraint is not None and self._constraint.broken:
            self._reason = "length"
        elif self._reader.ended or self._is_complete(step.tokens[-1]):
            self._reason = "stop"
        elif len(self.tokens) >= self._end:
            self._reason = "length"
        record = self._shown(record)
        self._decode_s = self.clock() - self._first_at
        return record

    def _with_again(self, token: TokenRecord) -> TokenRecord:
        """A token, with the number of its bytes that a fill writes again."""
        again = min(self._again, len(self._tokenizer.token_bytes(token.id)))
        self._again -= again
        return replace(token, again=again)

    def _is_complete(self, last: int) -> bool:
        """Whether the model has ended its text, or the request's grammar allows nothing behind it."""
        over = self._constraint is not None and self._constraint.ends(self.tokens)
        return over or last in self._stop

    def _shown(self, record: Record) -> Record:
        """The next record; the last one has held text, too."""
        if self._reason is not None:
            if self._calls is not None:
                self._calls.cut = self._reason != "stop" or self._reader.stop_string is not None
            rest = self._reader.push((), final=True)
            if self._reason == "stop" and self._reader.called:
                self._reason = "tool_calls"
            record = replace(
                record,
                text=record.text + rest.text,
                content=record.content + rest.content,
                calls=record.calls + rest.calls,
                thoughts=record.thoughts + rest.thoughts,
                finish_reason=self._reason,
                stop=self._reader.stop_string,
            )
        if not self._records:
            scored = zip(self.tokens, self.scores, strict=False)
            prompt = tuple(TokenRecord(token, "prompt", *score) for token, score in scored)
            record = replace(record, prompt=prompt)
        self._records.append(record)
        return record
