"""The prompts that the shipped alignment was made of: nothing that measures, once each, in one order."""

import json
import random

from tools.alignment_prompts import _KINDS, _SLOW_MOST, _WORDS_FILE, _Filter, chosen, made, ordered

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def test_what_shares_eight_words_in_a_row_is_left_out() -> None:
    allowed = _Filter([" ".join(WORDS[:10]), "Short?"])
    assert not allowed.passes("so " + " ".join(WORDS[1:9]).upper() + "!")
    assert allowed.passes("so " + " ".join(WORDS[1:8]) + " and so on")
    assert not allowed.passes("short") and allowed.passes("shorter")


def test_every_form_is_filled() -> None:
    found = made(json.loads(_WORDS_FILE.read_text("utf-8")))
    assert {kind: len(texts) >= _KINDS[kind][0] for kind, texts in found.items()} == dict.fromkeys(
        found, True
    )
    assert not [text for texts in found.values() for text in texts if "{" in text or "}" in text]
    assert found == made(json.loads(_WORDS_FILE.read_text("utf-8")))


def test_all_kinds_are_mixed_and_slow_ones_last() -> None:
    by_kind = {kind: [f" {kind} question number {n} " for n in range(500)] * 2 for kind in _KINDS}
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
