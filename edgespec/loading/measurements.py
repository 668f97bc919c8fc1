"""Measurements that loading made of a bundle on this machine, kept for the next load.

One small JSON file for each set of :class:`Conditions`, in ``measurements`` under ``EDGESPEC_HOME`` or the
platform's cache folder. Deleting a file, or all of them, is safe: the next load measures again. Files that
are damaged, of another format or of other conditions count as missing, and are written anew. If the folder
cannot be written, there is a warning, and every load measures. Files are replaced whole, so processes that
load at the same time do not disturb each other: the last one's file stays.
"""

import hashlib
import json
import logging
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.kept import types_of
from edgespec_models.errors import EdgespecError
from edgespec_models.schema import read
from edgespec_models.storage import measurements_dir, read_text, write_text
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.cpu import CpuOptions, default_threads, library_digest
from edgespec_runtimes.ort import ort

_PACKAGES = ("edgespec", "onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers")
_FORMAT = 4  # earlier ones may hold falling times of a machine under load, or do not say what is confirmed
_LARGEST_FILE = 1 << 16
_LOG = logging.getLogger("edgespec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions that a measurement depends on.

    ``device`` is ``cpu``, or name and version of another; ``options`` say how many threads. ``kept`` are the
    types of the KV cache. ``machine`` is processor, cores, system, the version of ONNX Runtime and the
    kernels' library.
    """

    bundle: str
    device: str
    options: CpuOptions
    kept: str
    machine: dict[str, Any]

    @classmethod
    def of(cls, bundle: Bundle, options: CpuOptions, device: str = "cpu") -> "Conditions":
        """The conditions of ``bundle`` on this machine, run with ``options`` on ``device``."""
        return cls(
            bundle=bundle.digest,
            device=device,
            options=replace(options, threads=options.threads or default_threads()),
            kept=types_of(bundle.manifest.kept),
            machine=_fingerprint(),
        )

    @property
    def path(self) -> Path:
        """The file for these conditions; it need not exist."""
        key = json.dumps(asdict(self), sort_keys=True)
        return measurements_dir() / f"{self.bundle}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The results of a measurement.

    Attributes:
        row_exact: the session's self-test: it can roll back, and passes give the same bits for any number
            of rows, or not. A property of graph, kernels and processor, so on the CPU it need not be
            tested again.
        curve: T(n); has a point for one row.
    """

    row_exact: bool
    curve: CostCurve


def recall(conditions: Conditions) -> Measurement | None:
    """The measurement under these conditions; None if there is none."""
    path = conditions.path
    try:
        return _parsed(json.loads(read_text(path, most=_LARGEST_FILE)), conditions)
    except FileNotFoundError:
        return None
    except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError, EdgespecError) as error:
        _LOG.debug("%s is ignored: %s", path, error)
        return None


def remember(conditions: Conditions, measurement: Measurement) -> None:
    """Keep a measurement, if the folder can be written."""
    known = {"format": _FORMAT, "conditions": asdict(conditions), "row_exact": measurement.row_exact}
    value = known | asdict(measurement.curve)
    path = conditions.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(value, indent=2) + "\n")
    except (OSError, EdgespecError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        _warn(path.parent, getattr(cause, "strerror", None) or str(error))


@cache  # once, however many models are loaded
def _warn(folder: Path, reason: str) -> None:
    _LOG.warning(
        "every load takes longer, because measurements cannot be written to %s: %s. Mend that, or set "
        "EDGESPEC_HOME to another folder",
        folder,
        reason,
    )


def discard(conditions: Conditions) -> None:
    """Have the next load measure again."""
    try:
        conditions.path.unlink(missing_ok=True)
    except OSError as error:
        _LOG.debug("%s cannot be deleted: %s", conditions.path, error)


def _parsed(value: Any, conditions: Conditions) -> Measurement:
    """Parse a measurement of these conditions. Bad values raise what JSON values may raise."""
    if value.pop("format") != _FORMAT or value.pop("conditions") != asdict(conditions):
        raise ValueError("of another format or other conditions")
    row_exact = value.pop("row_exact")
    curve = read(CostCurve, value, "the curve", EdgespecError, "It is measured anew")
    points = {int(rows): seconds for rows, seconds in curve.seconds_by_rows.items()}
    if not isinstance(row_exact, bool) or 1 not in points or min(points) < 1:
        raise ValueError(f"row_exact is {row_exact!r}, and passes have {[*points]} rows")
    return Measurement(row_exact, replace(curve, seconds_by_rows=points))


def describe_machine() -> dict[str, Any]:
    """The machine that figures were measured on, as JSON values that name no person or host."""
    packages = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    memory = {"memory_bytes": psutil.virtual_memory().total, "python": platform.python_version()}
    return {**_hardware(), **memory, "packages": packages}


def _fingerprint() -> dict[str, Any]:
    """The conditions that decide the speed and the bits of a pass, as JSON values.

    ``features`` is a digest of the processor's instruction sets: virtual machines often hide its name.
    ``kernels`` is a digest of edgespec's kernels, so that an upgrade measures anew.
    """
    kernels = library_digest()
    return {**_hardware(), "features": _features(), "onnxruntime": ort.__version__, "kernels": kernels}


def _hardware() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The processor's marketing name, or the platform module's name for it."""
    name = ""
    with suppress(OSError, subprocess.SubprocessError):
        name = _cpu_name_of_system()
    return name or platform.processor() or platform.machine()


def _cpu_name_of_system() -> str:
    if sys.platform == "win32":
        import winreg

        key = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as processor:
            return str(winreg.QueryValueEx(processor, "ProcessorNameString")[0]).strip()
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, timeout=5, check=True)
        return done.stdout.decode(errors="replace").strip()
    return _cpuinfo("model name", "Model")


def _features() -> str:
    """A text that differs between instruction sets, or the platform module's name where none are listed."""
    listed = ""
    with suppress(OSError):
        listed = _cpuinfo("flags", "Features") if sys.platform == "linux" else ""
    return hashlib.sha256((listed or platform.processor()).encode()).hexdigest()[:8]


def _cpuinfo(*names: str) -> str:
    """The first line under one of ``names`` in Linux's list of processors; empty if there is none."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return ""
