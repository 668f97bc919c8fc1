"""Where chat templates lie in files: one for all conversations, and perhaps one with tools or documents."""

from collections.abc import Mapping
from typing import Final

from edgespec_models.errors import ModelFileError

DEFAULT, NAMED = "default", ("tool_use", "rag")
FILE: Final = "chat_template.jinja"
AS_JSON: Final = "chat_template.json"
BESIDE: Final = {DEFAULT: FILE} | {name: f"additional_chat_templates/{name}.jinja" for name in NAMED}
"""Files of a Hugging Face directory, by name."""


def file_of(name: str) -> str:
    """The file of a bundle that holds the template of that name."""
    return FILE if name == DEFAULT else f"chat_template.{name}.jinja"


def templates(value_by_key: Mapping[str, object], where: str) -> dict[str, str]:
    """Jinja source by name; without a default template the first is that, and other names are left out.

    Raises ModelFileError where a source is no text; None is none.
    """
    sources = {name: source for name, source in value_by_key.items() if source is not None}
    for name, source in sources.items():
        if not isinstance(source, str):
            kind = type(source).__name__
            raise ModelFileError(f"{where}: chat template {name!r:.40} is {kind}, not a text")
    kept = {name: str(sources[name]) for name in (DEFAULT, *NAMED) if name in sources}
    return {DEFAULT: str(next(iter(sources.values()))), **kept} if sources else {}
