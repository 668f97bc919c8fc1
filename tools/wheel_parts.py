"""Puts into a wheel the list of its parts, with licences: CycloneDX, in ``.dist-info/sboms`` (PEP 770).

Needs the packages ``cyclonedx-python-lib`` and ``wheel``. The licences' texts are in ``LICENSES``, from where
setuptools takes them into wheels (PEP 639).
"""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from datetime import UTC, datetime
from pathlib import Path

from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6

LINKED = {
    "compiler-rt of zig": ("", "MIT"),
    "libc++, libc++abi and libunwind": ("", "Apache-2.0 WITH LLVM-exception"),
    "start files of mingw-w64": ("-win_", "ZPL-2.1"),
    "start files of glibc": ("-manylinux_", "LGPL-2.1-or-later WITH GCC-exception-2.0"),
}
"""What zig links into libraries besides our code: where a wheel's name has this, under these terms."""


def add_parts(wheel: Path) -> None:
    """Write the list into ``wheel``, in place; its time is ``SOURCE_DATE_EPOCH``, if that is set.

    Unpacking compares every file with RECORD: of the wheel as it was, and as it is then.
    """
    tool = (sys.executable, "-m", "wheel")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run((*tool, "unpack", wheel, "--dest", folder), check=True, capture_output=True)
        (unpacked,) = Path(folder).iterdir()
        sboms = next(unpacked.glob("*.dist-info")) / "sboms"
        sboms.mkdir()
        (sboms / "edgespec.cdx.json").write_text(listed(unpacked, wheel.name), encoding="utf-8", newline="\n")
        subprocess.run((*tool, "pack", unpacked, "--dest", wheel.parent), check=True, capture_output=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run((*tool, "unpack", wheel, "--dest", folder), check=True, capture_output=True)


def listed(unpacked: Path, name: str) -> str:
    """The list for the wheel called ``name``: what is linked in, and models, by the catalogue's licences."""
    zig = f"as in zig {importlib.metadata.version('ziglang')}"
    parts = [(part, zig, terms) for part, (where, terms) in LINKED.items() if where in name]
    for path in sorted(unpacked.rglob("*.safetensors")):
        entry = tomllib.loads(path.with_suffix(".toml").read_text(encoding="utf-8"))
        parts.append((path.name, "", entry["licence"]))
    package, version, *_ = name.split("-")
    whole, *inside = (
        Component(name=part, version=number, bom_ref=part, licenses=[LicenseExpression(terms)])
        for part, number, terms in [(package, version, "Apache-2.0"), *parts]
    )
    moment = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())), UTC)
    about = BomMetaData(component=whole, timestamp=moment)
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, name), metadata=about, components=inside)
    bom.register_dependency(whole, inside)
    return str(JsonV1Dot6(bom).output_as_string(indent=1))
