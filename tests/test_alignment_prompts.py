"""The prompts that the shipped alignment was made of: nothing that measures, once each, in one order."""

import hashlib
import json
import lzma
import random
from pathlib import Path

import pytest

from edgespec.align.answers import Answer
from tools import alignment_prompts
from tools.alignment_prompts import _ANSWERS_FILE, _KINDS, _SLOW_MOST, _Filter, answered, chosen, ordered

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def test_what_shares_eight_words_in_a_row_is_left_out() -> None:
    allowed = _Filter([" ".join(WORDS[:10]), "Short?"])
    assert not allowed.passes("so " + " ".join(WORDS[1:9]).upper() + "!")
    assert allowed.passes("so " + " ".join(WORDS[1:8]) + " and so on")
    assert not allowed.passes("short") and allowed.passes("shorter")


def test_all_kinds_are_mixed_and_slow_ones_last() -> None:
    many = range(max(count for count, _ in _KINDS.values()))
    by_kind = {kind: [f" {kind} question number {n} " for n in many] * 2 for kind in _KINDS}
    by_kind["qa"] += ["too short", "x" * 5000, " ".join(WORDS)]
    kept = chosen(by_kind, _Filter([" ".join(WORDS)]))
    assert {kind: len(set(texts)) for kind, texts in kept.items()} == {k: n for k, (n, _) in _KINDS.items()}
    every = ordered(kept)
    assert sorted(every) == sorted((kind, text) for kind, texts in kept.items() for text in texts)
    first = every[: len(every) // 2]
    assert {kind for kind, _ in first} == set(_KINDS)
    assert sum(kind == "rag" for kind, _ in first) <= _SLOW_MOST
    shuffled = {kind: random.Random(1).sample(texts, len(texts)) for kind, texts in kept.items()}
    assert [text for _, text in ordered(shuffled)][:100] == [text for _, text in every][:100]


def test_answers_find_their_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lzma.open(_ANSWERS_FILE, "rt", encoding="utf-8") as file:
        kept = [json.loads(line) for line in file]
    assert len(kept) == len({row["prompt_sha256"] for row in kept}) == 5580
    row = kept[3] | {"prompt_sha256": hashlib.sha256(b"Why?").hexdigest()[:16]}
    place = tmp_path / "answers.jsonl.xz"
    place.write_bytes(lzma.compress(json.dumps(row).encode()))
    monkeypatch.setattr(alignment_prompts, "_ANSWERS_FILE", place)
    (answer,) = answered([("qa", "Who?"), ("reasoning", "Why?")])
    target = "qwen2.5-coder-1.5b-instruct"
    assert answer == Answer("Why?", row["text"], row["complete"], "reasoning", row["temperature"], target)
