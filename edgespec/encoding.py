"""A request's text as a model's tokens: with its beginning-of-text token, in its chat template."""

from collections.abc import Mapping, Sequence

from edgespec_models.bundle import Bundle

__all__ = ["Messages", "encode_chat", "encode_text"]

Messages = Sequence[Mapping[str, str]]
"""A conversation: mappings with ``role`` (system, user, assistant) and ``content``."""


def encode_text(bundle: Bundle, text: str) -> list[int]:
    """Tokens of ``text``, begun as the model's texts are."""
    return _begun(bundle, bundle.tokenizer.encode(text))


def encode_chat(bundle: Bundle, messages: Messages) -> list[int]:
    """Tokens of a conversation in the model's own template; without one, of its plain text."""
    if bundle.chat_template is None:
        return encode_text(bundle, "".join(f"{m['content']}\n\n" for m in messages))
    ids = bundle.chat_template.encode(messages, bundle.tokenizer)
    return ids if ids[:1] == [bundle.manifest.special_tokens.bos] else _begun(bundle, ids)


def _begun(bundle: Bundle, ids: list[int]) -> list[int]:
    special = bundle.manifest.special_tokens
    return [special.bos, *ids] if special.add_bos and special.bos is not None else ids
