"""Pulling models from the hub: whole, resumed, broken, refused."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest

from edgespec_models.downloads.download import model_path, pull
from edgespec_models.downloads.hub_http import LostError, within
from edgespec_models.errors import DownloadError
from edgespec_models.progress import Progress
from tests.downloads_for_tests import BOTH, CONTENT, FROM_HUB, assert_whole
from tests.hub_stand_in import Hub

pytestmark = pytest.mark.usefixtures("home")


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


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_ctrl_c_ends_a_stalled_download_at_once(
    home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "60")
    hub.stalls_after = 100_000
    part = home / "toy.gguf.hub.part"
    # A shell starts what it runs in the background with the signal ignored, and children inherit that.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    found = "from edgespec_models.downloads.download import pull"
    work = f"{found}\nfrom tests.downloads_for_tests import FROM_HUB\n"
    command, root = [sys.executable, "-c", f"{heed}\n{work}pull(FROM_HUB)"], Path(__file__).parents[1]
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
