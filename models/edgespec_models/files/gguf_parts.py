"""GGUF models in several files, as llama.cpp's ``gguf-split`` names them: ``NAME-00001-of-00003.gguf``."""

import re
from pathlib import Path

from edgespec_models.errors import ModelFileError
from edgespec_models.storage import is_file

_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})(\.gguf)", re.IGNORECASE)


def part_names(name: str) -> tuple[str, ...]:
    """The names of all parts, in order, of the model that a file of this name belongs to."""
    found = _PART.fullmatch(name)
    count = 0 if found is None else int(found[2])
    if found is None or count == 0:
        return (name,)
    return tuple(f"{found[1]}-{number:05}-of-{found[2]}{found[3]}" for number in range(1, count + 1))


def parts_of(path: Path) -> list[Path]:
    """The files of the model that ``path`` is, or is a part of; ModelFileError where one is missing."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    missing = [part.name for part in parts if not is_file(part)]
    if missing and len(parts) > 1:
        raise ModelFileError(
            f"{path} is one of {len(parts)} parts of a model, and {missing[0]} is not beside it. Download or "
            "copy all parts into one directory."
        )
    return parts


def stem_of(path: Path) -> str:
    """The file's name without what says which part it is, and without its suffix."""
    found = _PART.fullmatch(path.name)
    return path.stem if found is None else found[1]
