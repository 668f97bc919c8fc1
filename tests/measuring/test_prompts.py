"""Prompt files: the form, the faults, and a limit that spreads over categories."""

import json
from pathlib import Path

import pytest

from edgespec.measuring.prompts import Prompt, builtin_prompts, load_prompts, named, select
from edgespec_models.errors import RequestError

GOOD = json.dumps({"id": "a", "category": "x", "turns": ["one\u2028line", "two"]}, ensure_ascii=False)


def write(folder: Path, text: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(text.encode("utf-8"))
    return path


@pytest.mark.parametrize("text", [GOOD, f"\ufeff{GOOD}", f"\n{GOOD}\r\n\r\n", f"{GOOD}\n"])
def test_a_file_is_read_whatever_its_line_ends(tmp_path: Path, text: str) -> None:
    assert load_prompts(write(tmp_path, text)) == (Prompt("a", "x", ("one\u2028line", "two")),)


TURNS = "[]", '"t"', '["t", 2]'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        (GOOD + "\n{", "line 2 is not JSON"),
        ("[]", "a table with category, turns"),
        ('{"id": 3.5, "category": "x", "turns": ["t"]}', "id is 3.5"),
        ('{"category": "x", "turns": ["t"]}', "neither id nor question_id"),
        ('{"id": "a", "turns": ["t"]}', "category is missing"),
        *(
            (f'{{"id": "a", "category": "x", "turns": {turns}}}', "turns")
            for turns in ("[]", '"t"', '["t", 2]')
        ),
        (f"{GOOD}\n{GOOD}", "two prompts with the id 'a'"),
    ],
)
def test_a_bad_file_says_what_is_wrong_and_where(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RequestError, match=message) as caught:
        load_prompts(path)
    assert str(path) in str(caught.value)
    path.write_bytes(b"\xff\xfe\x00")
    for unreadable in (path, tmp_path / "none.jsonl"):
        with pytest.raises(RequestError, match="cannot read"):
            load_prompts(unreadable)


def test_a_limit_takes_from_every_category_in_turn_and_keeps_the_order() -> None:
    prompts = [Prompt(name, name[0], ("t",)) for name in ("a0", "a1", "a2", "b0", "c0", "c1")]
    assert [p.id for p in select(prompts, 4)] == ["a0", "a1", "b0", "c0"]
    assert [p.id for p in select(prompts, 5)] == ["a0", "a1", "b0", "c0", "c1"]
    assert select(prompts, None) == select(prompts, 99) == tuple(prompts)
    assert len({prompt.category for prompt in select(builtin_prompts(), 6)}) == 6
    with pytest.raises(RequestError, match="limit is 0"):
        select(prompts, 0)


def test_lines_of_spec_bench_are_read_and_selected(tmp_path: Path) -> None:
    line = {"category": "writing", "turns": ["a"], "reference": []}
    lines = [{"question_id": number, **line} for number in (81, 85, 9)]
    prompts = load_prompts(write(tmp_path, "\n".join(map(json.dumps, lines))))
    assert [prompt.id for prompt in prompts] == ["81", "85", "9"]
    ids = tmp_path / "ids.txt"
    ids.write_text("9\n81\n")
    assert [prompt.id for prompt in named(prompts, ids)] == ["81", "9"]
    spaced = [Prompt("edit 1", "a", ("t",)), Prompt("edit", "a", ("t",))]
    ids.write_text(" edit 1 \n\n")
    assert [prompt.id for prompt in named(spaced, ids)] == ["edit 1"]
    for text, says in (("9\n7\n", "names 7; 1 of its 2 ids"), ("\n", "names no id")):
        ids.write_text(text)
        with pytest.raises(RequestError, match=says):
            named(prompts, ids)
