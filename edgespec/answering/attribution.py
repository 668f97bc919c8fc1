"""The tokens of an answer, each with its part of the text."""

from collections import deque
from typing import Any

from edgespec.answering.answer_reading import TextStream
from edgespec.answering.results import Record
from edgespec_models.text.tokenizer import Tokenizer


class Attribution:
    """Cuts a stream's text at its tokens.

    A character whose bytes come from several tokens belongs to the last of them. Where the stream holds back
    text that may begin a stop string, its tokens are held back too.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = TextStream(tokenizer)
        self._waiting: deque[tuple[str, str]] = deque()  # text that was not returned yet, and its source
        self._thinks = False

    def push(self, record: Record) -> list[dict[str, Any]]:
        """The tokens of the stream's next record: ``text`` and ``source`` of each.

        Their joined texts are the record's thoughts, marked by ``reasoning``, and then its text. Tags, and
        tokens that a stop string cut off, have an empty text.
        """
        text, tokens, thoughts = record.text, record.tokens, record.thoughts
        last = record.finish_reason is not None
        self._thinks |= bool(thoughts)
        shown = [
            {"text": thought, "source": token.source, "reasoning": True}
            for thought, token in zip(thoughts, tokens, strict=False)
        ]
        for token in tokens[len(thoughts) :]:
            self._pieces.skip = token.again
            self._waiting.append((self._pieces.push([token.id]), token.source))
        if self._thinks and text:  # tags, and space around them, are not shown
            self._thinks, dropped = False, sum(len(piece) for piece, _ in self._waiting) - len(text)
            for at, (piece, source) in enumerate(self._waiting):
                self._waiting[at] = piece[max(0, dropped) :], source
                dropped -= len(piece)
        while self._waiting and (last or len(self._waiting[0][0]) <= len(text)):
            piece, source = self._waiting.popleft()
            shown.append({"text": text[: len(piece)], "source": source})
            text = text[len(piece) :]
        if not text:
            return shown
        source = "target"  # of an unfinished character at the end, whose bytes no token completed
        if self._waiting:
            piece, source = self._waiting.popleft()
            self._waiting.appendleft((piece[len(text) :], source))
        return [*shown, {"text": text, "source": source}]
