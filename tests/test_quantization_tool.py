"""The tool that compares ways to store the weights."""

import sys
from pathlib import Path
from unittest import mock

import pytest

from edgespec_export import plan
from edgespec_export.quantization import Quantization
from edgespec_models.errors import RequestError
from edgespec_runtimes.cpu import CpuSession
from tests.gguf_for_tests import tiny_gguf
from tools import quantization


def rows(text: str) -> dict[str, list[str]]:
    """A Markdown table's cells by its first column."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {first: rest for first, *rest in cells[2:]}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", *map(str, arguments)])
    with mock.patch.multiple(plan, _REFINED_FROM=1, _REFINED_WEIGHTS=1, _LEAST_REFINED=24):
        quantization.main()


def test_a_coarse_head_and_a_whole_one_are_timed_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_gguf("llama", "Q6_K").write(tmp_path / "m.gguf")
    turns: list[int] = []
    forward = CpuSession.forward

    def watched(session: CpuSession, tokens: list[int]) -> object:
        if len(tokens) == 1:
            turns.append(id(session))
        return forward(session, tokens)

    monkeypatch.setattr(quantization, "PAST", 16)
    monkeypatch.setattr(CpuSession, "forward", watched)
    run(monkeypatch, "--gguf", source, "--alternate", 5, "close+whole", "close")
    table = rows(capsys.readouterr().out)
    assert list(table) == ["close+whole", "close"]
    assert all(float(cell) > 0 for cells in table.values() for cell in cells[1:])
    assert table["close+whole"][3] == "1.000"
    passes = turns[-2 * (5 + quantization.WARM_UP) :]
    assert passes[0::2] == passes[:1] * len(passes[0::2])
    assert passes[1::2] == passes[1:2] * len(passes[1::2])
    assert passes[0] != passes[1]


def test_a_whole_head_is_a_policys_without_its_coarse_one() -> None:
    options = quantization.parse("close+whole+kv8")
    assert isinstance(options.quantization, plan.Policy)
    assert (options.quantization.name, options.quantization.refined) == ("close+whole", False)
    assert options.quantization.layers == plan.POLICIES["close"].layers
    assert options.weights is None and options.kv == "int8"
    assert quantization.parse("4/32/fit").quantization == Quantization()


@pytest.mark.parametrize("spec", ["exact+whole", "4/32/fit+whole", "close+half", "none"])
def test_what_is_no_spec_says_what_is(spec: str) -> None:
    with pytest.raises(RequestError, match=r"\+whole behind close|no quantization"):
        quantization.parse(spec)


def test_everything_is_compared_with_the_files_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text = tiny_gguf("llama", "Q6_K").write(tmp_path / "m.gguf"), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 4, encoding="utf-8")
    monkeypatch.setattr(quantization, "PAST", 16)
    run(
        monkeypatch,
        "--gguf",
        source,
        "--text",
        text,
        "--turns",
        1,
        "--repeats",
        1,
        "exact",
        "close",
        "close+whole",
    )
    table = rows(capsys.readouterr().out)
    kl = {spec: float(cells[7]) for spec, cells in table.items()}
    assert abs(kl["exact"]) < 1e-4 < kl["close+whole"] < kl["close"]
