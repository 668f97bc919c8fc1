"""Chat templates: Jinja source from a model file, rendered in a sandbox.

A template is code of the model file's author. Jinja's sandbox keeps it from reaching Python: no private
attributes, no imports, no changes to the messages; :mod:`template_sandbox` bounds its time and memory.
The environment is the same as in the ``transformers`` library ("Chat templates" in its documentation),
because templates are written for it.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from itertools import chain, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser

from edgespec_models.errors import Closed, EdgespecError, RequestError, TokenizerError, naming
from edgespec_models.schema import no_number, read_text, shown
from edgespec_models.text.marked_text import mark, unmark
from edgespec_models.text.template_files import DEFAULT
from edgespec_models.text.template_sandbox import LONGEST_SOURCE, Sandbox, limited
from edgespec_models.text.tokenizer import Tokenizer

_SYSTEM: Final = ("system", "developer")
_ROLES: Final = (*_SYSTEM, "user", "assistant", "tool")
_LOG = logging.getLogger("edgespec")

_LONGEST_DATE = 200  # characters of a date's form, which may ask for padding
_DEEPEST: Final = 64  # lists and mappings within each other
_ALWAYS: Final = frozenset(("messages", "add_generation_prompt", "strftime_now"))
EFFORT: Final = "reasoning_effort"  # the variable for how hard a model thinks
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The values of :data:`EFFORT` that templates know, in ascending order."""
_PROBE: Final = "probe1234"  # nine letters and digits, as some templates want identifiers
_CHANGES: Final = re.compile(r"\b(lower|upper|capitalize|title|swapcase|casefold|replace|join)\b")
"""Filters and methods that can turn a text into the text of a control token."""
_BRACKET: Final = re.compile(r"[<\[]")  # with which control tokens begin
_ASK: Final[dict[str, Any]] = {"role": "user", "content": "a"}
_IMAGE: Final = {"type": "image"}
"""A picture, as templates read it."""
_TOOL: Final = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


class _Reads(NamedTuple):
    """The form in which a template reads conversations.

    ``parts``: contents are lists of parts. ``none``: the missing content of a message that calls tools is
    None, else an empty text. ``texts``: arguments of calls are JSON, else mappings. ``any_text``: arguments
    that are no JSON object stay as text; else they are left out.
    """

    parts: bool = False
    none: bool = False
    texts: bool = False
    any_text: bool = False


