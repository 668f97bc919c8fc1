"""Where systems differ: files that are open, folders of other users, pipes that nobody reads."""

import os
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any
from unittest import mock

import psutil
import pytest

import edgespec
from edgespec import LoadOptions
from edgespec.history.manage import History
from edgespec.loading.measurements import describe_machine
from edgespec_export import staging
from edgespec_export.export import ExportOptions, export_model
from edgespec_models import storage
from edgespec_models.errors import RequestError
from edgespec_models.storage import move
from tests.kit.gguf import tiny_gguf
from tests.kit.machines import LINUX, POSIX


@pytest.mark.skipif(sys.platform != "win32", reason="elsewhere what is open can be renamed")
def test_what_a_scanner_has_open_is_moved_when_it_lets_go(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    scanner = (tmp_path / "a").open("rb")
    Timer(0.3, scanner.close).start()
    move(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"content"


def held(folder: Path) -> list[str]:
    """What this process has open or mapped below ``folder``."""
    process = psutil.Process()
    paths = [file.path for file in process.open_files()] + [area.path for area in process.memory_maps()]
    return [path for path in paths if path.startswith(str(folder))]


@LINUX
class TestOpenFiles:
    """Windows neither moves nor deletes them."""

    @pytest.mark.parametrize("weights", ["exact", "portable"])
    @pytest.mark.parametrize("role", ["target", "drafter"])
    def test_a_bundle_is_moved_when_all_is_closed(self, tmp_path: Path, role: Any, weights: Any) -> None:
        seen: list[list[str]] = []

        def look(folder: Path, out: Path) -> None:
            seen.append(held(folder))
            move(folder, out)

        source = tiny_gguf("llama").write(tmp_path / "m.gguf")
        with mock.patch.object(staging, "move", look):
            export_model(source, tmp_path / "out", options=ExportOptions(role=role, weights=weights))
        assert seen == [[]] and held(tmp_path) == []

    def test_a_model_that_is_closed_holds_nothing(self, tmp_path: Path, home: Path) -> None:
        source = tiny_gguf("llama").write(tmp_path / "m.gguf")
        with edgespec.load(source, source, options=LoadOptions(threads=1), history="me") as model:
            model.generate("hello", max_new_tokens=4)
            assert held(tmp_path)
        assert held(tmp_path) == []


@POSIX
def test_folders_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", "~no-such-user/models")
    with pytest.raises(RequestError, match="~no-such-user/models begins with an unknown user"):
        storage.home()
    with pytest.raises(RequestError, match="begins with an unknown user"):
        History("~no-such-user/me.history")


def test_where_nobody_reads_the_output_a_command_just_ends(home: Path) -> None:
    code = "from edgespec.cli import main; main()"
    command = [sys.executable, "-c", code, "models", "--json"]
    environment = {**os.environ, "EDGESPEC_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    with child.stderr:
        assert (child.wait(60), child.stderr.read()) == (1, b"")


def test_the_processor_has_a_name() -> None:
    assert describe_machine()["cpu"].strip()
