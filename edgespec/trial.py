"""One prompt through a model as a user would ask it; what bench and audit share."""

from typing import TYPE_CHECKING

from edgespec.prompts import Prompt

if TYPE_CHECKING:
    from edgespec.engine import Model
    from edgespec.request import RequestOptions
    from edgespec.results import Generation

__all__ = ["ask", "forget"]


def ask(model: "Model", prompt: Prompt, options: "RequestOptions") -> "Generation":
    """The answer to the prompt's first turn: as chat, or as plain text where the model has no template."""
    if model.target.chat_template is None:
        return model.generate(prompt.turns[0], **options)
    return model.chat([{"role": "user", "content": prompt.turns[0]}], **options)


def forget(model: "Model") -> None:
    """Leave nothing of earlier prompts in the KV caches.

    A request keeps the prefix it shares with those before. Of two runs of one prompt, the second would
    have no prompt to read, and its time to first token would mean nothing.
    """
    model.forget()
