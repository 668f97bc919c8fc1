"""A request's text as a model's tokens: with its beginning-of-text token, in its chat template."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.decoding.grammar import Lark, ResponseFormat
from edgespec.requests.request import Request
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.schema import shown

if TYPE_CHECKING:  # what prompts without a conversation do not need, such as Jinja
    from edgespec.requests.tool_calls import ToolReader
    from edgespec_models.text.chat_template import ChatTemplate

__all__ = [
    "Messages",
    "answer_format",
    "detokenize",
    "drafter_tokens",
    "encode_chat",
    "encode_text",
    "prompt_tokens",
    "tokenize",
    "tool_reader",
]

Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings with ``role`` (system, developer, user, assistant, tool) and ``content``."""


def prompt_tokens(bundle: Bundle, said: str | Messages, request: Request) -> list[int]:
    """What a target reads: a text to continue, or a conversation to answer.

    Raises:
        RequestError: nothing is said, or not in a way that the model's chat template takes; tools or template
            arguments for a text, which is in no template.
    """
    arguments = _arguments(said, request)
    ids = encode_text(bundle, said) if isinstance(said, str) else encode_chat(bundle, said, arguments)
    if not ids:
        raise RequestError("the prompt is empty; give at least one character")
    return ids


def drafter_tokens(bundle: Bundle, said: str | Messages, request: Request) -> list[int]:
    """What a drafter reads: what its template cannot take is left out, for it only guesses."""
    if isinstance(said, str):
        return encode_text(bundle, said)
    template = bundle.chat_template
    if template is not None:
        arguments = _arguments(said, request)
        known = {name: each for name, each in arguments.items() if name in template.arguments}
        try:
            return _chat(bundle, template, said, known)
        except (RequestError, TokenizerError):  # it knows fewer roles, or no tool calls
            pass
    return encode_text(bundle, "".join(f"{message.get('content')}\n\n" for message in said))


def encode_text(bundle: Bundle, text: str) -> list[int]:
    """Tokens of ``text``, begun as the model's texts are."""
    return _begun(bundle, bundle.tokenizer.encode(text))


def encode_chat(bundle: Bundle, messages: Messages, arguments: Mapping[str, Any] | None = None) -> list[int]:
    """Tokens of a conversation in the model's own template.

    Raises:
        RequestError: the model has no template, or it does not take the messages or arguments.
    """
    template = bundle.chat_template
    if template is None:
        raise RequestError(f"{bundle.manifest.name} has no chat template; use generate, or another model")
    arguments = arguments or {}
    if "tools" in arguments:
        _check_tools(bundle.manifest.name, template)
    return _chat(bundle, template, messages, arguments)


def tokenize(bundle: Bundle, text: str) -> list[int]:
    """Token ids of ``text`` alone: without a BOS token, and the text of a control token as ordinary text.

    Raises:
        RequestError: ``text`` is not one, or holds lone surrogates.
    """
    if not isinstance(text, str):
        raise RequestError(f"text is {shown(text)}; allowed: a text")
    return bundle.tokenizer.encode(text)


def detokenize(bundle: Bundle, tokens: Sequence[int]) -> str:
    """The text of ``tokens``, control tokens spelled out; what is not valid UTF-8 becomes U+FFFD.

    Raises:
        RequestError: an id that the model does not have.
    """
    try:
        return bundle.tokenizer.decode(tokens, skip_special=False)
    except (TokenizerError, TypeError) as error:
        most = bundle.tokenizer.vocab_size - 1
        raise RequestError(f"tokens is {shown(tokens)}; allowed: token ids from 0 to {most}") from error


def tool_reader(bundle: Bundle, request: Request) -> "ToolReader | None":
    """What reads tool calls out of the answer; None where the model is shown no tools."""
    if bundle.chat_template is None or not request.tools or request.tool_choice == "none":
        return None
    from edgespec.requests.tool_calls import ToolReader

    eos = bundle.manifest.special_tokens.eos
    return ToolReader(bundle.chat_template.source, request.tools, bundle.tokenizer, eos)


def answer_format(bundle: Bundle, request: Request) -> ResponseFormat | None:
    """What the answer to ``request`` has to be: its format, or a call that it has to make, if any."""
    if request.tool_choice in ("auto", "none") or bundle.chat_template is None:
        return request.response_format
    from edgespec.requests.tool_calls import calls_grammar, must_call

    called = must_call(request.tools, request.tool_choice)
    return Lark(calls_grammar(bundle.chat_template.source, called, bundle.tokenizer))


def _check_tools(name: str, template: "ChatTemplate") -> None:
    """See that ``template`` shows tools, and that the calls it asks for can be read."""
    if "tools" not in template.arguments:
        raise RequestError(f"the chat template of {name} shows no tools; use another model, or no tools")
    from edgespec.requests.tool_calls import format_of

    if format_of(template.source) is None:
        raise RequestError(
            f"the chat template of {name} asks for tool calls in a form that edgespec does not read; "
            "describe the tools in a system message and read the answer's text, or use another model"
        )


def _chat(
    bundle: Bundle, template: "ChatTemplate", messages: Messages, arguments: Mapping[str, Any]
) -> list[int]:
    ids = template.encode(messages, bundle.tokenizer, arguments)
    return ids if ids[:1] == [bundle.manifest.special_tokens.bos] else _begun(bundle, ids)


def _begun(bundle: Bundle, ids: list[int]) -> list[int]:
    special = bundle.manifest.special_tokens
    return [special.bos, *ids] if special.add_bos and special.bos is not None else ids


def _arguments(said: str | Messages, request: Request) -> Mapping[str, Any]:
    """What the chat template is told besides the messages."""
    if isinstance(said, str) and (request.tools or request.template_args):
        raise RequestError(
            "tools and template_args are for a model's chat template, in which a text is not; use chat"
        )
    tools = {"tools": request.tools} if request.tools and request.tool_choice != "none" else {}
    return {**request.template_args, **tools}
