"""Answers of several messages, each behind a header that names its channel, as gpt-oss writes them (harmony).

A header stands between control tokens: ``<|start|>assistant<|channel|>NAME`` with ``to=RECIPIENT`` before or
behind the name, then ``<|message|>``. A message to a function is a call, other messages of ``final`` and
``commentary`` to nobody else are text, and the rest are thoughts. No ordinary token ends a message or
begins one.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from edgespec.answering.answer_reading import AnswerReader
from edgespec.answering.results import Record, ToolCall
from edgespec_models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgespec.answering.call_reading import CallReader

_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_FUNCTION: Final = "functions."
_NOBODY: Final = ("", "assistant", "user", "all")
_BETWEEN: Final = b"\n\n"  # texts of two messages


class ChannelReader(AnswerReader):
    """Reads such an answer, whose first header begins behind ``<|start|>assistant``, as it is committed.

    An answer that begins with another word is a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, calls: "CallReader | None" = None, *, stop: Sequence[str] = ()
    ) -> None:
        super().__init__(tokenizer, None, calls, stop=stop)
        self._header: bytes | None = b""  # None within a message
        self._kind: Literal["thoughts", "text", "call"] = "text"
        self._read = 0  # tokens
        self._has_text = self._has_messages = False
        self._text = self._content = ""  # since the last push
        self._parts: list[ToolCall] = []

    def push(self, tokens: Sequence[int], *, final: bool = False) -> Record:
        """Take tokens. The ``final`` ones release held text.

        Headers before the first text count as thoughts, with nothing in them.
        """
        before, self._text, self._content, self._parts = self._read, "", "", []
        for token in tokens:
            had_messages, thought = self._has_messages, self._token(token)
            is_mark = self._header is not None or self._tokenizer.is_special(token)
            if self._kind == "thoughts" or (is_mark and not had_messages):
                self.thoughts += [""] * (self._read - len(self.thoughts)) + [thought]
            self._read += 1
        if final:
            self._show(self._streams[0].finish())
            if self._calls is not None:
                self._take(*self._calls.push("", final=True))
        thoughts = tuple(self.thoughts[before:])
        return Record(self._text, (), content=self._content, calls=tuple(self._parts), thoughts=thoughts)

    def _token(self, token: int) -> str:
        """Read a token, and return its addition to the thoughts."""
        data, thought = self._tokenizer.token_bytes(token), ""
        if self._tokenizer.is_special(token):
            if self._header is None:
                thought = self._end()
            self._header = (self._header or b"") + data
            if data == b"<|message|>":
                self._begin(self._header.decode(errors="replace"))
        elif self._header is None:
            if self._kind == "thoughts":
                return self._decoder.decode(data)
            self._show(self._streams[0].push_bytes(data))
        else:
            self._header += data
            begun = self._header.lstrip()
            if not (begun.startswith((b"<", b"to=")) or b"to=".startswith(begun)):
                header = self._header
                self._begin("")
                self._show(self._streams[0].push_bytes(header))
        return thought

    def _begin(self, header: str) -> None:
        """Begin a message."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._header, name = None, "" if recipient is None else recipient[1]
        known = self._calls is not None and self._calls.knows(name)
        if name.startswith(_FUNCTION) or known:
            self._kind, self._has_messages = "call", True
            if self._calls is not None:
                self._take(*self._calls.push(f"to={_FUNCTION}{name.removeprefix(_FUNCTION)}"))
        elif name in _NOBODY and (channel is None or channel[1] in ("final", "commentary")):
            self._kind, self._has_messages = "text", True
            if self._has_text:
                self._show(self._streams[0].push_bytes(_BETWEEN))
        else:
            self._kind = "thoughts"

    def _end(self) -> str:
        """End the message, and return held thoughts."""
        if self._kind == "thoughts":
            return self._decoder.decode(b"", final=True)
        self._show(self._streams[0].finish())
        return ""

    def _show(self, piece: str) -> None:
        """Take a piece of a message."""
        self._text += piece
        if self._kind == "call" and self._calls is not None:
            self._take(*self._calls.push(piece))
        else:
            self._content += piece
            self._has_text |= bool(piece)

    def _take(self, content: str, calls: Sequence[ToolCall]) -> None:
        """Take what a reader of calls returned."""
        self._content += content
        self._parts += calls
