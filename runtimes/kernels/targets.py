"""The platforms that the library is built for, each with its compiler flags, file name and wheel tag."""

import platform
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMPILE = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Werror",
)

KERNELS = ("set_plain.cpp", "processor.cpp")
LIBRARY = (*KERNELS, "operators.cpp")
CHECK = (*KERNELS, "check.cpp")
"""Compiled for the baseline of the architecture: with the sets below, the library and its check."""

X86 = {
    "set_avx512.cpp": "x86_64_v3+avx512f+avx512bw+avx512dq+avx512vl+avx512cd+avx512vnni",
    "set_avxvnni.cpp": "x86_64_v3+avxvnni",
    "set_avx2.cpp": "x86_64_v3",
}
ARM = {
    "set_neon_dot.cpp": "generic+dotprod",
    "set_neon_i8mm.cpp": "generic+dotprod+i8mm",
}
"""Sources compiled for more than the baseline; they run on processors that have it."""


@dataclass(frozen=True)
class Target:
    """A platform: zig's name for it (empty: this machine's), its baseline, its wheels' tag."""

    name: str
    zig: str
    baseline: str
    sets: Mapping[str, str]
    tag: str
    suffix: str

    @property
    def static(self) -> str:
        """Zig's name for programs without a library of the platform; empty if all need one."""
        return f"{self.name}-musl" if self.suffix == ".so" and self.zig else ""

    @property
    def library(self) -> str:
        """The library's file name."""
        return f"edgespec_kernels{self.suffix}"

    @property
    def link(self) -> tuple[str, ...]:
        """The flags that make a library of object files.

        Otherwise on Linux another library's ``operator new``, with exceptions of another kind, could replace
        the linked one, and on macOS the library would keep the path of its build.
        """
        bound = {".so": ("-Wl,-Bsymbolic",), ".dylib": ("-install_name", f"@rpath/{self.library}")}
        return ("-shared", "-s", *bound.get(self.suffix, ()))

    def processors(self, sources: Sequence[str]) -> dict[str, str]:
        """``sources`` and the sets, each with the processor it is compiled for in zig's words."""
        return dict.fromkeys(sources, self.baseline) | dict(self.sets)


TARGETS = (
    Target("x86_64-linux", "x86_64-linux-gnu.2.28", "x86_64", X86, "manylinux_2_28_x86_64", ".so"),
    Target("aarch64-linux", "aarch64-linux-gnu.2.28", "generic", ARM, "manylinux_2_28_aarch64", ".so"),
    Target("x86_64-windows", "x86_64-windows-gnu", "x86_64", X86, "win_amd64", ".dll"),
    Target("aarch64-windows", "aarch64-windows-gnu", "generic", ARM, "win_arm64", ".dll"),
    Target("aarch64-macos", "aarch64-macos.11.0", "generic", ARM, "macosx_11_0_arm64", ".dylib"),
)

MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}
SYSTEMS = {"Linux": "linux", "Windows": "windows", "Darwin": "macos"}
SUFFIXES = {"Windows": ".dll", "Darwin": ".dylib"}


def native_target() -> Target:
    """This machine's target; if the table has none, zig's own choice."""
    place = sysconfig.get_platform()  # the platform of this Python, which the machine may only emulate
    machine = platform.machine() if place.endswith("universal2") else place.rpartition("-")[2]
    machine = MACHINES.get(machine.lower(), machine)
    name = f"{machine}-{SYSTEMS.get(platform.system(), '')}"
    known = next((target for target in TARGETS if target.name == name), None)
    if known is not None and (platform.system() != "Linux" or has_glibc()):
        return known
    sets = {"x86_64": X86, "aarch64": ARM}.get(machine, {})
    tag = place.replace("-", "_").replace(".", "_")
    return Target("native", "", "baseline", sets, tag, SUFFIXES.get(platform.system(), ".so"))


def has_glibc() -> bool:
    """Whether this machine's C library is glibc 2.28 or newer."""
    name, version = platform.libc_ver()
    return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 28)
