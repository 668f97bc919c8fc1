"""Options for loading models, checked when they are made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil

from edgespec_models.bundles.bundle import WEIGHTS
from edgespec_models.schema import Checked, matching, one_of, within
from edgespec_runtimes.cpu import CpuOptions, Instructions, Threads

ImageTokens = Annotated[int, within(1, 16384)]
"""Tokens of a prompt that a picture may take."""


@dataclass(frozen=True, slots=True)
class LoadOptions(Checked):
    """How models are loaded.

    Attributes:
        threads: Threads of a pass, at most twice the number of logical cores. 0 takes the physical cores.
        battery_threads: Threads of a pass if the machine runs on its battery when the model is loaded. None
            is ``threads``.
        spinning: Idle threads wait busily for up to 50 µs within a pass.
        max_draft: The most tokens of a draft. Each round decides how many are worth drafting.
        weights: The weights of exports that a load makes: ``exact`` or ``portable``. None takes ``exact``.
        kv: The KV cache in ``16bit``, or in ``8bit``, which takes half the memory and disk and changes
            answers a little.
        namespace: Keeps what a history learns apart, for an app, a task or a language.
        keep_prompts: Keep whole turns, prompts included, in the history, so that a drafter can learn
            from them (``docs/history.md``). Requests with ``prompt_cache=False`` are left out.
        adapt: ``idle`` trains the drafter on the history's texts while no request runs and the machine is on
            mains power, in a process of its own with the lowest priority. None trains when
            :meth:`edgespec.Model.adapt` is called, and never else.
        huge_pages: Copy weights into huge pages at load (Linux), which makes passes a tenth faster. Without
            it models open at once, and processes share the weights.
        instructions: The instructions that edgespec's kernels use, such as ``avx2``. Empty takes the best
            that the processor has. All give the same bits.
        max_waiting: The most requests that may wait. One more raises :class:`edgespec.Busy`; a
            server refuses it with status 429.
        parallel: The most requests that are answered at once, in common passes. Each answer is the one that
            the request gets alone. Models that do not run on edgespec's own kernels answer one at a time.
        cache_bytes: Memory for the KV caches of other conversations, in bytes. The least recently used go
            first. 0 keeps none.
        prompt_cache_bytes: Disk for the keys and values of prompts, which later processes need not read
            again, in bytes. None is 2 GB, or a tenth of the free disk if that is less. 0 neither reads nor
            writes any. ``docs/security.md`` says who can read them.
        chat_template: A file with a Jinja chat template for the target, in place of the model's own.
        adapters: LoRA adapters that the target's export merges into its weights, each ``PATH`` or
            ``PATH=SCALE``: a directory of PEFT, or a GGUF file.
        mmproj: The file of the tower by which a target in a GGUF file sees; None takes one beside it.
        image_tokens: Tokens of each picture in a prompt. None leaves them to the model and the ``detail``.
    """

    threads: Threads = 0
    battery_threads: Threads | None = None
    spinning: bool = True
    max_draft: Annotated[int, within(1, 64)] = 32
    weights: Annotated[str, one_of(WEIGHTS)] | None = None
    kv: Annotated[str, one_of(("16bit", "8bit"))] = "16bit"
    namespace: Annotated[str, matching(r"[^\ud800-\udfff]{0,200}", "of at most 200 characters")] = ""
    keep_prompts: bool = False
    adapt: Annotated[str, one_of(("idle",))] | None = None
    huge_pages: bool = True
    instructions: Instructions = ""
    max_waiting: Annotated[int, within(0, 1_000_000)] = 64
    parallel: Annotated[int, within(1, 64)] = 4
    cache_bytes: Annotated[int, within(0, 2**60)] = 256 << 20
    prompt_cache_bytes: Annotated[int, within(0, 2**60)] | None = None
    chat_template: Path | None = None
    adapters: tuple[str, ...] = ()
    mmproj: Path | None = None
    image_tokens: ImageTokens | None = None

    def cpu(self, *, low_priority: bool = False) -> CpuOptions:
        """The options of a session on the CPU."""
        threads = self.battery_threads
        return CpuOptions(
            threads=self.threads if threads is None or not on_battery() else threads,
            spinning=self.spinning,
            low_priority=low_priority,
            huge_pages=self.huge_pages,
            instructions=self.instructions,
        )


def on_battery() -> bool:
    """Whether the machine runs on its battery."""
    battery = getattr(psutil, "sensors_battery", lambda: None)()  # not on every system
    return battery is not None and battery.power_plugged is False
