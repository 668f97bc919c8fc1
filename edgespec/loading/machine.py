"""What figures were measured on: processor, memory, system, versions. Nothing that names a person or host."""

import hashlib
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["describe_machine", "fingerprint"]

_PACKAGES = ("edgespec", "onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers")


def describe_machine() -> dict[str, Any]:
    """Facts as JSON values: ``cpu``, ``cores``, ``logical_cores``, ``memory_bytes``, ``system``, versions."""
    import psutil

    return {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def fingerprint() -> dict[str, Any]:
    """What the speed and the bits of a pass depend on, as JSON values.

    ``cpu``, ``features`` (a digest of its instruction sets where the system lists them: virtual machines
    often hide the processor's name), cores, system, version of ONNX Runtime.
    """
    import psutil

    from edgespec_runtimes.ort import ort

    return {
        "cpu": _cpu_name(),
        "features": _features(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "onnxruntime": ort.__version__,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The processor's marketing name, else what the platform module knows."""
    try:
        name = _cpu_name_of_system()
    except (OSError, subprocess.SubprocessError):
        name = ""
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
    """Differs where instruction sets do; of systems that do not list them, what the platform module knows."""
    try:
        listed = _cpuinfo("flags", "Features") if sys.platform == "linux" else ""
    except OSError:
        listed = ""
    return hashlib.sha256((listed or platform.processor()).encode()).hexdigest()[:8]


def _cpuinfo(*names: str) -> str:
    """Linux's first line of one of ``names`` about its processors; empty where there is none."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return ""
