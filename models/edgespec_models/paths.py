"""Where edgespec keeps files: ``EDGESPEC_HOME``, or the platform's cache folder; what folders are called."""

import os
from pathlib import Path

import platformdirs

from edgespec_models.errors import RequestError


def home() -> Path:
    """The folder everything lies under; it need not exist yet."""
    override = os.environ.get("EDGESPEC_HOME")
    return expanded(override) if override else platformdirs.user_cache_path("edgespec", appauthor=False)


def models_dir() -> Path:
    """Where pulled checkpoints lie."""
    return home() / "models"


def bundles_dir() -> Path:
    """Where bundles exported on first use lie."""
    return home() / "bundles"


def measurements_dir() -> Path:
    """Where it is kept what models cost on this machine. May be deleted at any time."""
    return home() / "measurements"


def histories_dir() -> Path:
    """Where histories lie: no cache, since no download brings them back."""
    override = os.environ.get("EDGESPEC_HOME")
    base = home() if override else platformdirs.user_data_path("edgespec", appauthor=False)
    return base / "histories"


def is_file(path: Path) -> bool:
    """Whether there is this file, whose name may be one that no system allows."""
    try:
        return path.is_file()
    except OSError:
        return False


def expanded(path: str | Path) -> Path:
    """``path`` with the folder of the user that it begins with, ``~`` or ``~name``.

    Raises:
        RequestError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{path} begins with a user who has no folder; write the folder out") from error


def model_name(folder: Path) -> str:
    """What a model's directory is called.

    In the hub's cache, ``models--OWNER--NAME/snapshots/COMMIT``, that is NAME; elsewhere its own name.
    """
    resolved = folder.resolve()
    cached = next((part for part in resolved.parts if part.startswith("models--")), None)
    return resolved.name if cached is None else cached.rpartition("--")[2]
