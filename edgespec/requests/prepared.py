"""A request that was made ready: rounds in, records out, and the result as far as it came."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from edgespec.decoding.draft import Clock, Passed, Progress, Remarks, Step
from edgespec.decoding.grammar import Constraint
from edgespec.decoding.loop import Decoding, Verifier
from edgespec.decoding.sampling import RowStep, Spelled
from edgespec.drafting.policy import Policy
from edgespec.requests.answer_reading import AnswerReader
from edgespec.requests.request import Hole, Request
from edgespec.requests.results import FinishReason, Generation, Record, TokenRecord, statistics, token_records
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Session

if TYPE_CHECKING:  # requests without tools or thoughts need neither
    from edgespec.requests.call_reading import CallReader
    from edgespec_models.text.thoughts import Place


@dataclass(slots=True, kw_only=True)
class PreparedRequest:
    """One request, with what it runs on: rounds in, records out, and the result as far as it came.

    ``tokens`` is the prompt and grows. ``begin`` makes the policy, which is closed when the request ends;
    then ``ended`` is called. ``started`` is when making it ready began; None is when it starts.
    """

    session: Session
    tokenizer: Tokenizer
    tokens: list[int]
    request: Request
    eos: frozenset[int]
    max_draft: int
    begin: Callable[[], Policy]
    constraint: Constraint | None = None
    place: "Place | None" = None
    calls: "CallReader | None" = None
    hole: Hole | None = None
    clock: Clock = perf_counter
    ended: Callable[[], None] = lambda: None
    started: float | None = None
    _policy: Policy | None = field(init=False, default=None)
    _decoding: Decoding | None = field(init=False, default=None)
    _reader: AnswerReader = field(init=False)
    _steps: list[Step] = field(init=False, default_factory=list)
    _records: list[Record] = field(init=False, default_factory=list)
    _reason: FinishReason | None = field(init=False, default=None)
    _progress: Progress | None = field(init=False, default=None)
    _started: float = field(init=False, default=0.0)
    _first_at: float = field(init=False, default=0.0)
    _again: int = field(init=False, default=0)  # bytes of a cut word to come
    _measured: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        fill = None
        if self.hole is not None:
            from edgespec.requests.fill_reading import FillReader

            fill = FillReader(self.hole, self.request.max_lines)
            self._again = fill.skip
        self._reader = AnswerReader(self.tokenizer, self.place, self.calls, fill, stop=self.request.stop)
        self._measured["prompt_tokens"] = len(self.tokens)

    def start(self, queued_s: float) -> None:
        """Its turn has come, for which it waited so long."""
        self._started = self.clock() if self.started is None else self.started
        if self.request.prompt_logprobs:
            self.session.rewind(0)  # what is in the cache says nothing of how likely it was
        self._policy = policy = self.begin()
        masks: list[RowStep] = [] if self.constraint is None else [self.constraint]
        if self.hole is not None and self.hole.held:
            masks.append(Spelled(self.tokenizer, self.hole.held, len(self.tokens)))
        self._decoding = Decoding(
            self.session,
            policy,
            Verifier(self.request.sampling, masks),
            self.tokens,
            max_new_tokens=self.request.max_new_tokens,
            max_draft=self.max_draft,
            stop=self.eos,
            top_logprobs=self.request.top_logprobs if self.request.logprobs else None,
            prompt_logprobs=self.request.top_logprobs if self.request.prompt_logprobs else None,
            clock=self.clock,
        )
        cached = self.session.length
        self._measured |= {"queued_s": queued_s, "cached_tokens": cached}
        if self._decoding.unread >= self.session.model.piece:
            self._progress = Progress(len(self.tokens), cached, cached, 0.0)

    @property
    def decoding(self) -> Decoding:
        """Its rounds; there once it has started."""
        assert self._decoding is not None
        return self._decoding

    @property
    def read(self) -> tuple[int, int]:
        """How many tokens the prompt has, and how many of them the KV cache held when it started."""
        return self._measured["prompt_tokens"], self._measured.get("cached_tokens", 0)

    @property
    def progress(self) -> Record | None:
        """How far a prompt is read that takes several passes; None for others."""
        if self._progress is None:
            return None
        return Record("", (), progress=self._progress)

    def take(self, predictions: Predictions, passed: Passed) -> list[Record]:
        """What a pass adds: how far the prompt is read, what was committed; the last has the reason."""
        step, now, records = self.decoding.take(predictions, passed), self.clock(), list[Record]()
        if self._progress is not None:
            self._progress = replace(self._progress, read=self.session.length, seconds=now - self._started)
            records.append(Record("", (), progress=self._progress))
        if step is None:
            is_over = self.decoding.ended and self.decoding.unread <= 0
            return [*records, self.stop("length")] if is_over else records
        self._progress = None
        if not self._steps:
            self._first_at, self._measured["ttft_s"] = now, now - self._started
        return [*records, self._record(step)]

    def stop(self, reason: FinishReason) -> Record:
        """End it early; what it has to say yet."""
        self._reason = reason
        return self._shown(Record("", ()))

    def close(self) -> None:
        """It is over, however that came: called once."""
        try:
            if self._policy is not None:
                self._policy.close()
        finally:
            self.ended()

    @property
    def result(self) -> Generation:
        """As far as it came."""
        thoughts = tuple(self._reader.thoughts)
        tokens = tuple(token for record in self._records for token in record.tokens)
        remarks = Remarks() if self._policy is None else self._policy.remarks
        return Generation(
            "".join(record.text for record in self._records),
            tuple(token.id for token in tokens),
            self._reason or "error",
            statistics(
                self._steps,
                remarks,
                **self._measured,
                reasoning_tokens=len(thoughts),
                schema_problems=self._schema_problems(),
            ),
            self._reader.stop_string,
            tokens,
            tuple(self._reader.called),
            "".join(record.content for record in self._records)
            + ("" if self.calls is None else self.calls.cut),
            thoughts=thoughts,
            prompt=self._records[0].prompt if self._records else (),
        )

    def _schema_problems(self) -> tuple[str, ...]:
        """What a whole answer, or its calls, break of schemas that the grammar does not hold whole."""
        schemas = {} if self.constraint is None else self.constraint.schemas
        if self._reason not in ("stop", "tool_calls") or not any(each.unheld for each in schemas.values()):
            return ()
        values = [(call.name, call.arguments) for call in self._reader.called]
        if not values:
            with suppress(ValueError, RecursionError):  # a stop string may have ended it
                values = [("", json.loads("".join(record.text for record in self._records)))]
        found = [
            problem for name, value in values if name in schemas for problem in schemas[name].problems(value)
        ]
        return tuple(dict.fromkeys(found))

    def _record(self, step: Step) -> Record:
        """What a round adds."""
        self._steps.append(step)
        tokens = tuple(map(self._told, token_records(step)))
        record = replace(self._reader.push(step.tokens), tokens=tokens)
        if self._reader.ended or self._is_complete(step.tokens[-1]):
            self._reason = "stop"
        elif len(self.tokens) >= self._measured["prompt_tokens"] + self.request.max_new_tokens:
            self._reason = "length"
        record = self._shown(record)
        self._measured["decode_s"] = self.clock() - self._first_at
        return record

    def _told(self, token: TokenRecord) -> TokenRecord:
        """A token with what it writes again."""
        again = min(self._again, len(self.tokenizer.token_bytes(token.id)))
        self._again -= again
        return replace(token, again=again)

    def _is_complete(self, last: int) -> bool:
        """Whether the model has ended its text, or the request's grammar allows nothing behind it."""
        over = self.constraint is not None and self.constraint.ends(self.tokens)
        return over or last in self.eos

    def _shown(self, record: Record) -> Record:
        """The next record, with what was held back if it is the last."""
        if self._reason is not None:
            rest = self._reader.push((), final=True)
            if self._reason == "stop" and self._reader.called:
                self._reason = "tool_calls"
            record = replace(
                record,
                text=record.text + rest.text,
                content=record.content + rest.content,
                calls=record.calls + rest.calls,
                finish_reason=self._reason,
                stop=self._reader.stop_string,
            )
        if not self._records and self._decoding is not None:
            told = zip(self.tokens, self._decoding.scores, strict=False)
            record = replace(record, prompt=tuple(TokenRecord(id_, "prompt", *score) for id_, score in told))
        self._records.append(record)
        return record
