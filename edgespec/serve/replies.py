"""Answers as replies in OpenAI's JSON, with edgespec's own facts in the field ``edgespec``."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, Self

from edgespec.answering.attribution import Attribution
from edgespec.answering.results import Generation, Record, SourceStats, TokenRecord, call_id
from edgespec.decoding.draft import PromptProgress
from edgespec.engine import Model
from edgespec.running.embedding import Embeddings, Scores
from edgespec.serve.problems import Problem
from edgespec_models.text.tokenizer import Tokenizer

Json = dict[str, Any]
_FINISH = {"stop": "stop", "tool_calls": "tool_calls"}  # other reasons are limits of tokens or time


def plain_speed(model: Model) -> float:
    """The tokens per second of plain decoding, by the costs at load."""
    return 1.0 / model.cost_curve.seconds(1)


def usage(answers: Sequence[Generation]) -> Json:
    """Tokens read and written. Each answer has a prompt of its own and may have several choices."""
    prompt_tokens = sum(answer.stats.prompt_tokens for answer in answers)
    written = sum(len(choice.tokens) for choice in _choices(answers))
    copies = [choice.stats.by_source.get("prediction", SourceStats()) for choice in _choices(answers)]
    predicted = SourceStats(sum(copy.drafted for copy in copies), sum(copy.accepted for copy in copies))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": sum(answer.stats.cached_tokens for answer in answers)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.stats.reasoning_tokens for choice in _choices(answers)),
            "accepted_prediction_tokens": predicted.accepted,
            "rejected_prediction_tokens": predicted.drafted - predicted.accepted,
        },
    }


def vectors_json(embeddings: Embeddings, model: str, *, base64: bool) -> str:
    """Vectors as lists of numbers, or as the base64 of little-endian float32 numbers."""
    rows = (b64encode(row.astype("<f4")).decode() if base64 else row.tolist() for row in embeddings.vectors)
    data = ({"object": "embedding", "index": at, "embedding": row} for at, row in enumerate(rows))
    prompt_tokens = sum(embeddings.tokens)
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return with_rows({"object": "list", "model": model, "usage": usage}, "data", data)


def scores_json(scores: Scores, model: str, texts: Sequence[str], *, top_n: int | None, whole: bool) -> Json:
    """Scores in the order of relevance; with ``whole`` each has its text."""
    results = [
        {"index": at, "relevance_score": float(scores.scores[at])}
        | ({"document": {"text": texts[at]}} if whole else {})
        for at in scores.order[:top_n]
    ]
    read = sum(scores.tokens)
    usage = {"prompt_tokens": read, "total_tokens": read}
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "object": "list",
        "model": model,
        "usage": usage,
        "results": results,
    }


def with_rows(table: Json, name: str, rows: Iterable[object]) -> str:
    """``table`` with a field of many rows, as JSON.

    It is written row by row, because no other thread runs within :func:`json.dumps`.
    """
    return f'{{"{name}":[{",".join(map(json.dumps, rows))}],{json.dumps(table)[1:]}'


@dataclass(slots=True)
class Reply(ABC):
    """One reply in the form of an endpoint, whole or as events. :meth:`use` has to come before answers.

    ``prompt`` of a stream has the numbers of the prompt's tokens and of its cached tokens.
    """

    done: ClassVar[str] = ""  # what ends a stream
    media_type: ClassVar[str] = "text/event-stream"

    model: str
    tokenizer: Tokenizer = field(init=False)
    plain_tokens_per_s: float = field(init=False)
    id: str = field(default_factory=partial(secrets.token_hex, 12), kw_only=True)
    created: int = field(default_factory=lambda: int(time.time()), kw_only=True)
    prompt: tuple[int, int] = field(default=(0, 0), kw_only=True)

    def use(self, model: Model) -> None:
        """Note facts of the model, such as its speed without speculation by the costs at load."""
        self.tokenizer, self.plain_tokens_per_s = model.target.tokenizer, plain_speed(model)

    @abstractmethod
    def whole(self, answers: Sequence[Generation]) -> Json:
        """The whole reply. Each of ``answers`` has a prompt of its own."""

    def choices(self, indices: Iterable[int]) -> Sequence["Reply"]:
        """The same reply for each of some choices."""
        return [self]

    def begin(self) -> list[Json]:
        """The events before the text, if there are any."""
        return []

    @abstractmethod
    def chunk(self, record: Record, shown: list[Json]) -> list[Json]:
        """The events of a piece; ``shown`` are its tokens as :class:`Attribution` cut them."""

    def reading(self, progress: PromptProgress) -> list[Json]:
        """An event about the reading of the prompt."""
        return []

    @abstractmethod
    def end(self, answer: Generation) -> list[Json]:
        """The last events: why the answer ended, and what it cost."""

    def used(self, answers: Sequence[Generation]) -> Json:
        """The event that ``stream_options.include_usage`` asks for."""
        raise NotImplementedError

    def failed(self, problem: Problem, path: str) -> Json:
        """The event that says why nothing more comes, in the form of the requests at ``path``."""
        return problem.to_json(path)

    def line(self, event: Mapping[str, Any]) -> str:
        """An event as a line of the stream."""
        name = f"event: {event['type']}\n" if "type" in event else ""  # OpenAI's chunks have none
        return f"{name}data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"

    def comment(self, text: str) -> str:
        """A comment that says what a request waits for. Clients skip it, and proxies keep the stream open."""
        return f": {text}\n\n"

    def _scores(self, tokens: Sequence[TokenRecord]) -> list[Json]:
        """Tokens of a chat with their log probabilities."""
        return [
            self._entry(token.id, token.logprob)
            | {"top_logprobs": [self._entry(id_, logprob) for id_, logprob in token.top_logprobs]}
            for token in tokens
        ]

    def _entry(self, token: int, logprob: float | None) -> Json:
        spelled = self.tokenizer.token_bytes(token)
        return {"token": self._text(token), "logprob": logprob, "bytes": list(spelled)}

    def _text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")

    def _extension(self, answer: Generation) -> Json:
        """The field ``edgespec``."""
        return {
            "finish_reason": answer.finish_reason,
            "stop": answer.stop,
            "stats": answer.stats.to_json(),
            "plain_tokens_per_second": self.plain_tokens_per_s,
        }


@dataclass(slots=True)
class _Completion(Reply):
    """The fields that all chunks of a completion share. A streamed one has one choice.

    ``written`` counts the characters that were sent. There are ``n`` choices for each prompt. ``echoed`` are
    the prompts, if choices begin with them; ``special`` is the request's option.
    """

    done = "data: [DONE]\n\n"
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    logprobs: bool = False
    index: int = 0
    written: int = 0
    n: int = 1
    echoed: Sequence[str | Sequence[int]] = ()
    special: bool = False

    def whole(self, answers: Sequence[Generation]) -> Json:
        choices = [
            {
                "index": choice.index,
                **choice._choice(answer),
                **self._ended(answer, tokens=self._tokens(answer)),
            }
            for at, generation in enumerate(answers)
            for choice, answer in zip(
                self._to_prompt(at, len(generation.choices)), generation.choices, strict=True
            )
        ]
        return self._head(self.kind) | {"choices": choices, "usage": usage(answers)}

    def choices(self, indices: Iterable[int]) -> Sequence[Self]:
        choices = list[Self]()
        for index in indices:
            choices.append(copy(self))
            choices[-1].index = index
        return choices

    def _to_prompt(self, at: int, count: int) -> Sequence[Self]:
        return self.choices(range(at * self.n, at * self.n + count))

    def reading(self, progress: PromptProgress) -> list[Json]:
        """A chunk about the reading of the prompt, in llama.cpp's form: beside an empty piece."""
        so_far = {"total": progress.total, "cache": progress.cached, "processed": progress.read}
        progress_json = {"prompt_progress": {**so_far, "time_ms": round(progress.seconds * 1e3)}}
        return [chunk | progress_json for chunk in self.chunk(Record("", ()), [])]

    def used(self, answers: Sequence[Generation]) -> Json:
        return self._head(self.chunk_kind) | {"choices": [], "usage": usage(answers)}

    @abstractmethod
    def _choice(self, answer: Generation) -> Json:
        """The fields of a choice with the text of its answer."""

    def _chunk(self, choice: Json) -> list[Json]:
        empty = {"index": self.index, "logprobs": None, "finish_reason": None}
        return [self._head(self.chunk_kind) | {"choices": [empty | choice]}]

    def _head(self, kind: str) -> Json:
        id_ = f"{self.prefix}-{self.id}"
        return {"id": id_, "object": kind, "created": self.created, "model": self.model}

    def _tokens(self, answer: Generation) -> list[Json]:
        whole = Record(answer.text, answer.records, answer.finish_reason, thoughts=answer.thoughts)
        return Attribution(self.tokenizer).push(whole)

    def _ended(self, answer: Generation, **more: Any) -> Json:
        """The fields of a choice's end: its reason, and the field ``edgespec``."""
        reason = _FINISH.get(answer.finish_reason, "length")
        return {"finish_reason": reason, "edgespec": self._extension(answer) | more}


