"""Text from tokens as they come: whole characters only, and nothing that a stop string may take back."""

import codecs
from collections.abc import Iterable, Sequence

from edgespec_models.errors import RequestError
from edgespec_models.text.tokenizer import Tokenizer


class TextStream:
    """Turns committed tokens into text that can be shown at once.

    >>> stream = TextStream(tokenizer, stop=["\\n\\n"])
    >>> shown = stream.push(tokens) + stream.finish()

    The pieces joined equal ``tokenizer.decode`` of all tokens, up to the first stop string. That is the
    one completed first, and the longest of those completed by the same byte, however the tokens were
    grouped into pushes. Special tokens contribute no text. Push committed tokens only: text that was
    handed out is not taken back.

    Raises RequestError where a stop string is empty or holds a lone surrogate.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str):
            raise RequestError(f"stop must be a list of texts, not the text {stop!r}.")
        if not all(stop):
            raise RequestError("A stop string is empty. Leave it out.")
        try:
            # UTF-8 synchronises itself, so stop strings can be found in the bytes.
            self._stops = {text.encode("utf-8"): text for text in stop}
        except UnicodeEncodeError as error:
            raise RequestError(f"A stop string is not valid text: {error}") from error
        self._tokenizer = tokenizer
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
        if self.stopped:
            return ""
        shown = (token for token in tokens if not self._tokenizer.is_special(token))
        text = self._held + self._tokenizer.bytes_of(shown)
        found = self._first_stop(text)
        if found is None:
            keep = len(text) - self._length_to_hold(text)
            self._held = text[keep:]
            return self._decoder.decode(text[:keep])
        start, stop = found
        self.stop_string, self._held = self._stops[stop], b""
        return self._decoder.decode(text[:start], final=True)

    def finish(self) -> str:
        """The text still held back: no more tokens come. An incomplete character becomes U+FFFD."""
        held, self._held = self._held, b""
        return self._decoder.decode(held, final=True)

    def _first_stop(self, text: bytes) -> tuple[int, bytes] | None:
        """Start of the stop string completed first, and the stop string."""
        starts = ((text.find(stop), stop) for stop in self._stops)
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(found)[1:] if found else None

    def _length_to_hold(self, text: bytes) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            lengths = range(min(len(stop) - 1, len(text)), longest, -1)
            longest = next((n for n in lengths if text.endswith(stop[:n])), longest)
        return longest
