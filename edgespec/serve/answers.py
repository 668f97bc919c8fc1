"""What a model wrote, in OpenAI's JSON; what edgespec knows besides stands in fields ``edgespec``."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from edgespec.requests.results import Attribution, Generation, TokenRecord
from edgespec_models.text.tokenizer import Tokenizer

__all__ = ["ChatAnswer", "CompletionAnswer", "finish_reason", "usage"]

Json = dict[str, Any]
_FINISH = {"stop": "stop", "length": "length", "timeout": "length", "tool_calls": "tool_calls"}


def finish_reason(reason: str) -> str:
    """In OpenAI's words; that time ran out is a limit, too."""
    return _FINISH.get(reason, "length")


def usage(answers: Sequence[Generation]) -> Json:
    """Tokens read and written. Each answer is to a prompt of its own and may have several choices."""
    read = sum(answer.stats.prompt_tokens for answer in answers)
    written = sum(len(choice.tokens) for choice in _choices(answers))
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(answer.stats.cached_tokens for answer in answers)},
    }


@dataclass(slots=True)
class _Answer:
    """One response: its id, what is the same in all its parts, and how many characters chunks had so far."""

    model: str
    tokenizer: Tokenizer
    plain_tokens_per_s: float
    logprobs: bool = False
    id: str = field(default_factory=partial(secrets.token_hex, 12))
    created: int = field(default_factory=lambda: int(time.time()))
    written: int = 0

    def _head(self, kind: str, prefix: str) -> Json:
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _extension(self, answer: Generation) -> Json:
        """What OpenAI's format has no place for."""
        return {
            "finish_reason": answer.finish_reason,
            "stop": answer.stop,
            "stats": answer.stats.to_json(),
            "plain_tokens_per_second": self.plain_tokens_per_s,
        }

    def _tokens(self, answer: Generation) -> list[dict[str, str]]:
        return Attribution(self.tokenizer).push(answer.text, answer.records, last=True)

    def _spelled(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)

    def _text(self, token: int) -> str:
        return self._spelled(token).decode("utf-8", "replace")


class ChatAnswer(_Answer):
    """A ``chat.completion`` and its chunks."""

    __slots__ = ()

    def whole(self, answers: Sequence[Generation]) -> Json:
        """The response in one piece; each of ``answers`` is to a prompt."""
        choices = [self._choice(index, answer) for index, answer in enumerate(_choices(answers))]
        return self._head("chat.completion", "chatcmpl") | {"choices": choices, "usage": usage(answers)}

    def begin(self) -> Json:
        """The first chunk: who speaks."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def chunk(self, text: str, tokens: Sequence[TokenRecord], shown: list[dict[str, str]]) -> Json:
        """A piece of the text; ``shown`` are its tokens as :class:`Attribution` cut them."""
        return self._chunk({"content": text} if text else {}, self._logprobs(tokens), {"tokens": shown})

    def end(self, answer: Generation) -> Json:
        """The last chunk: why it ended, the tools to call, and what it cost."""
        calls = [{"index": index, **call} for index, call in enumerate(_calls(answer))]
        chunk = self._chunk({"tool_calls": calls} if calls else {}, None, self._extension(answer))
        chunk["choices"][0]["finish_reason"] = finish_reason(answer.finish_reason)
        return chunk

    def used(self, answer: Generation) -> Json:
        """The chunk that ``stream_options.include_usage`` asks for."""
        head = self._head("chat.completion.chunk", "chatcmpl")
        return head | {"choices": [], "usage": usage([answer])}

    def _choice(self, index: int, answer: Generation) -> Json:
        calls = _calls(answer)
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        if calls:
            message |= {"content": answer.content or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.records),
            "finish_reason": finish_reason(answer.finish_reason),
            "edgespec": self._extension(answer) | {"tokens": self._tokens(answer)},
        }

    def _chunk(self, delta: Json, logprobs: Json | None, extension: Json | None = None) -> Json:
        choice: Json = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if extension is not None:
            choice["edgespec"] = extension
        return self._head("chat.completion.chunk", "chatcmpl") | {"choices": [choice]}

    def _logprobs(self, tokens: Sequence[TokenRecord]) -> Json | None:
        if not self.logprobs:
            return None
        content = [
            self._entry(token.id, token.logprob)
            | {"top_logprobs": [self._entry(id_, logprob) for id_, logprob in token.top_logprobs]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> Json:
        return {"token": self._text(token), "logprob": logprob, "bytes": list(self._spelled(token))}


class CompletionAnswer(_Answer):
    """A ``text_completion`` and its chunks, which have the same form."""

    __slots__ = ()

    def whole(self, answers: Sequence[Generation]) -> Json:
        """The response in one piece; each of ``answers`` is to a prompt."""
        choices = [
            self._choice(answer.text, self._logprobs(answer.records, 0))
            | {
                "index": index,
                "finish_reason": finish_reason(answer.finish_reason),
                "edgespec": self._extension(answer) | {"tokens": self._tokens(answer)},
            }
            for index, answer in enumerate(_choices(answers))
        ]
        return self._head("text_completion", "cmpl") | {"choices": choices, "usage": usage(answers)}

    def begin(self) -> None:
        """Nothing stands before the text."""

    def chunk(self, text: str, tokens: Sequence[TokenRecord], shown: list[dict[str, str]]) -> Json:
        """A piece of the text; ``shown`` are its tokens as :class:`Attribution` cut them."""
        logprobs = self._logprobs(tokens, self.written)
        self.written += sum(len(self._text(token.id)) for token in tokens)
        return self._chunk(self._choice(text, logprobs) | {"edgespec": {"tokens": shown}})

    def end(self, answer: Generation) -> Json:
        """The last chunk: why it ended, and what it cost."""
        ended = {
            "finish_reason": finish_reason(answer.finish_reason),
            "edgespec": self._extension(answer),
        }
        return self._chunk(self._choice("", None) | ended)

    def used(self, answer: Generation) -> Json:
        """The chunk that ``stream_options.include_usage`` asks for."""
        return self._head("text_completion", "cmpl") | {"choices": [], "usage": usage([answer])}

    def _chunk(self, choice: Json) -> Json:
        return self._head("text_completion", "cmpl") | {"choices": [choice]}

    def _choice(self, text: str, logprobs: Json | None) -> Json:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, tokens: Sequence[TokenRecord], start: int) -> Json | None:
        """As lists; ``text_offset`` counts characters from ``start``."""
        if not self.logprobs:
            return None
        texts = [self._text(token.id) for token in tokens]
        offsets = [start + sum(map(len, texts[:index])) for index in range(len(texts))]
        tops = [{self._text(id_): logprob for id_, logprob in token.top_logprobs} for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _choices(answers: Sequence[Generation]) -> list[Generation]:
    return [choice for answer in answers for choice in answer.choices]


def _calls(answer: Generation) -> list[Json]:
    return [call.to_message() for call in answer.tool_calls]
