"""Which part of the text came with which token: text is handed out later than tokens are committed."""

from collections import deque
from collections.abc import Sequence

from edgespec.requests.results import TokenRecord
from edgespec_models.text.text_stream import TextStream
from edgespec_models.text.tokenizer import Tokenizer

__all__ = ["Attribution"]


class Attribution:
    """Cuts a stream's text at its tokens.

    A character whose bytes several tokens write belongs to the last of them. Text that may begin a
    stop string is held back by the stream, and here the tokens with it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = TextStream(tokenizer)
        self._waiting: deque[tuple[str, str]] = deque()  # text not handed out yet, and its source

    def push(self, text: str, tokens: Sequence[TokenRecord], *, last: bool) -> list[dict[str, str]]:
        """The tokens that ``text``, the next piece of the stream, shows: ``text`` and ``source`` of each.

        Their texts joined are ``text``. ``last`` says that no piece follows; a token that a stop string cut
        off has an empty text.
        """
        for token in tokens:
            self._waiting.append((self._pieces.push([token.id]), token.source))
        shown = []
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
