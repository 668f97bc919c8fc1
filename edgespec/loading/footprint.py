"""The memory that a model needs for weights, KV cache and passes, and the disk space to open it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from edgespec_models.bundles.bundle import VISION_DATA, Bundle
from edgespec_models.decoders.config import DecoderShape
from edgespec_models.decoders.kept import BLOCK, KeptTensor, bytes_per_sequence, bytes_per_token, types_of
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import DeviceError
from edgespec_models.storage import size
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.memory import MachineMemory, machine_memory
from edgespec_runtimes.session import KV_STEP

State = Literal["here", "to be exported", "to be pulled"]

Verdict = Literal["fits", "from disk", "no"]
"""``fits``: everything fits. ``from disk``: everything but the weights fits, so each pass reads some weights
from the disk, slowly. ``no``: the rest does not fit either.
"""

_STEPS: Final = 16
_TEXT: Final = 8192
_PROGRAM_BYTES: Final = 125_000_000  # as measured (docs/apps.md)
_LOG = logging.getLogger("edgespec")

GPU_BYTES: Final = 600_000_000
"""What CUDA's libraries and buffers take on a GPU beside weights and KV cache, estimated."""
WORKING_BYTES: Final = 950
"""For each token of a vocabulary, as measured (docs/apps.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """The size of a text's KV cache, for which room is made in steps.

    Attributes:
        kept: The tensors that a sequence keeps.
        longest: The most tokens that the context holds.
        spare: Tokens of room behind the text, which some passes write.
        step: The number of tokens that room is made for at once.
        copies: The number of copies. Graphs that concatenate their cache keep two.
        buckets: The lengths of graphs of fixed shapes. Empty where any length will do.
    """

    kept: Sequence[KeptTensor]
    longest: int
    spare: int = 0
    step: int = KV_STEP
    copies: int = 1
    buckets: tuple[int, ...] = ()

    def room(self, tokens: int) -> int:
        """Tokens of room that a session makes for a text of ``tokens``, at most the context's length."""
        wanted = min(tokens, self.longest)
        if self.buckets:
            return next(bucket for bucket in self.buckets if bucket >= wanted)
        rounded = -(-wanted // self.step) * self.step
        return rounded if self.step == BLOCK else min(rounded, self.longest) + self.spare

    @property
    def long_text(self) -> int:
        """Tokens of a long text: 8,192, or the most that the context holds."""
        return min(_TEXT, self.longest)

    def bytes(self, tokens: int) -> int:
        """Bytes that are reserved for a text of ``tokens``."""
        return self.room(tokens) * self.bytes_per_token + self.bytes_per_sequence

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in the KV cache."""
        return bytes_per_token(self.kept) * self.copies

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes that the states of a text take, however long it is."""
        return bytes_per_sequence(self.kept) * self.copies

    @property
    def types(self) -> str:
        """The number formats of the KV cache."""
        return types_of(self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory and disk space that one model needs.

    Attributes:
        name: The model's name.
        state: ``here``, ``to be exported`` or ``to be pulled``.
        weights_bytes: Bytes of the weights that a pass reads.
        expert_bytes: Bytes of the experts among the weights. Each row uses a few experts.
        mapped: Whether weights may stay in their file, from which the system reads them piece by piece. Other
            weights are copied at load.
        table_bytes: Bytes of tables. A pass reads a few of their rows, and they stay in their file.
        working_bytes: Bytes of the tokenizer, of the buffers of passes, and of a tower for pictures.
        cache: The KV cache.
        experts_used: The share of a layer's experts that a row uses.
        download_bytes: Bytes to download before the model can be opened.
        export_bytes: Bytes that an export will write.
        device: The device that the bundle was made for. None is the CPU.
    """

    name: str
    state: State
    weights_bytes: int
    mapped: bool
    table_bytes: int
    working_bytes: int
    cache: CacheSize
    expert_bytes: int = 0
    experts_used: float = 1.0
    download_bytes: int = 0
    export_bytes: int = 0
    device: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The footprint as plain JSON values."""
        values = asdict(self)
        del values["cache"]
        return {
            **values,
            "kv_type": self.cache.types,
            "kv_bytes_per_token": self.cache.bytes_per_token,
            "state_bytes": self.cache.bytes_per_sequence,
            "context_length": self.cache.longest,
        }


@dataclass(frozen=True, slots=True)
class Fit:
    """The memory that models need with a text of some length.

    Attributes:
        tokens: The length of the text.
        kv_bytes: Bytes of the KV caches.
        memory_bytes: The most bytes of everything, with loading and the program itself.
        verdict: ``fits``, ``from disk`` (all but the weights fits) or ``no``.
        read_bytes: Bytes that a pass over one row reads from the disk, if all experts are used alike.
    """

    tokens: int
    kv_bytes: int
    memory_bytes: int
    verdict: Verdict
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory and disk space that a target and its drafter need, and that this machine has.

    Attributes:
        target: The target.
        drafter: The drafter. None without a drafter model.
        machine: The physical memory of the machine.
        disk_free: Free bytes of the disk that models are pulled and exported to.
        program_bytes: Bytes of the program itself: Python, ONNX Runtime and other packages.
        contexts: What texts of several lengths take, the shortest first.
        gpu: The memory of the GPU that bundles for CUDA run on. None without, or if the driver does not say.
    """

    target: Footprint
    drafter: Footprint | None
    machine: MachineMemory
    disk_free: int
    program_bytes: int = _PROGRAM_BYTES
    contexts: tuple[Fit, ...] = ()
    gpu: MachineMemory | None = None

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the GPU's memory with a text of 8,192 tokens; 0 if no model is for one."""
        return self.on_gpu(self.target.cache.long_text)

    def on_gpu(self, tokens: int) -> int:
        """Bytes of the GPU's memory with a text of ``tokens``."""
        models = [model for model in self.models if model not in self._here]
        used = (model.weights_bytes + model.table_bytes + model.cache.bytes(tokens) for model in models)
        return sum(used) + GPU_BYTES * bool(models)

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
        """Tokens of the longest text that fits in memory; 0 if none fits."""
        least, most = 0, self.target.cache.longest
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.fit(middle).verdict == "fits" else (least, middle - 1)
        return least

    def fit(self, tokens: int) -> Fit:
        """The fit of a text of ``tokens``; the drafter's has as many, at most its context's length."""
        kv = sum(model.cache.bytes(tokens) for model in self._here)
        total = self._least(tokens) + sum(model.weights_bytes for model in self._here if model.mapped)
        spare = self.machine.available - self._least(tokens)
        verdict: Verdict = "no" if spare < 0 else "from disk" if total > self.machine.available else "fits"
        return Fit(tokens, kv, total, verdict, self._read_bytes(spare) if verdict == "from disk" else 0)

    @property
    def copied_bytes(self) -> int:
        """Bytes of each model's weights to copy where not all of both fit, beside a long text.

        A quarter of the room is left to what is read from the disk, and to other programs.
        """
        room = max(0, self.machine.available - self._least(self.target.cache.long_text)) * 3 // 4
        second = 0 if self.drafter is None else self.drafter.weights_bytes
        wanted, step = max(room - second, room // 2), max(1, self.target.weights_bytes // _STEPS)
        return wanted // step * step  # about as many at every load, so that measurements stay valid

    def _read_bytes(self, spare: int) -> int:
        """Bytes that a row reads from the disk if ``spare`` are free for weights; experts take the rest."""
        experts, every = self.target.expert_bytes, self.target.weights_bytes - self.target.expert_bytes
        others = sum(model.weights_bytes for model in self._here if model.mapped and model is not self.target)
        left = spare - every - others
        # The system forgets first what a pass reads next, so only copied weights stay.
        missing = max(0, every - self.copied_bytes) if left < 0 else 0
        return missing + round((experts - min(experts, max(0, left))) * self.target.experts_used)

    @property
    def _here(self) -> list[Footprint]:
        return [model for model in self.models if model.device != "cuda"]  # a GPU has memory of its own

    def _least(self, tokens: int) -> int:
        """Bytes of everything but weights that may stay mapped."""
        models = sum(model.cache.bytes(tokens) for model in self._here)
        models += sum(model.weights_bytes for model in self._here if not model.mapped)
        return self.program_bytes + sum(model.working_bytes for model in self.models) + models

    def short(self) -> str:
        """A sentence of figures, for messages."""
        weights = " and ".join(f"{model.name} {size(model.weights_bytes)}" for model in self.models)
        fit = self.fit(KV_STEP)
        limit = ", its container's limit" if self.machine.limited else ""
        return (
            f"weights: {weights}; in all {size(fit.memory_bytes)} with a text of {KV_STEP} tokens, of the "
            f"{size(self.machine.available)} available of {size(self.machine.total)}{limit}"
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values, with sizes in bytes."""
        return {
            "target": self.target.to_json(),
            "drafter": None if self.drafter is None else self.drafter.to_json(),
            "program_bytes": self.program_bytes,
            "memory_bytes": self.machine.total,
            "memory_available_bytes": self.machine.available,
            "memory_limited": self.machine.limited,
            "disk_bytes": self.disk_bytes,
            "disk_free_bytes": self.disk_free,
            "gpu_bytes": self.gpu_bytes,
            "gpu_available_bytes": None if self.gpu is None else self.gpu.available,
            "contexts": [asdict(fit) for fit in self.contexts],
            "longest_context": self.longest_context,
        }


def footprint_of(bundle: Bundle, *, exact_rows: bool) -> Footprint:
    """The footprint of a bundle; ``exact_rows`` is as in :class:`edgespec_runtimes.cpu.CpuOptions`."""
    manifest = bundle.manifest
    made = footprint_with(
        *(manifest.name, manifest.config, manifest.bytes_by_class, _cache_of(bundle, exact_rows)),
        native=manifest.operators == "edgespec",
        state="here",
        device=manifest.made_for,
    )
    tower = manifest.files.get(VISION_DATA)
    return made if tower is None else replace(made, working_bytes=made.working_bytes + tower.size_bytes)


def footprint_with(
    name: str,
    config: DecoderShape,
    by_class: Mapping[str, int],
    cache: CacheSize,
    *,
    native: bool,
    state: State,
    **facts: Any,
) -> Footprint:
    """The footprint of a model with these bytes of weights by class. ``facts`` are its other fields."""
    tables = sum(by_class.get(kind, 0) for kind in ("embedding", "other"))
    shares = record(config).shares if isinstance(config, Transformer) else {}
    return Footprint(
        name=name,
        state=state,
        weights_bytes=sum(by_class.values()) - tables,
        mapped=native,
        expert_bytes=by_class.get("experts", 0),
        experts_used=shares.get("experts", 1.0),
        table_bytes=tables,
        working_bytes=WORKING_BYTES * config.vocab_size,
        cache=cache,
        **facts,
    )


def _cache_of(bundle: Bundle, exact_rows: bool) -> CacheSize:
    manifest, static = bundle.manifest, bundle.manifest.static
    if static is not None:
        return CacheSize(kept=manifest.kept, longest=static.longest, buckets=static.buckets)
    spare, longest = int(exact_rows and manifest.operators == "standard"), bundle.config.context_length
    step = BLOCK if manifest.operators == "edgespec" else KV_STEP
    own = CacheSize(kept=manifest.kept, longest=longest, spare=spare, step=step)
    if manifest.files:
        return own
    copies = 1 if _shares_cache(bundle) else 2  # another exporter's, without files
    return replace(own, longest=longest - spare, copies=copies)


def _shares_cache(bundle: Bundle) -> bool:
    """Whether a foreign graph writes its cache in place. Attention that takes the whole cache does so.

    A load tries it out (:class:`edgespec_runtimes.graph_io.ForeignModel`); this is read from the header.
    """
    from edgespec_models.files.onnx_header import read_header  # of no use to edgespec's own bundles

    written = {tensor.output for tensor in bundle.manifest.kept}
    writers = [node for node in read_header(bundle.graph).nodes if written & set(node.outputs)]
    return all(node.op_type == "GroupQueryAttention" for node in writers)


def plan_of(target: Bundle, drafter: Bundle | None) -> Plan:
    """The plan for both models beside this program, which runs already, on this machine now."""
    second = None if drafter is None else footprint_of(drafter, exact_rows=False)
    first = footprint_of(target, exact_rows=True)
    return with_gpu(Plan(first, second, machine_memory(), 0, program_bytes=0))


def with_gpu(made: Plan) -> Plan:
    """The plan with the memory of the GPU, if a model is for one."""
    if not made.gpu_bytes:
        return made
    from edgespec_runtimes.discovery import Runtime  # and ONNX Runtime

    return replace(made, gpu=Runtime().gpu_memory())


def room_for(target: Bundle, drafter: Bundle | None, options: CpuOptions) -> CpuOptions:
    """``options`` under which models can be loaded here: where not all weights have room, some stay mapped.

    Raises:
        DeviceError: they do not fit even with a short text; the message says what they need.
    """
    made = plan_of(target, drafter)
    fit, on_gpu = made.fit(KV_STEP), made.on_gpu(KV_STEP)
    if made.gpu is not None and on_gpu > made.gpu.available:
        raise DeviceError(
            f"the GPU has no room for these models: they need {size(on_gpu)}, and {size(made.gpu.available)} "
            f"of its {size(made.gpu.total)} are free. Free memory, or take smaller models or device='cpu'"
        )
    if fit.verdict == "no":
        raise DeviceError(
            f"this machine's memory has no room for these models: {made.short()}. Free memory, take smaller "
            "models or drafter='ngram', or export with weights='exact', which may stay on the disk; "
            "'edgespec plan' shows more"
        )
    if fit.verdict == "from disk":
        _LOG.warning("slow: a pass will read about %s from the disk: %s", size(fit.read_bytes), made.short())
        return replace(options, huge_pages=True, copied_bytes=made.copied_bytes)
    return options
