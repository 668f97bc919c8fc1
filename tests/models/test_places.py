"""Places on disk that change while an export runs, that containers share, and files that are none."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import filelock
import pytest

from edgespec.loading.opening import open_model
from edgespec_export import staging
from edgespec_export.staging import check_place
from edgespec_models import storage
from edgespec_models.bundles.bundle import MANIFEST, Bundle
from edgespec_models.errors import EdgespecError, RequestError, StorageError
from edgespec_models.files.facts import Facts
from edgespec_models.schema import read_text
from edgespec_models.storage import leftovers, own_name, writing
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.gguf import tiny_gguf
from tests.kit.machines import LINUX, POSIX

Patch = pytest.MonkeyPatch


def export_to(out: Path, meanwhile: Callable[[], object], *, overwrite: bool = False) -> None:
    """What an export does at ``out``, while somebody else does something."""
    check = partial(check_place, out.parent, out, overwrite=overwrite, replaceable=(out / MANIFEST).is_file)
    with writing(out), staging.staging(out, check) as folder:
        (folder / MANIFEST).write_text("bundle")
        meanwhile()


def beside(out: Path) -> Path:
    """The only other folder beside ``out``; nothing hidden is left."""
    assert not [*out.parent.glob(".*")]
    (folder,) = (path for path in out.parent.iterdir() if path != out)
    return folder


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["folder", "file", "empty folder"])
def test_what_appears_at_the_place_of_an_export_stays(tmp_path: Path, kind: str, overwrite: bool) -> None:
    out = tmp_path / "out"

    def appear() -> None:
        if kind == "file":
            out.write_text("mine")
            return
        out.mkdir()
        if kind == "folder":
            (out / "thesis.txt").write_text("mine")

    if kind == "empty folder" and overwrite:
        export_to(out, appear, overwrite=True)
        assert (out / MANIFEST).read_text() == "bundle"
        return
    with pytest.raises(RequestError, match=r"out.*\. The new export is complete in .*out-.*use it") as caught:
        export_to(out, appear, overwrite=overwrite)
    assert (out.read_text() == "mine") if kind == "file" else not (out / MANIFEST).exists()
    assert (beside(out) / MANIFEST).read_text() == "bundle" and str(beside(out)) in str(caught.value)


def test_what_appears_between_the_check_and_the_move_stays(tmp_path: Path) -> None:
    out, checks = tmp_path / "out", list[bool]()

    def check() -> None:
        checks.append(out.exists())
        if len(checks) == 2:
            out.mkdir()
            (out / "thesis.txt").write_text("mine")

    with pytest.raises(StorageError, match=r"complete in .*out-"), staging.staging(out, check) as folder:
        (folder / MANIFEST).write_text("bundle")
    assert checks == [False, False] and (out / "thesis.txt").read_text() == "mine"
    assert (beside(out) / MANIFEST).is_file()


def test_the_second_of_two_exports_to_a_place_is_kept_beside_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RequestError, match=r"exists; choose .* The new export is complete in"):
        export_to(out, lambda: export_to(out, lambda: None))
    assert {path.name for path in tmp_path.iterdir()} == {"out", beside(out).name}


def test_an_export_whose_place_cannot_be_replaced_at_last_is_kept(tmp_path: Path, monkeypatch: Patch) -> None:
    """As on Windows, where a server has the old bundle mapped."""
    out = tmp_path / "out"
    export_to(out, lambda: None)

    def move(source: Path, to: Path) -> None:
        if source == out:
            raise PermissionError(13, "in use")
        source.replace(to)

    monkeypatch.setattr(staging, "move", move)
    with pytest.raises(StorageError, match=r"cannot replace .*out: .*in use.*complete in .*out-"):
        export_to(out, lambda: None, overwrite=True)
    assert (beside(out) / MANIFEST).is_file() and (out / MANIFEST).is_file()


@POSIX
def test_all_files_and_their_names_are_on_the_disk_before_they_get_their_place(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    synced, moved, fsync = list[tuple[int, int]](), list[int](), os.fsync

    def note(handle: int) -> None:
        facts = os.fstat(handle)
        synced.append((facts.st_ino, facts.st_size))
        fsync(handle)

    def move(source: Path, to: Path) -> None:
        moved.append(len(synced))
        source.replace(to)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(staging, "move", move)
    export_to(tmp_path / "out", lambda: None)
    manifest = (tmp_path / "out" / MANIFEST).stat()
    before, after = synced[: moved[0]], synced[moved[0] :]
    assert (manifest.st_ino, manifest.st_size) in before
    assert (tmp_path / "out").stat().st_ino in [number for number, _ in before]
    assert tmp_path.stat().st_ino in [number for number, _ in after]


def test_who_waits_for_the_export_of_another_process_is_told(
    tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tiny_gguf("llama", layers=1).write(tmp_path / "m.gguf")
    path = open_model(source, "target").path
    shutil.rmtree(path)
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), thread_local=False)

    class Release(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lock.release()

    log, release = logging.getLogger("edgespec"), Release()
    log.addHandler(release)
    try:
        with lock, caplog.at_level(logging.WARNING, logger="edgespec"):
            open_model(source, "target")
    finally:
        log.removeHandler(release)
    assert "another process is exporting m; waiting for it" in caplog.messages


@LINUX
def test_containers_of_one_name_leave_each_others_files_alone(tmp_path: Path) -> None:
    """Where this system lets a process be in a container of its own."""
    code = (
        "import sys; from edgespec_models.storage import own_name; sys.stdout.write(own_name('.x-', 4999999))"
    )
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    made = subprocess.run(
        [*command, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no container here: {made.stderr.strip()[-80:]}")
    (tmp_path / f"{made.stdout}a").touch()
    (tmp_path / f"{own_name('.x-', 4999999)}b").touch()
    assert [path.name for path in leftovers(tmp_path, ".x-")] == [f"{own_name('.x-', 4999999)}b"]


READERS: dict[str, Callable[[Path], object]] = {
    "facts": Facts.read,
    "texts": lambda path: read_text(path, EdgespecError, "Give another"),
    "a tokenizer": Tokenizer.from_file,
    "a manifest": lambda path: Bundle(path.parent),
}


@POSIX
@pytest.mark.parametrize("what", ["pipe", "device", "large"])
@pytest.mark.parametrize("reader", READERS)
def test_only_ordinary_files_of_bounded_size_are_read(tmp_path: Path, reader: str, what: str) -> None:
    path = tmp_path / MANIFEST
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, (256 << 20) + 1)  # with a hole, so it takes no room
    reason = "larger than" if what == "large" else "no ordinary file"
    with pytest.raises(EdgespecError, match=f"edgespec.json.*{reason}"):
        READERS[reader](path)


def test_lines_end_as_in_any_text(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert storage.read_text(tmp_path / "t", "utf-8-sig") == "a\nb\nc\n"
