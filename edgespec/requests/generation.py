"""One request: rounds of the decoding loop turned into records, a result and statistics."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from edgespec.decoding.constraint import Constraint
from edgespec.decoding.draft import Clock, Remarks, Step
from edgespec.decoding.loop import decode
from edgespec.drafting.forced import Forced
from edgespec.drafting.policy import Policy
from edgespec.requests.answer import Answer
from edgespec.requests.request import Request
from edgespec.requests.results import (
    FinishReason,
    Generation,
    GenerationStats,
    Record,
    SourceStats,
    TokenRecord,
    nothing,
)
from edgespec.requests.tool_calls import ToolCall, ToolReader
from edgespec_models.errors import Cancelled
from edgespec_models.text.text_stream import TextStream
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.session import Session

__all__ = ["Generating", "PreparedRequest", "respond"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request and what it runs on. ``tokens`` is the prompt and grows.

    ``begin`` makes the policy, which is closed when the request ends.
    """

    session: Session
    tokenizer: Tokenizer
    tokens: list[int]
    request: Request
    eos: frozenset[int]
    max_draft: int
    begin: Callable[[], Policy | Forced]
    constraint: Constraint | None = None
    reader: ToolReader | None = None
    clock: Clock = perf_counter

    def calls(self, answer: Sequence[int]) -> tuple[str, tuple[ToolCall, ...]]:
        """The text around the tool calls in ``answer``, and these; nothing where no tools were shown."""
        return ("", ()) if self.reader is None else self.reader.read(self.tokens, answer)


def respond(answer: Answer) -> None:
    """Answer a request whose turn has come; what goes wrong, its reader is told."""
    generating, error = None, None
    try:
        generating = Generating(answer.prepare(), answer.why_end, answer.queued_s)
        for record in generating.records():
            answer.put(record)
    except BaseException as caught:  # noqa: BLE001 - raised where the answer is read
        error = caught
    answer.end(nothing("error") if generating is None else generating.result, error)


class Generating:
    """One request as it runs: rounds in, records out, and the result as far as it came.

    Args:
        prepared: the request.
        why_end: what is to end it now, asked between passes; None lets it go on.
        queued_s: how long it waited.
    """

    def __init__(
        self, prepared: PreparedRequest, why_end: Callable[[], FinishReason | None], queued_s: float = 0.0
    ) -> None:
        self._prepared, self._why_end = prepared, why_end
        self._stream = TextStream(prepared.tokenizer, stop=prepared.request.stop)
        self._text, self._steps, self._records = list[str](), list[Step](), list[TokenRecord]()
        self._remarks = Remarks()
        self._reason: FinishReason | None = None
        self._content, self._calls = "", tuple[ToolCall, ...]()
        self._measured: dict[str, Any] = {
            "prompt_tokens": len(prepared.tokens),
            "cached_tokens": 0,
            "ttft_s": 0.0,
            "decode_s": 0.0,
            "queued_s": queued_s,
        }

    def records(self) -> Iterator[Record]:
        """Decode; the last record has the reason of the end."""
        prepared = self._prepared
        started = prepared.clock()
        self._measured["cached_tokens"] = prepared.session.shared_prefix(prepared.tokens[:-1])
        with closing(prepared.begin()) as policy, suppress(Cancelled):
            self._remarks = policy.remarks
            for step in self._rounds(policy):
                now = prepared.clock()
                if not self._steps:
                    first_at = now
                    self._measured["ttft_s"] = now - started
                record = self._record(step)
                self._measured["decode_s"] = prepared.clock() - first_at
                yield record
                if record.finish_reason is not None:
                    break
        if self._reason is None:
            self._reason = self._why_end() or "cancelled"
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
            self._content, self._calls = self._prepared.calls([record.id for record in self._records])
            self._reason = "tool_calls" if self._calls else "stop"
        elif len(self._records) >= self._prepared.request.max_new_tokens:
            self._reason = "length"
        if self._reason is not None:
            text += self._stream.finish()
        return Record(self._shown(text), tokens, self._reason, self._stream.stop_string)

    def _is_complete(self, last: int) -> bool:
        """Whether the model has ended its text, or the request's grammar allows nothing behind it."""
        prepared = self._prepared
        over = prepared.constraint is not None and prepared.constraint.ends(prepared.tokens)
        return over or last in prepared.eos

    def _shown(self, text: str) -> str:
        self._text.append(text)
        return text

    def _rounds(self, policy: Policy | Forced) -> Iterator[Step]:
        prepared, request = self._prepared, self._prepared.request
        masks = [] if prepared.constraint is None else [prepared.constraint]
        return decode(
            prepared.session,
            policy,
            request.verifier(masks),
            prepared.tokens,
            max_new_tokens=request.max_new_tokens,
            max_draft=prepared.max_draft,
            stop=prepared.eos,
            cancelled=lambda: self._why_end() is not None,
            clock=prepared.clock,
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
