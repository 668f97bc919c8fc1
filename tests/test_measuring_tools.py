"""Tools that measure, run on the CPU: they are to work at once where there are models or a GPU."""

import json
import random
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from edgespec.measuring.prompts import Prompt
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.discovery import resolve
from tests.kit.gguf import tiny_gguf
from tests.kit.machines import PLAIN
from tests.kit.native import tiny_native
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import until
from tools import cuda_table, replay, try_clients


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    sources = [tiny_gguf("llama", "Q4_K", seed=n).write(tmp_path / f"{n}.gguf") for n in range(2)]
    words = ["--target", str(sources[0]), "--drafter", str(sources[1]), "--work", str(tmp_path / "work")]
    return [*words, "--limit", "2", "--max-new-tokens", "6"]


def test_a_table_and_everything_behind_it(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_table, "ROWS", (1, 2, 16))
    out = tmp_path / "out.json"
    cuda_table.main([*arguments, "--device", "cpu", "--json", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Target on cpu")
    assert lines[2] == "| a pass, ms, by rows | 1 | 2 | 16 |"
    assert [line.split(" | ")[0] for line in lines[4:8]] == [
        f"| {who}, {what}"
        for who in ("target", "drafter")
        for what in ("argmax on the device", "logits to the host")
    ]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[9:]]
    assert [len(row) for row in cells[:4]] == [len(cuda_table.COLUMNS)] * 4
    assert [row[0] for row in cells[2:4]] == ["cpu", "the CPU"]
    result = json.loads(out.read_text(encoding="utf-8"))
    assert {label: found["prompts"] for label, found in result["answers"].items()} == {"cpu": 2, "the CPU": 2}
    assert result["answers"]["the CPU"]["placement"].startswith("target on cpu (asked for); drafter on cpu")
    for times in result["target_passes"]["ms"].values():
        assert len(times) == 3 and all(ms > 0 for ms in times.values())
    kinds = {path.name.rsplit("-r", 1)[0]: Bundle(path).manifest for path in (tmp_path / "work").iterdir()}
    assert {name: (kind.role, kind.activations) for name, kind in kinds.items()} == {
        "0-target": ("target", "float16"),
        "1-drafter": ("drafter", "float16"),
        "1-drafter-cpu": ("drafter", "float32"),
    }


def test_without_a_gpu_it_says_so_and_makes_nothing(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_table, "resolve", lambda name: resolve(name, PLAIN))
    with pytest.raises(SystemExit, match=r"error: device cuda cannot be had.*onnxruntime-gpu"):
        cuda_table.main(arguments)
    assert not (tmp_path / "work").exists()


# ---- Recorded answers replayed -----------------------------------------------------------------------------


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
    recorded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", *recorded, "--memo", str(tmp_path / "memo")])
    replay.main()
    assert "all" in capsys.readouterr().out


def test_prices_that_know_a_context_lose_less_behind_it(tmp_path: Path) -> None:
    """Drafts are seldom right and rows are dear, so who knows that drafts less from the first round on."""
    target = open_bundle(_chatting(tmp_path / "t", 0))
    words = [20 + number % 7 for number in random.Random(0).choices(range(1000), k=60)]
    seconds = {}
    for blind in (True, False):
        how = Namespace(
            memo=tmp_path / "memo", ahead=False, max_draft=8, behind="8000", attention_us="1,8", blind=blind
        )
        how.target_ms, how.experts = "1:30,8:33", ""
        with replay.replayed(target, None, how) as (model, recorded):
            (result,) = replay.replay(model, recorded, [Prompt("a", "c", ("prompt",))], {"a": (words, {})})
            seconds[blind] = result[1].stats.decode_s
    assert seconds[False] < seconds[True]


def test_rows_that_share_experts_gain_more(tmp_path: Path) -> None:
    target, ratios = open_bundle(_chatting(tmp_path / "t", 0)), []
    words = [20 + number * number % 9 for number in range(90)]  # comes again and again
    for overlap in ("0.05", "0.9"):
        how = Namespace(memo=tmp_path / "memo", ahead=False, max_draft=8, behind="0", blind=False)
        how.attention_us, how.target_ms = "0,0", "1:40,8:180"
        how.experts = f"250,80,0.1,{overlap}"
        with replay.replayed(target, None, how) as (model, recorded):
            (result,) = replay.replay(model, recorded, [Prompt("a", "c", ("prompt",))], {"a": (words, {})})
            ratios.append(result[2])
    assert 0.9 < ratios[0] < 0.8 * ratios[1]


def test_answers_that_come_again_are_learned(tmp_path: Path) -> None:
    target = open_bundle(_chatting(tmp_path / "t", 0))
    once = random.Random(0).sample(range(20, 400), 60)  # nothing in it comes twice
    prompts = [Prompt(str(number), "c", (f"prompt {number}",)) for number in range(8)]
    how = Namespace(
        memo=tmp_path / "memo", ahead=False, max_draft=8, behind="0", attention_us="0,0", blind=False
    )
    how.target_ms, how.experts = "1:38,2:48,3:60,4:72,5:82,6:93,8:120", ""
    with replay.replayed(target, None, how) as (model, recorded):
        model.use_history(tmp_path / "stream.history")
        written: dict[str, replay.Answer] = {prompt.id: (once, {}) for prompt in prompts}
        ratios = [ratio for _, _, ratio in replay.replay(model, recorded, prompts, written)]
    assert ratios[0] == pytest.approx(1.0, abs=0.05)
    assert ratios[-1] > 1.2


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        ({"calls": ["blue teapot"], "answers": ["There are 4,127.", "Teapots."]}, ""),
        ({"answers": ["4127", "teapots"]}, ""),  # of a program whose calls are not seen
        ({"calls": [], "answers": ["4127", "teapots"]}, "the tool was not called"),
        ({"calls": ["cups"], "answers": ["4127", "teapots"]}, "called for 'cups'"),
        ({"answers": ["41", "teapots"]}, "has not the number"),
        ({"answers": ["4127", "cups"]}, "does not name the article"),
    ],
)
def test_a_client_is_right_if_both_answers_and_its_call_are(report: dict[str, list[str]], cause: str) -> None:
    told = try_clients.cause_of(report, "4127")
    assert cause in told and bool(told) == bool(cause)


