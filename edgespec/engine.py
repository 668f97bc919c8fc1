"""The SDK's front door: load a target and a drafter."""

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from edgespec.decoding.draft import Drafter
from edgespec.loading.footprint import room_for
from edgespec.loading.names import NGRAM, Reference, open_model, recommended_drafter
from edgespec.loading.sessions import Loaded, LoadOptions, open_pair
from edgespec.model import Model
from edgespec_models.errors import RequestError
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_models.schema import checked, length
from edgespec_runtimes.devices.discovery import AUTO
from edgespec_runtimes.devices.placement import export_for, place, run_at_once

if TYPE_CHECKING:  # a model without a drafter model or a history imports nothing of them
    from edgespec.drafting.ahead import Beside

__all__ = ["LoadOptions", "Model", "load"]

DeviceName = Annotated[str, length(1, 200)]


@checked
def load(
    target: Reference,
    drafter: Reference | Drafter | None = "auto",
    *,
    options: LoadOptions | None = None,
    history: Reference | None = None,
    progress: ProgressCallback = ignore_progress,
    device: DeviceName = AUTO,
    drafter_device: DeviceName = AUTO,
) -> Model:
    """Load a target and its drafter.

    Args:
        target: a bundle's directory, one that onnxruntime-genai's builder, mobius or Optimum wrote (run as it
            is), a GGUF file, a Hugging Face directory (``config.json`` and safetensors), a catalogue name, or
            ``hf:OWNER/REPO`` on the hub. Names are pulled, checkpoints exported, at first use.
        drafter: the same; ``"auto"`` takes the catalogue's recommendation, ``"ngram"`` drafts from the text
            alone, a :class:`Drafter` of your own drafts beside that, None is plain decoding.
        options: threads and limits.
        history: a name or a file: what answers teach is kept there and drafted from, across requests and
            restarts (:class:`edgespec.history.History`). With None nothing is written anywhere.
        progress: told of downloads and exports.
        device: where the target runs: a name that :func:`edgespec.devices` lists, or ``npu``; what cannot be
            had, or does not fit the bundle, is an error. ``"auto"`` takes the device the bundle was made for,
            or the CPU, and says why (:attr:`Model.placement`).
        drafter_device: the same for the drafter.

    Returns:
        A :class:`Model`, to be used as a context manager or closed.

    Raises:
        EdgespecError: what kept a model from being found, made or loaded.
    """
    options = options or LoadOptions()
    if history is not None and drafter is None:
        raise RequestError("plain decoding (drafter None) uses no history; give drafter='ngram' or a model")
    if history is not None:
        from edgespec.history.manage import History

        named = History(history)
        named.check()  # before a model is pulled
        history = named.path
    made_for = export_for(device), export_for(drafter_device)
    target_bundle = open_model(
        target, "target", weights=options.weights, device=made_for[0], progress=progress
    )
    placement = place(target_bundle, device)
    if drafter == "auto":
        drafter = recommended_drafter(target_bundle)
    drafter_bundle, drafter_placement = None, None
    if isinstance(drafter, str | Path) and drafter != NGRAM:
        drafter_bundle = open_model(
            drafter, "drafter", weights=options.weights, device=made_for[1], progress=progress
        )
        drafter_placement = place(drafter_bundle, drafter_device)
    cpu = room_for(target_bundle, drafter_bundle, options.cpu())
    loaded = open_pair(target_bundle, drafter_bundle, cpu, (placement, drafter_placement))
    model = Model(
        loaded,
        options=options,
        drafts=drafter is not None,
        clock=perf_counter,
        beside=_beside(loaded),
        own=drafter if isinstance(drafter, Drafter) else None,
    )
    if history is not None:
        model.use_history(history)
    return model


def _beside(loaded: Loaded) -> "Beside | None":
    """Drafting ahead, where target and drafter compute side by side."""
    target, aside = loaded.target, loaded.drafter
    if aside is None or not run_at_once(target.placed, aside.placed):
        return None
    from edgespec.drafting.ahead import Beside

    return Beside(aside.curve)
