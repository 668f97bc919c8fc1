"""What verification costs: the figures from their definitions, the command, the page."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from edgespec.cli import app
from edgespec.loading.opening import open_one
from edgespec.measuring import costs
from edgespec.measuring.costs import Costs, as_ranges, draft_gain, measure_costs
from edgespec.measuring.report import render_costs
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.operations import Experts
from edgespec_models.errors import RequestError
from edgespec_models.progress import Progress
from edgespec_runtimes.cost import DEFAULT_ROWS, CostCurve, ExpertCosts
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.memory import memory_bandwidth, peak_memory_bytes
from tests.kit.native import tiny_native
from tests.kit.toy import LLAMA
from tests.measuring.test_report import Page

CURVE = CostCurve({1: 0.010, 2: 0.0105, 4: 0.011, 8: 0.020, 16: 0.040})
"""Bound by memory up to 4 rows, by arithmetic from 8 on."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_native(tmp_path_factory.mktemp("cost") / "some-target", LLAMA, "Q4_0").bundle


@pytest.fixture(autouse=True)
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory is read."""
    monkeypatch.setattr(costs, "memory_bandwidth", lambda threads: memory_bandwidth(threads, size=1 << 20))


def _costs(bundle: Bundle, curve: CostCurve = CURVE, bandwidth: float = 1e6) -> Costs:
    return Costs(
        bundle=bundle,
        options=CpuOptions(),
        threads=2,
        curve=curve,
        remembered=False,
        bandwidth=bandwidth,
        prompt_rate=300.0,
        other_programs=0.0,
    )


def _run(bundle: Bundle, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["cost", str(bundle.path), "--threads", "1", *arguments])


def test_a_pass_reads_the_experts_that_its_rows_use(tmp_path: Path) -> None:
    """Tiny bundles say of themselves: 3,000 bytes a pass, to which experts are added here."""
    experts = Experts(count=8, used=2, width=32)
    bundle = tiny_native(tmp_path / "b", replace(LLAMA, experts=experts), "Q8_0").bundle
    manifest = replace(bundle.manifest, bytes_by_class={"attention": 3000, "experts": 16_000})
    bundle.manifest = manifest
    shared = ExpertCosts(read_s=0.001, used=4, overlap=0.5)  # in two layers
    measured = _costs(bundle, replace(CURVE, experts=shared))
    assert measured.bytes_read(1) == 3000 + 16_000 * 2 / 8
    assert measured.bytes_read(2) == 3000 + 6 * manifest.expert_bytes
    assert measured.reading_s(2) == pytest.approx(0.009)
    assert measured.to_json()["experts"] == {"used": 4, "overlap": 0.5, "us": pytest.approx(1000)}


def test_the_roofline_from_its_definition(bundle: Bundle) -> None:
    """Tiny bundles say of themselves: 3,000 weights and bytes a pass."""
    manifest = bundle.manifest
    assert manifest.bytes_per_pass == manifest.parameters_per_pass == 3000
    measured = _costs(bundle, bandwidth=3000 / 0.008)
    assert measured.operations_per_row == 6000
    assert measured.peak == pytest.approx(6000 * 16 / 0.040)
    assert measured.reading_s(1) == measured.reading_s(8) == pytest.approx(0.008)
    assert measured.ridge == pytest.approx(0.008 / 0.0025)
    assert measured.bound_s(1) == measured.bound_s(3) == pytest.approx(0.008)
    assert measured.bound_s(8) == pytest.approx(0.020)
    assert measured.free_rows == 4
    rows = {row["n"]: row for row in measured.to_json()["rows"]}
    assert [rows[n]["bound"] for n in rows] == ["memory", "memory", "arithmetic", "arithmetic", "arithmetic"]
    assert rows[8]["relative"] == pytest.approx(2.0) and rows[8]["ms_per_row"] == pytest.approx(2.5)
    assert rows[1]["gigabytes_per_second"] == pytest.approx(3000 / 0.010 / 1e9)
    assert rows[4]["gops"] == pytest.approx(24000 / 0.011 / 1e9)


@given(
    st.dictionaries(st.integers(2, 64), st.floats(1e-4, 10.0), max_size=10),
    st.floats(1e-4, 10.0),
    st.floats(0.1, 10.0),
)
def test_no_pass_is_faster_than_the_roofline(
    bundle: Bundle, more: dict[int, float], single: float, memory: float
) -> None:
    points = {1: single} | more
    fastest = bundle.manifest.bytes_per_pass / min(points.values())
    measured = _costs(bundle, CostCurve(points), bandwidth=fastest * max(1.0, memory))
    for n, seconds in points.items():
        assert measured.bound_s(n) <= seconds * (1 + 1e-9)
    assert 1 <= measured.free_rows <= max(points)
    assert all(points[n] <= 1.1 * single for n in points if n <= measured.free_rows)


@given(st.floats(0.0, 0.99), st.integers(1, 20))
def test_the_gain_of_free_drafts_from_its_definition(acceptance: float, longest: int) -> None:
    gain = draft_gain(CURVE, acceptance, longest)
    speedups = [
        (1 - acceptance ** (k + 1)) / (1 - acceptance) * CURVE.seconds(1) / CURVE.seconds(k + 1)
        for k in range(longest + 1)
    ]
    assert gain["speedup"] == pytest.approx(max(speedups)) and gain["speedup"] >= 1.0
    assert speedups[gain["best_length"]] == pytest.approx(gain["speedup"])
    for k, speedup in enumerate(speedups):
        if abs(speedup - 1.0) > 1e-9:
            assert (k in gain["lengths_that_pay"]) == (speedup > 1.0)
    assert 0 not in gain["lengths_that_pay"]
    nothing = {"best_length": 0, "speedup": 1.0, "tokens_per_pass": 1.0, "lengths_that_pay": []}
    steep = CostCurve({1: 1.0, 2: 2.0, 8: 8.0})  # where rows cost what they are
    assert draft_gain(steep, acceptance, 7) == {"acceptance": acceptance, **nothing}


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], "none"), ([3], "3"), ([1, 2, 3], "1 to 3"), ([1, 2, 4, 7, 8], "1 to 2, 4, 7 to 8")],
)
def test_ranges_are_written_short(numbers: list[int], text: str) -> None:
    assert as_ranges(numbers) == text


def test_what_is_measured_serves_the_next_load_and_fresh_forgets_it(
    bundle: Bundle, timings: Callable[..., None]
) -> None:
    as_it_is = dict.fromkeys(("recheck_cost", "look_again"), lambda session, stored, rows: stored)
    timings(**as_it_is)
    options = CpuOptions(threads=1)
    told = list[Progress]()
    first = measure_costs(bundle, options, progress=told.append)
    loading = [Progress("Loading the model", done, 1, "models") for done in (0, 1)]
    assert [told[0], told[-1]] == loading and len(told) > 2
    assert set(first.curve.seconds_by_rows) == set(DEFAULT_ROWS) and first.threads == 1
    assert first.bandwidth >= bundle.manifest.bytes_per_pass / min(first.curve.seconds_by_rows.values())
    again = measure_costs(bundle, options)
    assert (again.remembered, again.curve) == (True, first.curve)
    assert not measure_costs(bundle, options, fresh=True).remembered
    assert not first.remembered


def test_a_check_at_a_later_load_is_kept_where_it_corrects(
    bundle: Bundle, timings: Callable[..., None]
) -> None:
    measured, now = CURVE, replace(CURVE, seconds_by_rows={**CURVE.seconds_by_rows, 2: 0.0101})
    options = CpuOptions(threads=1)
    timings(measure_cost=lambda *_, **__: measured)
    timings(measure_context=lambda session, curve: curve, recheck_cost=lambda session, stored, rows: stored)
    looks = list[CostCurve]()

    def look(session: Any, curve: CostCurve, rows: int) -> CostCurve:
        looks.append(curve)
        return now if len(looks) == 2 else curve

    timings(look_again=look)
    loads = [open_one(bundle, options, tuple(CURVE.seconds_by_rows)) for _ in range(3)]
    for load in loads:
        load.session.close()
    assert [load.remembered for load in loads] == [False, True, True]
    assert [load.curve for load in loads] == [measured, now, now] and looks[2] == now


def test_peak_memory_is_this_process_own() -> None:
    """Not what the process had that started it."""
    much = np.ones(200 << 17)
    code = "from edgespec_runtimes.memory import peak_memory_bytes as p; print(p())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 << 20 < int(run.stdout) < much.nbytes < peak_memory_bytes()


@pytest.mark.usefixtures("consoles")
def test_the_command_prints_a_table_or_writes_a_page(bundle: Bundle, own_measurements: Path) -> None:
    refused = _run(bundle, "--report", str(own_measurements / "none" / "cost.html"))
    assert refused.exit_code == 1 and "does not exist" in refused.stderr
    assert not own_measurements.exists()
    result = _run(bundle)
    assert result.exit_code == 0, result.stderr
    assert any(line.split()[:1] == ["32"] for line in result.stdout.splitlines())
    assert "some-target as a target, 1 threads, measured now" in result.stdout
    assert str(own_measurements) in result.stderr.replace("\n", "")
    assert len(list(own_measurements.iterdir())) == 1
    page = own_measurements.with_suffix(".html")
    told = _run(bundle, "--drafter", "--json", "--report", str(page), "--fresh")
    value = json.loads(told.stdout)
    assert value["role"] == "drafter" and [row["n"] for row in value["rows"]] == list(DEFAULT_ROWS)
    assert Page(page.read_text(encoding="utf-8")).open == []


@pytest.mark.usefixtures("consoles")
@pytest.mark.parametrize(("disturbed", "code"), [(True, 0), (False, 130)])
def test_disturbed_times_are_named_and_interrupted_ones_not_kept(
    bundle: Bundle, own_measurements: Path, timings: Callable[..., None], disturbed: bool, code: int
) -> None:
    def measure(*_: Any, **__: Any) -> CostCurve:
        if disturbed:
            return replace(CURVE, confirmed=False)
        raise KeyboardInterrupt

    timings(measure_cost=measure)
    result = _run(bundle)
    assert result.exit_code == code and ("--fresh" if disturbed else "interrupted") in result.stderr
    assert own_measurements.exists() == disturbed


@pytest.mark.parametrize("curve", [CURVE, CostCurve({1: 0.01}), replace(CURVE, confirmed=False)])
@pytest.mark.parametrize("bandwidth", [3000 / 0.008, 3000 / 1e-6, 3000 / 10.0])
def test_the_page_is_whole_and_fetches_nothing(bundle: Bundle, curve: CostCurve, bandwidth: float) -> None:
    result = json.loads(json.dumps(_costs(bundle, curve, bandwidth).to_json()))
    text = render_costs(result | {"name": "<b>x"})
    page = Page(text)
    assert page.open == [] and page.fetched == [] and "script" not in page.tags and "<b>x" not in text
    assert text.count('class="bar"') == text.count('class="mark"') == len(curve.seconds_by_rows)
    assert ("disturbed" in text) == (not curve.confirmed)
    with pytest.raises(RequestError, match="not the result of a measurement of costs"):
        render_costs(result | {"format": 2})
