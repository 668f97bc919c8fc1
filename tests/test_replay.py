"""Recorded answers replayed: the tool that compares policies runs the engine as it is now."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from edgespec_models.bundle import MANIFEST, TEMPLATE, FileRecord
from edgespec_models.tokenizer import Tokenizer
from tests.tokenizers_for_tests import byte_level_json
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
