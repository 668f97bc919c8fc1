"""Prompts for benches and audits: the built-in ones, and files of the same form.

A file holds one JSON object a line (JSON Lines, UTF-8):

    {"id": "edit-1", "category": "editing", "turns": ["Fix the spelling: ..."]}

Numbers are ids too, and the key may be ``question_id``, as in Spec-Bench's file. ``turns`` are the user's
messages of one conversation; bench and audit ask the first.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edgespec_models.errors import RequestError
from edgespec_models.schema import Checked, length, read_lines, read_text

if TYPE_CHECKING:
    from edgespec.asking.request import RequestOptions
    from edgespec.engine import Model
    from edgespec.running.stream import Stream


_REMEDY = "Write one JSON object on each line: id or question_id, category, turns"
_Text = Annotated[str, length(1)]
_Id = _Text | int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's messages in one conversation: ``turns``, at least one."""

    id: _Text
    category: _Text
    turns: Annotated[tuple[_Text, ...], length(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line(Checked):
    """A line of a file of prompts."""

    id: _Id | None = None
    question_id: _Id | None = None
    category: _Text
    turns: Annotated[tuple[_Text, ...], length(1)]

    def prompt(self, where: Path) -> Prompt:
        """The prompt of the line."""
        name = self.question_id if self.id is None else self.id
        if name is None:
            raise RequestError(f"{where}: a prompt has neither id nor question_id. {_REMEDY}.")
        return Prompt(str(name), self.category, self.turns)


def builtin_prompts() -> tuple[Prompt, ...]:
    """The prompts that come with edgespec: two of each of six categories."""
    with resources.as_file(resources.files("edgespec.measuring") / "prompts.jsonl") as path:
        return load_prompts(path)


def load_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read a file of prompts; RequestError if it is unreadable or empty, or a line has another form."""
    prompts = tuple(line.prompt(path) for line in read_lines(_Line, path, _REMEDY))
    if not prompts:
        raise RequestError(f"{path} holds no prompt. {_REMEDY}.")
    name, count = Counter(prompt.id for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise RequestError(f"{path} has two prompts with the id {name!r}; every id must be different")
    return prompts


def named(prompts: Sequence[Prompt], file: Path) -> tuple[Prompt, ...]:
    """The prompts whose ids stand in ``file``, one on each line, in the order of ``prompts``.

    Raises:
        RequestError: the file cannot be read, or a prompt is missing.
    """
    lines = read_text(file, RequestError, "Write one id on each line").splitlines()
    ids = {line.strip() for line in lines} - {""}
    if not ids:
        raise RequestError(f"{file} names no id. Write ids of prompts, one on each line.")
    missing = sorted(ids - {prompt.id.strip() for prompt in prompts})
    if missing:
        raise RequestError(
            f"{file} names {', '.join(missing[:3])}; {len(missing)} of its {len(ids)} ids belong to no "
            "prompt. Write ids of prompts, one on each line."
        )
    return tuple(prompt for prompt in prompts if prompt.id.strip() in ids)


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


def ask(model: "Model", prompt: Prompt, options: "RequestOptions") -> "Stream":
    """Ask the prompt's first turn, as chat, or as plain text if the model has no template."""
    text = prompt.turns[0]
    if model.target.chat_template is None:
        return model.stream(text, **options)
    return model.stream_chat([{"role": "user", "content": text}], **options)
