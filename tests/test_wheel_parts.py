"""The list of parts that a wheel gets."""

import base64
import hashlib
import json
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

WHY = "needs the extra 'release', which the gate does without"
pytest.importorskip("cyclonedx", reason=WHY)
pytest.importorskip("wheel", reason=WHY)


INFO = "toy-1.0.dist-info"


def wheel(folder: Path, tag: str, changed: dict[str, str] | None = None) -> Path:
    """A sound wheel, but for the files that are ``changed`` behind RECORD's back."""
    files = {
        "toy/head.safetensors": "",
        "toy/head.toml": 'licence = "MIT"\n',
        f"{INFO}/METADATA": "Metadata-Version: 2.4\nName: toy\nVersion: 1.0\n",
        f"{INFO}/WHEEL": f"Wheel-Version: 1.0\nTag: py3-none-{tag}\n",
    }
    hashes = {name: hashlib.sha256(text.encode()).digest() for name, text in files.items()}
    texts = {name: base64.urlsafe_b64encode(digest).decode().rstrip("=") for name, digest in hashes.items()}
    record = [f"{name},sha256={text},{len(files[name])}" for name, text in texts.items()]
    folder.mkdir(exist_ok=True)
    path = folder / f"toy-1.0-py3-none-{tag}.whl"
    with ZipFile(path, "w") as archive:
        for name, text in (files | (changed or {})).items():
            archive.writestr(name, text)
        archive.writestr(f"{INFO}/RECORD", "\n".join([*record, f"{INFO}/RECORD,,\n"]))
    return path


def test_a_wheel_that_is_not_as_its_record_says_is_refused(tmp_path: Path) -> None:
    from tools.wheel_parts import add_parts

    with pytest.raises(subprocess.CalledProcessError):
        add_parts(wheel(tmp_path, "win_amd64", {"toy/head.safetensors": "changed"}))


@pytest.mark.parametrize("tag", ["win_amd64", "manylinux_2_28_aarch64", "macosx_11_0_arm64"])
def test_a_wheel_lists_what_it_contains(tmp_path: Path, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    from tools.wheel_parts import add_parts

    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    made = [wheel(tmp_path / name, tag) for name in ("one", "two")]
    for path in made:
        add_parts(path)
    assert made[0].read_bytes() == made[1].read_bytes()
    with ZipFile(made[0]) as archive:
        text = archive.read(f"{INFO}/sboms/edgespec.cdx.json").decode("utf-8")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    listed = json.loads(text)
    parts = {part["name"]: part["licenses"][0] for part in listed["components"]}
    start = {"win_amd64": ["start files of mingw-w64"], "manylinux_2_28_aarch64": ["start files of glibc"]}
    always = {"compiler-rt of zig", "libc++, libc++abi and libunwind", "head.safetensors"}
    assert set(parts) == always.union(start.get(tag, []))
    assert parts["head.safetensors"] == {"expression": "MIT"} and all(parts.values())
    assert listed["metadata"]["component"]["version"] == "1.0"
