"""tools/peers: what the tables say of samples."""

from typing import Any

import pytest

from tools.peers.rows import Row
from tools.peers.table import Sample, Table, tables


def sample(row: str, prompt: str, speed: float, **other: Any) -> Sample:
    values: dict[str, Any] = {"turn": 0, "prompt_tokens": 5, "tokens": (1, 2), "text": ""}
    values |= {"busy": 0.0, "request_s": 1.0}
    return Sample(row=row, prompt=prompt, category=prompt, tokens_per_s=speed, **values | other)


def test_ratios_are_taken_over_the_prompts_both_ran() -> None:
    rows = [Row(name, "edgespec", ()) for name in ("edgespec plain", "fast")]
    samples = [
        sample("edgespec plain", "a", 10.0),
        sample("edgespec plain", "b", 20.0),
        sample("edgespec plain", "c", 1.0),
        sample("fast", "a", 40.0, tokens=(1, 3), drafted=4, accepted=1),
        sample("fast", "b", 10.0, prompt_tokens=6, drafted=4, accepted=2),
    ]
    table = Table(rows, samples)
    row = table.summary()["fast"]
    assert row["gain"] == pytest.approx({"total": 1.2, "median": 2.25})
    assert row["by_category"]["a"]["gain"]["total"] == pytest.approx(4.0)
    assert row["by_category"]["c"] == {"total": None, "gain": None}
    assert row["same_as_plain"] == pytest.approx(0.75)
    assert row["acceptance_rate"] == pytest.approx(3 / 8)
    assert row["total"] == pytest.approx(16.0)
    assert row["request"] == pytest.approx(2.0)
    (warning,) = table.warnings(2)
    assert warning.startswith("b: the rows read prompts of different lengths")
    assert len(tables(table.summary(), {}).split("\n\n")) == 2
