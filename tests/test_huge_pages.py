"""Memory that is moved into huge pages, and the many systems where nothing is to be done."""

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec_runtimes import huge_pages as module
from edgespec_runtimes.huge_pages import _page_size, _without, huge_pages

ranges = st.lists(st.integers(0, 60), unique=True, max_size=12).map(
    lambda ends: list(zip(*[iter(sorted(ends[: len(ends) // 2 * 2]))] * 2, strict=True))
)


def _members(some: list[tuple[int, int]]) -> set[int]:
    return {at for start, end in some for at in range(start, end)}


@given(ranges, ranges)
def test_what_was_there_before_is_left_out(now: list[tuple[int, int]], before: list[tuple[int, int]]) -> None:
    new = list(_without(now, before))
    assert _members(new) == _members(now) - _members(before)
    assert all(start < end for start, end in new)


@pytest.mark.skipif(_page_size() is None, reason="this system gives no huge pages on request")
def test_a_large_allocation_is_moved_and_keeps_its_contents() -> None:
    with huge_pages():
        memory = mmap.mmap(
            -1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )  # malloc may hand out what was there before
        memory.write(b"edgespec" * (2 << 20))
    block = np.frombuffer(memory, np.uint8)
    assert block.tobytes() == b"edgespec" * (2 << 20)
    assert _huge_kib(block.ctypes.data + block.nbytes // 2) >= 8 << 10


def _huge_kib(address: int) -> int:
    """KiB of huge pages in the mapping around an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "AnonHugePages:":
            return int(line.split()[1])
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("setting", ["[always] madvise never", "always madvise [never]", None])
def test_where_nobody_has_to_ask_or_nobody_is_heard_nothing_is_done(
    setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SYSTEM", tmp_path)
    monkeypatch.setattr(module, "_MAPS", tmp_path / "not read")
    if setting is not None:
        (tmp_path / "enabled").write_text(setting, encoding="ascii")
        (tmp_path / "hpage_pmd_size").write_text("2097152\n", encoding="ascii")
    with huge_pages():
        pass


def test_where_the_mappings_cannot_be_read_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_page_size", lambda: 2 << 20)
    monkeypatch.setattr(module, "_MAPS", tmp_path / "hidden")
    with huge_pages():
        (tmp_path / "hidden").touch()
    with huge_pages():
        (tmp_path / "hidden").unlink()


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert _page_size() is None


def test_what_goes_wrong_within_is_not_hidden() -> None:
    with pytest.raises(MemoryError), huge_pages():
        raise MemoryError
