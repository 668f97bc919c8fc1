"""The finished part of a stopped export's weights file, behind which the next export goes on.

A journal lies beside the weights. Its first line names their sources, and every other line is the CRC-32 of a
complete matrix, in the order of writing. Nothing waits for the disk: after a loss of power the first matrix
with another checksum is written again, with all behind it.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from edgespec_models.storage import replacing

DATA_FILE: Final = "model.onnx.data"
"""The weights."""
JOURNAL: Final = "unfinished.jsonl"
"""The journal beside them."""
_LOG = logging.getLogger("edgespec")


class Journal:
    """The journal in ``folder``. ``made_of`` are the facts, by name, on which the weights depend."""

    def __init__(self, folder: Path, made_of: Mapping[str, str]) -> None:
        self._path, self._made_of = folder / JOURNAL, dict(made_of)

    def read(self) -> list[object]:
        """The checksums of finished matrices; none, with a warning, if they belong to other weights."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        values = list[object]()
        try:
            for line in lines:
                values.append(json.loads(line))
        except ValueError:
            pass  # of a line that was cut off
        if not values:
            return []
        begun = values[0] if isinstance(values[0], dict) else {}
        others = [name for name, value in self._made_of.items() if begun.get(name) != value]
        if not others:
            return values[1:]
        _LOG.warning("an unfinished export has another %s; this export begins anew", " and ".join(others))
        return []

    def write(self, checksums: Iterable[object]) -> None:
        """Write a journal of these matrices."""
        with replacing(self._path) as file:
            file.writelines(f"{json.dumps(value)}\n".encode() for value in (self._made_of, *checksums))

    def add(self, checksum: int) -> None:
        """Add a matrix."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{checksum}\n")