@dataclass(slots=True)
class ChatReply(_Completion):
    """A ``chat.completion`` and its chunks. With ``is_old`` its call is a ``function_call``.

    ``called`` counts the calls that were sent.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    is_old: bool = False
    called: int = 0

    def begin(self) -> list[Json]:
        """The chunk with the role."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}})

    def chunk(self, record: Record, shown: list[Json]) -> list[Json]:
        """A chunk for each piece of the thoughts, of the text, and for each call.

        Some clients read one field of a chunk, and one entry of its calls.
        """
        pieces = {"reasoning_content": record.reasoning, "content": record.content}
        deltas: list[Json] = [{name: piece} for name, piece in pieces.items() if piece]
        for call in record.calls:
            item = {"index": self.called} | call.to_message() | {"id": call_id(call.id, self.index)}
            deltas.append(self._called([item]))
            self.called += 1
        first, *others = deltas or [{}]
        logprobs = self._logprobs(record.tokens[len(record.thoughts) :])
        chunks = self._chunk({"delta": first, "logprobs": logprobs, "edgespec": {"tokens": shown}})
        return chunks + [chunk for delta in others for chunk in self._chunk({"delta": delta})]

    def end(self, answer: Generation) -> list[Json]:
        return self._chunk({"delta": {}, **self._ended(answer)})

    def _called(self, calls: Sequence[Json]) -> Json:
        """The field of a message, or of a delta, with its calls."""
        return {"function_call": calls[0]["function"]} if self.is_old else {"tool_calls": calls}

    def _ended(self, answer: Generation, **more: Any) -> Json:
        ended = _Completion._ended(self, answer, **more)
        is_call = self.is_old and ended["finish_reason"] == "tool_calls"
        return ended | ({"finish_reason": "function_call"} if is_call else {})

    def _choice(self, answer: Generation) -> Json:
        message = {**answer.message, "refusal": None}
        if answer.tool_calls:
            message |= {"content": answer.content or None, **self._called(message.pop("tool_calls"))}
        return {"message": message, "logprobs": self._logprobs(answer.records[len(answer.thoughts) :])}

    def _logprobs(self, tokens: Sequence[TokenRecord]) -> Json | None:
        return {"content": self._scores(tokens), "refusal": None} if self.logprobs else None


