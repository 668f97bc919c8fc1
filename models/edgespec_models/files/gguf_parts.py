"""GGUF models in several files, as llama.cpp's ``gguf-split`` names them: ``NAME-00001-of-00003.gguf``."""

import re
from pathlib import Path

from edgespec_models.errors import ModelFileError
from edgespec_models.storage import is_file

_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})(\.gguf)", re.IGNORECASE)


def part_names(name: str) -> tuple[str, ...]:
    """The names of all parts, in order, of the model with a file of this name."""
    match = _PART.fullmatch(name)
    count = 0 if match is None else int(match[2])
    parts = (_PART.sub(rf"\g<1>-{number:05}-of-\g<2>\3", name) for number in range(1, count + 1))
    return tuple(parts) or (name,)


def parts_of(path: Path) -> list[Path]:
    """The files of the model in ``path``, which may be a part; ModelFileError if one is missing."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    for part in parts:
        if len(parts) > 1 and not is_file(part):
            raise ModelFileError(
                f"{path} is one of {len(parts)} parts of a model, and {part.name} is missing. Put all parts "
                "into one directory."
            )
    return parts


def stem_of(path: Path) -> str:
    """The file's name without its suffix and the number of the part."""
    return _PART.sub(r"\1", path.name) if _PART.fullmatch(path.name) else path.stem
