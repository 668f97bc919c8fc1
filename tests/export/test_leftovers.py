import os
import time
from pathlib import Path

from edgespec_models.storage import leftovers, own_name
from tests.export.test_export import NEVER_A_PROCESS


def found(folder: Path) -> list[str]:
    return sorted(path.name for path in leftovers(folder, ".x-"))


def test_only_what_a_dead_process_left_is_found(tmp_path: Path) -> None:
    dead = own_name(".x-", NEVER_A_PROCESS) + "a"
    for name in (dead, own_name(".x-") + "b", ".x-notes", ".x-1", ".x-12-old", ".x-mine@home-1"):
        (tmp_path / name).touch()
    assert found(tmp_path) == [dead]


def test_what_another_machine_makes_is_left_alone_for_a_day(tmp_path: Path) -> None:
    process, _, _ = own_name(".x-", NEVER_A_PROCESS).partition("@")
    (tmp_path / f"{process}@00c0ffee-a").touch()
    assert found(tmp_path) == []
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 90_000, time.time() - 90_000))
    assert len(found(tmp_path)) == 1
