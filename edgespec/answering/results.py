"""The results of requests: text, tokens, why the answer ended, and what it cost."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal

from edgespec.decoding.draft import PromptProgress, Remarks, Round

FinishReason = Literal["stop", "length", "cancelled", "timeout", "closed", "tool_calls", "error"]
"""Why an answer ended: the model or a stop string ended it (stop), it reached its limit or the context's
(length), it was cancelled, its time was up, the model was closed, the model calls tools, or an error."""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token of an answer, or of a prompt.

    Attributes:
        id: the token's id in the target's vocabulary.
        source: who proposed it: ``target``, ``model``, ``ngram``, ``history``, ``prediction``,
            ``grammar``, or the class of an app's own drafter; ``prompt`` for a token of the prompt.
        logprob: its log probability in nats. None unless the request asks for it.
        top_logprobs: the most likely tokens at its place, with their log probabilities. Empty unless the
            request asks for them.
        again: the number of its first bytes that a fill writes again and that are no part of the text.
    """

    id: int
    source: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    again: int = 0


def call_id(id_: str, index: int) -> str:
    """The identifier of a call, unique among the answers to one prompt."""
    return sha256(f"{id_} {index}".encode()).hexdigest()[: len(id_)] if index else id_


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks to have called.

    Attributes:
        id: the identifier that the message with the result refers to. The same prompt and answer give the
            same one.
        name: the tool's name, or the name that the model wrote if no tool has it.
        arguments: the arguments, as the model wrote them. They may not fit the tool's parameters.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)

    def to_message(self) -> dict[str, Any]:
        """The call as an item of ``tool_calls`` in an assistant's message."""
        function = {"name": self.name, "arguments": self.arguments_json}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Record:
    """The addition of a round to an answer, or the progress in a long prompt.

    Attributes:
        text: the text that can be shown now. It is empty while a character or a stop string may have only
            begun.
        tokens: the committed tokens. The last record of an answer that was ended from outside has none.
        finish_reason: why the answer ended, in its last record; None in all others.
        stop: the stop string that ended it, or None. It is not part of the text.
        content: the part of ``text`` around calls of tools.
        calls: the calls that became complete.
        thoughts: additions of the first of these tokens to the thoughts.
        progress: the reading of a prompt that takes more than one pass, in the first records, which have no
            text and tokens; None in all others.
        prompt: the prompt's tokens, in the first record, if the request wants their log
            probabilities.
    """

    text: str
    tokens: tuple[TokenRecord, ...]
    finish_reason: FinishReason | None = None
    stop: str | None = None
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    thoughts: tuple[str, ...] = ()
    progress: PromptProgress | None = None
    prompt: tuple[TokenRecord, ...] = ()

    @property
    def reasoning(self) -> str:
        """The text that it adds to the thoughts."""
        return "".join(self.thoughts)

    def then(self, more: "Record") -> "Record":
        """This record with the text, calls and thoughts of the next one."""
        return replace(
            self,
            text=self.text + more.text,
            content=self.content + more.content,
            calls=self.calls + more.calls,
            thoughts=self.thoughts + more.thoughts,
        )


