"""What models take of this machine, before they are loaded: :func:`plan`, which ``edgespec plan`` shows.

Loading asks too (:func:`room_for`): weights that memory has no room for stay mapped, and what cannot work
even so is refused. The module is not called after its function, which would stand in its way in
``edgespec``.
"""

import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from edgespec.loading.footprint import Footprint, footprint_of
from edgespec.loading.names import NGRAM, Reference
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import DeviceError, RequestError
from edgespec_models.paths import home
from edgespec_models.schema import checked, within
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.graph_session import KV_STEP
from edgespec_runtimes.memory import MachineMemory, machine_memory

__all__ = ["Fit", "Plan", "Verdict", "plan", "room_for"]

Verdict = Literal["fits", "from disk", "no"]
"""Whether all has room; whether it has but for weights, which are read from the disk again and again, slowly;
or not even so."""

_LENGTHS: Final = (2048, 8192, 32768)
_PROGRAM_BYTES: Final = 125_000_000  # as measured (docs/plan.md)
_LOG = logging.getLogger("edgespec")


@dataclass(frozen=True, slots=True)
class Fit:
    """What models take with a text of some length.

    Attributes:
        tokens: the text's.
        kv_bytes: of the KV caches.
        memory_bytes: at most, loading included, of everything, the program too.
        verdict: whether this machine has so much.
    """

    tokens: int
    kv_bytes: int
    memory_bytes: int
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "tokens": self.tokens,
            "kv_bytes": self.kv_bytes,
            "memory_bytes": self.memory_bytes,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What a target and its drafter take, and what this machine has.

    Attributes:
        target: what the target takes.
        drafter: the same of the drafter; None without a drafter model.
        machine: physical memory.
        disk_free: bytes, where models are pulled to and exported to.
        program_bytes: of the program itself: Python, ONNX Runtime and other packages.
        contexts: what texts of several lengths take, ascending.
    """

    target: Footprint
    drafter: Footprint | None
    machine: MachineMemory
    disk_free: int
    program_bytes: int = _PROGRAM_BYTES
    contexts: tuple[Fit, ...] = ()

    @property
    def models(self) -> tuple[Footprint, ...]:
        """The target, and the drafter if there is one."""
        return (self.target,) if self.drafter is None else (self.target, self.drafter)

    @property
    def disk_bytes(self) -> int:
        """Bytes that pulling and exporting write."""
        return sum(model.download_bytes + model.export_bytes for model in self.models)

    @property
    def longest_context(self) -> int:
        """Tokens of the longest text that fits; 0 where none does."""
        least, most = 0, self.target.cache.longest
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.fit(middle).verdict == "fits" else (least, middle - 1)
        return least

    def fit(self, tokens: int) -> Fit:
        """What a text of ``tokens`` takes, of as many of the drafter's, as far as its context goes."""
        here = [model for model in self.models if model.device != "cuda"]  # a GPU has memory of its own
        kv = sum(model.cache.bytes(tokens) for model in here)
        base = self.program_bytes + sum(model.working_bytes for model in self.models)
        copied = base + sum(model.weights_bytes for model in here)
        total = copied + max(kv, max((model.twice_bytes for model in here), default=0))
        least = base + kv + sum(model.weights_bytes for model in here if not model.mapped)
        available = self.machine.available
        verdict: Verdict = "fits" if total <= available else "from disk" if least <= available else "no"
        return Fit(tokens, kv, total, verdict)

    def short(self) -> str:
        """A sentence of figures, for messages."""
        weights = " and ".join(f"{model.name} {_size(model.weights_bytes)}" for model in self.models)
        fit = self.fit(KV_STEP)
        limit = ", its container's limit" if self.machine.limited else ""
        return (
            f"weights: {weights}; in all {_size(fit.memory_bytes)} with a text of {KV_STEP} tokens, of the "
            f"{_size(self.machine.available)} available of {_size(self.machine.total)}{limit}"
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, sizes in bytes."""
        return {
            "target": self.target.to_json(),
            "drafter": None if self.drafter is None else self.drafter.to_json(),
            "program_bytes": self.program_bytes,
            "memory_bytes": self.machine.total,
            "memory_available_bytes": self.machine.available,
            "memory_limited": self.machine.limited,
            "disk_bytes": self.disk_bytes,
            "disk_free_bytes": self.disk_free,
            "contexts": [fit.to_json() for fit in self.contexts],
            "longest_context": self.longest_context,
        }


@checked
def plan(
    target: Reference,
    drafter: Reference | None = "auto",
    *,
    context: Annotated[int, within(1)] | None = None,
    weights: str | None = None,
) -> Plan:
    """What a target and its drafter would take of this machine; nothing is pulled, exported or loaded.

    Args:
        target: as :func:`edgespec.load` takes it; a model of the hub (``hf:``) has to be pulled before. Of
            models of the catalogue that are not here the file's size stands for the weights.
        drafter: the same; ``"auto"``, ``"ngram"`` and None as :func:`edgespec.load` takes them.
        context: tokens of a text to plan for besides 2,048, 8,192, 32,768 and the model's whole context.
        weights: policy of exports, as in :class:`edgespec.LoadOptions`.

    Returns:
        A :class:`Plan`. Its verdicts are for the CPU; weights and KV cache of a bundle that was made for
        CUDA are not counted, since they lie in the GPU's memory.

    Raises:
        RequestError: a context longer than the model's, a model of the hub that was not pulled.
        EdgespecError: a model that cannot be found, read or exported.
    """
    from edgespec.loading.unmade import footprint, look_up, recommended  # loading needs none of it

    located = look_up(target, "target", weights)
    first = footprint(located, "target", weights)
    if drafter == "auto":
        drafter = recommended(located)
    second = None
    if drafter is not None and drafter != NGRAM:
        second = footprint(look_up(drafter, "drafter", weights), "drafter", weights)
    longest = first.cache.longest
    if context is not None and context > longest:
        raise RequestError(
            f"context is {context:,}; allowed: 1 to {longest:,}, the tokens {first.name} can hold"
        )
    lengths = {min(each, longest) for each in (*_LENGTHS, longest, context or longest)}
    made = Plan(first, second, machine_memory(), shutil.disk_usage(_existing(home())).free)
    return replace(made, contexts=tuple(made.fit(each) for each in sorted(lengths)))


def room_for(target: Bundle, drafter: Bundle | None, options: CpuOptions) -> CpuOptions:
    """``options`` under which models can be loaded here: weights stay mapped where copies have no room.

    Raises:
        DeviceError: they cannot, not even with a short text; says what they take.
    """
    second = None if drafter is None else footprint_of(drafter, exact_rows=False)
    # This program runs already, so what it takes is not among what is available.
    made = Plan(footprint_of(target, exact_rows=True), second, machine_memory(), 0, program_bytes=0)
    verdict = made.fit(KV_STEP).verdict
    if verdict == "no":
        raise DeviceError(
            f"this machine's memory has no room for these models: {made.short()}. Free memory, take smaller "
            "models or drafter='ngram', or export with weights='exact', which may stay on the disk; "
            "'edgespec plan' shows more"
        )
    if verdict == "from disk":
        _LOG.warning("slow: weights will be read from the disk again and again: %s", made.short())
        return replace(options, huge_pages=False)
    return options


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.resolve().parents) if path.is_dir())


def _size(count: int) -> str:
    """Bytes in decimal units."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
