"""Exports of a history as JSON, and their import."""

import base64
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from edgespec.history.memory import DrafterKey
from edgespec.history.passages import LEAD, LONGEST, Entry, Passage
from edgespec.history.store import Kept, Learned, Name, Scope, unpack
from edgespec_models.errors import RequestError
from edgespec_models.schema import length, matching, parse, read, read_text, shown, within

_FORMAT: Final = "edgespec history 1"


def exported(passages: Iterable[Learned], corrections: Iterable[tuple[Scope, Kept]]) -> str:
    """Passages and corrections as JSON. Bytes that are no UTF-8 become lone surrogates."""
    value = {
        "format": _FORMAT,
        "passages": [_passage_json(passage) for passage in passages],
        "corrections": [_correction_json(*correction) for correction in corrections],
    }
    return json.dumps(value, indent=1) + "\n"


def imported(file: Path) -> tuple[list[Learned], list[tuple[Scope, Kept]]]:
    """Passages and corrections of an export. Corrections that this edgespec cannot use are left out.

    Raises:
        RequestError: ``file`` cannot be read, or something else wrote it.
    """
    where, remedy = f"cannot import {file}", "Give a file that 'edgespec history export' wrote"
    text = read_text(file, RequestError, remedy, encoding="utf-8-sig")
    parts = read(_Exported, parse(text, str(file), RequestError, remedy), where, RequestError, remedy)
    passages = [passage.learned() for passage in parts.passages]
    corrections = [correction.kept() for correction in parts.corrections]
    return passages, [kept for kept in corrections if unpack(kept[1].data) is not None]


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
class _Correction:
    scope: Scope
    drafter: Name
    name: Name
    tokens: Annotated[int, within(0, 2**53 - 1)]
    used_on: _Date
    table: str

    def __post_init__(self) -> None:
        try:
            unpack(base64.b64decode(self.table, validate=True))
        except ValueError as error:
            raise RequestError(f"table is {shown(self.table)}; allowed: as an export writes it") from error

    def kept(self) -> tuple[Scope, Kept]:
        data = base64.b64decode(self.table, validate=True)
        return self.scope, Kept(DrafterKey(self.drafter, self.name), self.tokens, self.used_on, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exported:
    format: Literal["edgespec history 1"]
    passages: tuple[_Passage, ...]
    corrections: tuple[_Correction, ...] = ()


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


def _correction_json(scope: Scope, kept: Kept) -> dict[str, Any]:
    return {
        "scope": asdict(scope),
        "drafter": kept.drafter.digest,
        "name": kept.drafter.name,
        "tokens": kept.tokens,
        "used_on": kept.used_on,
        "table": base64.b64encode(kept.data).decode(),
    }
