"""Reads calls of tools out of an answer while it is written.

Text before a tag is shown as it comes. From a tag on text is held back. Names and arguments are returned as
soon as they are certain, and what turns out to be no call becomes text. Many models leave out the tag. So
JSON with the name of a known tool and its arguments is a call too, at the beginning of an answer or in a
fence.
Arguments become JSON. Models write them as JSON, as Python literals, or as texts between tags, whose types
are in the tool's schema.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from edgespec.requests.call_values import (
    DEEPEST,
    QUOTE,
    MoreError,
    begun_string,
    dumped,
    is_text,
    literal,
    properties_of,
    summary,
    table,
    typed,
    value_end,
)
from edgespec.requests.results import CallPart, ToolCall
from edgespec_models.text.tokenizer import Tokenizer, begun_at_end

if TYPE_CHECKING:
    from edgespec.requests.tool_calls import Form

_ID_LENGTH: Final = 9  # letters and digits; Mistral's templates require nine
_WORD: Final = re.compile(r"[\w.-]*")
_LITERAL: Final = re.compile(r"[^,\]}]*")
_SPACE: Final = re.compile(r"\s*")
_END: Final = "</parameter>"
_FENCE: Final = r"[ \t]*```\w*\s*"
_BEGINS: Final = re.compile(rf"\A\s*(?:{_FENCE})?(?=[{{[])")  # an answer
_FENCED: Final = re.compile(rf"\n{_FENCE}(?=[{{[])")
_MAY_BEGIN: Final = re.compile(r"\A\s*(?:`{1,2}|```\w*\s*)\Z")
_MAY_BE_FENCED: Final = re.compile(r"\n[ \t]*(?:`{0,2}|```\w*\s*)\Z")


class CallReader:
    """Takes an answer's text in pieces and returns the text that can be shown and the certain parts of calls.

    ``tools`` are the parameters of functions by name, and ``prompt`` is the prompt of the answer. With
    ``single`` nothing behind the first call is read.
    """

    def __init__(
        self, form: "Form", tools: Mapping[str, Any], prompt: Sequence[int], *, single: bool = False
    ) -> None:
        self.calls: list[ToolCall] = []
        """The complete calls."""
        self.cut = ""
        """The text of the last call, if it is incomplete and parts of it were returned."""
        self._form, self._tools, self._single = form, tools, single
        self._seed = hashlib.sha256(repr(list(prompt)).encode())
        self._text = ""  # text that may still become a call
        self._space = ""  # space that is shown if text follows
        self._says = False
        self._is_beginning, self._is_tagged = True, False
        self._tag: str | None = None  # at the text's beginning
        self._index = 0  # index of the first call behind the tag
        self._sent: list[int] = []  # length of the returned arguments, by call
        self._whole = 0  # complete calls behind the tag

    def marks(self, tokenizer: Tokenizer) -> set[int]:
        """The control tokens whose text the answer's text must contain."""
        marks = (*self._form.tags, self._form.close, "[ARGS]", "[CALL_ID]", QUOTE)
        ids = map(tokenizer.special_id, marks)
        return {id_ for id_ in ids if id_ is not None}

    @property
    def complete(self) -> bool:
        """Whether the reader ignores further text."""
        return self._single and bool(self.calls)

    def push(self, text: str, *, final: bool = False) -> tuple[str, list[CallPart]]:
        """Take a piece of text, the last one if ``final``."""
        self._text += text
        shown, parts = "", list[CallPart]()
        while not self.complete:
            if self._tag is None:
                shown += self._shown(self._before_tag(final))
                if self._tag is None:
                    break
            block = _Block(self._text, self._tools, self._tag)
            goes_on = block.read("```" if block.is_fenced else self._form.close)
            parts += self._parts(block)
            if goes_on and not final:
                break
            self._is_beginning = False
            if goes_on and len(self._sent) > self._whole:
                self.cut = self._shown(self._text[block.settled :]) + self._space
                self._text = self._space = ""
                break
            end = block.settled or len(self._tag) or 1
            if not block.settled:
                shown += self._shown(self._text[:end])
            self._text, self._tag = self._text[end:], None
            self._index, self._sent, self._whole = self._index + len(self._sent), [], 0
        if final and not self.calls:
            shown += self._space
        return shown, parts

    def _before_tag(self, final: bool) -> str:
        """Take the text before the next tag, or before a possible beginning of one, and note the tag."""
        text, tags = self._text, self._form.tags
        tag = re.search("|".join(map(re.escape, tags)), text)
        held = len(text) if final else len(text) - max(begun_at_end(text, mark) for mark in tags)
        if not self._is_tagged:
            bare = self._without_tag(text)
            if bare and bare.end() < held and (tag is None or bare.start() < tag.start()):
                tag = bare
            if not final:
                may_begin = bare, _MAY_BE_FENCED.search(text), self._is_beginning and _MAY_BEGIN.search(text)
                held = min([held, *(match.start() for match in may_begin if match)])
        start = held if tag is None else tag.start()
        self._is_beginning = self._is_beginning and not text[:start].strip()
        self._is_tagged = self._is_tagged or (tag is not None and tag[0] in tags)
        self._text, self._tag = text[start:], None if tag is None else tag[0]
        return text[:start]

    def _without_tag(self, text: str) -> re.Match[str] | None:
        """The beginning of JSON that may be a call without a tag."""
        return (_BEGINS.search(text) if self._is_beginning else None) or _FENCED.search(text)

    def _shown(self, text: str) -> str:
        """The text that can be shown. Space at the ends of an answer with calls is dropped."""
        text = self._space + text
        if self.calls and not self._says:
            text = text.lstrip()
        shown = text.rstrip()
        self._space, self._says = text[len(shown) :], self._says or bool(shown)
        return shown

    def _parts(self, block: "_Block") -> list[CallPart]:
        """The parts of calls that were not returned yet."""
        parts = list[CallPart]()
        for at, call in enumerate(block.certain):
            index = self._index + at
            seed = self._seed.copy()
            seed.update(b"%d" % index)
            id_ = seed.hexdigest()[:_ID_LENGTH]
            if at == len(self._sent):
                self._sent.append(0)
                parts.append(CallPart(index, id=id_, name=call.name))
            if new := call.text[self._sent[at] :]:
                self._sent[at] += len(new)
                parts.append(CallPart(index, new))
            if call.arguments is not None and at == self._whole:
                self._whole += 1
                self.calls.append(ToolCall(id_, call.name, call.arguments))
            if self.complete:
                break
        return parts


