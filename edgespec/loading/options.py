"""How models are loaded: what an app may choose, checked when it is made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil

from edgespec_models.bundles.bundle import WEIGHTS
from edgespec_models.schema import Checked, matching, one_of, within
from edgespec_runtimes.cpu import CpuOptions, Instructions, Threads


@dataclass(frozen=True, slots=True)
class LoadOptions(Checked):
    """How models are loaded.

    Attributes:
        threads: threads of a pass, at most twice the logical cores; 0 takes the physical cores.
        battery_threads: the same where the machine is on its battery at load; None is ``threads``.
        spinning: idle threads wait busily within a pass (see :class:`edgespec_runtimes.cpu.CpuOptions`).
        max_draft: the longest draft; what is worth drafting is decided round by round.
        weights: policy of exports made at first use, ``exact`` or ``portable``
            (:class:`edgespec_export.export.ExportOptions`); None is the default.
        namespace: keeps what a history learns apart, by app, task or language.
        training_share: share of the time, 0 to 1, that training a drafter on what the target writes may take,
            between requests, in a thread of its own; 0 trains nothing. It needs a history.
        huge_pages: weights are copied into huge pages at load (Linux): passes are a tenth faster. Without,
            models open at once, and processes share their weights.
        instructions: what edgespec's kernels use, of :data:`edgespec_runtimes.cpu.INSTRUCTIONS`; empty
            takes the best that the processor has. All give the same bits.
        max_waiting: requests that may wait while others are answered; one more is refused
            (:class:`edgespec.Busy`).
        parallel: requests that may be answered at once, in common passes; each gives the text that it gives
            alone. They need edgespec's own kernels; other models answer one after the other.
        cache_bytes: memory for KV caches of earlier conversations, beside the one in use, in bytes; the least
            recently used go first. 0 keeps none: then a conversation that another one interrupted is read
            again.
        prompt_cache_bytes: disk for keys and values of prompts that were read, which later processes need not
            read again; the least recently used go first. None is 2 GB, or a tenth of the disk's free space if
            that is less. 0 neither reads nor writes any. ``docs/security.md`` says who can read them.
        chat_template: a file with a chat template in Jinja for the target, which has none or a wrong one.
    """

    threads: Threads = 0
    battery_threads: Threads | None = None
    spinning: bool = True
    max_draft: Annotated[int, within(1, 64)] = 32
    weights: Annotated[str, one_of(WEIGHTS)] | None = None
    namespace: Annotated[str, matching(r"[^\ud800-\udfff]{0,200}", "of at most 200 characters")] = ""
    training_share: Annotated[float, within(0, 1)] = 0.0
    huge_pages: bool = True
    instructions: Instructions = ""
    max_waiting: Annotated[int, within(0, 1_000_000)] = 64
    parallel: Annotated[int, within(1, 64)] = 4
    cache_bytes: Annotated[int, within(0, 2**60)] = 256 << 20
    prompt_cache_bytes: Annotated[int, within(0, 2**60)] | None = None
    chat_template: Path | None = None

    def cpu(self, *, low_priority: bool = False) -> CpuOptions:
        """What a session on the CPU is told of them."""
        threads = self.threads
        if self.battery_threads is not None:
            battery = getattr(psutil, "sensors_battery", lambda: None)()  # not on every system
            threads = self.battery_threads if battery and battery.power_plugged is False else threads
        return CpuOptions(
            threads=threads,
            spinning=self.spinning,
            low_priority=low_priority,
            huge_pages=self.huge_pages,
            instructions=self.instructions,
        )
