"""What is kept between loads: read back as written, never an error, whatever lies there."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.loading.measurements import Conditions, Measurement, discard, recall, remember
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.cpu import CpuOptions, default_threads
from tests.kit.toy import tiny_bundle

HERE = Conditions(
    bundle="0123456789abcdef",
    device="cpu",
    options=CpuOptions(threads=2),
    kept="float16",
    machine={"cpu": "some", "cores": 2, "system": None},
)
FOUND = Measurement(True, CostCurve({1: 0.04, 2: 0.05, 8: 0.12}))

points = st.dictionaries(st.integers(2, 99), st.floats(1e-9, 1e6), max_size=12)


@settings(max_examples=30, deadline=None)  # a busy disk takes its time
@given(points, st.floats(1e-9, 1e6), st.booleans())
def test_what_is_remembered_is_recalled_to_the_bit(
    more: dict[int, float], single: float, row_exact: bool
) -> None:
    measurement = Measurement(row_exact, CostCurve({1: single} | more))
    remember(HERE, measurement)
    assert recall(HERE) == measurement


def test_nothing_is_known_before_and_after(own_measurements: Path) -> None:
    assert recall(HERE) is None
    discard(HERE)
    assert not own_measurements.exists()
    remember(HERE, FOUND)
    assert list(own_measurements.iterdir()) == [HERE.path]
    discard(HERE)
    assert recall(HERE) is None and list(own_measurements.iterdir()) == []


OTHERS: list[tuple[str, Any]] = [
    ("bundle", "fedcba9876543210"),
    ("device", "npu"),
    ("options", CpuOptions(threads=1)),
    ("options", CpuOptions(threads=2, spinning=False)),
    ("options", CpuOptions(threads=2, exact_rows=False)),
    ("options", CpuOptions(threads=2, huge_pages=False)),
    ("options", CpuOptions(threads=2, instructions="avx2")),
    ("options", CpuOptions(threads=2, low_priority=True)),
    ("kept", "int8"),
    ("machine", HERE.machine | {"onnxruntime": "9.9"}),
]


@pytest.mark.parametrize(("condition", "other"), OTHERS)
def test_other_conditions_have_a_file_of_their_own(condition: str, other: Any) -> None:
    assert {name for name, _ in OTHERS} == {field.name for field in fields(HERE)}
    remember(HERE, FOUND)
    elsewhere = replace(HERE, **{condition: other})
    assert recall(elsewhere) is None
    remember(elsewhere, Measurement(False, CostCurve({1: 1.0})))
    assert recall(HERE) == FOUND


def test_conditions_are_those_that_passes_run_under(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path / "m").bundle
    conditions = Conditions.of(bundle, CpuOptions())
    assert conditions == Conditions.of(bundle, CpuOptions(threads=default_threads()))
    assert conditions != Conditions.of(bundle, CpuOptions(exact_rows=False))
    assert conditions != Conditions.of(bundle, CpuOptions(low_priority=True))
    assert conditions.machine["onnxruntime"] and conditions.machine["logical_cores"] >= 1


TIMES: list[Any] = [0.0, float("nan"), float("inf"), 10**400, "fast"]  # of a row
ROWS = [{"2": 0.1}, {"0": 0.1, "1": 0.1}, {"1": 0.1, "two": 0.1}]
DAMAGES: list[Any] = [
    *(b"", b"{", b"[]", b"3", b"[" * 60_000, b"\xff\x00"),
    *({"seconds_by_rows": curve} for curve in (None, {}, *ROWS, *({"1": time} for time in TIMES))),
    *(
        {"more": "x" * 70_000},
        {"format": 2},
        {"context_s": -1.0},
        {"row_context_s": "no"},
        {"conditions": {"bundle": "another"}},
        {"row_exact": "yes"},
    ),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_what_is_damaged_or_foreign_is_ignored_and_written_anew(damage: bytes | dict[str, Any]) -> None:
    remember(HERE, FOUND)
    if isinstance(damage, dict):
        damage = json.dumps(json.loads(HERE.path.read_text(encoding="utf-8")) | damage).encode()
    HERE.path.write_bytes(damage)
    assert recall(HERE) is None
    remember(HERE, FOUND)
    assert recall(HERE) == FOUND


def test_a_place_that_cannot_be_written_is_told_once_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("EDGESPEC_HOME", str(file))
    for _ in range(2):
        remember(HERE, FOUND)
    [said] = caplog.messages
    assert f"measurements cannot be written to {file}" in said
    assert recall(HERE) is None
    discard(HERE)
    assert file.read_text(encoding="utf-8") == "in the way"
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    HERE.path.mkdir(parents=True)
    remember(HERE, FOUND)
    assert recall(HERE) is None
    discard(HERE)


def test_those_who_read_while_others_write_see_whole_files(own_measurements: Path) -> None:
    remember(HERE, FOUND)

    def write(count: int) -> None:
        for index in range(1, 25):
            remember(HERE, Measurement(True, CostCurve({n: count + index * n for n in range(1, 40)})))

    with ThreadPoolExecutor(2) as pool:
        written = pool.map(write, (100, 200))
        assert all(recall(HERE) is not None for _ in range(100))
        assert len([*written]) == 2
    assert len(list(own_measurements.iterdir())) == 1