@dataclass(slots=True)
class _Call:
    """A call. ``text`` is the certain JSON of its arguments; ``arguments`` are there once it is complete."""

    name: str = ""
    text: str = ""
    arguments: dict[str, Any] | None = None


@dataclass(slots=True)
class _Block:
    """The calls written so far behind ``tag``, with which ``text`` begins.

    Nothing is decided that further text could change, so a longer text has the same calls and more.
    """

    text: str
    tools: Mapping[str, Any]
    tag: str
    settled: int = field(init=False, default=0)  # where the last complete call ends
    _calls: list[_Call] = field(init=False, default_factory=list)
    _at: int = field(init=False, default=0)

    @property
    def is_fenced(self) -> bool:
        """Whether the tag is a fence."""
        return "```" in self.tag

    @property
    def certain(self) -> list[_Call]:
        """The calls whose arguments have begun. Calls in a program count once it certainly is a program."""
        calls = self._calls if self.tag != "<code>" or self.settled else []
        return [call for call in calls if call.name and call.text]

    def read(self, close: str) -> bool:
        """Read the calls and the optional ``close``; return whether further text could change the result."""
        try:
            self._read()
            if self.settled and close and self._take(close):
                self.settled = self._at
        except MoreError:
            return True
        except (ValueError, RecursionError):
            pass
        return False

    def _read(self) -> None:
        self._at = len(self.tag)
        if self.tag == "<code>":
            self._program()
        elif self.tag == "<function=" or self._take("<function="):
            self._function()
            while self._take("<function="):
                self._function()
        elif self._next() == "{":
            self._object()
            while self._take(";") or self._next() == "{":
                self._object()
        elif self._next() == "[":
            for _ in self._items("[", "]"):
                self._object() if self._next() == "{" or self.is_fenced else self._python()
            self.settled = self.settled and self._at
        elif self.tag == "<|tool_call>":
            self._need("call:")
            self._end(self._plain_members(self._begin(self._word())))
        else:
            self._named()

    def _object(self) -> None:
        """Read ``{"name": .., "arguments": {..}}``. Arguments may be JSON within JSON.

        Behind a tag arguments may be missing, and other keys are allowed.
        """
        call, is_bare, is_whole = self._begin(), not self.tag.strip() or self.is_fenced, False
        is_doubled = self._take("{{")  # some templates show doubled braces, and models copy them
        self._at -= is_doubled
        for _ in self._items("{", "}"):
            key = self._key()
            if key == "name" and not call.name:
                self._call_it(call, json.loads(self._value()))
            elif key not in ("arguments", "parameters") or call.text:
                if is_bare and key not in ("type", "id"):
                    raise ValueError("other JSON")
                json.loads(self._value())
                continue
            elif self._next() == '"':
                _Block(json.loads(self._value()), {}, "")._members(call)
            else:
                self._members(call)
            is_whole = is_whole or key != "name"
        if is_bare and not is_whole:
            raise ValueError("no arguments")
        self._end(call)
        if is_doubled and self._take("}"):
            self.settled = self._at

    def _named(self) -> None:
        """Read ``name[CALL_ID]id[ARGS]{..}``. Only the name is required."""
        name = self._word()
        if self._take("[CALL_ID]"):
            self._word()
        self._take("[ARGS]")
        self._end(self._members(self._begin(name)))

    def _python(self) -> None:
        """Read ``name(key=value, ..)``."""
        self._end(self._members(self._begin(self._word()), "(", ")"))

    def _program(self) -> None:
        """Read a program of calls in Python and nothing else. Results may be assigned to names."""
        while not self._take("</code>"):
            start = self._at
            self._word()
            if not self._take("="):
                self._at = start
            self._python()
        self.settled = self._at if self._calls else 0

    def _function(self) -> None:
        """Read ``name>``, then ``<parameter=key>value</parameter>`` for each argument, one a line."""
        call = self._begin(self._until(">").strip())
        parameters = table(self.tools.get(call.name))
        properties = properties_of(parameters)
        while not self._take("</function>"):
            self._need("<parameter=")
            key = self._until(">").strip()
            schema = summary(parameters, properties.get(key, {}))
            self._add(call, key)
            start = self._at = self._at + self.text.startswith("\n", self._at)
            try:
                value = self._until(_END)
            except MoreError:
                if is_text(schema):
                    call.text += dumped(self.text[start : max(start, len(self.text) - len(_END))])[:-1]
                raise
            call.text += dumped(typed(value.removesuffix("\n"), schema))
        self._end(call)

    def _members(self, call: _Call, begin: str = "{", end: str = "}") -> _Call:
        """Read the arguments, an object of JSON or a dict of Python, into ``call``."""
        is_json = begin == "{"
        for _ in self._items(begin, end):
            self._add(call, self._key() if is_json else self._word("="))
            self._next()
            start = self._at
            try:
                value = self._value()
            except MoreError:
                call.text += begun_string(self.text[start:]) if is_json else ""
                raise
            call.text += dumped(json.loads(value) if is_json else literal(value))
        return call

    def _plain_members(self, call: _Call) -> _Call:
        """Read the arguments as Gemma 4 writes them, ``{key:value,..}``, into ``call``."""
        for _ in self._items("{", "}"):
            self._add(call, self._plain_key())
            self._next()
            start = self._at
            try:
                value = self._plain_value()
            except MoreError:
                if self.text.startswith(QUOTE, start):
                    begun = self.text[start + len(QUOTE) :]
                    call.text += dumped(begun[: len(begun) - begun_at_end(begun, QUOTE)])[:-1]
                raise
            call.text += dumped(value)
        return call

    def _plain_key(self) -> str:
        key = self._until(QUOTE) if self._take(QUOTE) else self._word()
        self._need(":")
        return key

    def _plain_value(self, depth: int = 0) -> Any:
        """A text between marks, a list, a table, or a literal."""
        if depth > DEEPEST:
            raise ValueError("too deep")
        if self._take(QUOTE):
            return self._until(QUOTE)
        if self._next() == "[":
            return [self._plain_value(depth + 1) for _ in self._items("[", "]")]
        if self._next() == "{":
            return {self._plain_key(): self._plain_value(depth + 1) for _ in self._items("{", "}")}
        match = _LITERAL.match(self.text, self._at)
        if match is None or match.end() == len(self.text):
            raise MoreError
        self._at = match.end()
        return literal(match[0].strip())

    def _begin(self, name: object = None) -> _Call:
        self._calls.append(_Call())
        if name is not None:
            self._call_it(self._calls[-1], name)
        return self._calls[-1]

    def _call_it(self, call: _Call, name: object) -> None:
        # the answer may be other JSON, or another program
        known = self.tag.strip() in ("", "<code>") or self.is_fenced
        if not isinstance(name, str) or not name or (known and name not in self.tools):
            raise ValueError("no name of a function")
        call.name = json.loads(dumped(name))

    def _add(self, call: _Call, key: str) -> None:
        call.text += f"{', ' if call.text else '{'}{dumped(key)}: "

    def _end(self, call: _Call) -> None:
        if not call.name:
            raise ValueError("a call without a name")
        call.text = (call.text or "{") + "}"
        call.arguments = json.loads(call.text)
        if self.tag != "<code>":
            self.settled = self._at

    def _next(self) -> str:
        """The next character that is no space."""
        self._at = self._end_of(_SPACE)
        if self._at == len(self.text):
            raise MoreError
        return self.text[self._at]

    def _end_of(self, pattern: re.Pattern[str]) -> int:
        """The end of the match here. Patterns match an empty text, too."""
        match = pattern.match(self.text, self._at)
        assert match is not None
        return match.end()

    def _take(self, literal: str) -> bool:
        """Read ``literal`` if it comes next, and return whether it did."""
        start = self._end_of(_SPACE)
        if self.text.startswith(literal, start):
            self._at = start + len(literal)
            return True
        if literal.startswith(self.text[start:]):
            raise MoreError
        return False

    def _need(self, literal: str) -> None:
        if not self._take(literal):
            raise ValueError(f"{literal} is missing")

    def _items(self, begin: str, end: str) -> Iterator[None]:
        """Yield for each item between ``begin`` and ``end``, which commas separate; the caller reads it."""
        self._need(begin)
        if self._next() != end:
            yield
            while self._next() == ",":
                self._at += 1
                yield
        self._need(end)

    def _key(self) -> str:
        key = json.loads(self._value())
        self._need(":")
        if not isinstance(key, str):
            raise ValueError("a key is no text")
        return key

    def _word(self, behind: str = "") -> str:
        """Read a name and the text that must follow it."""
        self._next()
        end = self._end_of(_WORD)
        if end == len(self.text):
            raise MoreError
        word, self._at = self.text[self._at : end], end
        self._need(behind)
        return word

    def _until(self, tag: str) -> str:
        text, separator, _ = self.text[self._at :].partition(tag)
        if not separator:
            raise MoreError
        self._at += len(text) + len(tag)
        return text

    def _value(self) -> str:
        """Read a value of JSON or Python: the text up to the next comma or closing bracket."""
        self._next()
        start, self._at = self._at, value_end(self.text, self._at)
        return self.text[start : self._at].strip()
