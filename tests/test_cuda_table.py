"""The script that measures a GPU, run on the CPU: it is to work at once where there is one."""

import json
from pathlib import Path

import pytest

from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.discovery import resolve
from tests.gguf_for_tests import tiny_gguf
from tests.machines_for_tests import PLAIN
from tools import cuda_table


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
