"""Training a drafter on its target's answers, in PyTorch; a run that was stopped goes on.

The loss is ``-log q(token)`` of the answers' tokens in the drafter's own vocabulary, so any target can teach
any drafter. Answers are the target's own, so the mean gradient is the gradient of ``KL(p || q)``. AdamW
(Loshchilov and Hutter 2019), warm-up and cosine.
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import cos, pi
from pathlib import Path
from time import monotonic
from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as computed_again

from edgespec_export.align.decoder import TorchDecoder, batch_of
from edgespec_export.align.settings import Text, TrainingOptions
from edgespec_models.errors import RequestError
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_models.storage import replacing, writing

_WARM_SHARE, _WARM_MOST = 0.1, 20  # of all steps, and steps
_LONGEST: Final = 1.0  # of a gradient
_WINDOW = 16  # batches whose texts are sorted by length: padding is computed for nothing
_SAVE_S: Final = 120.0
_MEASURED: Final = 1024  # tokens of a pass
_UNREADABLE = OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError


class SparingDecoder(TorchDecoder):
    """Computes layers again on the way back, which takes a third of the memory and a third more time."""

    def computed(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The stream behind a layer, with the layer's names on the way back too."""
        prefix = self.prefix

        def again(x: Tensor) -> Tensor:
            self.prefix, before = prefix, self.prefix
            try:
                return layer(x)
            finally:
                self.prefix = before

        return computed_again(again, x, use_reentrant=False)


class _Run:
    """A training run: batches in their order, the optimizer, and the progress."""

    def __init__(
        self, decoder: TorchDecoder, texts: Sequence[Text], options: TrainingOptions, known: str
    ) -> None:
        self._decoder, self.options = decoder, options
        self.batches = batches_of(texts, options)
        self.optimizer = torch.optim.AdamW(decoder.parameters.values(), lr=options.rate, weight_decay=0.0)
        self.step = 0
        self.key = hashlib.sha256(repr((asdict(options), list(texts), known)).encode()).hexdigest()

    def rate_at(self, step: int) -> float:
        """Warm-up, then half a cosine down to zero."""
        total = len(self.batches)
        warm = max(1, min(_WARM_MOST, int(_WARM_SHARE * total)))
        if step < warm:
            return self.options.rate * (step + 1) / warm
        return self.options.rate * 0.5 * (1.0 + cos(pi * (step - warm) / max(1, total - warm)))

    def save(self, path: Path) -> None:
        state = {
            "key": self.key,
            "step": self.step,
            "parameters": {name: value.detach() for name, value in self._decoder.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        with writing(path), replacing(path) as file:
            torch.save(state, file)

    def load(self, path: Path) -> None:
        another = f"{path} holds another training run, or is damaged; delete it, or choose another directory"
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)  # numbers only, no code
            if state["key"] != self.key:
                raise ValueError("of another run")
        except _UNREADABLE as error:
            raise RequestError(another) from error
        with torch.no_grad():
            for name, value in state["parameters"].items():
                self._decoder.parameters[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def train(
    decoder: TorchDecoder,
    texts: Sequence[Text],
    options: TrainingOptions,
    *,
    file: Path | None = None,
    known: str = "",
    device: str = "cpu",
    progress: ProgressCallback = ignore_progress,
) -> int:
    """Train ``decoder`` on ``texts``; returns the number of steps.

    ``file`` has the progress, written every two minutes; a run with this file goes on from it. The
    file also has ``known``, further facts of the run.

    Raises:
        RequestError: ``file`` is of another run, or the rate is so high that the loss grows
            without bound.
        StorageError: it cannot be written.
    """
    run, saved_at = _Run(decoder, texts, options, known), monotonic()
    if file is not None and file.exists():
        run.load(file)
    for index in range(run.step, len(run.batches)):
        try:
            progress(Progress("Training", index, len(run.batches), "steps"))
        except BaseException:  # who stops the run here loses nothing
            if file is not None:
                run.save(file)
            raise
        for group in run.optimizer.param_groups:
            group["lr"] = run.rate_at(index)
        with torch.autocast(device, torch.bfloat16, enabled=_multiplies_bfloat16(device)):
            loss = decoder.losses(batch_of(run.batches[index], device)).mean()
        if not torch.isfinite(loss):
            raise RequestError(
                f"the loss of step {index + 1} is no finite number: a rate of {options.rate:g} is too high; "
                "give a lower one with --rate"
            )
        run.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        torch.nn.utils.clip_grad_norm_(decoder.parameters.values(), _LONGEST)
        run.optimizer.step()
        run.step = index + 1
        if file is not None and monotonic() - saved_at > _SAVE_S:
            run.save(file)
            saved_at = monotonic()
    if file is not None:
        run.save(file)
    progress(Progress("Training", len(run.batches), len(run.batches), "steps"))
    return len(run.batches)


def first_guesses(
    decoder: TorchDecoder,
    texts: Sequence[Text],
    *,
    device: str = "cpu",
    progress: ProgressCallback = ignore_progress,
) -> list[list[bool]]:
    """Whether each answer token of each text is the decoder's first guess behind the text before it."""
    guesses: dict[int, list[bool]] = {}
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].tokens))
    groups = _cut([texts[index] for index in order], _MEASURED)
    numbers = iter(order)
    for number, group in enumerate(groups):
        progress(Progress("Measuring", number, len(groups), "steps"))
        right, at = decoder.right(batch_of(group, device)).tolist(), 0
        for text in group:
            count = len(text.tokens) - text.start
            guesses[next(numbers)] = right[at : at + count]
            at += count
    progress(Progress("Measuring", len(groups), len(groups), "steps"))
    return [guesses[index] for index in range(len(texts))]


def _multiplies_bfloat16(device: str) -> bool:
    """Whether the processor multiplies bfloat16, with which a step takes half the time."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def batches_of(texts: Sequence[Text], options: TrainingOptions) -> list[list[Text]]:
    """The batches of all passes, in order: texts of similar length together, the rest at random."""
    batches: list[list[Text]] = []
    generator = torch.Generator().manual_seed(options.seed)
    size = sum(len(text.tokens) for text in texts) / len(texts)
    window = max(1, int(_WINDOW * options.batch_tokens / size))
    for _ in range(options.passes):
        order = [texts[i] for i in torch.randperm(len(texts), generator=generator).tolist()]
        for start in range(0, len(order), window):
            groups = _cut(
                sorted(order[start : start + window], key=lambda t: len(t.tokens)), options.batch_tokens
            )
            batches += [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
    return batches


def _cut(texts: Sequence[Text], most: int) -> list[list[Text]]:
    """Neighbouring texts together, as long as they take at most this many tokens with padding."""
    groups: list[list[Text]] = []
    for text in texts:
        if groups and (len(groups[-1]) + 1) * max(len(t.tokens) for t in (*groups[-1], text)) <= most:
            groups[-1].append(text)
        else:
            groups.append([text])
    return groups
