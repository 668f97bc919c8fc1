"""The code in docs/apps.md runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

import edgespec
from tests.models_for_tests import toy_model, toy_session

DOC = Path(__file__).parents[1] / "docs" / "apps.md"


def test_the_code_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(edgespec, "load", lambda name: toy_model(toy_session(), toy_session()))
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 8
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(DOC), "exec"), names)  # noqa: S102 - that is the test
    out = capsys.readouterr().out
    assert "cancelled '" in out and "does not fit the model's context" in out
