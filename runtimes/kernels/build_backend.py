"""Builds wheels and editable installs: setuptools' own backend (PEP 517), with the library compiled first.

A wheel is for one platform: this machine's, or the setting ``target``, as in ``pip wheel --config-settings
target=aarch64-linux .``. An editable install has the library in the checkout, beside the package's modules.
"""

import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from setuptools import build_meta

from compiling import SOURCES, BuildError, library
from targets import TARGETS, Target, native_target

PACKAGE = SOURCES.parent / "edgespec_runtimes"

Settings = Mapping[str, str | list[str] | None]

build_sdist = build_meta.build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Make a wheel for the target, with the library in the folder that setuptools gathers.

    The folder belongs to this build alone, so nothing of another target gets in.
    """
    settings = dict(config_settings or {})
    target = target_of(settings.pop("target", None))
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "lib", PACKAGE.name)
        package.mkdir(parents=True)
        shutil.copyfile(library_of(target), package / target.library)
        add(settings, "--global-option", ["build", "--build-base", folder])
        add(settings, "--build-option", ["--plat-name", target.tag])
        return str(build_meta.build_wheel(wheel_directory, settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Put the library into the checkout, and make a wheel that points there."""
    target = native_target()
    put(library_of(target), PACKAGE / target.library)
    return str(build_meta.build_editable(wheel_directory, config_settings, metadata_directory))


def target_of(name: str | list[str] | None) -> Target:
    """The target called ``name``; this machine's if there is none."""
    if name is None:
        return native_target()
    for target in TARGETS:
        if target.name == name:
            return target
    known = ", ".join(target.name for target in TARGETS)
    raise SystemExit(f"edgespec: no target is called {name}; there are {known}")


def library_of(target: Target) -> Path:
    """The library. If it cannot be compiled, only the reason is shown."""
    try:
        return library(target)
    except BuildError as error:
        raise SystemExit(f"edgespec: {error}") from error


def put(made: Path, to: Path) -> None:
    """Put a copy of ``made`` at ``to`` in one step, unless it is there: a process may have it loaded."""
    content = made.read_bytes()
    if to.exists() and to.read_bytes() == content:
        return
    try:
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=".making-") as folder:
            copy = Path(folder) / to.name
            copy.write_bytes(content)
            copy.chmod(0o755)
            copy.replace(to)
    except OSError as error:
        advice = (
            "close programs that use edgespec, and install from a checkout in a folder that you can write to"
        )
        raise SystemExit(f"edgespec: {to} cannot be written ({error.strerror}); {advice}") from error


def add(settings: dict[str, str | list[str] | None], name: str, values: list[str]) -> None:
    """Put ``values`` before a setting's own values, which take precedence."""
    stated = settings.get(name) or []
    settings[name] = [*values, *(shlex.split(stated) if isinstance(stated, str) else stated)]
