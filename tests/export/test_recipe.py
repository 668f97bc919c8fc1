"""The cache of bundles that `load` exports: what is opened again, what is made anew, for whom, and when."""

import logging
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest

from edgespec.loading.opening import open_model
from edgespec_export.recipe import RECIPES
from edgespec_models.bundles.static_graphs import ExportDevice
from edgespec_models.errors import RequestError, StorageError
from tests.kit.gguf import tiny_gguf
from tests.kit.whole import BUNDLES
from tools import recipes

NAMES = ("smollm2-135m-instruct", "hf:someone/something")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in a folder where bundles will be cached, and nothing else."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    return tiny_gguf("llama", layers=1).write(tmp_path / "m.gguf")


def made(source: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in source.parent.rglob("*") if file.is_file()}


def test_what_another_recipe_made_is_made_anew_and_left_alone(
    source: Path, later_recipe: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    first = open_model(source, "target").path
    before = made(source)
    later_recipe()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="edgespec"):
        third = open_model(source, "target").path
        assert open_model(source, "target").path == third
    assert third != first
    folders = [record.getMessage().split(" was made")[0] for record in caplog.records]
    assert folders == [str(first)]
    assert made(source).items() >= before.items()
    assert open_model(source, "target", weights="portable").path not in (first, third)
    assert open_model(source, "target", weights="exact").path == third  # which is the default


@pytest.mark.parametrize("weights", ["fsat", "", "a/b", "a/../../../../x"])
def test_weights_that_are_not_known_leave_nothing(source: Path, weights: str) -> None:
    for reference in (source, *NAMES):
        with pytest.raises(RequestError, match=r"weights is '.*; allowed: .*'exact', 'portable'"):
            open_model(reference, "target", weights=weights)
    assert [file.name for file in source.parent.iterdir()] == ["m.gguf"]


def test_a_device_that_settles_formats_takes_no_weights(source: Path) -> None:
    bundle = open_model(source, "target").path
    before = made(source)
    devices: tuple[ExportDevice, ...] = ("npu-qnn", "cuda")
    references: list[str | Path] = [source, *NAMES]
    for reference, device in product(references, devices):
        with pytest.raises(RequestError, match=f"{device} chooses formats itself; leave out weights"):
            open_model(reference, "target", weights="exact", device=device)
    assert made(source) == before
    assert open_model(bundle, "target", weights="exact", device="npu-qnn").path == bundle


def test_a_cache_that_cannot_be_written_is_an_error(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = mock.patch("filelock.FileLock.acquire", side_effect=PermissionError("read-only"))
    with denied, pytest.raises(StorageError, match=r"cannot write .*home.*: read-only"):
        open_model(source, "target")
    monkeypatch.setenv("EDGESPEC_HOME", str(source))
    with pytest.raises(StorageError, match=r"cannot write .*m.gguf"):
        open_model(source, "target")


WITHOUT_THE_EXPORTER = """
import sys
from edgespec.loading.opening import open_model
print(open_model({cached!r}, "target").path)
print(*{{name.partition(".")[0] for name in sys.modules}} & {{"onnx", "onnx_ir", "onnxscript", "sympy"}})
"""


def test_opening_a_cached_model_imports_no_exporter(source: Path) -> None:
    path = open_model(source, "target").path
    code = WITHOUT_THE_EXPORTER.format(cached=str(source))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(path), ""]


@pytest.mark.parametrize("name", BUNDLES)
def test_an_export_makes_what_the_table_says(name: str, tmp_path: Path) -> None:
    made, stored = BUNDLES[name].digests(tmp_path), recipes.read_table()["bundles"].get(name, {})
    del made["source"]  # whose bytes depend on the package that writes it
    assert made == {file: digest for file, digest in stored.items() if file != "source"}, (
        f"exports make another bundle of {name!r}; 'python -m tools.recipes' says what to do"
    )


def test_the_table_is_of_these_recipes_and_bundles() -> None:
    table = recipes.read_table()
    assert table["recipes"] == recipes.named(RECIPES) and table["bundles"].keys() == BUNDLES.keys()


def test_the_tool_tells_another_bundle_from_another_source() -> None:
    first, second = "llama/directory", "llama/directory/cuda"
    before = {name: {"source": "s", "model.onnx": "a", "edgespec.json": "m"} for name in (first, second)}
    other_graph, other_source = {"model.onnx": "b"}, {"source": "t", "model.onnx": "b"}
    for change, expected in (
        ({}, {}),
        ({first: other_source}, {}),
        ({first: other_graph}, {None: {"model.onnx": [first]}}),
        ({second: {"edgespec.json": "n"}}, {"cuda": {"edgespec.json": [second]}}),
    ):
        after = {name: digests | change.get(name, {}) for name, digests in before.items()}
        assert recipes.changes(before, after) == expected
    without = {name: {"source": "s", "model.onnx": "a"} for name in before}
    assert recipes.changes(before, without)[None] == {"edgespec.json": [first]}
    assert recipes.changes({}, before) == {}  # new rows


def test_every_device_has_a_recipe() -> None:
    assert RECIPES.keys() == {None, *get_args(ExportDevice)}
