"""Files that a download or a checkout left in place of a model's own."""

import re
from pathlib import Path

from edgespec_models.errors import ModelFileError

_LONGEST = 64
_POINTER = re.compile(rb"version https://git-lfs")
_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE)


def refuse_impostor(path: Path) -> None:
    """Raise ModelFileError where a file is a pointer of git-lfs or a web page; what cannot be read passes."""
    try:
        with path.open("rb") as file:
            start = file.read(_LONGEST)
    except OSError:
        return
    if _POINTER.match(start):
        raise ModelFileError(
            f"{path} is a pointer of git-lfs, not the file itself. Run 'git lfs pull' in its directory, or "
            "download the file."
        )
    if _PAGE.match(start):
        raise ModelFileError(
            f"{path} is a web page, not the file itself: its download was answered with a page, such as one "
            "to log in. Download it again from the address of the file."
        )
