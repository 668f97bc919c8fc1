"""The files of chat templates: one for all conversations, and perhaps others for tools or documents."""

from collections.abc import Mapping
from typing import Final

from edgespec_models.errors import ModelFileError

DEFAULT, NAMED = "default", ("tool_use", "rag")
FILE: Final = "chat_template.jinja"
AS_JSON: Final = "chat_template.json"
BESIDE: Final = {DEFAULT: FILE} | {name: f"additional_chat_templates/{name}.jinja" for name in NAMED}
"""Files of a Hugging Face directory, by name."""


def file_of(name: str) -> str:
    """The file of a bundle with the template of that name."""
    return FILE if name == DEFAULT else f"chat_template.{name}.jinja"


def templates(value_by_key: Mapping[str, object], where: str) -> dict[str, str]:
    """Jinja source by name. Without a default template the first becomes the default.

    Unknown names and None are left out. Raises ModelFileError if a source is no text.
    """
    sources = {name: source for name, source in value_by_key.items() if source is not None}
    for name, source in sources.items():
        if not isinstance(source, str):
            kind = type(source).__name__
            raise ModelFileError(f"{where}: chat template {name!r:.40} is {kind}, not a text")
    kept = {name: str(sources[name]) for name in (DEFAULT, *NAMED) if name in sources}
    return {DEFAULT: str(next(iter(sources.values()))), **kept} if sources else {}