@dataclass(frozen=True, slots=True)
class SourceStats:
    """The tokens that one source drafted, and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """The statistics of an answer. Times are wall-clock seconds.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Tokens of the prompt that a KV cache held already.
        new_tokens: Tokens of the answer.
        reasoning_tokens: Tokens of the answer that are thoughts or their tags.
        queued_s: Time that the request waited for its turn. No other time includes it.
        ttft_s: Time from the request's turn to its first token.
        decode_s: Time from the first token to the last one's text, with all work between rounds.
        decode_tokens: Tokens that came in that time. Those of the first round do not count.
        rounds: Passes of the target that gave tokens. The first is the last pass over the prompt.
        drafted: Tokens that were proposed.
        accepted: Proposed tokens that were kept.
        by_source: Drafted and accepted tokens by source.
        drafted_by_position: How often each position of a draft was proposed.
        accepted_by_position: How often it was accepted.
        target_s: Time in passes of the target, without the prompt's and a GPU's preparations. A shared pass
            is divided among its requests.
        drafter_s: Time that rounds waited for the drafter, with its reading of the prompt.
        speculation_off_reason: Why little or nothing was drafted. None while drafting pays.
        placement: The devices on which target and drafter ran, and why.
        history_problem: Why the history cannot be read or written. None if it can, or without one.
        prompt_cache_problem: Why prompts cannot be kept on disk. None if they can.
        rolled_back: Statistics of the history that misled and were put back, and why.
        schema_problems: Rules of schemas that the answer, or its calls, break, and rules that were not
            checked.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    by_source: Mapping[str, SourceStats] = field(default_factory=dict)
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    target_s: float = 0.0
    drafter_s: float = 0.0
    speculation_off_reason: str | None = None
    history_problem: str | None = None
    prompt_cache_problem: str | None = None
    rolled_back: tuple[str, ...] = ()
    placement: str = ""
    queued_s: float = 0.0
    reasoning_tokens: int = 0
    schema_problems: tuple[str, ...] = ()

    @property
    def tpot_s(self) -> float:
        """Time of a token after the first round; 0 if there was only one round."""
        return self.decode_s / self.decode_tokens if self.decode_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second after the first round; 0 if there was only one round."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def block_efficiency(self) -> float:
        """Tokens that a pass of the target gave."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values, times in milliseconds (``*_ms``)."""
        values = asdict(self) | {
            "tpot_s": self.tpot_s,
            "tokens_per_second": self.tokens_per_s,
            "block_efficiency": self.block_efficiency,
            "acceptance_rate": self.acceptance_rate,
        }
        del values["decode_s"], values["decode_tokens"]
        times = {f"{name[:-2]}_ms": values.pop(name) * 1e3 for name in [*values] if name.endswith("_s")}
        lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        return values | times | lists


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of a request, complete or as far as it came.

    Attributes:
        text: the generated text, without the stop string and without thoughts.
        tokens: all committed ids. The last one may reach into the stop string.
        finish_reason: why the answer ended.
        stop: the stop string that ended it, or None.
        records: the same tokens, each with its source.
        tool_calls: the calls of tools. The text contains them too, as the model wrote them.
        content: the text around the calls; the whole text without calls.
        others: further answers to the same prompt, if the request asks for several.
        thoughts: the addition of each of the first tokens to the thoughts.
        prompt: the prompt's tokens with their log probabilities, if the request wants them. The first has
            none.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats
    stop: str | None = None
    records: tuple[TokenRecord, ...] = field(default=(), repr=False)
    tool_calls: tuple[ToolCall, ...] = ()
    content: str = ""
    others: tuple["Generation", ...] = ()
    thoughts: tuple[str, ...] = field(default=(), repr=False)
    prompt: tuple[TokenRecord, ...] = field(default=(), repr=False)

    @property
    def reasoning(self) -> str:
        """The model's thoughts before its text, without tags."""
        return "".join(self.thoughts)

    @property
    def choices(self) -> tuple["Generation", ...]:
        """All answers to the prompt, this one first."""
        return (self, *self.others)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message for the conversation's next request.

        It has the thoughts; chat templates leave out thoughts that the model does not expect to see again.
        """
        thoughts = {"reasoning_content": self.reasoning} if self.reasoning else {}
        calls = {"tool_calls": [call.to_message() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **thoughts, **calls}


def nothing(reason: FinishReason) -> Generation:
    """The result of a request that ended before its prompt was read."""
    return Generation("", (), reason, GenerationStats())


def token_records(round_: Round) -> tuple[TokenRecord, ...]:
    """The tokens of a round with their sources."""
    sources = (*round_.draft.sources[: round_.accepted], *["target"] * len(round_.tokens))
    logprobs = round_.logprobs or (None,) * len(round_.tokens)
    tops = round_.top_logprobs or ((),) * len(round_.tokens)
    return tuple(map(TokenRecord, round_.tokens, sources, logprobs, tops))


def statistics(rounds: Sequence[Round], remarks: Remarks) -> GenerationStats:
    """The statistics of a request's rounds, without the prompt and the total time.

    The first round belongs to the reading of the prompt, and does not count as decoding.
    """
    decoded = rounds[1:]
    drafted, drafted_at = Counter[str](), Counter[int]()
    accepted, accepted_at = Counter[str](), Counter[int]()
    for round_ in rounds:
        drafted.update(round_.draft.sources)
        drafted_at.update(range(len(round_.draft.tokens)))
        accepted.update(round_.draft.sources[: round_.accepted])
        accepted_at.update(range(round_.accepted))
    if remarks.speculation_off_reason is None and not drafted and decoded:
        remarks.speculation_off_reason = "no proposal was expected to pay"
    return GenerationStats(
        new_tokens=sum(len(round_.tokens) for round_ in rounds),
        decode_tokens=sum(len(round_.tokens) for round_ in decoded),
        rounds=len(rounds),
        drafted=drafted.total(),
        accepted=accepted.total(),
        by_source={name: SourceStats(count, accepted[name]) for name, count in drafted.items()},
        drafted_by_position=tuple(drafted_at[at] for at in range(len(drafted_at))),
        accepted_by_position=tuple(accepted_at[at] for at in range(len(drafted_at))),
        target_s=sum(round_.target_s for round_ in decoded),
        drafter_s=sum(round_.drafter_s for round_ in rounds),
        **asdict(remarks),
    )
