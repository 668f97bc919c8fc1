"""Exports that were stopped go on, and the bundle is the one that an uninterrupted export makes."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec_export.export import ExportOptions, export_model
from edgespec_export.graphs import writer
from edgespec_export.journal import DATA_FILE, JOURNAL
from edgespec_models.bundles.bundle import GRAPH
from edgespec_models.progress import Progress
from tests.kit.gguf import tiny_gguf
from tests.kit.machines import POSIX

OPTIONS = ExportOptions(name="model")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model and the bundle ``whole`` of it. Small weights have a journal too."""
    folder = tmp_path_factory.mktemp("stopped")
    source = tiny_gguf("llama", "Q4_K").write(folder / "m.gguf")
    export_model(source, folder / "whole", options=OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "JOURNALED_BYTES", 0)
        yield folder


def run(folder: Path, stop: int | None = None, options: ExportOptions = OPTIONS) -> list[str]:
    """Export, or be stopped at a report; returns the stages that were reported."""
    stages = list[str]()
    shutil.rmtree(folder / "out", ignore_errors=True)

    def report(step: Progress) -> None:
        stages.append(step.stage)
        if len(stages) - 1 == stop:
            raise KeyboardInterrupt

    try:
        export_model(folder / "m.gguf", folder / "out", options=options, progress=report)
    except KeyboardInterrupt:
        assert not (folder / "out").exists()
    return stages


def left_in(folder: Path) -> Path | None:
    """What the stopped export has left."""
    return next(folder.glob(".out.partial-*"), None)


def flip(left: Path, at: float) -> None:
    data = bytearray((left / DATA_FILE).read_bytes())
    data[min(int(at * len(data)), len(data) - 1)] ^= 1
    (left / DATA_FILE).write_bytes(data)


def cut(name: str) -> Callable[[Path, float], None]:
    return lambda left, at: os.truncate(left / name, int(at * (left / name).stat().st_size))


@settings(max_examples=25)
@given(
    stops=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    damage=st.sampled_from([lambda left, at: None, flip, cut(DATA_FILE), cut(JOURNAL)]),
    at=st.floats(0, 1),
)
def test_a_stopped_export_goes_on_to_the_same_bits(
    whole: Path, stops: list[int], damage: Callable[[Path, float], None], at: float
) -> None:
    """Whatever a loss of power has left of the files."""
    for stop in stops:
        run(whole, stop)
        left = left_in(whole)
        if left is not None and (left / DATA_FILE).stat().st_size:
            damage(left, at)
    run(whole)
    made, expected = ({path.name: path for path in (whole / name).iterdir()} for name in ("out", "whole"))
    assert made.keys() == expected.keys()
    for name in (GRAPH, DATA_FILE):
        assert made[name].read_bytes() == expected[name].read_bytes()
    assert left_in(whole) is None


def test_what_is_finished_is_not_done_again(whole: Path) -> None:
    stages = run(whole)
    last = len(stages) - 1 - stages[::-1].index("Exporting")
    run(whole, last)
    again = run(whole)
    (going_on,) = {stage for stage in again if stage.startswith("Exporting")}
    assert going_on.startswith("Exporting, going on at ") and int(going_on.split()[-2]) > 80
    assert again.count(going_on) < stages.count("Exporting") / 2


@pytest.mark.parametrize("other", ["source", "version of edgespec", "set of options"])
def test_another_export_begins_anew_and_says_why(
    whole: Path, other: str, later_recipe: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    source, options = (whole / "m.gguf").read_bytes(), OPTIONS
    run(whole, 15)
    assert left_in(whole) is not None
    if other == "source":
        (whole / "m.gguf").write_bytes(source[:-1] + bytes([source[-1] ^ 1]))
    elif other == "set of options":
        options = ExportOptions(name="another")
    else:
        later_recipe()
    stages = run(whole, options=options)
    (whole / "m.gguf").write_bytes(source)
    assert "Exporting" in stages
    assert f"an unfinished export has another {other}; this export begins anew" in caplog.text


@POSIX
def test_links_in_place_of_unfinished_weights_are_not_followed(whole: Path) -> None:
    (whole / "elsewhere").mkdir()
    for name in (DATA_FILE, JOURNAL):
        (whole / "elsewhere" / name).write_bytes(b"mine")
    (whole / ".out.partial-stopped-x").symlink_to(whole / "elsewhere", target_is_directory=True)
    run(whole)
    assert (whole / "elsewhere" / DATA_FILE).read_bytes() == b"mine"
