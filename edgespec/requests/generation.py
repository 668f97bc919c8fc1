"""One request: rounds of the decoding loop turned into records, a result and statistics."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from edgespec.decoding.draft import Clock, Remarks, Step
from edgespec.decoding.grammar import Constraint
from edgespec.decoding.loop import decode
from edgespec.drafting.policy import Policy
from edgespec.requests.request import Request
from edgespec.requests.results import (
    FinishReason,
    Generation,
    GenerationStats,
    Record,
    SourceStats,
    TokenRecord,
    ToolCall,
    nothing,
)
from edgespec.requests.worker import Answer
from edgespec_models.errors import Cancelled
from edgespec_models.text.text_stream import TextStream
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.session import Session

if TYPE_CHECKING:  # requests without tools import nothing of them
    from edgespec.requests.tool_calls import ToolReader

__all__ = ["PreparedRequest", "respond"]


def respond(prepare: Callable[[], "PreparedRequest"], answer: Answer) -> None:
    """Answer a request whose turn has come; what goes wrong, its reader is told."""
    prepared, error = None, None
    try:
        prepared = prepare()
        for record in prepared.records(answer.why_end, answer.queued_s):
            answer.put(record)
    except BaseException as caught:  # noqa: BLE001 - raised where the answer is read
        error = caught
    answer.end(nothing("error") if prepared is None else prepared.result, error)


@dataclass(slots=True, kw_only=True)
class PreparedRequest:
    """One request, with what it runs on: rounds in, records out, and the result as far as it came.

    ``tokens`` is the prompt and grows. ``begin`` makes the policy, which is closed when the request ends.
    """

    session: Session
    tokenizer: Tokenizer
    tokens: list[int]
    request: Request
    eos: frozenset[int]
    max_draft: int
    begin: Callable[[], Policy]
    constraint: Constraint | None = None
    reader: "ToolReader | None" = None
    clock: Clock = perf_counter
    _stream: TextStream = field(init=False)
    _text: list[str] = field(init=False, default_factory=list)
    _steps: list[Step] = field(init=False, default_factory=list)
    _records: list[TokenRecord] = field(init=False, default_factory=list)
    _remarks: Remarks = field(init=False, default_factory=Remarks)
    _reason: FinishReason | None = field(init=False, default=None)
    _content: str = field(init=False, default="")
    _calls: tuple[ToolCall, ...] = field(init=False, default=())
    _measured: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer, stop=self.request.stop)
        self._measured["prompt_tokens"] = len(self.tokens)

    def records(self, why_end: Callable[[], FinishReason | None], queued_s: float = 0.0) -> Iterator[Record]:
        """Decode; the last record has the reason of the end.

        Args:
            why_end: what is to end the request now, asked between passes; None lets it go on.
            queued_s: how long it waited.
        """
        started, measured = self.clock(), self._measured
        measured["queued_s"] = queued_s
        measured["cached_tokens"] = self.session.shared_prefix(self.tokens[:-1])
        with closing(self.begin()) as policy, suppress(Cancelled):
            self._remarks = policy.remarks
            for step in self._rounds(policy, lambda: why_end() is not None):
                now = self.clock()
                if not self._steps:
                    first_at = now
                    measured["ttft_s"] = now - started
                record = self._record(step)
                measured["decode_s"] = self.clock() - first_at
                yield record
                if record.finish_reason is not None:
                    break
        if self._reason is None:
            self._reason = why_end() or "cancelled"
            yield Record(self._shown(self._stream.finish()), (), self._reason)

    @property
    def result(self) -> Generation:
        """As far as it came."""
        return Generation(
            "".join(self._text),
            tuple(record.id for record in self._records),
            self._reason or "error",
            _statistics(self._steps, self._remarks, **self._measured),
            self._stream.stop_string,
            tuple(self._records),
            self._calls,
            self._content,
        )

    def _record(self, step: Step) -> Record:
        """What a round adds."""
        self._steps.append(step)
        tokens = _token_records(step)
        self._records += tokens
        text = self._stream.push(step.tokens)
        if self._stream.stopped or self._is_complete(step.tokens[-1]):
            if self.reader is not None:
                answer = [record.id for record in self._records]
                self._content, self._calls = self.reader.read(self.tokens, answer)
            self._reason = "tool_calls" if self._calls else "stop"
        elif len(self._records) >= self.request.max_new_tokens:
            self._reason = "length"
        if self._reason is not None:
            text += self._stream.finish()
        return Record(self._shown(text), tokens, self._reason, self._stream.stop_string)

    def _is_complete(self, last: int) -> bool:
        """Whether the model has ended its text, or the request's grammar allows nothing behind it."""
        over = self.constraint is not None and self.constraint.ends(self.tokens)
        return over or last in self.eos

    def _shown(self, text: str) -> str:
        self._text.append(text)
        return text

    def _rounds(self, policy: Policy, cancelled: Callable[[], bool]) -> Iterator[Step]:
        return decode(
            self.session,
            policy,
            self.request.verifier([] if self.constraint is None else [self.constraint]),
            self.tokens,
            max_new_tokens=self.request.max_new_tokens,
            max_draft=self.max_draft,
            stop=self.eos,
            top_logprobs=self.request.top_logprobs if self.request.logprobs else None,
            cancelled=cancelled,
            clock=self.clock,
        )


def _token_records(step: Step) -> tuple[TokenRecord, ...]:
    """The tokens of a round, and where they came from."""
    sources = (*step.draft.sources[: step.accepted], *["target"] * len(step.tokens))
    logprobs = step.logprobs or (None,) * len(step.tokens)
    tops = step.top_logprobs or ((),) * len(step.tokens)
    return tuple(map(TokenRecord, step.tokens, sources, logprobs, tops))


def _statistics(steps: Sequence[Step], remarks: Remarks, **prompt: Any) -> GenerationStats:
    """What the rounds of a request come to. The first follows prefill and is not decoding's."""
    decoded = steps[1:]
    drafted, drafted_at = Counter[str](), Counter[int]()
    accepted, accepted_at = Counter[str](), Counter[int]()
    for step in steps:
        drafted.update(step.draft.sources)
        drafted_at.update(range(len(step.draft.tokens)))
        accepted.update(step.draft.sources[: step.accepted])
        accepted_at.update(range(step.accepted))
    if remarks.speculation_off_reason is None and not drafted and decoded:
        remarks.speculation_off_reason = "no proposal was expected to pay"
    return GenerationStats(
        new_tokens=sum(len(step.tokens) for step in steps),
        decode_tokens=sum(len(step.tokens) for step in decoded),
        rounds=len(steps),
        drafted=drafted.total(),
        accepted=accepted.total(),
        by_source={name: SourceStats(count, accepted[name]) for name, count in drafted.items()},
        drafted_by_position=tuple(drafted_at[at] for at in range(len(drafted_at))),
        accepted_by_position=tuple(accepted_at[at] for at in range(len(drafted_at))),
        target_s=sum(step.target_s for step in steps),
        drafter_s=sum(step.drafter_s for step in steps),
        **prompt,
        **asdict(remarks),
    )
