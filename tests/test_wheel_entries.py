"""Wheels whose archive is not what its lists say."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.wheel_entries import EntriesError, check_entries, digest

WHEEL = "Wheel-Version: 1.0\nTag: py3-none-win_amd64\n"
METADATA = "Metadata-Version: 2.4\nName: toy\nVersion: 1.0\n"


NOTHING: Mapping[str, str] = {}


def wheel(
    folder: Path,
    changed: Mapping[str, str] = NOTHING,
    tag: str = "win_amd64",
    more: Mapping[str, str] = NOTHING,
) -> Path:
    """A sound wheel with ``more`` files, but for the entries that are ``changed`` when RECORD is written."""
    info = "toy-1.0.dist-info"
    about = WHEEL.replace("win_amd64", tag)
    files = {"toy/a.py": "a = 1\n", f"{info}/METADATA": METADATA, f"{info}/WHEEL": about, **more}
    files |= {name: text for name, text in changed.items() if name.endswith(("WHEEL", "METADATA"))}
    rows = [f"{name},{digest(text.encode())},{len(text)}\n" for name, text in files.items()]
    path = folder / f"toy-1.0-py3-none-{tag}.whl"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, **changed}.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")
    return path


def test_a_sound_wheel(tmp_path: Path) -> None:
    assert check_entries(wheel(tmp_path)) == 4


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("toy/a.py", "a = 2\n", "other files than its RECORD: toy/a.py"),
        ("toy/b.py", "", "other files than its RECORD: toy/b.py"),
        ("toy-1.0.dist-info/WHEEL", WHEEL.replace("amd64", "arm64"), "its tag is py3-none-win_arm64"),
        ("toy-1.0.dist-info/METADATA", METADATA.replace("1.0", "1.1"), "that it is toy 1.1"),
        ("../b.py", "", "lead out"),
        ("toy/../../b.py", "", "lead out"),
        ("/b.py", "", "lead out"),
        ("C:b.py", "", "lead out"),
        ("toy/A.py", "", "case is nothing"),
    ],
)
def test_wheels_that_are_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(EntriesError, match=words):
        check_entries(wheel(tmp_path, {name: text}))


def test_a_wheel_cut_short(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(EntriesError, match="cannot be read"):
        check_entries(path)
