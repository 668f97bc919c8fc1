"""Renaming what was just written, also where Windows' virus scanners look at it first."""

import sys
import time
from pathlib import Path
from typing import Final

__all__ = ["move"]

_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def move(source: Path, to: Path) -> None:
    """Rename a file, replacing one that is there, or a folder to a name that is free.

    Windows renames no file, and no folder with a file, that a program has open. Scanners and indexers open
    what was just written and let go of it within moments, so a refusal counts after three seconds only.
    """
    for pause in _PAUSES_S if sys.platform == "win32" else ():
        try:
            source.replace(to)
            return
        except PermissionError:
            time.sleep(pause)
    source.replace(to)
