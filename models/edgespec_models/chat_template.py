"""Chat templates: Jinja source from a model file, rendered in a sandbox.

A template is code from whoever made the model file. Jinja's sandbox keeps it from reaching Python: no
private attributes, no imports, no changes to the messages; :mod:`edgespec_models.template_sandbox` bounds the
time and memory it may take. The environment is the one templates are written for, that of the
``transformers`` library ("Chat templates" in its documentation).
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser

from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.schema import shown
from edgespec_models.template_sandbox import LONGEST_SOURCE, Sandbox, limited
from edgespec_models.tokenizer import Tokenizer

__all__ = ["ROLES", "ChatTemplate"]

# Noncharacters: no text is meant to hold them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
FORGED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")

_LONGEST_DATE = 200  # characters of a date's form, which may ask for padding

ROLES = ("system", "user", "assistant", "tool")
"""The roles a message may have. A template may know fewer and refuse the others."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja source.
        bos: the text of the BOS token, for templates that write it (then the prompt needs no other).
        eos: the text of the EOS token.

    Raises TokenizerError where the source is not valid Jinja.
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

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """The conversation as text, with control tokens spelled out: encode it with ``special=True``.

        Contents go in as they are, so the text of a control token in them would count as one:
        :meth:`encode` keeps the two apart.

        Args:
            messages: each with a ``role`` of :data:`ROLES` and a ``content``.
            add_generation_prompt: end with the opening of the assistant's turn.
            now: what templates that state the date are told; the current time if None.

        Raises:
            RequestError: a message is malformed, or the template refuses the conversation.
            TokenizerError: the template fails or breaks out of its sandbox.
        """
        _check(messages)
        moment = now or datetime.now().astimezone()
        copies = [dict(message) for message in messages]
        try:
            with limited(self.source, copies):
                return self._template.render(
                    messages=copies,
                    add_generation_prompt=add_generation_prompt,
                    tools=None,
                    documents=None,
                    strftime_now=lambda form: moment.strftime(form[:_LONGEST_DATE]),
                    **self._tokens,
                )
        except _RefusedError as error:
            raise RequestError(f"The model's chat template refuses the conversation: {error}") from error
        except Exception as error:
            # A template can raise whatever the operations it uses raise.
            raise TokenizerError(f"The chat template failed: {_where(error)}") from error

    def encode(
        self,
        messages: Sequence[Mapping[str, str]],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> list[int]:
        """The token ids of the conversation; contents cannot forge control tokens.

        Takes and raises what :meth:`render` does; RequestError also where a content holds the
        noncharacters U+FDD0 or U+FDD1, which mark what must stay ordinary. The text of
        a control token within a content is spelled out in ordinary tokens; everything else is encoded as
        one text. No BOS is added.
        """
        _check(messages)
        marked = [{**message, "content": _mark(message["content"], tokenizer)} for message in messages]
        text = self.render(marked, add_generation_prompt=add_generation_prompt, now=now)
        ids: list[int] = []
        for number, part in enumerate(FORGED.split(text)):
            ids += tokenizer.encode(part, special=number % 2 == 0)
        return ids


def _mark(content: str, tokenizer: Tokenizer) -> str:
    """Put marks around the control tokens that ``content`` spells."""
    if OPEN in content or CLOSE in content:
        raise RequestError("A message holds U+FDD0 or U+FDD1, which are not characters. Remove them.")
    parts, end = [], 0
    for start, stop in tokenizer.special_spans(content):
        parts += [content[end:start], OPEN, content[start:stop], CLOSE]
        end = stop
    return "".join([*parts, content[end:]])


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


def _check(messages: Sequence[Mapping[str, str]]) -> None:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages is {shown(messages)}; allowed: a list of at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"Message {number} must be a mapping with 'role' and 'content'.")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError(f"Message {number} has the role {role!r}. Allowed are {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise RequestError(
                f"The content of message {number} must be a text, not {type(content).__name__}."
            )