class ChatTemplate:
    """A compiled chat template; TokenizerError if ``source`` is not valid Jinja.

    ``bos`` and ``eos`` are the texts of those tokens, for templates that write them. ``named`` are other
    sources for conversations with tools (``tool_use``) or documents (``rag``).
    """

    def __init__(
        self, source: str, *, bos: str = "", eos: str = "", named: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.source, self._sandbox = source, _environment()
        self._tokens = {"bos_token": bos, "eos_token": eos}
        if len(source) > LONGEST_SOURCE:
            raise TokenizerError(
                f"The chat template has {len(source):,} characters; allowed: at most {LONGEST_SOURCE:,}. "
                "Use the model's original file, or prompts without a template."
            )
        try:
            self._template = self._sandbox.from_string(source)
        except Exception as error:  # Jinja's, and Python's of the code that Jinja makes of it
            raise TokenizerError(f"The chat template is not valid: {_where(error)}") from error
        others = {name: text for name, text in named.items() if name != DEFAULT}
        self._named = {name: ChatTemplate(text, bos=bos, eos=eos) for name, text in others.items()}
        self._logged = set[str]()  # arrangements that are in the log

    def close(self) -> None:
        """End running and later renderings with an error. Any thread may call it."""
        for template in (self, *self._named.values()):
            template._sandbox.is_closed = True

    def taking(self, arguments: Collection[str]) -> "ChatTemplate":
        """The template for conversations with these arguments, chosen as in transformers."""
        by_argument = {"tools": "tool_use", "documents": "rag"}
        names = (name for argument, name in by_argument.items() if argument in arguments)
        return next((self._named[name] for name in names if name in self._named), self)

    @cached_property
    def arguments(self) -> frozenset[str]:
        """Names of the template's optional variables.

        ``tools`` is among them if the template can show tools; many have ``enable_thinking``.
        """
        shown = {"tools"} if self._tools_in_message else set[str]()
        known = _ALWAYS.union(self._template.environment.globals, self._tokens)
        own = frozenset((meta.find_undeclared_variables(self._tree) | shown) - known)
        return own.union(*(template.arguments for template in self._named.values()))

    @cached_property
    def switch(self) -> str | None:
        """The variable that turns thinking on and off; None without one."""
        return next((name for name in ("enable_thinking", "thinking") if name in self.arguments), None)

    @cached_property
    def opening(self) -> str:
        """A short prompt with the opening of the assistant's turn; empty if the template fails."""
        return self._tried(self._reads, _ASK)

    @cached_property
    def efforts(self) -> tuple[str, ...]:
        """Those of :data:`EFFORTS` that the template takes, in their order, found by rendering.

        If it shows any text, they are OpenAI's three.
        """
        if EFFORT not in self.arguments:
            return ()
        on = {self.switch: True} if self.switch else {}
        made = {word: self._tried(self._reads, _ASK, **on, **{EFFORT: word}) for word in (*EFFORTS, _PROBE)}
        unknown = made.pop(_PROBE)
        if _PROBE in unknown:
            return "low", "medium", "high"
        known = [word for word, text in made.items() if text not in ("", unknown)]
        if unknown and known:  # it takes any text, and those that it does not know change nothing
            return EFFORTS[EFFORTS.index(min(known[0], "low", key=EFFORTS.index)) :]
        return tuple(known)

    @cached_property
    def _tools_in_message(self) -> bool:
        """Whether it shows tools from the text of the system's message, as Phi-4-mini's does."""
        return re.search(r"\[.tools.\]", self.source) is not None

    @cached_property
    def knows_developer(self) -> bool:
        """Whether it distinguishes the role ``developer``: whether that word is one of its constants."""
        return any(constant.value == "developer" for constant in self._tree.find_all(nodes.Const))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any] = MappingProxyType({}),
        *,
        now: datetime | None = None,
    ) -> str:
        """The conversation as text, up to the opening of the assistant's turn; encode with ``special=True``.

        Texts are inserted unchanged, so the text of a control token in them would count as one;
        :meth:`encode` keeps them apart.

        Args:
            messages: messages of OpenAI's chat API. Messages of the role ``developer`` become the system's if
                the template does not know the role.
            arguments: values of the variables in :attr:`arguments`, such as ``tools``, a list of functions of
                OpenAI's chat API.
            now: the time for templates that state the date; the current time if None.

        Raises:
            RequestError: a message is malformed, an argument is not known, or the template refuses the
                conversation or does not show the tool calls in it.
            TokenizerError: the template fails or breaks out of its sandbox.
        """
        return self.taking(arguments)._made(messages, arguments, lambda role, text: text, now)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """The token ids of the conversation; texts in it cannot forge control tokens.

        Arguments and errors are as in :meth:`render`. A text with U+18A21 to U+18A7E, which mark ordinary
        text, also raises RequestError. The text of a control token within a content, a tool or an argument
        becomes ordinary tokens, also if the template changes it, for example its case. So does the text of an
        added token that the template writes, except in the assistant's own words. Everything else is encoded
        as one text, without BOS.
        """
        chosen = self.taking(arguments)
        marks = tokenizer.marks_in(chosen.source)

        changes = _CHANGES.search(chosen.source) is not None

        def spelled(role: str | None, text: str) -> str:
            own = frozenset[int]() if role == "assistant" else marks
            spans = tokenizer.special_spans(text, own)
            if not changes or _BRACKET.search(text) is None:
                return mark(text, spans)
            kept = {start for start, *_ in tokenizer.special_spans(text, marks)} - {span[0] for span in spans}
            places = {at for start, stop, _ in spans for at in range(start, stop)}
            places |= {bracket.start() for bracket in _BRACKET.finditer(text)} - kept
            return mark(text, ((at, at + 1, 0) for at in sorted(places)))

        text, places = unmark(chosen._made(messages, arguments, spelled))
        return tokenizer.encode_marked(text, places, marks)

    def _made(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        spelled: Callable[[str | None, str], str],
        now: datetime | None = None,
    ) -> str:
        """The text of a conversation in which ``spelled``, of role and text, replaces every text."""
        checked, others = self._checked(messages, arguments)
        others, refusals = _with_texts(others, partial(spelled, None)), list[RequestError]()
        for how, arranged in _arrangements(checked):
            shaped = [_shape(message, self._reads) for message in arranged]
            written = [_with_texts(message, partial(spelled, message["role"])) for message in shaped]
            try:
                text = self._render(written, others, now)
            except RequestError as error:
                refusals.append(error)
                continue
            if refusals and how not in self._logged:
                self._logged.add(how)
                _LOG.warning("%s It reads such conversations with %s.", refusals[0], how)
            return text
        raise refusals[0]

    def _checked(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        copies = _plain_messages(messages)
        unknown = sorted(arguments.keys() - self.arguments)
        if unknown:
            known = ", ".join(sorted(self.arguments)) or "nothing else"
            raise RequestError(
                f"has {', '.join(unknown)}, which the chat template does not read; it reads {known}",
                "template_args",
            )
        others = _plain(arguments, "template_args")
        if self._tools_in_message and isinstance(others.get("tools"), list):
            if copies[0]["role"] not in _SYSTEM:
                copies.insert(0, {"role": "system", "content": ""})
            functions = [tool.get("function") for tool in others.pop("tools") if isinstance(tool, dict)]
            copies[0]["tools"] = json.dumps(functions)
        if "+ tool.description" in self.source and isinstance(others.get("tools"), list):
            for tool in others["tools"]:  # gpt-oss's template takes descriptions for granted
                if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
                    tool["function"].setdefault("description", "")
        for copy in copies:
            if copy["role"] == "developer" and not self.knows_developer:
                copy["role"] = "system"
            if "tool_calls" in copy and "tool_calls" not in self.source:
                raise RequestError("the model's chat template does not show tool_calls; leave them out")
            # Templates with channels have no place for thoughts and a text in a message with calls.
            is_refused = copy["content"] and "tool_calls" in copy and "<|channel|>" in self.source
            if copy.get("reasoning_content") and not is_refused and "message.thinking" in self.source:
                copy.setdefault("thinking", copy["reasoning_content"])
        return copies, others

    @cached_property
    def _reads(self) -> _Reads:
        """The form, found by rendering a short conversation in each form."""
        ask = {"role": "user", "content": _PROBE}
        as_text, as_parts = (self._tried(_Reads(parts), ask) for parts in (False, True))
        as_python = str({"text": _PROBE})[1:]  # of a list that is printed, not read
        usual = _Reads(parts=_PROBE in as_parts and _PROBE not in as_text and as_python not in as_parts)
        forms = [usual._replace(none=none, texts=texts) for texts in (False, True) for none in (True, False)]
        as_python, as_json = str({"a": _PROBE}), json.dumps({"a": _PROBE})
        for is_long in (True, False):  # which templates take that refuse the other
            made = {form: self._tried(form, *_calling({"a": _PROBE}, is_long)) for form in forms}
            good = {
                form: text.count("None")  # which a template prints that cannot do without a content
                for form, text in made.items()
                if (as_json if form.texts else _PROBE) in text and as_python not in text
            }
            if good:
                best = min(good, key=lambda form: good[form])
                any_text = best._replace(any_text=True)
                return any_text if _PROBE in self._tried(any_text, *_calling(_PROBE, is_long)) else best
        return usual

    def _tried(self, form: _Reads, *messages: dict[str, Any], **arguments: object) -> str:
        """A conversation rendered in that form; empty if the template fails."""
        if "tools" in self.arguments:
            arguments["tools"] = [_TOOL]
        try:
            return self._render([_shape(message, form) for message in messages], arguments, share=1 / 8)
        except EdgespecError:
            return ""

    def _render(
        self,
        messages: list[dict[str, Any]],
        arguments: dict[str, Any],
        now: datetime | None = None,
        share: float = 1.0,
    ) -> str:
        moment = now or datetime.now().astimezone()
        variables = {"tools": None, "documents": None} | arguments
        try:
            with limited(self.source, [*messages, variables], share):
                return self._template.render(
                    messages=messages,
                    add_generation_prompt=True,
                    strftime_now=lambda form: moment.strftime(form[:_LONGEST_DATE]),
                    **variables,
                    **self._tokens,
                )
        except _RefusedError as error:
            raise RequestError(f"The model's chat template refuses the conversation: {error}") from error
        except Closed:
            raise
        except Exception as error:
            # A template can raise whatever the operations it uses raise.
            remedy = "use the model's original template, or prompts without one"
            raise TokenizerError(f"The chat template failed: {_where(error)}; {remedy}") from error

    @cached_property
    def _tree(self) -> nodes.Template:
        return _environment().parse(self.source)


def read_template(path: Path) -> str:
    """The Jinja source in a user's file; RequestError if it cannot be read, TokenizerError if invalid."""
    source = read_text(path, RequestError, "Give a file with a chat template in Jinja", encoding="utf-8-sig")
    with naming(path):
        ChatTemplate(source)
    return source


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of ``messages`` with checked contents and calls; RequestError if a message is malformed.

    The content of an assistant's message with tool calls may be None. Further keys, such as ``name`` and
    ``tool_call_id``, stay as they are.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"is {shown(messages)}; allowed: a list of at least one message", "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _plain(value: object, where: str, depth: int = 0) -> Any:
    """A copy of ``value`` in dictionaries and lists; RequestError if JSON cannot hold it."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if depth < _DEEPEST:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: _plain(item, f"{where}.{shown(key)}", depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [_plain(item, f"{where}[{at}]", depth + 1) for at, item in enumerate(value)]
    raise RequestError(
        f"is {shown(value)}; allowed: values of JSON (texts, numbers, True, False, None, lists, tables with "
        f"texts as keys), at most {_DEEPEST} levels deep",
        where,
    )


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"is {shown(message)}; allowed: a mapping with 'role' and 'content'", where)
    content = message.get("content")
    if isinstance(content, list | tuple):
        message = {**message, "content": [_IMAGE if _is_image(part) else part for part in content]}
    copy: dict[str, Any] = _plain(message, where)
    role = copy.get("role")
    if role not in _ROLES:
        raise RequestError(f"has the role {shown(role)}; allowed: {', '.join(_ROLES)}", where)
    calls = copy.pop("tool_calls", None)
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise RequestError(f"has tool_calls {shown(calls)}; allowed: a list, of an assistant", where)
        copy["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    content = copy.setdefault("content", None)
    if not isinstance(content, str | list) and not (calls and content is None):
        raise RequestError(f"has the content {shown(content)}; allowed: a text, or text parts", where)
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str) and part != _IMAGE:
            raise RequestError(
                f"has the part {shown(part)}; allowed: {{'type': 'text', 'text': a text}}, and "
                "pictures where the model reads them",
                where,
            )
    return copy


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _arrangements(messages: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The conversation as it is, and in forms for templates that refuse it, the least changed first."""
    yield "nothing changed", messages
    systems = [message for message in messages if message["role"] in _SYSTEM]
    turns = [message for message in messages if message["role"] not in _SYSTEM]
    begin = [_joined(systems)] if systems else []
    yield "one system message at the beginning", [*begin, *turns]
    if not turns or turns[0]["role"] != "user":
        turns.insert(0, {"role": "user", "content": ""})
        yield "an empty question at the beginning", [*begin, *turns]
    groups = groupby(turns, lambda turn: (turn["role"], turn["role"] == "tool" or "tool_calls" in turn))
    grouped = [(apart, [*group]) for (_, apart), group in groups]
    turns = [turn for apart, group in grouped for turn in (group if apart else [_joined(group)])]
    yield "neighbours of one role joined", [*begin, *turns]
    turns[0] = turns[0] | {"content": _joined([*begin, turns[0]])["content"]}
    yield "the system's text in the first question", turns


def _joined(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first of ``messages`` with the contents of all."""
    contents = [message["content"] for message in messages if message["content"]]
    if all(isinstance(content, str) for content in contents):
        return messages[0] | {"content": "\n\n".join(contents)}
    parts = [[{"type": "text", "text": text}] if isinstance(text, str) else text for text in contents]
    return messages[0] | {"content": [*chain.from_iterable(parts)]}


def _call(call: object, where: str) -> dict[str, Any]:
    """One of a message's tool calls, checked."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError(f"is {shown(call)}; allowed: a table with a 'function'", where)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"calls {shown(name)}; allowed: the name of a function", where)
    return call | {"type": "function"}


def _shape(message: dict[str, Any], form: _Reads) -> dict[str, Any]:
    """The message with contents and arguments of calls in the form that a template reads."""
    content = message["content"]
    if isinstance(content, list) and not form.parts and _IMAGE not in content:
        content = "\n".join(part["text"] for part in content)
    elif not isinstance(content, list) and not (content is None and form.none):
        content = [{"type": "text", "text": content or ""}] if form.parts else content or ""
    calls = [
        call | {"function": function | {"arguments": _arguments(function.get("arguments"), form)}}
        for call in message.get("tool_calls", ())
        for function in [call["function"]]
    ]
    return message | {"content": content} | ({"tool_calls": calls} if calls else {})


def _arguments(arguments: object, form: _Reads) -> object:
    """A call's arguments. Models write broken ones, and the conversation has to go on."""
    table = arguments = arguments or {}
    if isinstance(table, str):
        try:
            table = _plain(json.loads(table, parse_constant=no_number), "")
        except (ValueError, RecursionError, RequestError):
            table = None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(table, dict):
        return text if form.any_text else {}
    return text if form.texts else table


def _calling(arguments: object, is_long: bool) -> list[dict[str, Any]]:
    """A conversation with a call of a tool and no content beside it, perhaps with messages behind."""
    call = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": arguments}}
    calls = [_ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    result = {"role": "tool", "content": "b", "tool_call_id": "call12345", "name": "f"}
    return [*calls, result, {"role": "assistant", "content": "c"}, _ASK] if is_long else calls


def _with_texts(value: Any, made: Callable[[str], str]) -> Any:
    """A copy of ``value`` with ``made`` applied to its texts."""
    if isinstance(value, str):
        return made(value)
    if isinstance(value, dict):
        return {made(key): _with_texts(item, made) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item, made) for item in value]
    return value


class _RefusedError(jinja2.TemplateError):
    """A template called ``raise_exception``."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what the block encloses."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> Sandbox:
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _GenerationBlock],
    )
    environment.globals["raise_exception"] = _refuse
    return environment


def _refuse(message: object) -> str:
    raise _RefusedError(str(message))


def _where(error: Exception) -> str:
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"{type(error).__name__}: {error}{line}"
