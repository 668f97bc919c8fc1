"""Thoughts that models write before their answer: the tags around them, and where they begin and end."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from edgespec_models.text.tokenizer import Tokenizer, begun_at_end

if TYPE_CHECKING:  # and Jinja, which texts do not need
    from edgespec_models.text.chat_template import ChatTemplate

_END: Final = re.compile(r"</(\w+:)?think>|\[/THINK\]|<channel\|>")
_BEGINS: Final = MappingProxyType({"<channel|>": "<|channel>thought"})  # where no slash makes the difference
_OPENED: Final = re.compile(r"([<\[])((?:\w+:)?think>|THINK\])\s*$")  # where only the model writes the end
_RESPONSE: Final = "<response>"  # Granite writes it around the text behind its thoughts
_TAIL: Final = 24  # tokens that hold a prompt's last tag, and the space around it


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags that a model writes around its thoughts.

    ``response`` begins the text behind them, or is empty. ``switch`` is the variable of the chat template
    that turns thinking on and off, or None. ``efforts`` are the words that it takes for how hard to think.
    With ``channels`` thoughts are one of several messages of an answer, whose headers name their channels in
    control tokens. Behind ``end`` comes the name of the next channel then.
    """

    begin: str
    end: str
    response: str = ""
    switch: str | None = None
    efforts: tuple[str, ...] = ()
    channels: bool = False

    @property
    def levels(self) -> tuple[str, ...]:
        """The efforts but the one that turns thinking off."""
        return tuple(word for word in self.efforts if word != "none")

    def variables(self, thinking: bool | int | str) -> dict[str, Any]:
        """The chat template's variables for ``thinking``: of efforts the nearest, of two the higher.

        True and a bound of tokens leave the effort to the template; off is the least where no switch is.
        """
        from edgespec_models.text.chat_template import EFFORT, EFFORTS  # and Jinja

        variables = dict[str, Any]()
        if self.switch is not None:
            variables[self.switch] = bool(thinking)
        if isinstance(thinking, str) and self.levels:
            place = EFFORTS.index(thinking)
            places = map(EFFORTS.index, self.levels)
            variables[EFFORT] = EFFORTS[min(places, key=lambda near: (abs(near - place), -near))]
        elif not thinking and self.switch is None and self.efforts:
            variables[EFFORT] = self.efforts[0]
        return variables


@dataclass(frozen=True, slots=True)
class ThoughtState:
    """The state of an answer: its stage, and held bytes that may still become a tag.

    Only the beginning of an answer holds thoughts: later tags are text. ``opened`` and ``closed`` are the tag
    and space behind it.
    """

    tags: Tags
    stage: Literal["before", "opened", "thoughts", "closed", "text"] = "before"
    held: bytes = b""

    @property
    def thinks(self) -> bool:
        """Whether it is within the tags."""
        return self.stage in ("opened", "thoughts")

    @property
    def has_text(self) -> bool:
        """Whether the text of the answer has begun."""
        return self.stage in ("closed", "text")

    @property
    def held_text(self) -> bytes:
        """The part of the held bytes that is text if the answer ends here."""
        return b"" if self.thinks else self.held if self.stage == "before" else self.held.lstrip()

    def read_token(self, token: int, tokenizer: Tokenizer) -> tuple["ThoughtState", bytes, bytes]:
        """:meth:`read` of a token; of control tokens, others than the tags begin the text, or do nothing.

        With channels no other tokens spell tags.
        """
        data, tags = tokenizer.token_bytes(token), self.tags
        if not tokenizer.is_special(token):
            return self.read(data.replace(b"<", b" ") if tags.channels else data)
        if data in tags.begin.encode() or data in tags.end.encode():
            return self.read(data)
        return (self, b"", b"") if self.thinks else (ThoughtState(self.tags, "text"), b"", self.held_text)

    def read(self, data: bytes) -> tuple["ThoughtState", bytes, bytes]:
        """The state behind ``data``, the new thoughts, and the new text.

        Tags, and space at the ends of the thoughts and before the text, belong to neither.
        """
        data = self.held + data
        if self.thinks:
            return self._thoughts(data.lstrip() if self.stage == "opened" else data)
        if self.stage == "text":
            return self, b"", data
        is_first, begun = self.stage == "before", data.lstrip()
        tag = (self.tags.begin if is_first else self.tags.response).encode()
        if len(begun) < len(tag) and tag.startswith(begun):
            return replace(self, held=data), b"", b""
        if is_first and begun.startswith(tag):
            return ThoughtState(self.tags, "opened").read(begun[len(tag) :])
        text = data if is_first else begun.removeprefix(tag).lstrip()
        return ThoughtState(self.tags, "text" if text else "closed"), b"", text

    def _thoughts(self, data: bytes) -> tuple["ThoughtState", bytes, bytes]:
        end = self.tags.end.encode()
        thoughts, ended, text = data.partition(end)
        if ended:
            state, _, text = ThoughtState(self.tags, "closed").read(text)
            return state, thoughts.rstrip(), text
        shown = data[: len(data) - begun_at_end(data, end)].rstrip()
        return ThoughtState(self.tags, "thoughts" if shown else self.stage, data[len(shown) :]), shown, b""


def tags_of(template: "ChatTemplate", tokenizer: Tokenizer) -> Tags | None:
    """The tags of a template or of the vocabulary; None for a model that does not think."""
    if "<|channel|>" in template.source and tokenizer.special_id("<|channel|>") is not None:
        begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>"
        return Tags(begin, end, efforts=template.efforts, channels=True)
    match = _END.search(template.source)
    end = "</think>" if match is None else match[0]
    if match is None and len(tag_tokens(tokenizer, end)) > 1:
        opened = _OPENED.search(template.opening)
        if opened is None:
            return None
        end = f"{opened[1]}/{opened[2]}"
    response = _RESPONSE if f"{_RESPONSE}</response>" in template.source else ""
    begin = _BEGINS.get(end, end.replace("/", "", 1))
    return Tags(begin, end, response, template.switch, template.efforts)


def tag_tokens(tokenizer: Tokenizer, tag: str) -> list[int]:
    """The tokens that write a tag; parts of it may be control tokens."""
    ids, at = list[int](), 0
    for start, stop, control in [*tokenizer.special_spans(tag), (len(tag), len(tag), None)]:
        ids += tokenizer.encode_bytes(tag[at:start].encode())
        ids += [] if control is None else [control]
        at = stop
    return ids


def state_behind(prompt: Sequence[int], tags: Tags, tokenizer: Tokenizer) -> ThoughtState:
    """The state at the beginning of an answer.

    Templates may open the thoughts in the prompt, or open and close them.
    """
    text = tokenizer.decode(prompt[-_TAIL:], skip_special=False).rstrip()
    if text.endswith(tags.begin):
        return ThoughtState(tags, "opened")
    return ThoughtState(tags, "text" if text.endswith(tags.end) else "before")
