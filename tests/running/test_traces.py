"""Who gets which rows in every pass, and every draft, are as they were stored."""

import json
from pathlib import Path

import pytest

from tests.kit.traces import SETTINGS, STORED, traced


@pytest.mark.parametrize("name", SETTINGS)
def test_passes_are_those_that_are_stored(name: str, tmp_path: Path) -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))[name]
    passes = traced(name, tmp_path)
    for at, (now, before) in enumerate(zip(passes, stored, strict=False)):
        assert now == before, f"pass {at}"
    assert len(passes) == len(stored)
