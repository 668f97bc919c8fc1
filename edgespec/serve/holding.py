"""Streams of answers that may call tools: text goes out as it comes, calls when they are whole."""

from edgespec.requests.results import Generation, Record
from edgespec_models.text.tokenizer import Tokenizer

__all__ = ["Holding"]

_TAG = "<tool_call>"


class Holding:
    """Holds back what may be the writing of a call, which is no text for a user.

    Models begin calls with a tag, with a control token, or, where the whole answer is one, with JSON
    (:mod:`edgespec.requests.tool_calls`). From there on the answer is held until it ends.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text, self._shown = "", 0
        self._held = False

    def push(self, record: Record) -> str:
        """What can be shown of the text so far."""
        begun = any(self._tokenizer.is_special(token.id) for token in record.tokens)
        if record.finish_reason is not None or begun:
            self._held = True  # what ends an answer is a control token, too, and then :meth:`finish` follows
        if not self._held:
            self._text += record.text
            self._held = self._text.lstrip()[:1] in ("{", "[") or _TAG in self._text
        end = self._shown if self._held else len(self._text) - _begun(self._text)
        if _TAG in self._text:
            end = max(self._shown, self._text.index(_TAG))
        shown, self._shown = self._text[self._shown : end], end
        return shown

    def finish(self, answer: Generation) -> str:
        """What is to be shown yet of the answer; its calls are not."""
        before = self._text[: self._shown]
        if not answer.tool_calls:
            return answer.text[self._shown :]
        if not answer.content.startswith(before.strip()):  # text before a call that was not seen as text
            return ""
        return answer.content[len(before.lstrip()) :]  # which has no space around it


def _begun(text: str) -> int:
    """Characters at the end of ``text`` that may begin the tag."""
    return next((n for n in range(len(_TAG) - 1, 0, -1) if text.endswith(_TAG[:n])), 0)
