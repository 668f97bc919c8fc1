"""Tells thoughts, text and calls of an answer apart while it is written."""

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from edgespec.answering.results import Record, ToolCall
from edgespec_models.text.thoughts import ThoughtState
from edgespec_models.text.tokenizer import Tokenizer, begun_at_end

if TYPE_CHECKING:  # only answers with thoughts or tools need these
    from edgespec.answering.call_reading import CallReader
    from edgespec.answering.fill_reading import FillReader


class AnswerReader:
    """Reads an answer as its tokens are committed: thoughts, then text, then the calls in the text.

    A call at the end of the thoughts is read, because models forget the closing tag.

    ``state`` is that of the answer's beginning, or None without thoughts. ``calls`` reads calls of tools, or
    is None. ``fill`` ends a text that fills a hole, or is None. Stop strings end the text; within thoughts
    they are ordinary text.

    Attributes:
        thoughts: what each token of the thoughts added to them.
        called: the complete calls.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        state: ThoughtState | None = None,
        calls: "CallReader | None" = None,
        fill: "FillReader | None" = None,
        *,
        stop: Sequence[str] = (),
    ) -> None:
        self.thoughts, self.called = list[str](), list[ToolCall]() if calls is None else calls.calls
        self._tokenizer, self._state, self._calls, self._fill = tokenizer, state, calls, fill
        self._streams = [TextStream(tokenizer, stop=stop)]
        self._streams[0].skip = 0 if fill is None else fill.skip
        self._marks = set[int]() if calls is None else calls.marks(tokenizer)
        self._parts = list[ToolCall]()  # of calls in thoughts
        if calls is not None:  # control tokens may begin calls
            self._streams.append(TextStream(tokenizer, stop=stop, spelled=self._marks))
            if state is not None and not state.tags.channels and state.stage != "text":
                calls.begin_thoughts(state.tags.end)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._before_text = 0  # tokens of tags and thoughts

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._streams[0].stop_string

    @property
    def ended(self) -> bool:
        """Whether the text has ended, by a stop string, its last call, or the end of a fill."""
        over = self.stop_string is not None or (self._calls is not None and self._calls.complete)
        return over or (self._fill is not None and self._fill.ended)

    def push(self, tokens: Sequence[int], *, final: bool = False) -> Record:
        """Take tokens. With ``final`` no more come, and what was held back is returned too.

        Tokens of thoughts and of their tags come first. The beginning of a closing tag is no thought.
        """
        before, self._parts = self._before_text, []
        begun, rest = self._think(tokens)
        thoughts = tuple(self.thoughts[before:])
        if final and self._state is not None:
            begun += self._state.held_text
            if self._calls is not None and self._calls.thinks and self._state.thinks:
                held, self._parts = self._calls.push("", final=True)
                thoughts = (*thoughts, held)
                self.thoughts[-1:] = [thought + held for thought in self.thoughts[-1:]]
        texts = [
            stream.push_bytes(begun) + stream.push(rest) + (stream.finish() if final else "")
            for stream in self._streams
        ]
        if self._fill is not None:
            texts = [self._fill.push(texts[0], final=final)]
        content, calls = texts[-1], self._parts
        has_text = self._state is None or self._state.has_text or (final and not self._state.thinks)
        if self._calls is not None and has_text:
            if self._calls.thinks:  # the answer has no thoughts
                self._calls.end_thoughts()
            content, parts = self._calls.push(content, final=final)
            calls = [*calls, *parts]
        return Record(texts[0], (), content=content, calls=tuple(calls), thoughts=thoughts)

    def _think(self, tokens: Sequence[int]) -> tuple[bytes, Sequence[int]]:
        """Read up to the text, and return its first bytes and the tokens behind them."""
        begun = b""
        for at, token in enumerate(tokens):
            state = self._state
            if state is None or state.stage == "text":
                return begun, tokens[at:]
            if state.thinks and token in self._marks:
                self._state, thought, text = state.read(self._tokenizer.token_bytes(token))
            else:
                self._state, thought, text = state.read_token(token, self._tokenizer)
            behind = self._state
            begun += text
            self._before_text += 1
            if state.thinks or behind.thinks:
                self.thoughts += [""] * (self._before_text - 1 - len(self.thoughts))  # these are a tag
                self.thoughts.append(self._decoder.decode(thought, final=not behind.thinks))
                if self._calls is not None and self._calls.thinks:
                    shown, self._parts = self._calls.push(self.thoughts[-1])
                    if self._parts:  # what is shown stands behind the call
                        self.thoughts[-1], self._state = "", ThoughtState(state.tags, "text")
                        self._calls.thinks = False
                        return begun + shown.encode(), tokens[at + 1 :]
                    if not behind.thinks:
                        more, self._parts = self._calls.end_thoughts()
                        shown += more
                    self.thoughts[-1] = shown
            if state.thinks and behind.has_text and state.tags.response:
                end = state.tags.response.replace("<", "</")
                for stream in self._streams:
                    stream.stops[end.encode()] = end
            if behind.stage == "text" and self._tokenizer.is_special(token):
                return begun, tokens[at:]
        return begun, ()


class TextStream:
    """Turns committed tokens into text that can be shown.

    >>> stream = TextStream(tokenizer, stop=["\\n\\n"])
    >>> shown = stream.push(tokens) + stream.finish()

    The joined pieces equal ``tokenizer.decode`` of all tokens, up to the first stop string. First means
    completed first; if a byte completes several, the longest counts. How tokens are grouped into pushes does
    not matter. Special tokens give no text, except those in ``spelled``, but they complete stop strings that
    end with their text. Push committed tokens only: returned text is never taken back.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), spelled: Collection[int] = ()
    ) -> None:
        # UTF-8 is self-synchronising, so stop strings can be found in the bytes.
        self.stops = {text.encode("utf-8"): text for text in stop}
        self._tokenizer, self._spelled = tokenizer, spelled
        self.skip = 0  # next bytes that are no part of the text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""  # perhaps the beginning of a stop string
        self.stop_string: str | None = None
        """The stop string that ended the text, or None. It is no part of it; later tokens are ignored."""

    def push(self, tokens: Iterable[int]) -> str:
        """Take tokens and return the text that can be shown now. Raises TokenizerError for an unknown id."""
        text = ""
        for token in tokens:
            data = self._tokenizer.token_bytes(token)
            is_text = token in self._spelled or not self._tokenizer.is_special(token)
            text += self.push_bytes(data) if is_text else self._push_special(data)
        return text

    def _push_special(self, name: bytes) -> str:
        """The text before a stop string that a special token completes; empty if it completes none."""
        whole = self._held + name
        ended = (stop for stop in self.stops if stop.endswith(name) and whole.endswith(stop))
        stop = max(ended, key=len, default=None)
        if self.stop_string is not None or stop is None:
            return ""
        self.stop_string, self._held = self.stops[stop], b""
        return self._decoder.decode(whole.removesuffix(stop), final=True)

    def push_bytes(self, data: bytes) -> str:
        """Take bytes and return the text that can be shown now."""
        if self.stop_string is not None:
            return ""
        text = self._held + data[self.skip :]
        self.skip = max(0, self.skip - len(data))
        first = self._first_stop(text)
        if first is None:
            keep = len(text) - max((begun_at_end(text, stop) for stop in self.stops), default=0)
            self._held = text[keep:]
            return self._decoder.decode(text[:keep])
        start, stop = first
        self.stop_string, self._held = self.stops[stop], b""
        return self._decoder.decode(text[:start], final=True)

    def finish(self) -> str:
        """Return the text that is still held back. An incomplete character becomes U+FFFD."""
        held, self._held = self._held, b""
        return self._decoder.decode(held, final=True)

    def _first_stop(self, text: bytes) -> tuple[int, bytes] | None:
        """The first completed stop string, and where it starts."""
        starts = ((text.find(stop), stop) for stop in self.stops)
        stops = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(stops)[1:] if stops else None
