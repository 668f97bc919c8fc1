"""Puts into a wheel the list of its parts, with licences: CycloneDX, in ``.dist-info/sboms`` (PEP 770).

``tools/wheels.py`` does so with every wheel that it makes. Needs the packages ``cyclonedx-python-lib`` and
``wheel``. The texts of the licences are those in ``LICENSES``, which setuptools puts beside (PEP 639).
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6


def add_parts(wheel: Path) -> None:
    """Write the list into ``wheel``, in place; times in it are ``SOURCE_DATE_EPOCH``, if that is set."""
    tool = (sys.executable, "-m", "wheel")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run((*tool, "unpack", wheel, "--dest", folder), check=True, capture_output=True)
        (unpacked,) = Path(folder).iterdir()
        (info,) = unpacked.glob("*.dist-info")
        (info / "sboms").mkdir()
        text = listed(unpacked, wheel.name) + "\n"
        (info / "sboms" / "edgespec.cdx.json").write_text(text, encoding="utf-8", newline="\n")
        subprocess.run((*tool, "pack", unpacked, "--dest", wheel.parent), check=True, capture_output=True)


def listed(unpacked: Path, name: str) -> str:
    """The list of the wheel called ``name``."""
    package, version, *_ = name.split("-")
    purl = f"pkg:pypi/{package}@{version}?file_name={name}"
    whole = Component(name=package, version=version, bom_ref=purl, licenses=[LicenseExpression("Apache-2.0")])
    moment = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    about = BomMetaData(component=whole, timestamp=datetime.fromtimestamp(moment, UTC))
    inside = [*compiled_in(name), *models(unpacked)]
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, purl), metadata=about, components=inside)
    bom.register_dependency(whole, inside)
    return str(JsonV1Dot6(bom).output_as_string(indent=1))


def compiled_in(name: str) -> Iterator[Component]:
    """What zig links into the library besides our code."""
    found = importlib.util.find_spec("ziglang")
    assert found is not None and found.origin is not None  # it has compiled the library
    config = Path(found.origin).with_name("lib") / "libcxx/include/__config"
    (llvm,) = re.findall(r"define _LIBCPP_VERSION (\d\d)(\d\d)(\d\d)", config.read_text(encoding="utf-8"))
    zig = importlib.metadata.version("ziglang")
    parts = [("compiler-rt of zig", zig, LicenseExpression("MIT"))]
    parts += [
        (
            part,
            ".".join(str(int(number)) for number in llvm),
            LicenseExpression("Apache-2.0 WITH LLVM-exception"),
        )
        for part in ("libc++", "libc++abi", "libunwind")
    ]
    if "-win_" in name:
        parts.append(("start files of mingw-w64", f"as in zig {zig}", LicenseExpression("ZPL-2.1")))
    if "-manylinux_" in name:
        terms = DisjunctiveLicense(name="LGPL-2.1-or-later, with unlimited permission to link")
        parts.append(("start files of glibc", f"as in zig {zig}", terms))
    for part, version, terms in parts:
        yield Component(name=part, version=version, bom_ref=part, licenses=[terms])


def models(unpacked: Path) -> Iterator[Component]:
    """What the catalogue brings of models, under the licence that it names."""
    for path in sorted(unpacked.rglob("*.safetensors")):
        terms = tomllib.loads(path.with_suffix(".toml").read_text(encoding="utf-8"))["licence"]
        kind = ComponentType.MACHINE_LEARNING_MODEL
        yield Component(name=path.name, type=kind, bom_ref=path.name, licenses=[LicenseExpression(terms)])
