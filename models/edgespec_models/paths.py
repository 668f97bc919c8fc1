"""Where edgespec keeps files: ``EDGESPEC_HOME``, or the platform's cache folder; what folders are called."""

import os
from pathlib import Path

import platformdirs

__all__ = ["bundles_dir", "home", "measurements_dir", "model_name", "models_dir", "histories_dir"]


def home() -> Path:
    """The folder everything lies under; it need not exist yet."""
    override = os.environ.get("EDGESPEC_HOME")
    return (
        Path(override).expanduser() if override else platformdirs.user_cache_path("edgespec", appauthor=False)
    )


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


def model_name(folder: Path) -> str:
    """What a model's directory is called.

    In the hub's cache, ``models--OWNER--NAME/snapshots/COMMIT``, that is NAME; elsewhere its own name.
    """
    resolved = folder.resolve()
    cached = next((part for part in resolved.parts if part.startswith("models--")), None)
    return resolved.name if cached is None else cached.rpartition("--")[2]
