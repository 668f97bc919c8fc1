"""Recorded answers replayed: the tool that compares policies runs the engine as it is now."""

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from edgespec.drafting.bridge import ByteBridge
from edgespec_models.bundle import MANIFEST, TEMPLATE, FileRecord
from edgespec_models.tokenizer import Tokenizer
from tests.tokenizers_for_tests import byte_level_json, sentencepiece_json
from tests.toy import tiny_bundle
from tools import replay, streams


def _chatting(folder: Path, seed: int) -> Path:
    tiny_bundle(folder, seed=seed)
    (folder / TEMPLATE).write_text("{{ messages[0].content }}", encoding="utf-8")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"][TEMPLATE] = asdict(FileRecord.of(folder / TEMPLATE))
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return folder


@pytest.fixture
def recorded(tmp_path: Path) -> list[str]:
    """Arguments that name a target, a drafter and what the target wrote."""
    target, drafter = (_chatting(tmp_path / name, seed) for seed, name in enumerate("td"))
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = {"one": "the quick brown fox", "two": "the lazy dog"}
    prompts.write_text(
        "".join(json.dumps({"id": i, "category": "c", "turns": [t]}) + "\n" for i, t in texts.items()),
        encoding="utf-8",
    )
    words = Tokenizer.from_json(byte_level_json()).encode("a fox and a fox and a fox")
    lines = [json.dumps({"id": i, "tokens": words}) for i in texts]
    answers.write_text("\n".join(lines), encoding="utf-8")
    return [str(target), "--drafter", str(drafter), "--answers", str(answers), "--prompts", str(prompts)]


@pytest.mark.parametrize("tool", [replay, streams])
def test_recorded_answers_are_replayed(
    recorded: list[str],
    tool: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*recorded, "--memo", str(tmp_path / "memo")]
    if tool is streams:
        arguments += ["--picture", str(tmp_path / "curves.svg")]
    monkeypatch.setattr(sys, "argv", ["tool", *arguments])
    tool.main()  # type: ignore[attr-defined]
    assert "all" in capsys.readouterr().out


def request(number: int, *, category: str = "mail", passes: int = 10) -> streams.Request:
    """Twenty tokens; a pass takes a second, plain decoding one a token."""
    drafted, accepted = 3 * number, 2 * number
    return streams.Request(category, 20, passes, drafted, accepted, float(passes), 20.0)


def test_a_stream_is_cut_where_the_category_changes_and_into_stretches() -> None:
    stream = [*(request(n) for n in range(7)), *(request(n, category="code") for n in range(2))]
    assert streams.stretches(stream, 3) == [(0, 3), (3, 6), (6, 7), (7, 9)]
    assert streams.stretches(stream[:1], 3) == [(0, 1)]


def test_tables_have_a_line_for_each_stretch_and_a_column_for_each_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = [request(n, category="code" if n > 3 else "mail") for n in range(1, 6)]
    fast = [request(n, passes=5) for n in range(1, 6)]
    streams.show({"slow": slow, "fast": fast}, 50)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [
        ["tokens", "per", "pass", "slow", "fast"],
        ["mail", "1", "to", "3", "2.000", "4.000"],
        ["code", "4", "to", "5", "2.000", "4.000"],
        ["all", "1", "to", "5", "2.000", "4.000"],
    ]
    assert [line[-2:] for line in lines[5:8]] == [["0.667", "0.667"]] * 3
    assert [line[-2:] for line in lines[9:]] == [["2.000", "4.000"]] * 3


def test_the_picture_has_a_curve_of_means_for_each_way_and_measure() -> None:
    slow = [request(n, category="code" if n > 20 else "mail") for n in range(1, 31)]
    fast = [request(n, passes=5) for n in range(1, 31)]
    drawn = ElementTree.fromstring(streams.picture({"slow": slow, "<fast>": fast}))
    space = "{http://www.w3.org/2000/svg}"
    curves = [line.attrib["points"].split() for line in drawn.iter(f"{space}polyline")]
    assert [len(points) for points in curves] == [6] * 2 * len(streams.MEASURES)
    heights = [{float(point.partition(",")[2]) for point in points} for points in curves]
    assert all(len(curve) == 1 for curve in heights)  # what was put in does not change
    assert min(heights[0]) > max(heights[1])  # y grows downwards
    changes = [line for line in drawn.iter(f"{space}path") if "stroke-dasharray" in line.attrib]
    assert len(changes) == len(streams.MEASURES)
    assert any(text.text == "\u25a0 <fast>" for text in drawn.iter(f"{space}text"))


def test_direct_mapping_ends_where_the_target_has_no_such_token() -> None:
    target = Tokenizer.from_json(byte_level_json())
    drafter = Tokenizer.from_json(sentencepiece_json())
    bridge = ByteBridge(target, drafter, prompt_length=0, drafter_prompt=[])
    drafted = drafter.encode("the quick brown fox")
    same = [target.id_of_bytes(drafter.token_bytes(token)) for token in drafted]
    known = same.index(None) if None in same else len(same)
    assert streams.directly(bridge, drafted) == list(zip(same[:known], range(1, known + 1), strict=True))
    lacking = next(
        token
        for token in range(drafter.vocab_size)
        if drafter.token_bytes(token) and target.id_of_bytes(drafter.token_bytes(token)) is None
    )
    assert streams.directly(bridge, [drafted[-1], lacking, drafted[-1]])[1:] == []


def test_a_stream_that_repeats_itself_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = _chatting(tmp_path / "t", 0)
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    once = random.Random(0).sample(range(20, 400), 60)  # nothing in it comes twice
    lines = [{"id": str(n), "category": "c", "turns": [f"prompt {n}"]} for n in range(8)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    answers.write_text(
        "".join(json.dumps({"id": line["id"], "tokens": once}) + "\n" for line in lines), encoding="utf-8"
    )
    arguments = [target, "--answers", answers, "--prompts", prompts, "--memo", tmp_path / "memo"]
    arguments += ["--way", "nothing learned", "--way", "n-grams", "--stretch", 4]
    monkeypatch.setattr(sys, "argv", ["tool", *map(str, arguments)])
    streams.main()
    size, *table = capsys.readouterr().out.splitlines()[:5]
    assert "KiB on disk" in size
    early, late, _ = ([float(cell) for cell in line.split()[-2:]] for line in table[1:])
    assert early[0] == late[0] == pytest.approx(1.0, abs=0.05)
    assert late[1] > early[1] > 1.2