class CompletionReply(_Completion):
    """A ``text_completion`` and its chunks, which have the same form."""

    __slots__ = ()
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def begin(self) -> list[Json]:
        """The prompt, if it is to be echoed."""
        return self._chunk({"text": self._echo}) if self._echo else []

    def chunk(self, record: Record, shown: list[Json]) -> list[Json]:
        """A chunk with a piece of the text, and the places where its tokens begin."""
        tokens = record.prompt + record.tokens
        logprobs = self._logprobs(tokens, self.written)
        self.written += sum(map(self._length, tokens))
        return self._chunk({"text": record.text, "logprobs": logprobs, "edgespec": {"tokens": shown}})

    def end(self, answer: Generation) -> list[Json]:
        return self._chunk({"text": "", **self._ended(answer)})

    def _choice(self, answer: Generation) -> Json:
        logprobs = self._logprobs(answer.prompt + answer.records, 0)
        return {"text": self._echo + answer.text, "logprobs": logprobs}

    @property
    def _echo(self) -> str:
        prompt = self.echoed[self.index // self.n] if self.echoed else ""
        if isinstance(prompt, str) and not self.special:
            return prompt
        ids = self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else prompt
        return self.tokenizer.decode(ids)  # control tokens are no text here, as in answers

    def _length(self, token: TokenRecord) -> int:
        """The number of characters that begin in a token."""
        spelled = b"" if self.tokenizer.is_special(token.id) else self.tokenizer.token_bytes(token.id)
        return sum(byte & 0xC0 != 0x80 for byte in spelled[token.again :])

    def _spelled(self, token: int) -> str:
        """The text of a token; of a part of a character its bytes, as OpenAI writes them."""
        spelled = self.tokenizer.token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _logprobs(self, tokens: Sequence[TokenRecord], start: int) -> Json | None:
        """Log probabilities as lists. ``text_offset`` counts characters from ``start``.

        The chosen token stands among the most likely ones.
        """
        if not self.logprobs:
            return None
        return {
            "tokens": [self._spelled(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {
                    self._spelled(id_): logprob
                    for id_, logprob in (*token.top_logprobs, (token.id, token.logprob))
                }
                if token.logprob is not None
                else None
                for token in tokens
            ],
            "text_offset": [*accumulate(map(self._length, tokens), initial=start)][:-1],
        }


@dataclass(slots=True)
class InfillReply(Reply):
    """A fill in the form of llama.cpp's server, or only its named ``fields``."""

    fields: Sequence[str] = ()

    def whole(self, answers: Sequence[Generation]) -> Json:
        return self._ended(answers[0], answers[0].text)

    def chunk(self, record: Record, shown: list[Json]) -> list[Json]:
        tokens = [token.id for token in record.tokens]
        return [{"content": record.text, "tokens": tokens, "stop": False}]

    def end(self, answer: Generation) -> list[Json]:
        return [self._ended(answer, "")]

    def _ended(self, answer: Generation, content: str) -> Json:
        stats, written = answer.stats, len(answer.tokens)
        timings: dict[str, float] = {"cache_n": stats.cached_tokens}
        prompt_tokens = stats.prompt_tokens - stats.cached_tokens
        parts = ("prompt", prompt_tokens, stats.ttft_s), ("predicted", stats.decode_tokens, stats.decode_s)
        for name, tokens, seconds in parts:
            timings |= {
                f"{name}_n": tokens,
                f"{name}_ms": 1e3 * seconds,
                f"{name}_per_token_ms": 1e3 * seconds / max(1, tokens),
                f"{name}_per_second": tokens / seconds if seconds else 0.0,
            }
        whole: Json = {
            "content": content,
            "stop": True,
            "model": self.model,
            "tokens_predicted": written,
            "tokens_evaluated": stats.prompt_tokens,
            "tokens_cached": stats.prompt_tokens + written,
            "truncated": False,
            "stop_type": "limit" if answer.finish_reason != "stop" else "word" if answer.stop else "eos",
            "stopping_word": answer.stop or "",
            "timings": timings,
        }
        flat = whole | {f"timings/{name}": value for name, value in timings.items()}
        return {name: flat[name] for name in self.fields if name in flat} if self.fields else whole


def _choices(answers: Sequence[Generation]) -> list[Generation]:
    return [choice for answer in answers for choice in answer.choices]
