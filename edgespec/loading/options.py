"""How models are loaded, and what a loaded model may take: checked once."""

from dataclasses import dataclass
from typing import Annotated

from edgespec_models.bundles.bundle import WEIGHTS
from edgespec_models.schema import check_fields, form, one_of, within
from edgespec_runtimes.cpu import Instructions, Threads

__all__ = ["LoadOptions"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How models are loaded.

    Attributes:
        threads: threads of a pass, at most twice the logical cores; 0 takes the physical cores.
        spinning: idle threads wait busily within a pass (see :class:`edgespec_runtimes.cpu.CpuOptions`).
        max_draft: the longest draft; what is worth drafting is decided round by round.
        weights: policy of exports made at first use, ``exact`` or ``portable``
            (:class:`edgespec_export.export.ExportOptions`); None is the default.
        namespace: keeps what a history learns apart, by app, task or language.
        training_share: share of the time, 0 to 1, that training a drafter on what the target writes may take,
            between requests, in a thread of its own; 0 trains nothing. It needs a history.
        huge_pages: weights are copied into huge pages at load (Linux): passes are a tenth faster. Without,
            models open at once, and processes share their weights.
        instructions: what edgespec's kernels use, of :data:`edgespec_runtimes.kernels.INSTRUCTIONS`; empty
            takes the best that the processor has. All give the same bits.
        max_waiting: requests that may wait while another one is answered; one more is refused
            (:class:`edgespec.Busy`).
        cache_bytes: memory for KV caches of earlier conversations, beside the one in use, in bytes; the least
            recently used go first. 0 keeps none: then a conversation that another one interrupted is read
            again.
    """

    threads: Threads = 0
    spinning: bool = True
    max_draft: Annotated[int, within(1, 64)] = 32
    weights: Annotated[str, one_of(WEIGHTS)] | None = None
    namespace: Annotated[str, form(r"[^\ud800-\udfff]{0,200}", "of at most 200 characters")] = ""
    training_share: Annotated[float, within(0, 1)] = 0.0
    huge_pages: bool = True
    instructions: Instructions = ""
    max_waiting: Annotated[int, within(0, 1_000_000)] = 64
    cache_bytes: Annotated[int, within(0, 2**60)] = 256 << 20

    def __post_init__(self) -> None:
        check_fields(self)
