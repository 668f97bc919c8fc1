"""Opens the checkpoint at a path."""

from collections.abc import Callable, Sequence
from pathlib import Path

from edgespec_export.sources.adapters import add_adapters
from edgespec_export.sources.assistants import GGUFAssistant, HFAssistant
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.gguf import GGUFFile
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.heads import GGUFHead, HFHead
from edgespec_export.sources.hf_checkpoint import CONFIG, HFCheckpoint
from edgespec_export.sources.mtp import GGUFLayer, HFLayer, is_layer
from edgespec_models.bundles.foreign import is_model, what_instead
from edgespec_models.errors import ModelFileError, RequestError
from edgespec_models.families import head_of, of_gguf
from edgespec_models.files.facts import Facts
from edgespec_models.files.gguf_parts import parts_of


def open_checkpoint(
    source: Path,
    target: Path | None = None,
    adapters: Sequence[str] = (),
    mmproj: Path | None = None,
) -> Checkpoint:
    """Open a GGUF file or a Hugging Face directory; with a ``target``, a head of it, or its MTP layer.

    ``adapters`` are merged (:func:`.adapters.add_adapters`). ``mmproj`` is the file with a GGUF file's tower.

    Raises:
        ModelFileError: it is neither, or damaged, or an adapter does not fit.
        UnsupportedModelError: a model that edgespec cannot export.
        RequestError: a head without its target, or a target with something else; an ``mmproj`` with it, or
            for a directory.
    """
    checkpoint = _open(source, target, mmproj)
    try:
        if adapters:
            add_adapters(checkpoint, adapters)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _open(source: Path, target: Path | None, mmproj: Path | None) -> Checkpoint:
    if mmproj is not None and (target is not None or source.is_dir()):
        raise RequestError(
            f"mmproj is {mmproj}, the tower of a GGUF file's model, and {source} is a directory or a head; "
            "leave out mmproj"
        )
    if source.is_file():
        if target is None:
            return GGUFCheckpoint(source, mmproj)
        return _class_of(source)(source, _open_target(target))
    if is_model(source):
        raise ModelFileError(f"{source} is a bundle, or runs without an export; give a model's source")
    instead = what_instead(source)
    if instead is not None:
        raise ModelFileError(f"{source} {instead}")
    if (source / CONFIG).is_file():
        if target is None:
            return HFCheckpoint(source)
        return _class_of(source)(source, _open_target(target))
    what = f"lacks {CONFIG}" if source.is_dir() else "does not exist"
    raise ModelFileError(
        f"{source} {what}; give a GGUF file, a directory with {CONFIG} and safetensors, or a catalogue name"
    )


def _open_target(target: Path) -> Checkpoint:
    if is_model(target):
        raise ModelFileError(f"{target} is a bundle; as a head's target give the source that it was made of")
    return open_checkpoint(target)


def is_head(source: Path, target: Path | None = None) -> bool:
    """Whether what ``source`` holds drafts as a head, of ``target``. Raises as opening it does."""
    return _class_of(source) not in (GGUFLayer, HFLayer) or is_layer(source, target)


_Opens = Callable[[Path, Checkpoint], Checkpoint]


def _class_of(source: Path) -> _Opens:
    """The class that opens ``source`` as a head. The class of MTP layers opens everything that is no head."""
    if source.is_file():
        with GGUFFile(parts_of(source)[0]) as file:
            family = of_gguf(file.metadata.get("general.architecture"))
        kind = "model" if family is None else family.kind
        return {"head": GGUFHead, "assistant": GGUFAssistant, "model": GGUFLayer}[kind]
    head = head_of(Facts.read(source / CONFIG))
    kind = "model" if head is None else head[0].kind
    return {"head": HFHead, "assistant": HFAssistant, "model": HFLayer}[kind]
