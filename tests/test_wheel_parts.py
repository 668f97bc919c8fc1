"""The list of parts that a wheel gets."""

import json
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.test_wheel_entries import wheel
from tools.wheel_entries import check_entries

WHY = "needs the extra 'release', which the gate does without"
pytest.importorskip("cyclonedx", reason=WHY)
pytest.importorskip("wheel", reason=WHY)


@pytest.mark.parametrize("tag", ["win_amd64", "manylinux_2_28_aarch64", "macosx_11_0_arm64"])
def test_a_wheel_lists_what_it_contains(tmp_path: Path, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    from tools.wheel_parts import add_parts

    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    files = {"toy/head.safetensors": "", "toy/head.toml": 'licence = "MIT"\n'}
    made = [wheel(tmp_path / name, tag=tag, more=files) for name in ("one", "two")]
    for path in made:
        add_parts(path)
    assert made[0].read_bytes() == made[1].read_bytes()
    assert check_entries(made[0]) == 7
    with ZipFile(made[0]) as archive:
        text = archive.read("toy-1.0.dist-info/sboms/edgespec.cdx.json").decode("utf-8")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    listed = json.loads(text)
    parts = {part["name"]: part["licenses"][0] for part in listed["components"]}
    start = {"win_amd64": ["start files of mingw-w64"], "manylinux_2_28_aarch64": ["start files of glibc"]}
    always = {"compiler-rt of zig", "libc++, libc++abi and libunwind", "head.safetensors"}
    assert set(parts) == always.union(start.get(tag, []))
    assert parts["head.safetensors"] == {"expression": "MIT"} and all(parts.values())
    assert listed["metadata"]["component"]["version"] == "1.0"
