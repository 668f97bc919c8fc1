"""Heads beside graphs of ONNX Runtime's operators, which return no states: refused before all work."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import edgespec
from edgespec import LoadOptions
from edgespec.cli import app
from edgespec.loading.drafters import choose
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.downloads.catalog import hub_heads
from edgespec_models.errors import RequestError
from edgespec_models.storage import bundles_dir
from tests.kit.downloads import REPOSITORY, Hub
from tests.kit.heads import Head, target
from tests.kit.machines import WORKSTATION, on_machine

REFUSED = "is a head, which reads states .* return none; leave out device and weights 'portable'"
PORTABLE = LoadOptions(threads=1, weights="portable")
KNOWN = "hf:AngelSlim/Qwen3-1.7B_eagle3"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return target(tmp_path / "target")


@pytest.mark.parametrize(
    "options", [{"options": PORTABLE}, {"device": "cuda"}, {"drafter_device": "cuda"}], ids=str
)
def test_no_target_is_exported_or_pulled_for_it(
    tmp_path: Path, source: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, WORKSTATION)
    head = Head.random().write(tmp_path / "head")
    export_model(head, tmp_path / "bundle", options=ExportOptions(role="drafter", target=source))
    pairs = (source, head), (source, tmp_path / "bundle"), ("qwen3-1.7b", KNOWN)
    for model, drafter in pairs[: 1 if "drafter_device" in options else 3]:
        with pytest.raises(RequestError, match=REFUSED):
            edgespec.load(model, drafter, progress=None, **options)
    assert not any(bundles_dir().glob("*"))


def test_no_target_is_exported_for_a_head_of_the_hub(tmp_path: Path, source: Path, hub: Hub) -> None:
    head = Head.random().write(tmp_path / "head")
    hub.files, hub.content = {file.name: file.read_bytes() for file in head.iterdir()}, None
    with pytest.raises(RequestError, match=f"{REPOSITORY} {REFUSED}"):
        edgespec.load(source, f"hf:{REPOSITORY}", progress=None, options=PORTABLE)
    assert not any(bundles_dir().glob("*"))


def test_the_command_neither_pulls_a_head_nor_its_target(tmp_path: Path) -> None:
    words = ["export", KNOWN, "--target", "qwen3-1.7b", "-o", str(tmp_path / "out")]
    for option in (["--device", "cuda"], ["--weights", "portable"]):
        result = CliRunner().invoke(app, [*words, *option])
        assert result.exit_code == 1 and "is a head, which reads states" in " ".join(result.stderr.split())


@pytest.mark.usefixtures("all_pulled")
def test_auto_takes_none_for_such_a_target(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    small = replace(hub_heads()[KNOWN], step_bytes=1)  # as the target is
    monkeypatch.setattr("edgespec.loading.drafters.hub_heads", lambda: {KNOWN: small})
    chosen = []
    for weights in ("exact", "portable"):
        export_model(source, tmp_path / weights, options=ExportOptions(weights=weights))
        chosen.append(choose(Bundle(tmp_path / weights), "qwen3-1.7b") == KNOWN)
    assert chosen == [True, False]
