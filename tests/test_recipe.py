"""The cache of bundles that `load` exports: what is opened again, what is made anew, and for whom."""

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import onnx_ir as ir
import pytest

from edgespec.loading import first_use
from edgespec.loading.opening import open_model
from edgespec_export.formats import plan
from edgespec_export.formats.plan import plan_decoder
from edgespec_export.recipe import RECIPES
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Role
from edgespec_models.bundles.static_graphs import ExportDevice
from edgespec_models.errors import RequestError, StorageError
from edgespec_models.graphs.decoder import build_decoder
from edgespec_models.graphs.native import build_native
from edgespec_models.graphs.plan import FULL, Precision
from tests.kit.gguf import FORMATS, tiny_gguf

WRITTEN: dict[tuple[Role, ExportDevice | None, int], str] = {
    ("target", None, 17): "f03cf146d81c2a02",
    ("target", "cuda", 11): "3d2931ab0f624cb8",
    ("drafter", None, 17): "71130817583064a2",
    ("drafter", "cuda", 11): "3d2931ab0f624cb8",
}
"""Of each recipe, the beginning of a digest of tiny models."""
HALF = Precision("float16", "float16")
NAMED = {f"layers.{layer}.stream" for layer in range(100)}
"""Values within a graph that sessions ask for."""
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
    nameless = first.rename(first.with_name(first.name.rpartition("-r")[0]))  # of before there were recipes
    before = made(source)
    second = open_model(source, "target").path
    assert second == first
    later_recipe()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="edgespec"):
        third = open_model(source, "target").path
        assert open_model(source, "target").path == third
    assert third not in (first, nameless)
    folders = [record.getMessage().split(" was made")[0] for record in caplog.records]
    assert folders == [str(nameless), str(first)]
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
    denied = mock.patch.object(first_use, "FileLock", side_effect=PermissionError("read-only"))
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


def described(graph: ir.Graph) -> Iterator[Any]:
    """A decoder's inputs, operators with the values that they name, and weights."""
    yield [(value.name, str(value.dtype), str(value.shape)) for value in graph.inputs]
    for node in graph:
        if node.op_type != "Constant":
            attributes = {name: str(attribute.value) for name, attribute in sorted(node.attributes.items())}
            yield node.domain, node.op_type, attributes
            yield from (value.name for value in node.outputs if value.name in NAMED)
    for value in graph.initializers.values():
        if value.const_value is None:
            assert isinstance(value.shape, ir.Shape)
            yield value.name, str(value.dtype), [str(length) for length in value.shape]


def plans(checkpoint: Checkpoint, role: Role, device: ExportDevice | None) -> Iterator[Any]:
    """What would be written of ``checkpoint``, with each of WEIGHTS where there is a choice."""
    tunable, config = role == "drafter" and device is None, checkpoint.config
    chosen = plan_decoder(checkpoint, tunable=tunable, precision=FULL if device is None else HALF)
    yield [*described(build_decoder(config, chosen).graph)]
    yield [[part.format.name for part in linear.parts] for linear in chosen.linears.values()]
    if device is None:
        yield [*described(build_native(config, plan_decoder(checkpoint, native=True, tunable=tunable)).graph)]


def digest(folder: Path, role: Role, device: ExportDevice | None) -> str:
    seen: list[Any] = [plan._LARGE]
    models = [("llama", kind) for kind in FORMATS]
    for architecture, kind in [*models, ("qwen2", "Q4_K"), ("gemma3", "Q8_0")]:
        source = tiny_gguf(architecture, kind).write(folder / "m.gguf")
        with open_checkpoint(source) as checkpoint:
            seen += plans(checkpoint, role, device)
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("device", [None, "cuda"])
def test_what_exports_write_changes_with_the_recipe_only(
    role: Role, device: ExportDevice | None, tmp_path: Path
) -> None:
    assert WRITTEN.get((role, device, RECIPES[device])) == digest(tmp_path, role, device), (
        "exports write something else than when this was stored: raise edgespec_export.recipe.RECIPES, so "
        "that bundles in users' caches are made anew, and store the new digest here"
    )


def test_every_device_has_a_recipe() -> None:
    assert RECIPES.keys() == {None, *get_args(ExportDevice)}
