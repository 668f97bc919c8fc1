"""The text of a running request: rounds become records, and at last the result."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.answering.answer_reading import AnswerReader
from edgespec.answering.results import (
    FinishReason,
    Generation,
    Record,
    TokenRecord,
    statistics,
    token_records,
)
from edgespec.asking.request import PromptTokens, Request, form_of
from edgespec.decoding.draft import Clock, Remarks, Round
from edgespec.decoding.grammar import Constraint
from edgespec_models.bundles.bundle import Bundle

if TYPE_CHECKING:
    from edgespec.answering.call_reading import CallReader

TopLogprobs = tuple[tuple[int, float], ...]


class Answer:
    """Turns rounds into the answer to a request.

    ``remarks`` go into the statistics.

    Attributes:
        tokens: the prompt and all committed tokens. The list grows.
        started: the time of the request's turn by ``clock``.
        scores: for each token of the prompt that was read, if asked for: its log probability, and the most
            likely tokens there with theirs. The first token has none.
        rounds: the rounds so far.
        reason: why the answer ended; None while it goes on.
        prompt_tokens: the tokens of the prompt.
        cached_tokens: how many of them the KV cache held at the request's turn.
    """

    def __init__(
        self,
        target: Bundle,
        prompt: PromptTokens,
        request: Request,
        constraint: Constraint | None,
        remarks: Remarks,
        clock: Clock,
        started: float,
        queued_s: float,
    ) -> None:
        self.tokens, self._tokenizer, self.started = prompt.target.copy(), target.tokenizer, started
        self.scores: list[tuple[float | None, TopLogprobs]] = [(None, ())] if request.prompt_logprobs else []
        self._constraint, self._remarks, self.clock = constraint, remarks, clock
        self.prompt_tokens, self.cached_tokens = len(self.tokens), 0
        self._calls, fill = _call_reader(target, request, prompt.target), None
        if prompt.hole is not None:
            from edgespec.answering.fill_reading import FillReader

            fill = FillReader(prompt.hole, request.max_lines)
        if prompt.thoughts is not None and prompt.thoughts.tags.channels:
            from edgespec.answering.channel_reading import ChannelReader

            self._reader: AnswerReader = ChannelReader(self._tokenizer, self._calls, stop=request.stop)
        else:
            thoughts = prompt.thoughts
            self._reader = AnswerReader(self._tokenizer, thoughts, self._calls, fill, stop=request.stop)
        self._again = 0 if fill is None else fill.skip  # bytes of a cut word to come
        self.rounds, self._records = list[Round](), list[Record]()
        self._piece = Record("", ())  # of the present round
        self.reason: FinishReason | None = None
        self._queued_s = queued_s
        self._first_at = self._decode_s = 0.0

    def read(self, tokens: Sequence[int]) -> int:
        """Read a round's tokens up to the one that ends the text, and return how many that are.

        :attr:`tokens` lacks them yet.
        """
        before, count, piece = len(self.tokens) - self.prompt_tokens, 0, Record("", ())
        while count < len(tokens) and not self._reader.ended:
            piece = piece.then(self._reader.push(tokens[count : count + 1]))
            count += 1
        self._piece = replace(piece, thoughts=tuple(self._reader.thoughts[before:]))
        return count

    def push(self, round_: Round, reason: FinishReason | None) -> Record:
        """The record of a round, whose tokens :meth:`read` has read.

        ``reason`` says why the decoding is complete; None if it is not.
        """
        if not self.rounds:
            self._first_at = self.clock()
        self.rounds.append(round_)
        constraint = self._constraint
        if constraint is not None and constraint.broken:
            self.reason = "length"
        elif self._reader.ended or (constraint is not None and constraint.ends(self.tokens)):
            self.reason = "stop"
        else:
            self.reason = reason
        tokens = tuple(map(self._with_again, token_records(round_)))
        record = self._shown(replace(self._piece, tokens=tokens))
        self._decode_s = self.clock() - self._first_at
        return record

    def stop(self, reason: FinishReason) -> Record:
        """End the answer early, and return its last record."""
        self.reason = reason
        return self._shown(Record("", ()))

    @property
    def result(self) -> Generation:
        """The result so far."""
        thoughts = tuple(self._reader.thoughts)
        tokens = tuple(token for record in self._records for token in record.tokens)
        stats = replace(
            statistics(self.rounds, self._remarks),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            queued_s=self._queued_s,
            ttft_s=self._first_at - self.started if self.rounds else 0.0,
            decode_s=self._decode_s,
            reasoning_tokens=len(thoughts),
            schema_problems=self._schema_problems(),
        )
        return Generation(
            "".join(record.text for record in self._records),
            tuple(token.id for token in tokens),
            self.reason or "error",
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
        if self.reason not in ("stop", "tool_calls") or not any(s.unheld for s in schemas.values()):
            return ()
        values = [(call.name, call.arguments) for call in self._reader.called]
        if not values:
            with suppress(ValueError, RecursionError):  # a stop string may have ended it
                values = [("", json.loads("".join(record.text for record in self._records)))]
        held = [(schemas[name], value) for name, value in values if name in schemas]
        return tuple(dict.fromkeys(problem for schema, value in held for problem in schema.problems(value)))

    def _with_again(self, token: TokenRecord) -> TokenRecord:
        """A token, with the number of its bytes that a fill writes again."""
        again = min(self._again, len(self._tokenizer.token_bytes(token.id)))
        self._again -= again
        return replace(token, again=again)

    def _shown(self, record: Record) -> Record:
        """The next record; the last one has held text, too."""
        if self.reason is not None:
            if self._calls is not None:
                self._calls.cut = self.reason != "stop" or self._reader.stop_string is not None
            rest = self._reader.push((), final=True)
            if self.reason == "stop" and self._reader.called:
                self.reason = "tool_calls"
            stop = self._reader.stop_string
            record = replace(record.then(rest), finish_reason=self.reason, stop=stop)
        if not self._records:
            scored = zip(self.tokens, self.scores, strict=False)
            prompt = tuple(TokenRecord(token, "prompt", *score) for token, score in scored)
            record = replace(record, prompt=prompt)
        self._records.append(record)
        return record


def _call_reader(bundle: Bundle, request: Request, prompt: list[int]) -> "CallReader | None":
    """The reader of tool calls in the answer to ``prompt``; None if the prompt shows no tools."""
    form = form_of(bundle) if request.tools and request.tool_choice != "none" else None
    if form is None:
        return None
    from edgespec.answering.call_reading import CallReader

    functions = [tool["function"] for tool in request.tools]
    tools = {function["name"]: function.get("parameters") for function in functions}
    return CallReader(form, tools, prompt, single=request.parallel_tool_calls is False)
