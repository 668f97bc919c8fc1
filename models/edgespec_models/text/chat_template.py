"""Chat templates: Jinja source from a model file, rendered in a sandbox.

A template is code from whoever made the model file. Jinja's sandbox keeps it from reaching Python: no
private attributes, no imports, no changes to the messages; :mod:`template_sandbox` bounds the
time and memory it may take. The environment is the one templates are written for, that of the
``transformers`` library ("Chat templates" in its documentation).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser

from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.schema import shown
from edgespec_models.text.template_sandbox import CLOSE, LONGEST_SOURCE, OPEN, Sandbox, limited
from edgespec_models.text.tokenizer import Tokenizer

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")

FORGED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")

_LONGEST_DATE = 200  # characters of a date's form, which may ask for padding
_DEEPEST: Final = 64  # lists and mappings within each other
_ALWAYS: Final = frozenset(
    ("messages", "add_generation_prompt", "strftime_now", "loop", "caller", "varargs", "kwargs", "self")
)


class ChatTemplate:
    """A compiled chat template; TokenizerError where ``source`` is not valid Jinja.

    ``bos`` and ``eos`` are the texts of those tokens, for templates that write them.
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        if len(source) > LONGEST_SOURCE:
            raise TokenizerError(
                f"The chat template has {len(source):,} characters; allowed: at most {LONGEST_SOURCE:,}. "
                "Use a file of the model's maker, or prompts without a template."
            )
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # Jinja's, and Python's of the code that Jinja makes of it
            raise TokenizerError(f"The chat template is not valid: {_where(error)}") from error

    @cached_property
    def arguments(self) -> frozenset[str]:
        """Names of the variables that may be given to it: what it reads besides what it is always given.

        ``tools`` is among them if it can show tools; many know ``enable_thinking``.
        """
        read = {each.name for each in self._tree.find_all(nodes.Name) if each.ctx == "load"}
        stored = {each.name for each in self._tree.find_all(nodes.Name) if each.ctx != "load"}
        tested = {
            test.node.name
            for test in self._tree.find_all(nodes.Test)
            if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
        }
        known = _ALWAYS.union(self._template.environment.globals, self._tokens)
        shown = {"tools"} if self._tools_in_message else set[str]()
        return frozenset((read - stored | tested | shown) - known)

    @cached_property
    def _tools_in_message(self) -> bool:
        """Whether it shows the tools that the system's message holds as a text, as Phi-4-mini's does."""
        return re.search(r"\[.tools.\]", self.source) is not None

    @cached_property
    def knows_developer(self) -> bool:
        """Whether it tells the role ``developer`` from others: whether that word is one of its constants."""
        return any(each.value == "developer" for each in self._tree.find_all(nodes.Const))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any] = MappingProxyType({}),
        *,
        now: datetime | None = None,
    ) -> str:
        """The conversation as text, up to the opening of the assistant's turn; encode with ``special=True``.

        Texts go in as they are, so the text of a control token in them would count as one:
        :meth:`encode` keeps the two apart.

        Args:
            messages: as OpenAI's chat API has them. Where the template does not know the role ``developer``
                such messages are the system's.
            arguments: what else it is told, by the names in :attr:`arguments`: ``tools``, a list of functions
                as OpenAI's chat API has them, for one.
            now: what templates that state the date are told; the current time if None.

        Raises:
            RequestError: a message is malformed, an argument is not known, or the template refuses the
                conversation or does not show the tool calls in it.
            TokenizerError: the template fails or breaks out of its sandbox.
        """
        return self._render(*self._checked(messages, arguments), now)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """The token ids of the conversation; texts in it cannot forge control tokens.

        Takes and raises what :meth:`render` does; RequestError also where a text holds U+18AFE or U+18AFF,
        which mark what must stay ordinary. The text of a control token within a content, a tool or an
        argument is spelled out in ordinary tokens; all else is encoded as one text. No BOS is added.
        """
        checked, others = self._checked(messages, arguments)
        text = self._render(_marked(checked, tokenizer), _marked(others, tokenizer))
        ids: list[int] = []
        for number, part in enumerate(FORGED.split(text)):
            ids += tokenizer.encode(part, special=number % 2 == 0)
        return ids

    def _checked(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        copies = _plain_messages(messages)
        unknown = sorted(arguments.keys() - self.arguments)
        if unknown:
            known = ", ".join(sorted(self.arguments)) or "nothing else"
            raise RequestError(f"the chat template does not read {', '.join(unknown)}; it reads {known}")
        others = _plain(arguments, "template_args")
        if self._tools_in_message and isinstance(others.get("tools"), list):
            if copies[0]["role"] != "system":
                copies.insert(0, {"role": "system", "content": ""})
            functions = [each.get("function") for each in others.pop("tools") if isinstance(each, dict)]
            copies[0]["tools"] = json.dumps(functions)
        for copy in copies:
            if copy["role"] == "developer" and not self.knows_developer:
                copy["role"] = "system"
            if "tool_calls" in copy and "tool_calls" not in self.source:
                raise RequestError("the model's chat template does not show tool_calls; leave them out")
        return copies, others

    def _render(
        self, messages: list[dict[str, Any]], arguments: dict[str, Any], now: datetime | None = None
    ) -> str:
        moment = now or datetime.now().astimezone()
        given = {"tools": None, "documents": None} | arguments
        try:
            with limited(self.source, [*messages, given]):
                return self._template.render(
                    messages=messages,
                    add_generation_prompt=True,
                    strftime_now=lambda form: moment.strftime(form[:_LONGEST_DATE]),
                    **given,
                    **self._tokens,
                )
        except _RefusedError as error:
            raise RequestError(f"The model's chat template refuses the conversation: {error}") from error
        except Exception as error:
            # A template can raise whatever the operations it uses raise.
            raise TokenizerError(f"The chat template failed: {_where(error)}") from error

    @cached_property
    def _tree(self) -> nodes.Template:
        return _environment().parse(self.source)


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of ``messages`` in the form templates are written for; RequestError where one is malformed.

    A content's parts of type text become one text, a line each. The content of an assistant's message with
    tool calls may be None and becomes "". Arguments of tool calls may be JSON and become mappings. Further
    keys, such as ``name`` and ``tool_call_id``, stay as they are.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages is {shown(messages)}; allowed: a list of at least one message")
    return [_message(message, f"message {number}") for number, message in enumerate(messages)]


def _plain(value: object, where: str, depth: int = 0) -> Any:
    """A copy of ``value``, of dictionaries and lists; RequestError where it is not what JSON can say."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if depth < _DEEPEST:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: _plain(each, f"{where}.{shown(key)}", depth + 1) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [_plain(each, f"{where}[{at}]", depth + 1) for at, each in enumerate(value)]
    raise RequestError(
        f"{where} is {shown(value)}; allowed: what JSON can say (texts, numbers, True, False, None, lists, "
        f"tables with texts as keys), at most {_DEEPEST} levels deep"
    )


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {shown(message)}; allowed: a mapping with 'role' and 'content'")
    copy: dict[str, Any] = _plain(message, where)
    role = copy.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where} has the role {shown(role)}; allowed: {', '.join(_ROLES)}")
    calls = copy.pop("tool_calls", None)
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise RequestError(f"{where} has tool_calls {shown(calls)}; allowed: a list, of an assistant")
        copy["tool_calls"] = [_call(call, f"{where}: tool_calls[{at}]") for at, call in enumerate(calls)]
    copy["content"] = "" if calls and copy.get("content") is None else _text(copy.get("content"), where)
    return copy


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} has the content {shown(content)}; allowed: a text, or text parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where} has the part {shown(part)}; allowed: {{'type': 'text', 'text': a text}}, "
                "for the models read nothing but text"
            )
        texts.append(text)
    return "\n".join(texts)


def _call(call: object, where: str) -> dict[str, Any]:
    """One of a message's tool calls, its arguments as a mapping."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError(f"{where} is {shown(call)}; allowed: a table with a 'function'")
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where} calls {shown(name)}; allowed: the name of a function")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} has arguments that are not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} has the arguments {shown(arguments)}; allowed: a table, or its JSON")
    arguments = _plain(arguments, f"{where}.arguments")
    return call | {"type": "function", "function": function | {"arguments": arguments}}


def _marked(value: Any, tokenizer: Tokenizer) -> Any:
    """A copy of ``value`` with marks around the control tokens that its texts spell."""
    if isinstance(value, str):
        return _mark(value, tokenizer)
    if isinstance(value, dict):
        return {_mark(key, tokenizer): _marked(each, tokenizer) for key, each in value.items()}
    if isinstance(value, list):
        return [_marked(each, tokenizer) for each in value]
    return value


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """Put marks around the control tokens that ``text`` spells."""
    if OPEN in text or CLOSE in text:
        raise RequestError("A message holds U+18AFE or U+18AFF, which edgespec marks text with. Remove them.")
    parts, end = [], 0
    for start, stop in tokenizer.special_spans(text):
        parts += [text[end:start], OPEN, text[start:stop], CLOSE]
        end = stop
    return "".join([*parts, text[end:]])


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
