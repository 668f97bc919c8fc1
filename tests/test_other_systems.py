"""What Windows and macOS do otherwise than Linux, which fakes do here."""

import errno
import io
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

import edgespec
from edgespec import LoadOptions
from edgespec.cli import main
from edgespec.history.manage import History
from edgespec.loading.measurements import describe_machine
from edgespec_export import staging
from edgespec_export.export import ExportOptions, export_model
from edgespec_models import storage
from edgespec_models.errors import RequestError
from edgespec_models.storage import move, write_text
from edgespec_runtimes.memory import peak_memory_bytes
from tests.gguf_for_tests import tiny_gguf

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")


class TestMoves:
    """Windows renames nothing that a program has open, as a virus scanner has what was just written."""

    @pytest.fixture
    def pauses(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """The pauses that are made, of which renames need two, or as many as it says."""
        made, replace = list[float](), Path.replace

        def refuse(path: Path, to: Path) -> Path:
            if len(made) < self.needed:
                raise PermissionError(errno.EACCES, "Access is denied", str(path))
            return replace(path, to)

        self.needed = 2
        monkeypatch.setattr(Path, "replace", refuse)
        monkeypatch.setattr(time, "sleep", made.append)
        return made

    def test_files_and_folders_get_there(self, tmp_path: Path, windows: None, pauses: list[float]) -> None:
        with staging.staging(tmp_path / "out") as folder:
            (folder / "file").write_bytes(b"content")
        assert (tmp_path / "out" / "file").read_bytes() == b"content" and pauses == [0.05, 0.1]
        pauses.clear()
        write_text(tmp_path / "file", "text")
        assert (tmp_path / "file").read_text(encoding="utf-8") == "text" and len(pauses) == 2

    def test_a_refusal_that_lasts_is_one(self, tmp_path: Path, windows: None, pauses: list[float]) -> None:
        self.needed = 1000
        with pytest.raises(PermissionError):
            move(tmp_path / "a", tmp_path / "b")
        assert 2 < sum(pauses) < 5

    def test_elsewhere_a_refusal_counts_at_once(self, tmp_path: Path, pauses: list[float]) -> None:
        with pytest.raises(PermissionError):
            move(tmp_path / "a", tmp_path / "b")
        assert not pauses


def held(folder: Path) -> list[str]:
    """What this process has open or mapped below ``folder``."""
    process = psutil.Process()
    paths = [file.path for file in process.open_files()] + [each.path for each in process.memory_maps()]
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


def test_folders_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = mock.Mock(side_effect=RuntimeError("Could not determine home directory."))
    monkeypatch.setattr(Path, "expanduser", unknown)
    monkeypatch.setenv("EDGESPEC_HOME", "~nobody/models")
    with pytest.raises(RequestError, match="~nobody/models begins with a user who has no folder"):
        storage.home()
    with pytest.raises(RequestError, match="begins with a user who has no folder"):
        History("~nobody/me.history")


class TestPipes:
    """Windows says EINVAL of a pipe that nobody reads, others EPIPE: either way the command just ends."""

    class Closed(io.RawIOBase):
        def __init__(self, number: int) -> None:
            self.number: int | None = number

        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            if self.number is None:
                return len(bytes(data))  # type: ignore[call-overload]
            number, self.number = self.number, None  # what is flushed at the end is of no interest
            raise OSError(number, os.strerror(number))

    @pytest.mark.usefixtures("own_signals", "consoles")
    @pytest.mark.parametrize(("number", "platform"), [(errno.EPIPE, sys.platform), (errno.EINVAL, "win32")])
    def test_nobody_reads(self, monkeypatch: pytest.MonkeyPatch, number: int, platform: str) -> None:
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(self.Closed(number)), "utf-8"))
        monkeypatch.setattr(sys, "argv", ["edgespec", "models", "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1


@pytest.mark.usefixtures("own_signals")
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="the fake is a signal of POSIX")
def test_ctrl_break_ends_by_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    monkeypatch.setattr(sys, "argv", ["edgespec", "--version"])
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(SystemExit):
            main()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.value.code == 128 + signal.SIGUSR1


class TestMachines:
    """Names of processors and the memory of a process, from where each system has them."""

    def test_windows(self, windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
        def value(key: str, name: str) -> tuple[str, int]:
            assert (key, name) == ("opened", "ProcessorNameString")
            return "A Processor  ", 1

        fake = SimpleNamespace(HKEY_LOCAL_MACHINE=1, QueryValueEx=value)
        fake.OpenKey = lambda *_: nullcontext("opened")
        monkeypatch.setitem(sys.modules, "winreg", fake)
        assert describe_machine()["cpu"] == "A Processor"
        memory = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=12345))
        monkeypatch.setattr(psutil, "Process", lambda: memory)
        assert peak_memory_bytes() == 12345

    @pytest.mark.parametrize(("said", "name"), [(b"Apple M9\n", "Apple M9"), (b"\xff\n", "\ufffd")])
    def test_macos(self, monkeypatch: pytest.MonkeyPatch, said: bytes, name: str) -> None:
        def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[bytes]":
            assert command[-1] == "machdep.cpu.brand_string"
            return subprocess.CompletedProcess(command, 0, said)

        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(subprocess, "run", run)
        assert describe_machine()["cpu"] == name
