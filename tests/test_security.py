"""Limits that no other test shows; and that the tests exist which docs/security.md names."""

import ast
import importlib.util
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from edgespec_models.bundles.bundle import GRAPH, Bundle, FileRecord
from edgespec_models.errors import BundleError
from edgespec_runtimes.cpu import open_cpu
from tests.kit.native import edit_manifest, keep_weights_at, tiny_native
from tests.kit.toy import LLAMA

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "security.md"
DATA = f"{GRAPH}.data"


def have_weights_at(folder: Path, location: str) -> None:
    """Have the graph look for its weights there, and the manifest agree."""
    keep_weights_at(folder, "location", location)
    edit_manifest(folder, lambda m: m["files"].update({GRAPH: asdict(FileRecord.of(folder / GRAPH))}))


@pytest.mark.parametrize("way", ["up", "down and up", "absolute", "link"])
def test_weights_outside_the_folder_are_refused(tmp_path: Path, way: str) -> None:
    """Their bytes are right, so nothing but their place can be the reason."""
    folder = tiny_native(tmp_path / "model", LLAMA, "Q4_1").path
    outside = shutil.copy(folder / DATA, tmp_path / "other.data")
    (folder / "sub").mkdir()
    if way == "link":
        try:
            (folder / "link.data").symlink_to(outside)
        except OSError:
            pytest.skip("this system lets its users make no links")
    locations = {"up": "../other.data", "down and up": "sub/../../other.data", "link": "link.data"}
    have_weights_at(folder, locations.get(way, str(outside)))
    with pytest.raises(BundleError, match="External data path"):
        open_cpu(Bundle(folder))


def test_the_test_would_see_them_taken(tmp_path: Path) -> None:
    folder = tiny_native(tmp_path / "model", LLAMA, "Q4_1").path
    (folder / DATA).rename(folder / "other.data")
    have_weights_at(folder, "other.data")
    edit_manifest(folder, lambda m: m["files"].update({"other.data": m["files"].pop(DATA)}))
    assert open_cpu(Bundle(folder)).predict([1, 2]).shape == (2, LLAMA.vocab_size)


def defined_in(file: Path) -> set[str]:
    """Names of a file's tests, those of classes as ``Class::test``."""
    names = set[str]()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


def test_the_tests_that_the_page_names_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)::([\w:]+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 30
    if importlib.util.find_spec("edgespec.serve") is None:
        named = [(file, name) for file, name in named if not file.startswith("test_serve")]
    missing = [f"{file}::{name}" for file, name in named if name not in defined_in(next(TESTS.rglob(file)))]
    assert missing == []
