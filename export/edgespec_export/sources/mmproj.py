"""A tower in a file of its own, ``mmproj-*.gguf``, beside the GGUF file of its model.

The keys and names are in llama.cpp's ``conversion/`` and ``gguf-py``.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path

from edgespec_export.sources.gguf import GGUFFile, open_parts
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import EdgespecError, UnsupportedModelError
from edgespec_models.families import TOWERS
from edgespec_models.families.towers import Tower
from edgespec_models.files.facts import Facts
from edgespec_models.files.tensors import Tensor
from edgespec_models.graphs.tower import build_tower

FILES = "*mmproj*.gguf"
_LOG = logging.getLogger("edgespec")


def tower_for(
    path: Path, config: Transformer, tokens: Sequence[object], stack: ExitStack, named: Path | None
) -> tuple[Tower, Mapping[str, Tensor], Path] | None:
    """The tower of the model at ``path``, its tensors, and its file, which ``stack`` closes; None without.

    Among several beside the model the one with the name most like the model's counts; ``named`` is another
    file.

    Raises:
        ModelFileError: the named file is damaged.
        UnsupportedModelError: it has no tower that edgespec runs with this model.
    """
    if named is not None:
        made = _read(open_parts(named, stack), config, tokens)
        if made is None:
            raise UnsupportedModelError(
                f"{named} has no tower that edgespec runs with {path.name}; give the mmproj file of this "
                f"model, of one of these kinds: {', '.join(family.gguf for family in TOWERS)}"
            )
        return *made, named

    def alike(file: Path) -> int:
        letters = zip(file.name.removeprefix("mmproj-"), path.name, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], letters))

    for file in sorted(path.parent.glob(FILES), key=lambda file: (-alike(file), file)):
        with ExitStack() as opened:
            try:
                made = None if file == path else _read(open_parts(file, opened), config, tokens)
            except EdgespecError as error:  # the user did not name the file
                _LOG.warning("%s is left out: %s", file.name, error)
                continue
            if made is not None:
                stack.push(opened.pop_all())
                return *made, file
    return None


def _read(
    file: GGUFFile, config: Transformer, tokens: Sequence[object]
) -> tuple[Tower, Mapping[str, Tensor]] | None:
    keys = Facts(file.facts("clip.vision"), file.path.name)
    kind = keys.value("projector_type") or file.metadata.get("clip.projector_type")
    family = next((family for family in TOWERS if family.gguf == kind), None)
    if family is None or keys.integer("projection_dim") != config.hidden_size:
        return None
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    ids = {str(token): id_ for id_, token in enumerate(tokens)}
    tower = family.from_gguf(keys, shapes, config, ids)
    if tower is None:
        return None
    names = {name: family.gguf_name(name) for name in build_tower(tower)[1]}
    return tower, {name: file.tensors[stored] for name, stored in names.items() if stored in file.tensors}
