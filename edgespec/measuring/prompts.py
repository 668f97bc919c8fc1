"""Prompts to measure and audit with: the built-in ones, files of the same form, and how one is asked.

A file holds one JSON object a line (JSON Lines, UTF-8):

    {"id": "edit-1", "category": "editing", "turns": ["Fix the spelling: ..."]}

``turns`` are the user's messages of one conversation; bench and audit ask the first.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edgespec_models.errors import RequestError
from edgespec_models.schema import length, read

if TYPE_CHECKING:
    from edgespec.engine import Model
    from edgespec.requests.request import Messages, RequestOptions
    from edgespec.requests.stream import Stream
    from edgespec_models.bundles.bundle import Bundle


_BUILTIN = "prompts.jsonl"
_Text = Annotated[str, length(1)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user asks: ``turns``, at least one, are the messages of one conversation."""

    id: _Text
    category: _Text
    turns: Annotated[tuple[_Text, ...], length(1)]


def builtin_prompts() -> tuple[Prompt, ...]:
    """The prompts that come with edgespec: two of each of six categories."""
    text = (resources.files("edgespec.measuring") / _BUILTIN).read_text(encoding="utf-8")
    return _parse(text, _BUILTIN)


def load_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read a file of prompts.

    Raises:
        RequestError: it cannot be read, holds no prompt, or a line is not of the form above.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read prompts from {path}: {error}") from error
    return _parse(text, str(path))


def select(prompts: Sequence[Prompt], limit: int | None) -> tuple[Prompt, ...]:
    """At most ``limit`` of the prompts, spread over the categories: the first of each, then the second.

    None selects all. They come in the order of ``prompts``.

    Raises:
        RequestError: ``limit`` is below 1.
    """
    if limit is None:
        return tuple(prompts)
    if limit < 1:
        raise RequestError(f"limit is {limit}; allowed: 1 or more prompts")
    categories: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        categories.setdefault(prompt.category, []).append(index)
    in_turn = chain.from_iterable(zip_longest(*categories.values()))
    chosen = [index for index in in_turn if index is not None][:limit]
    return tuple(prompts[index] for index in sorted(chosen))


def said_by(prompt: Prompt, target: "Bundle") -> "str | Messages":
    """The prompt's first turn: as chat, or as plain text where the model has no template."""
    said = prompt.turns[0]
    return said if target.chat_template is None else [{"role": "user", "content": said}]


def ask(model: "Model", prompt: Prompt, options: "RequestOptions") -> "Stream":
    """The answer to the prompt's first turn, asked as a user would."""
    said = said_by(prompt, model.target)
    return model.stream(said, **options) if isinstance(said, str) else model.stream_chat(said, **options)


def _parse(text: str, where: str) -> tuple[Prompt, ...]:
    # Not splitlines(): JSON texts may hold U+2028, which is a line break there and not here.
    lines = enumerate(text.split("\n"), start=1)
    prompts = tuple(_prompt(line, f"{where}, line {number}") for number, line in lines if line.strip())
    if not prompts:
        raise RequestError(f"{where} holds no prompt; give one JSON object a line: id, category, turns")
    name, count = Counter(prompt.id for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise RequestError(f"{where} has two prompts with the id {name!r}; every id must be different")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON ({error}); give one object a line") from error
    if isinstance(value, dict):  # what else there may be, such as a reference answer, is not asked for
        value = {key: value[key] for key in ("id", "category", "turns") if key in value}
    return read(Prompt, value, where, RequestError, "Give one JSON object a line: id, category, turns")
