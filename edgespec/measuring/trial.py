"""One prompt through a model as a user would ask it; what bench and audit share."""

from typing import TYPE_CHECKING

from edgespec.measuring.prompts import Prompt

if TYPE_CHECKING:
    from edgespec.engine import Model
    from edgespec.requests.encoding import Messages
    from edgespec.requests.request import RequestOptions
    from edgespec.requests.results import Generation
    from edgespec_models.bundles.bundle import Bundle

__all__ = ["ask", "forget", "said_by"]


def said_by(prompt: Prompt, target: "Bundle") -> "str | Messages":
    """The prompt's first turn: as chat, or as plain text where the model has no template."""
    said = prompt.turns[0]
    return said if target.chat_template is None else [{"role": "user", "content": said}]


def ask(model: "Model", prompt: Prompt, options: "RequestOptions") -> "Generation":
    """The answer to the prompt's first turn."""
    said = said_by(prompt, model.target)
    return model.generate(said, **options) if isinstance(said, str) else model.chat(said, **options)


def forget(model: "Model") -> None:
    """Leave nothing of earlier prompts in the KV caches.

    A request keeps the prefix it shares with those before. Of two runs of one prompt, the second would
    have no prompt to read, and its time to first token would mean nothing.
    """
    model.forget()
