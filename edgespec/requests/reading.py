"""Answers as they are written: thoughts, text that can be shown, and which token wrote what."""

import codecs
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.requests.results import CallPart, TokenRecord, ToolCall
from edgespec_models.errors import RequestError
from edgespec_models.text.thoughts import Place, begun_at_end
from edgespec_models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgespec.requests.call_reading import CallReader


class Piece(NamedTuple):
    """What can be shown now: of thoughts what each token adds, text, the text around calls, and calls."""

    thoughts: tuple[str, ...]
    text: str
    content: str
    calls: tuple[CallPart, ...]


class AnswerReader:
    """Reads an answer as its tokens are committed: thoughts, then text, then the calls within that.

    ``place`` is where the answer begins; None where it has no thoughts. ``calls`` reads what the text calls;
    None where that is nothing. Stop strings end the text; within thoughts they are thoughts. Raises what
    :class:`TextStream` does.

    Attributes:
        text: the text that was shown.
        content: the same around calls.
        thoughts: what each token added to the thoughts, as far as these go.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        place: Place | None = None,
        calls: "CallReader | None" = None,
        *,
        stop: Sequence[str] = (),
    ) -> None:
        self.text, self.content, self.thoughts = list[str](), list[str](), list[str]()
        self._tokenizer, self._place, self._calls = tokenizer, place, calls
        self._streams = [TextStream(tokenizer, stop=stop)]
        if calls is not None:  # which control tokens may begin
            self._streams.append(TextStream(tokenizer, stop=stop, spelled=calls.marks(tokenizer)))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._tokens = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._streams[0].stop_string

    @property
    def ended(self) -> bool:
        """Whether what follows is not read: a stop string came, or the last call that is wanted."""
        return self._streams[0].stopped or (self._calls is not None and self._calls.complete)

    @property
    def called(self) -> tuple[ToolCall, ...]:
        """The calls that are whole."""
        return () if self._calls is None else tuple(self._calls.calls)

    def push(self, tokens: Sequence[int], *, final: bool = False) -> Piece:
        """Take tokens, with the ``final`` ones what was held back: no more come.

        Tokens of thoughts, their tags with them, come first. The beginning of a closing tag is no thought.
        """
        before, said = self._tokens, [""] * len(self._streams)
        self._tokens += len(tokens)
        for at, token in enumerate(tokens, before):
            place = self._place
            if place is not None and place.stage != "text":
                self._place, thought, text = place.read_token(token, self._tokenizer)
                self._think(at, place, self._place, thought)
                said = [old + each.push_bytes(text) for old, each in zip(said, self._streams, strict=True)]
                if self._place.stage != "text" or not self._tokenizer.is_special(token):
                    continue
            said = [old + each.push([token]) for old, each in zip(said, self._streams, strict=True)]
        if final:
            held = b"" if self._place is None else self._place.held_text
            for at, each in enumerate(self._streams):
                said[at] += each.push_bytes(held) + each.finish()
        calls = list[CallPart]()
        content = said[-1]
        if self._calls is not None:
            content, calls = self._calls.push(content, final=final)
        self.text.append(said[0])
        self.content.append(content)
        return Piece(tuple(self.thoughts[before:]), said[0], content, tuple(calls))

    def _think(self, at: int, place: Place, behind: Place, thought: bytes) -> None:
        """Note what the token ``at`` adds to the thoughts, between two places."""
        if place.thinks or behind.thinks:
            self.thoughts += [""] * (at - len(self.thoughts))  # what came before is their tag
            self.thoughts.append(self._decoder.decode(thought, final=not behind.thinks))
        if place.thinks and behind.has_text and place.tags.response:
            end = place.tags.response.replace("<", "</")
            for each in self._streams:
                each.stops[end.encode()] = end


class Attribution:
    """Cuts a stream's text at its tokens.

    A character whose bytes several tokens write belongs to the last of them. Text that may begin a
    stop string is held back by the stream, and here the tokens with it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = TextStream(tokenizer)
        self._waiting: deque[tuple[str, str]] = deque()  # text not handed out yet, and its source
        self._thinks = False

    def push(
        self, text: str, tokens: Sequence[TokenRecord], *, last: bool, thoughts: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """The tokens that ``text``, the next piece of the stream, shows: ``text`` and ``source`` of each.

        Their texts joined are ``text``, behind those of ``thoughts``, which the first tokens add to the
        thoughts and which are marked by ``reasoning``. ``last`` says that no piece follows; a token that a
        stop string cut off has an empty text, as have tags.
        """
        self._thinks |= bool(thoughts)
        shown = [
            {"text": thought, "source": token.source, "reasoning": True}
            for thought, token in zip(thoughts, tokens, strict=False)
        ]
        for token in tokens[len(thoughts) :]:
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


class TextStream:
    """Turns committed tokens into text that can be shown at once.

    >>> stream = TextStream(tokenizer, stop=["\\n\\n"])
    >>> shown = stream.push(tokens) + stream.finish()

    The pieces joined equal ``tokenizer.decode`` of all tokens, up to the first stop string. That is the
    one completed first, and the longest of those completed by the same byte, however the tokens were
    grouped into pushes. Special tokens contribute no text, but for those ``spelled``. Push committed tokens
    only: text that was handed out is not taken back.

    Raises RequestError where a stop string is empty or holds a lone surrogate.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), spelled: Collection[int] = ()
    ) -> None:
        if isinstance(stop, str):
            raise RequestError(f"stop must be a list of texts, not the text {stop!r}.")
        if not all(stop):
            raise RequestError("A stop string is empty. Leave it out.")
        try:
            # UTF-8 synchronises itself, so stop strings can be found in the bytes.
            self.stops = {text.encode("utf-8"): text for text in stop}
        except UnicodeEncodeError as error:
            raise RequestError(f"A stop string is not valid text: {error}") from error
        self._tokenizer, self._spelled = tokenizer, spelled
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""  # may be the beginning of a stop string
        self.stop_string: str | None = None
        """The stop string that ended the text; it is not part of the text."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; what is pushed from then on is ignored."""
        return self.stop_string is not None

    def push(self, tokens: Iterable[int]) -> str:
        """Take tokens, return the text that can be shown now. Raises TokenizerError for an unknown id."""
        shown = (each for each in tokens if each in self._spelled or not self._tokenizer.is_special(each))
        return self.push_bytes(self._tokenizer.bytes_of(shown))

    def push_bytes(self, data: bytes) -> str:
        """The same of bytes."""
        if self.stopped:
            return ""
        text = self._held + data
        found = self._first_stop(text)
        if found is None:
            keep = len(text) - max((begun_at_end(text, stop) for stop in self.stops), default=0)
            self._held = text[keep:]
            return self._decoder.decode(text[:keep])
        start, stop = found
        self.stop_string, self._held = self.stops[stop], b""
        return self._decoder.decode(text[:start], final=True)

    def finish(self) -> str:
        """The text still held back: no more tokens come. An incomplete character becomes U+FFFD."""
        held, self._held = self._held, b""
        return self._decoder.decode(held, final=True)

    def _first_stop(self, text: bytes) -> tuple[int, bytes] | None:
        """Start of the stop string completed first, and the stop string."""
        starts = ((text.find(stop), stop) for stop in self.stops)
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(found)[1:] if found else None
