"""Reads calls of tools out of an answer while it is written.

A mark begins a call, and the text from there on is held back. A call is returned once it is complete, and
what turns out to be none becomes text, whole. Many models leave out the marks. So JSON that names a known
tool and has its arguments is a call too, and so is a list of calls in Python: at the beginning of an answer,
in a fence, or on lines of its own at the end of an answer.

:mod:`edgespec.asking.call_values` reads the values. The tools' schemas decide between two readings.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from edgespec.answering.results import ToolCall
from edgespec.asking.call_values import (
    ARGUMENTS,
    QUOTE,
    Schemas,
    ValueReader,
    dumped,
    properties_of,
    summary,
    table,
    typed,
)
from edgespec_models.text.tokenizer import Tokenizer, begun_at_end

if TYPE_CHECKING:
    from edgespec.asking.tool_calls import Form

_ID_LENGTH: Final = 9  # letters and digits; Mistral's templates require nine
_STRAY: Final = ("<tool_call>", "<function_call>", "<tool_calls>", "<tools>", "<function=", "<function name=")
"""Marks of other forms that models write."""
_CLOSES: Final = (
    "</tool_call>",
    "</function_call>",
    "</tool_calls>",
    "</tools>",
    "</function>",
    "</parameter>",
)
_FENCE: Final = r"[ \t]*```\w*\s*"
_BEGINS: Final = re.compile(rf"\A\s*(?:{_FENCE})?(?=[{{[])")  # an answer
_BEHIND: Final = re.compile(rf"\n(?:{_FENCE}|[ \t]*)(?=[{{[])")  # a text
_MAY_BEGIN: Final = re.compile(r"\A\s*(?:`{1,2}|```\w*\s*)\Z")
_MAY_BE_BEHIND: Final = re.compile(r"\n[ \t]*(?:`{0,2}|```\w*\s*)\Z")
_WRAPPERS: Final = ("function", "tool_calls", "tool_call", "function_call")
_NAMES: Final = ("name", "function", "tool", "tool_name")
_BESIDE: Final = ("type", "id", "index", "call_id")  # what may stand beside a name and arguments
_KEYS: Final = (*_NAMES, *_WRAPPERS, *_BESIDE, *ARGUMENTS)
_NAMESPACE: Final = re.compile(r"[.:/]")
_INNER: Final = ("</function>", "</parameter>")
_MAY_CALL: Final = re.compile(r"""[\[{(\s]*(?:\Z|["'<]|[\w.:/$-]+\s*(?:\Z|[\[{(=<]))""")  # behind a mark
_NAMED: Final = re.compile(r"""\s*:\s*["']([^"']*)["']""")  # behind a name's key
_FUNCTION, _PARAMETER = (
    re.compile(rf"""\s*<{tag}(?:=|\s+name=)\s*["']?([^>"'\n]+?)["']?\s*>""")
    for tag in ("function", "parameter")
)

Called = tuple[str, dict[str, Any]]


class CallReader:
    """Takes an answer's text in pieces and returns the text that can be shown and the complete calls.

    ``tools`` are the parameters of functions by name, and ``prompt`` is the prompt of the answer. With
    ``single`` nothing behind the first call is read.

    Attributes:
        calls: the calls so far.
        thinks: whether the text is thoughts: there only the form's own marks begin calls, at the end.
        cut: whether the answer was ended from outside: what is missing at its end is missed then.
    """

    def __init__(
        self,
        form: "Form",
        tools: Mapping[str, Any],
        prompt: Sequence[int],
        *,
        single: bool = False,
    ) -> None:
        self.calls: list[ToolCall] = []
        self.cut = self.thinks = False
        self._form, self._tools, self._single = form, tools, single
        self._seed = hashlib.sha256(repr(list(prompt)).encode())
        self.tags = (*form.tags, *(mark for mark in _STRAY if mark not in form.tags))
        self._closes = [mark for mark in (form.close, *_CLOSES) if mark]
        self._text = ""  # text that may still become a call
        self._space = ""  # space that is shown if text follows
        self._says = False
        self._is_beginning, self._is_tagged = True, False
        self._tag: str | None = None  # at the text's beginning
        self._ended: str | None = None  # the tag of calls that end where the text begins

    def marks(self, tokenizer: Tokenizer) -> set[int]:
        """The control tokens whose text the answer's text must contain."""
        ids = map(tokenizer.special_id, (*self.tags, *self._closes, "[ARGS]", "[CALL_ID]", QUOTE))
        return {id_ for id_ in ids if id_ is not None}

    @property
    def complete(self) -> bool:
        """Whether the reader ignores further text."""
        return self._single and bool(self.calls)

    def knows(self, name: str) -> bool:
        """Whether a tool has this name."""
        return tool_named(name, self._tools) in self._tools

    def begin_thoughts(self, end: str) -> None:
        """Read thoughts first. Their mark ``end`` behind a call is no text."""
        self.thinks = True
        self._closes.append(end)

    def end_thoughts(self) -> tuple[str, list[ToolCall]]:
        """Go on with text, and return what the thoughts still held."""
        held = self.push("", final=True)
        self._space, self.thinks, self._says = "", False, False
        self._is_beginning, self._is_tagged = True, bool(self.calls)
        return held

    def push(self, text: str, *, final: bool = False) -> tuple[str, list[ToolCall]]:
        """Take a piece of text, the last one if ``final``."""
        self._text += text
        shown, new_calls = "", list[ToolCall]()
        while not self.complete:
            if self._tag is None:
                if self._ended is not None and not self._skip_rest(self._ended, final):
                    break
                shown += self._shown(self._before_tag(final))
                if self._tag is None:
                    break
            block = self._block(self._tag, final)
            if block is None:
                break
            end, calls = block
            self._is_beginning, self._ended = False, self._tag if calls else None
            new_calls += [self._call(*call) for call in (calls[:1] if self._single else calls)]
            if not calls:
                end = len(self._tag) or 1
                shown += self._shown(self._text[:end])
            self._text, self._tag = self._text[end:], None
        if final and not self.calls:
            shown += self._space
        return shown, new_calls

    def _skip_rest(self, tag: str, final: bool) -> bool:
        """Skip brackets and marks behind calls. False if more of them may come."""
        closes = self._closes_behind(tag)
        rest = self._text[_rest_end(self._text, 0, closes) :]
        if not final and any(mark.startswith(rest.lstrip()) for mark in closes):
            return False
        self._text, self._ended = rest, None
        return True

    def _closes_behind(self, tag: str) -> list[str]:
        return self._closes + ["```"] * ("```" in tag)

    def _before_tag(self, final: bool) -> str:
        """Take the text before the next tag, or before a possible beginning of one, and note the tag."""
        text, tags = self._text, self._form.tags if self.thinks else self.tags
        tag = _any(tags).search(text)
        held = len(text) if final else len(text) - max(begun_at_end(text, mark) for mark in tags)
        if not (self._is_tagged or self.thinks):
            bare = (_BEGINS.search(text) if self._is_beginning else None) or self._bare(text)
            if bare and bare.end() < held and (tag is None or bare.start() < tag.start()):
                tag = bare
            if not final:
                may_begin = bare, _MAY_BE_BEHIND.search(text), self._is_beginning and _MAY_BEGIN.search(text)
                held = min([held, *(match.start() for match in may_begin if match)])
        start = held if tag is None else tag.start()
        self._is_beginning = self._is_beginning and not text[:start].strip()
        self._is_tagged = self._is_tagged or (tag is not None and tag[0] in self._form.tags)
        self._text, self._tag = text[start:], None if tag is None else tag[0]
        return text[:start]

    def _bare(self, text: str) -> re.Match[str] | None:
        """The first place behind text where a call without a tag may begin."""
        places = _BEHIND.finditer(text)
        return next((at for at in places if "```" in at[0] or self._may_call(text[at.end() :])), None)

    def _may_call(self, text: str) -> bool:
        """Whether ``text`` may be the beginning of a call without a tag."""
        head = text.lstrip("[{ \t\n")
        if head[:1] in ("", "'", '"'):
            key, closed, rest = head[1:].partition(head[:1] or "'")
            named = _NAMED.match(rest) if key in _NAMES else None
            if named is not None and tool_named(named[1], self._tools) not in self._tools:
                return False
            return key in _KEYS or not (closed or all(not known.startswith(key) for known in _KEYS))
        name, bracket, _ = head.partition("(")
        return name in self._tools or (not bracket and any(tool.startswith(name) for tool in self._tools))

    def _shown(self, text: str) -> str:
        """The text that can be shown. Space at the ends of an answer with calls is dropped."""
        text = self._space + text
        if self.calls and not self._says:
            text = text.lstrip()
        shown = text.rstrip()
        self._space, self._says = text[len(shown) :], self._says or bool(shown)
        return shown

    def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolCall:
        """A complete call, with an identifier."""
        seed = self._seed.copy()
        seed.update(b"%d" % len(self.calls))
        call = ToolCall(seed.hexdigest()[:_ID_LENGTH], *json.loads(dumped([name, arguments])))
        self.calls.append(call)
        return call

    def _block(self, tag: str, final: bool) -> tuple[int, list[Called]] | None:
        """The end of the calls behind the tag, and the calls, if any; None if further text may decide.

        What is written without a slip is a call as soon as it is complete. The rest waits for the answer's
        end: then all text up to the mark that ends the calls, or up to the next tag, is read leniently.
        """
        text, begins = self._text, len(tag)
        ends_answer = not tag.strip() and not self._is_beginning
        is_mark = tag in self.tags
        if not (_MAY_CALL.match(text, _start(tag)) if is_mark else self._may_call(text[begins:])):
            return 0, []
        with suppress(ValueError, RecursionError):
            if self._form.raw and "'" in text:
                raise ValueError("a text may end later")
            end, calls = self._read(text, tag)
            behind = _rest_end(text, end, ())
            if not final and "<function".startswith(text[behind:]):  # another one may follow
                return None
            if not text.startswith(('"', "'"), behind):
                if not (ends_answer or self.thinks):
                    return end, calls
                behind = _rest_end(text, end, self._closes)
                rest, marks = text[behind:].lstrip(), (*self._closes, *self._form.tags)
                if not final and any(mark.startswith(rest) for mark in marks):
                    return None
                return end, calls * (not rest or (self.thinks and rest.startswith(self._form.tags)))
        if not final:
            return None
        within = re.compile(r"\s*<function[= ]").match(text, begins)
        following = _any(self.tags).search(text, begins if within is None else within.end())
        stop = len(text) if following is None else following.start()
        closes = [mark for mark in self._closes_behind(tag) if mark not in _INNER]
        ends = [match.start() for match in _any(closes).finditer(text, begins, stop)]
        has_mark = bool(ends)
        if not ends and (following or not self.cut):
            ends = [stop]
        for end in ends if self._form.raw else reversed(ends):
            with suppress(ValueError, RecursionError):
                at, calls = self._read(text[:end], tag, has_mark, lenient=True)
                if not text[at:end].strip(" \t\r\n]})") and not (ends_answer and text[end:].strip()):
                    return end, calls
        return 0, []

    def _read(
        self, text: str, tag: str, has_mark: bool = True, *, lenient: bool = False
    ) -> tuple[int, list[Called]]:
        block = _Block(text, tag, self._form, self._tools, has_mark, lenient)
        calls = block.read()
        if not calls or not block.is_sure:
            raise ValueError("no calls")
        return block.at, calls


class _Block:
    """Reads the calls behind ``tag``, with which ``text`` begins, perhaps as a ``lenient`` ValueReader.

    Without a mark at the end (``has_mark``) arguments end with their own bracket or tag.
    """

    def __init__(
        self,
        text: str,
        tag: str,
        form: "Form",
        tools: Mapping[str, Any],
        has_mark: bool,
        lenient: bool,
    ) -> None:
        self._tag, self._tools, self._has_mark, self._form = tag, tools, has_mark, form.name
        self._lenient, self._may_miss = lenient, 0
        # it may be other JSON, another program, or within a text
        self._is_bare = tag not in form.tags or tag == "<code>" or form.raw
        self._values = ValueReader(text, _start(tag), raw=form.raw, lenient=lenient, schemas_of=self._schemas)

    @property
    def at(self) -> int:
        """Where the calls end."""
        return self._values.at

    @property
    def is_sure(self) -> bool:
        """Whether no bracket of arguments is missing, unless a mark ends the calls."""
        return self._has_mark or self._values.missing <= self._may_miss

    def read(self) -> list[Called]:
        """Read the calls. ValueError if there are none, or not whole."""
        values, calls = self._values, list[Called]()
        following = values.peek()
        if self._tag == "<code>":
            while not values.take("</code>"):
                calls.append(self._statement())
        elif following == "<":
            calls.append(self._function())
            while values.take("<function"):
                values.at -= len("<function")
                calls.append(self._function())
        elif following == "{":
            calls += self._calls_in(values.table())
            while values.take(";") or values.peek() == "{":
                calls += self._calls_in(values.table())
        elif following == "[":
            values.enter(["[]"])
            while not values.is_over():
                if values.peek() == "{":
                    calls += self._calls_in(values.table())
                elif not values.take(","):
                    calls.append(self._named())
        else:
            calls.append(self._named())
        return calls

    def _calls_in(self, value: object) -> list[Called]:
        """The calls in a value of JSON, whose keys differ from model to model."""
        if isinstance(value, list):
            return [call for item in value for call in self._calls_in(item)]
        if not isinstance(value, dict):
            raise ValueError("no call")
        for key in _WRAPPERS:
            if isinstance(value.get(key), dict | list) and not value.keys() - {key, *_BESIDE}:
                return self._calls_in(value[key])
        key = next((key for key in _NAMES if isinstance(value.get(key), str)), "")
        name = self._known(value.get(key, ""))
        schemas = self._schemas(name) or {}
        inner = next((key for key in ARGUMENTS if key in value), None)
        arguments = {} if inner is None else value[inner]
        if isinstance(arguments, str):
            reader = ValueReader(arguments)
            arguments = reader.table()
            if reader.peek():
                raise ValueError("text behind arguments")
        if not isinstance(arguments, dict | None):
            raise ValueError("arguments are a table")
        self._may_miss = int(inner is not None)
        beside = {
            k: v for k, v in value.items() if k not in (key, inner) and (k in schemas or k not in _BESIDE)
        }
        if beside.keys() - schemas.keys() and (inner is None or self._is_bare):
            raise ValueError("other keys")
        if self._is_bare and inner is None and not beside:
            raise ValueError("no arguments")
        known = {k: v for k, v in beside.items() if k in schemas}
        return [(name, known | (arguments or {}))]

    def _named(self) -> Called:
        """Read a name and its arguments: ``name[ARGS]{..}``, ``call:name{..}``, ``name(key=value)``."""
        values = self._values
        values.take("call:")
        name = self._known(values.word())
        if values.take("[CALL_ID]"):
            values.word()
        values.take("[ARGS]")
        if self._form == "glm" and values.peek() == "<":
            return name, self._pairs(name)
        if "```" in self._tag or values.peek() not in ("{", "("):
            raise ValueError("no arguments")
        values.is_python = values.peek() == "("
        call = name, values.table(self._schemas(name))
        values.is_python = False
        return call

    def _pairs(self, name: str) -> dict[str, Any]:
        """Read ``<arg_key>key</arg_key><arg_value>value</arg_value>`` for each argument, and the mark."""
        values, arguments = self._values, dict[str, Any]()
        parameters = table(self._tools.get(name))
        properties = properties_of(parameters)

        def up_to(end: str) -> str:
            start, values.at = values.at, values.text.index(end, values.at) + len(end)
            return values.text[start : values.at - len(end)]

        while values.take("<arg_key>"):
            key = up_to("</arg_key>").strip()
            values.need("<arg_value>")
            arguments[key] = typed(up_to("</arg_value>"), summary(parameters, properties.get(key, {})))
        if not self._lenient:
            values.need("</tool_call>")
        return arguments

    def _statement(self) -> Called:
        """Read a call in a program, whose result may be assigned to a name."""
        start = self._values.at
        self._values.word()
        if not self._values.take("="):
            self._values.at = start
        return self._named()

    def _function(self) -> Called:
        """Read ``<function=name>``, and ``<parameter=key>value</parameter>`` for each argument."""
        values, arguments = self._values, dict[str, Any]()
        if not self._lenient and values.text.find("</function>", values.at) < 0:
            raise ValueError("no end yet")  # before a search through the whole text
        name = self._known(self._opened(_FUNCTION))
        parameters = table(self._tools.get(name))
        properties = properties_of(parameters)
        if values.peek() == "{":
            arguments = values.table(properties)
        while not values.take("</function>"):
            if self._lenient and not values.peek():
                break
            key = self._opened(_PARAMETER)
            schema = summary(parameters, properties.get(key, {}))
            arguments[key] = typed(
                self._inside([k for k in properties if k not in (*arguments, key)]), schema
            )
        return name, arguments

    def _opened(self, pattern: re.Pattern[str]) -> str:
        """Read an opening tag, and return the name in it."""
        match = pattern.match(self._values.text, self._values.at)
        if match is None:
            raise ValueError("no tag")
        self._values.at = match.end()
        return match[1]

    def _inside(self, others: Sequence[str]) -> str:
        """Read the text between tags, which may contain tags. Of ``others`` each may be the next.

        It ends at the closing tag that another tag follows. Where closing tags are missing, it ends at the
        tag of another argument on a line of its own, or at the end of the function.
        """
        names = "|".join(map(re.escape, others)) or "(?!)"
        end = (
            r"\n?</parameter>(?:\s*</parameter>)*(?=\s*(?:<parameter[= ]|</function>))"
            rf"""|\s*\n(?=<parameter(?:=|\s+name=)["']?(?:{names})["']?\s*>)"""
            r"|\n?(?=\s*</function>\s*</tool_call>\s*<tool_call>\s*<function)"
        )
        if self._lenient:
            end += rf"|\n?(?:</parameter>\s*){'*' if self._has_mark else '+'}(?=(?:</function>\s*)?\Z)"
        text, start = self._values.text, self._values.at
        match = re.compile(end).search(text, start)
        if match is None:
            raise ValueError("no end")
        self._values.at = match.end()
        inside = text[start : match.start()]
        return inside[1:] if inside.startswith("\n") else inside.strip()

    def _known(self, name: str) -> str:
        """The name of the tool that is called so."""
        name = tool_named(name, self._tools)
        if not name or (self._is_bare and name not in self._tools):
            raise ValueError("no name of a function")
        return name

    def _schemas(self, name: object) -> Schemas | None:
        """The schemas of a tool's arguments; None if it has none."""
        tool = tool_named(name, self._tools) if isinstance(name, str) else ""
        return properties_of(table(self._tools.get(tool))) or None


def tool_named(name: str, tools: Collection[str]) -> str:
    """The tool that ``name`` means: models write names with a namespace or without; else ``name`` itself."""
    name = name.strip()
    if name in tools:
        return name
    last = _NAMESPACE.split(name)[-1]
    meant = [tool for tool in tools if tool == last or _NAMESPACE.split(tool)[-1] == name]
    return meant[0] if len(meant) == 1 else name


def _start(tag: str) -> int:
    """Where the calls behind a tag begin: some tags are a part of a call."""
    return 0 if tag.startswith(("<function=", "<function ")) else len(tag)


def _any(marks: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def _rest_end(text: str, at: int, closes: Sequence[str]) -> int:
    """Where brackets, and then marks, that stand at ``at`` end."""
    marks = rf"(?:\s*(?:{_any(closes).pattern}))*" if closes else r"\s*"
    match = re.compile(rf"(?:\s*[\]}})])*{marks}").match(text, at)
    assert match is not None  # it matches an empty text
    return match.end()
