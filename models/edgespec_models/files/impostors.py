"""Files that a download or a checkout left in place of a model's file."""

import re
from pathlib import Path

from edgespec_models.errors import ModelFileError

_LONGEST = 64
_KINDS = {
    rb"version https://git-lfs": "a pointer of git-lfs, not the file. Run 'git lfs pull', or download it.",
    rb"\s*<(?i:!doctype|html|\?xml)": "a web page, not the file. Download it again, from its own address.",
}
"""Beginnings of files: what they are, and the remedy."""


def refuse_impostor(path: Path) -> None:
    """Raise ModelFileError if a file is a pointer of git-lfs or a web page; an unreadable file passes."""
    try:
        if not path.is_file():  # opening a pipe would wait
            return
        with path.open("rb") as file:
            start = file.read(_LONGEST)
    except OSError:
        return
    for begins, what in _KINDS.items():
        if re.match(begins, start):
            raise ModelFileError(f"{path} is {what}")
