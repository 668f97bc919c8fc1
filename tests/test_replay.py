"""Recorded answers replayed: the tool that compares policies runs the engine as it is now."""

import json
import random
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest

from edgespec.measuring.prompts import Prompt
from edgespec_models.bundles.bundle import MANIFEST, TEMPLATE, FileRecord
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.text.tokenizer import Tokenizer
from tests.tokenizers_for_tests import byte_level_json
from tests.toy import tiny_bundle
from tools import replay


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


def test_recorded_answers_are_replayed(
    recorded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", *recorded, "--memo", str(tmp_path / "memo")])
    replay.main()
    assert "all" in capsys.readouterr().out


def test_answers_that_come_again_are_learned(tmp_path: Path) -> None:
    target = open_bundle(_chatting(tmp_path / "t", 0))
    once = random.Random(0).sample(range(20, 400), 60)  # nothing in it comes twice
    prompts = [Prompt(str(number), "c", (f"prompt {number}",)) for number in range(8)]
    how = Namespace(memo=tmp_path / "memo", ahead=False, max_draft=8)
    how.target_ms = "1:38,2:48,3:60,4:72,5:82,6:93,8:120"
    with replay.replayed(target, None, how) as (model, recorded):
        model.use_history(tmp_path / "stream.history")
        written = {prompt.id: once for prompt in prompts}
        ratios = [ratio for _, _, ratio in replay.replay(model, recorded, prompts, written)]
    assert ratios[0] == pytest.approx(1.0, abs=0.05)
    assert ratios[-1] > 1.2
