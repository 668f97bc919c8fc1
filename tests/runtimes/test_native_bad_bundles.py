"""Native bundles whose files do not fit each other are refused when they are opened, with what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec_models.bundles.bundle import GRAPH, Bundle
from edgespec_models.errors import BundleError
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from tests.kit.native import Edit, edit_graph, edit_manifest, tiny_native

DATA = f"{GRAPH}.data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_native(tmp_path / "m").path


def sized(folder: Path) -> Bundle:
    """The bundle, with a manifest that says the sizes its files now have."""

    def edit(manifest: Any) -> None:
        for name, record in manifest["files"].items():
            record["size_bytes"] = (folder / name).stat().st_size

    edit_manifest(folder, edit)
    return Bundle(folder)


def refused(folder: Path, words: str) -> None:
    """Opening must fail in these words, with weights mapped and in huge pages alike."""
    for huge_pages in (False, True):
        with pytest.raises(BundleError, match=rf"model\.onnx .*(?s:{words}).*export the model again"):
            open_cpu(sized(folder), CpuOptions(threads=1, huge_pages=huge_pages))


@pytest.mark.parametrize("left", [0, 3, 4096, -1])
def test_weights_that_end_too_early(folder: Path, left: int) -> None:
    content = (folder / DATA).read_bytes()
    (folder / DATA).write_bytes(content[:left])
    with pytest.raises(BundleError, match=r"model\.onnx\.data has [\d,]+ bytes, not .*the model again"):
        Bundle(folder)
    refused(folder, "External initializer")


def node(graph: Any, kind: str) -> Any:
    """The first node of an operator: its attributes by name."""
    found = next(operator for operator in graph.node if operator.op_type == kind)
    return {attribute.name: attribute for attribute in found.attribute}


def change(kind: str, name: str, by: Callable[[Any], Any]) -> Edit:
    """Change an attribute, a number or a text."""

    def edit(graph: Any) -> None:
        attribute = node(graph, kind)[name]
        if attribute.s:
            attribute.s = by(attribute.s.decode()).encode()
        else:
            attribute.i = by(attribute.i)

    return edit


def shorten(graph: Any) -> None:
    """A matrix's tensor ends 64 bytes early, in a file that is whole."""
    weight = next(
        tensor for tensor in graph.initializer if "attention.qkv" in tensor.name and len(tensor.dims) == 1
    )
    weight.dims[0] -= 64
    for entry in weight.external_data:
        if entry.key == "length":
            entry.value = str(int(entry.value) - 64)


def widen(graph: Any) -> None:
    """A projection of twice the inputs by half the columns takes as many bytes."""
    attributes = node(graph, "Linear")
    attributes["inputs"].i *= 2
    parts = [part.split(":") for part in attributes["parts"].s.decode().split(",")]
    attributes["parts"].s = ",".join(f"{name}:{int(columns) // 2}" for name, columns in parts).encode()


BYTES = "edgespec: a matrix has more or fewer bytes than its widths take"
EDITS: dict[str, tuple[Edit, str]] = {
    "more columns": (change("Linear", "parts", lambda parts: parts.replace(":", ":1", 1)), BYTES),
    "no format": (change("Linear", "parts", lambda parts: parts.replace("Q4_0", "Q4_9", 1)), "called Q4_9"),
    "one part less": (change("Linear", "parts", lambda parts: parts.rpartition(",")[0]), "more matrices"),
    "more tokens": (change("Embedding", "rows", lambda rows: rows + 16), BYTES),
    "a short tensor": (shorten, BYTES),
    "more heads": (change("Attention", "heads", lambda heads: 3 * heads), "attention's input is not float32"),
    "a wide next layer": (widen, "edgespec: a projection's input is not float32"),
    "no heads": (change("Attention", "heads", lambda heads: 0), "edgespec: attention heads"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_graph_that_does_not_fit_its_weights(folder: Path, name: str) -> None:
    edit, words = EDITS[name]
    edit_graph(folder, edit)
    refused(folder, words)
