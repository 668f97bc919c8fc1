"""What a profile exports, as JSON, and what of it can be read again."""

import base64
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from edgespec.profile.corrections import DrafterKey, Kept, unpack
from edgespec.profile.entries import Entry
from edgespec.profile.passages import LEAD, LONGEST, Passage
from edgespec.profile.store import Learned, Scope
from edgespec_models.errors import RequestError

__all__ = ["FORMAT", "correction_json", "parse", "passage_json"]

FORMAT: Final = "edgespec profile 1"
_YEAR_3000: Final = 32_503_680_000.0  # beyond it Windows has no dates
_MOST_TOKENS: Final = 2**53


def passage_json(learned: Learned) -> dict[str, Any]:
    """A passage as plain JSON values; bytes that are no UTF-8 become lone surrogates."""
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


def correction_json(scope: Scope, kept: Kept) -> dict[str, Any]:
    """A correction as plain JSON values; the table as it is stored, in base64."""
    return {
        "scope": asdict(scope),
        "drafter": kept.drafter.digest,
        "name": kept.drafter.name,
        "tokens": kept.tokens,
        "used_on": kept.used_on,
        "table": base64.b64encode(kept.data).decode(),
    }


def parse(file: Path) -> tuple[list[Learned], list[tuple[Scope, Kept]]]:
    """Passages and corrections of an export. Corrections that this edgespec cannot use are left out.

    Raises:
        RequestError: ``file`` cannot be read, or something else wrote it.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot import {file}: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise RequestError(f"cannot import {file}: it is no export of a profile ({FORMAT!r})")
    what = "passage"
    with suppress(KeyError, TypeError, ValueError, OverflowError, AttributeError):
        passages = [_passage(each) for each in value["passages"]]
        what = "correction"
        return passages, list(_corrections(value.get("corrections", ())))
    raise RequestError(f"cannot import {file}: a {what} in it is not as an export writes it")


def _passage(value: Any) -> Learned:
    passage = Passage(_tokens(value["lead"], LEAD), _tokens(value["body"], LONGEST))
    right, wrong = bytearray(iter(value["right"])), bytearray(iter(value["wrong"]))
    worth, learned_on = float(value["worth"]), float(value["learned_on"])
    texts = [value[key].encode("utf-8", errors="surrogateescape") for key in ("before", "text")]
    scope = _scope(value["scope"])
    whole = passage.body and len(right) == len(wrong) == len(passage.body)
    if not whole or not 0 <= worth < 1e9 or not 0 <= learned_on < _YEAR_3000:
        raise ValueError(passage)
    return Learned(scope, Entry(passage, worth, 0, right, wrong), texts[0], texts[1], learned_on, worth)


def _corrections(values: Any) -> Iterator[tuple[Scope, Kept]]:
    for value in values:
        tokens, used_on = value["tokens"], float(value["used_on"])
        if type(tokens) is not int or not 0 <= tokens < _MOST_TOKENS or not 0 <= used_on < _YEAR_3000:
            raise ValueError(value)
        drafter = DrafterKey(_name(value["drafter"]), _name(value["name"]))
        data = base64.b64decode(value["table"], validate=True)
        if unpack(data) is not None:
            yield _scope(value["scope"]), Kept(drafter, tokens, used_on, data)


def _scope(value: Any) -> Scope:
    return Scope(*(_name(value[key]) for key in ("target", "tokenizer", "namespace")))


def _name(value: Any) -> str:
    name = str(value)
    name.encode()  # SQLite takes no lone surrogates
    return name


def _tokens(values: Any, most: int) -> tuple[int, ...]:
    tokens = tuple(values)
    if len(tokens) > most or not all(type(token) is int and 0 <= token < 2**31 - 1 for token in tokens):
        raise ValueError(values)
    return tokens
