"""One request: rounds of the decoding loop turned into text and statistics."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from edgespec.constraint import Constraint
from edgespec.decode import decode
from edgespec.drafting.draft import Clock, Step
from edgespec.drafting.forced import Forced
from edgespec.drafting.policy import Policy
from edgespec.request import Request
from edgespec.results import FinishReason, Generation, GenerationStats, Remarks, SourceStats
from edgespec.tools import ToolCall, ToolReader
from edgespec_models.errors import Cancelled, RequestError
from edgespec_models.text_stream import TextStream
from edgespec_models.tokenizer import Tokenizer
from edgespec_runtimes.session import Session

__all__ = ["PreparedRequest", "TextStreamer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request and what it runs on. ``tokens`` is the prompt and grows.

    ``begin`` makes the policy when the first piece of text is asked for, so that a stream that nobody reads
    costs nothing; it is closed when the request ends.
    """

    session: Session
    tokenizer: Tokenizer
    tokens: list[int]
    request: Request
    eos: frozenset[int]
    max_draft: int
    reader: ToolReader | None = None
    constraint: Constraint | None = None
    begin: Callable[[], Policy | Forced]
    clock: Clock = perf_counter

    def calls(self, answer: Sequence[int]) -> tuple[str, tuple[ToolCall, ...]]:
        """The text around the tool calls in ``answer``, and these; nothing where no tools were shown."""
        return ("", ()) if self.reader is None else self.reader.read(self.tokens, answer)


class TextStreamer:
    """Iterate over the text as it is generated; afterwards ``result`` is the whole :class:`Generation`.

    Pieces are never half a character and never text that a stop string takes back. Leaving the loop
    early ends the request, as the model's next request does; the model stays usable.
    """

    def __init__(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
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
        prepared, request = self._prepared, self._prepared.request
        started, steps = prepared.clock(), list[Step]()
        cached = prepared.session.shared_prefix(prepared.tokens[:-1])  # the last is always read
        prompt: dict[str, Any] = {
            "prompt_tokens": len(prepared.tokens),
            "cached_tokens": cached,
            "ttft_s": 0.0,
            "decode_s": 0.0,
        }
        first_at = held_s = 0.0  # when the first token was committed; how long the caller had the text
        stream, text = TextStream(prepared.tokenizer, stop=request.stop), list[str]()
        reason: FinishReason = "length"
        try:
            with closing(prepared.begin()) as policy:
                for step in self._rounds(policy):
                    if not steps:
                        first_at = prepared.clock()
                        prompt["ttft_s"] = first_at - started
                    steps.append(step)
                    piece = stream.push(step.tokens)
                    given_at = prepared.clock()
                    prompt["decode_s"] = given_at - first_at - held_s
                    over = prepared.constraint is not None and prepared.constraint.ends(prepared.tokens)
                    if over or step.tokens[-1] in prepared.eos or stream.stopped:
                        reason = "stop"
                    if piece:
                        text.append(piece)
                        yield piece
                        held_s += prepared.clock() - given_at
                    if over or stream.stopped:
                        break
        except Cancelled:
            reason = "cancelled"
        if reason == "length" and request.cancelled():
            reason = "cancelled"
        rest = stream.finish()
        if rest:
            text.append(rest)
        new = tuple(prepared.tokens[prompt["prompt_tokens"] :])
        stats = _statistics(steps, policy.remarks, **prompt)
        content, calls = prepared.calls(new)
        reason = "tool_calls" if calls and reason == "stop" else reason
        self._result = Generation("".join(text), new, reason, stats, calls, content)
        if rest:
            yield rest

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
            cancelled=request.cancelled,
            clock=prepared.clock,
        )


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
