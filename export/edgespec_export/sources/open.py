"""Opens the checkpoint at a path."""

from collections.abc import Callable
from pathlib import Path

from edgespec_export.sources.assistants import GGUFAssistant, HFAssistant, is_assistant
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.dflash import GGUFBlocks, HFBlocks
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.heads import GGUFHead, HFHead, family_of
from edgespec_export.sources.hf_checkpoint import CONFIG, HFCheckpoint
from edgespec_export.sources.mtp import GGUFLayer, HFLayer, is_layer
from edgespec_models.bundles.foreign import is_model, what_instead
from edgespec_models.errors import ModelFileError


def open_checkpoint(source: Path, target: Path | None = None) -> Checkpoint:
    """Open a GGUF file or a Hugging Face directory; with a ``target``, a head of it, or its MTP layer.

    Raises:
        ModelFileError: it is neither, or damaged.
        UnsupportedModelError: a model that edgespec cannot export.
        RequestError: a head without its target, or a target with something else.
    """
    if source.is_file():
        if target is None:
            return GGUFCheckpoint(source)
        return _classes(source)[0](source, open_checkpoint(target))
    if is_model(source):
        raise ModelFileError(
            f"{source} is a bundle, or runs without an export. As a head's target give the bundle's source"
        )
    instead = what_instead(source)
    if instead is not None:
        raise ModelFileError(f"{source} {instead}")
    if (source / CONFIG).is_file():
        if target is None:
            return HFCheckpoint(source)
        return _classes(source)[1](source, open_checkpoint(target))
    what = f"lacks {CONFIG}" if source.is_dir() else "does not exist"
    raise ModelFileError(
        f"{source} {what}; give a GGUF file, a directory with {CONFIG} and safetensors, or a catalogue name"
    )


def is_head(source: Path, target: Path | None = None) -> bool:
    """Whether what ``source`` holds drafts as a head, of ``target``. Raises as opening it does."""
    return _classes(source) != _OF_LAYERS or is_layer(source, target)


_Opens = Callable[[Path, Checkpoint], Checkpoint]
_OF_LAYERS: tuple[_Opens, _Opens] = GGUFLayer, HFLayer


def _classes(source: Path) -> tuple[_Opens, _Opens]:
    """What opens a head, in a GGUF file and in a directory."""
    if is_assistant(source):
        return GGUFAssistant, HFAssistant
    family = family_of(source)
    if family is None:
        return _OF_LAYERS
    return (GGUFHead, HFHead) if family.name == "eagle3" else (GGUFBlocks, HFBlocks)