def test_every_client_that_is_tried_has_a_program() -> None:
    assert all((try_clients.PROGRAMS / client.program).is_file() for client in try_clients.CLIENTS)
    names = [client.name for client in try_clients.CLIENTS]
    assert len(names) == len({*names})


@pytest.mark.skipif(sys.platform == "win32", reason="clients are tried on POSIX systems")
@pytest.mark.parametrize("ends", ["by itself", "too late", "interrupted"])
def test_a_client_leaves_no_process_behind(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts, programs, work = tmp_path / "venv" / "bin", tmp_path / "programs", tmp_path / "work"
    for folder in (scripts, programs, work):
        folder.mkdir(parents=True)
    (scripts / "python").symlink_to(sys.executable)
    waits = "" if ends == "by itself" else "child.wait()"
    (programs / "program.py").write_text(
        "import json, pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        f"print(json.dumps({{'answers': ['a', 'b']}}))\n{waits}\n"
    )
    monkeypatch.setattr(try_clients, "LOOK_S", 1)
    client = try_clients.Client("c", "Chat", ("pip", "c"), "program.py", minutes=0)
    if ends == "by itself":
        assert try_clients.ask(client, scripts, {}, work) == {"answers": ["a", "b"]}
    elif ends == "too late":
        with pytest.raises(OSError, match="not done after 0 minutes"):
            try_clients.ask(client, scripts, {}, work)
    else:
        monkeypatch.setattr(try_clients, "monotonic", Mock(side_effect=[0.0, KeyboardInterrupt]))
        with pytest.raises(KeyboardInterrupt):
            try_clients.ask(client, scripts, {}, work)
    child = int((work / "child").read_text())

    def is_gone() -> bool:
        try:
            return bool(psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    until(is_gone)


def test_a_client_without_a_report_is_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("")
    monkeypatch.setattr(try_clients, "ask", lambda *_: {})
    outcome = try_clients.tried(try_clients.CLIENTS[0], "1", tmp_path, {}, tmp_path / "log")
    assert "answers" in outcome.cause
