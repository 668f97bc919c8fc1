"""Recorded answers that are replayed."""

import json
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.measuring.prompts import Prompt
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.native import tiny_native
from tests.kit.tokenizers import byte_level_json
from tools import replay


def _chatting(folder: Path, seed: int) -> Path:
    return tiny_native(folder, seed=seed, template="{{ messages[0].content }}").path


@pytest.fixture
def recorded(tmp_path: Path) -> list[str]:
    """Arguments that name a target, a drafter and what the target wrote."""
    target, drafter = (_chatting(tmp_path / name, seed) for seed, name in enumerate("td"))
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = {"one": "the quick brown fox", "two": "the lazy dog"}
    lines = [json.dumps({"id": name, "category": "c", "turns": [text]}) for name, text in texts.items()]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    words = Tokenizer.from_json(byte_level_json()).encode("a fox and a fox and a fox")
    lines = [json.dumps({"id": name, "tokens": words}) for name in texts]
    answers.write_text("\n".join(lines), encoding="utf-8")
    return [str(target), "--drafter", str(drafter), "--answers", str(answers), "--prompts", str(prompts)]


def test_recorded_answers_are_replayed(
    recorded: list[str],
    tmp_path: Path,
    command_line: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command_line("tool", *recorded, "--memo", str(tmp_path / "memo"))
    replay.main()
    assert "all" in capsys.readouterr().out


def test_prices_that_know_a_context_lose_less_behind_it(tmp_path: Path) -> None:
    """Drafts are seldom right and rows are dear, so who knows that drafts less from the first round on."""
    place = _chatting(tmp_path / "t", 0)
    words = [20 + number % 7 for number in random.Random(0).choices(range(1000), k=60)]
    seconds = {}
    for blind in (True, False):
        how = Namespace(memo=tmp_path / "memo", max_draft=8, behind="8000", attention_us="1,8", blind=blind)
        how.target_ms, how.experts = "1:30,8:33", ""
        with replay.replayed(open_bundle(place), None, how) as (model, recorded):
            (result,) = replay.replay(model, recorded, [Prompt("a", "c", ("prompt",))], {"a": (words, {})})
            seconds[blind] = result[1].stats.decode_s
    assert seconds[False] < seconds[True]


def test_rows_that_share_experts_gain_more(tmp_path: Path) -> None:
    place, ratios = _chatting(tmp_path / "t", 0), []
    words = [20 + number * number % 9 for number in range(90)]  # comes again and again
    for overlap in ("0.05", "0.9"):
        how = Namespace(memo=tmp_path / "memo", max_draft=8, behind="0", blind=False)
        how.attention_us, how.target_ms = "0,0", "1:40,8:180"
        how.experts = f"250,80,0.1,{overlap}"
        with replay.replayed(open_bundle(place), None, how) as (model, recorded):
            (result,) = replay.replay(model, recorded, [Prompt("a", "c", ("prompt",))], {"a": (words, {})})
            ratios.append(result[2])
    assert 0.9 < ratios[0] < 0.8 * ratios[1]


def test_answers_that_come_again_are_learned(tmp_path: Path) -> None:
    target = open_bundle(_chatting(tmp_path / "t", 0))
    once = random.Random(0).sample(range(20, 400), 60)  # nothing in it comes twice
    prompts = [Prompt(str(number), "c", (f"prompt {number}",)) for number in range(8)]
    how = Namespace(memo=tmp_path / "memo", max_draft=8, behind="0", attention_us="0,0", blind=False)
    how.target_ms, how.experts = "1:38,2:48,3:60,4:72,5:82,6:93,8:120", ""
    with replay.replayed(target, None, how) as (model, recorded):
        model.use_history(tmp_path / "stream.history")
        written: dict[str, replay.Answer] = {prompt.id: (once, {}) for prompt in prompts}
        ratios = [ratio for _, _, ratio in replay.replay(model, recorded, prompts, written)]
    assert ratios[0] == pytest.approx(1.0, abs=0.05)
    assert ratios[-1] > 1.2
