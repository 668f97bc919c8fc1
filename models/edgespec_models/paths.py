"""Where edgespec keeps files: ``EDGESPEC_HOME``, or the platform's cache folder."""

import os
from pathlib import Path

import platformdirs

__all__ = ["bundles_dir", "home", "models_dir"]


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
