"""Exports of a history as JSON, and their import."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from edgespec.history.passages import LEAD, LONGEST, Entry, Passage, Turn
from edgespec.history.store import Learned, Scope, StoredTurn
from edgespec_models.errors import RequestError
from edgespec_models.schema import length, matching, parse, read, read_text, within

_FORMAT: Final = "edgespec history 1"


def exported(passages: Iterable[Learned], turns: Iterable[StoredTurn]) -> str:
    """Passages and turns as JSON. Bytes that are no UTF-8 become lone surrogates."""
    value: dict[str, Any] = {"format": _FORMAT, "passages": [_passage_json(passage) for passage in passages]}
    value["turns"] = [_turn_json(stored) for stored in turns]
    return json.dumps(value, indent=1) + "\n"


def imported(file: Path) -> tuple[list[Learned], list[StoredTurn]]:
    """The passages and turns of an export.

    Raises:
        RequestError: ``file`` cannot be read, or something else wrote it.
    """
    where, remedy = f"cannot import {file}", "Give a file that 'edgespec history export' wrote"
    text = read_text(file, RequestError, remedy, encoding="utf-8-sig")
    parts = read(_Exported, parse(text, str(file), RequestError, remedy), where, RequestError, remedy)
    return [passage.learned() for passage in parts.passages], [turn.stored() for turn in parts.turns]


_Bytes = Annotated[str, matching(r"[^\ud800-\udc7f\udd00-\udfff]*", "as surrogateescape decodes bytes")]
_Token = Annotated[int, within(0, 2**31 - 2)]
_Date = Annotated[float, within(0, 32_503_680_000)]
"""Seconds since 1970, to the year 3000; beyond it Windows has no dates."""
_Verdicts = tuple[Annotated[int, within(0, 255)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passage:
    scope: Scope
    before: _Bytes
    text: _Bytes
    lead: Annotated[tuple[_Token, ...], length(0, LEAD)]
    body: Annotated[tuple[_Token, ...], length(1, LONGEST)]
    worth: Annotated[float, within(0, 1e9)]
    right: _Verdicts
    wrong: _Verdicts
    learned_on: _Date

    def __post_init__(self) -> None:
        if not len(self.right) == len(self.wrong) == len(self.body):
            raise RequestError(f"right and wrong must have a number for each of the {len(self.body)} tokens")

    def learned(self) -> Learned:
        before, text = (part.encode("utf-8", "surrogateescape") for part in (self.before, self.text))
        right, wrong = bytearray(self.right), bytearray(self.wrong)
        entry = Entry(Passage(self.lead, self.body), self.worth, 0, right, wrong)
        return Learned(self.scope, entry, before, text, self.learned_on, self.worth)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    scope: Scope
    prompt: Any
    answer: _Bytes
    ended: bool
    written_on: _Date

    def stored(self) -> StoredTurn:
        prompt = json.dumps(self.prompt, ensure_ascii=False).encode(errors="replace")
        turn = Turn(prompt, self.answer.encode("utf-8", "surrogateescape"), self.ended)
        return StoredTurn(self.scope, turn, self.written_on)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exported:
    format: Literal["edgespec history 1"]
    passages: tuple[_Passage, ...]
    turns: tuple[_Turn, ...] = ()


def _turn_json(stored: StoredTurn) -> dict[str, Any]:
    return {
        "scope": asdict(stored.scope),
        "prompt": json.loads(stored.turn.prompt),
        "answer": stored.turn.answer.decode("utf-8", errors="surrogateescape"),
        "ended": stored.turn.ended,
        "written_on": stored.written_on,
    }


def _passage_json(learned: Learned) -> dict[str, Any]:
    entry = learned.entry
    return {
        "scope": asdict(learned.scope),
        "before": learned.before.decode("utf-8", errors="surrogateescape"),
        "text": learned.text.decode("utf-8", errors="surrogateescape"),
        "lead": list(entry.passage.lead),
        "body": list(entry.passage.body),
        "worth": learned.worth,
        "right": list(entry.right),
        "wrong": list(entry.wrong),
        "learned_on": learned.learned_on,
    }
