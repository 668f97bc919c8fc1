"""edgespec's own operators for ONNX Runtime on CPUs: the library beside this file (``runtimes/kernels``)."""

import ctypes
import sys
from pathlib import Path
from typing import Any, Final

from edgespec_models.errors import DeviceError
from edgespec_runtimes.ort import RUN_ERRORS, lacks_memory

INSTRUCTIONS: Final = ("avx512", "avxvnni", "avx2", "neon_i8mm", "neon_dot", "plain")
"""Sets of instructions that there are kernels for, the fastest first; every processor has ``plain``."""

_SETTING: Final = "edgespec.instructions"
_HUGE_PAGES: Final = "edgespec.huge_pages"
_SUFFIXES: Final = {"win32": "dll", "darwin": "dylib"}
_REMEDY: Final = (
    "Install edgespec again, from a package for this platform; or use models exported with "
    "--weights portable, which need no kernels of edgespec's own"
)


def library() -> Path:
    """The library for this platform.

    Raises:
        DeviceError: it is missing.
    """
    path = Path(__file__).with_name(f"edgespec_kernels.{_SUFFIXES.get(sys.platform, 'so')}")
    if not path.is_file():
        raise DeviceError(f"edgespec's kernels for this platform are missing: there is no {path}. {_REMEDY}.")
    return path


def register(settings: Any, instructions: str = "", *, huge_pages: bool = False) -> None:
    """Make the operators known to sessions with these ``settings``, ONNX Runtime's ``SessionOptions``.

    Args:
        settings: of sessions to come.
        instructions: one of :data:`INSTRUCTIONS`; empty takes the best that the processor has. All compute
            the same bits.
        huge_pages: copy weights into huge pages, where the system has them.

    Raises:
        DeviceError: the library is missing or cannot be loaded, or the processor lacks the instructions.
    """
    if instructions and instructions not in INSTRUCTIONS:
        raise DeviceError(
            f"instructions {instructions!r} are not known; allowed: {', '.join(INSTRUCTIONS)}, or none for "
            "the best that the processor has"
        )
    path = library()
    if huge_pages:
        settings.add_session_config_entry(_HUGE_PAGES, "1")
    if instructions:
        settings.add_session_config_entry(_SETTING, instructions)
    try:
        settings.register_custom_ops_library(str(path))
    except RUN_ERRORS as error:
        if lacks_memory(error):
            raise DeviceError(f"not enough memory to load {path.name}; free some") from error
        if "no instructions called" not in str(error):
            raise _unusable(path, error) from error
        raise DeviceError(
            f"this processor has no instructions {instructions!r}; name none for the best that it has, "
            f"{best_instructions()}"
        ) from error


def best_instructions() -> str:
    """The one of :data:`INSTRUCTIONS` that sessions use where none is named.

    Raises:
        DeviceError: the library is missing or cannot be loaded.
    """
    path = library()
    try:
        ask = ctypes.CDLL(str(path)).edgespec_instructions
    except (OSError, AttributeError) as error:
        raise _unusable(path, error) from error
    ask.argtypes, ask.restype = [], ctypes.c_char_p
    name: bytes = ask()
    return name.decode("ascii")


def _unusable(path: Path, error: Exception) -> DeviceError:
    return DeviceError(f"edgespec's kernels in {path} cannot be loaded: {error}. {_REMEDY}.")
