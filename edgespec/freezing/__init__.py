"""The hooks with which PyInstaller freezes apps; it finds them by an entry point, so apps need no options."""

from pathlib import Path


def hook_dirs() -> list[str]:
    """Where the hooks lie (entry point ``hook-dirs`` of ``pyinstaller40``)."""
    return [str(Path(__file__).parent)]
