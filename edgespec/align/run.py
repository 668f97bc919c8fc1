"""From answers to an alignment file: texts in the drafter's tokens, training, and the gain."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from edgespec.align.answers import Answer, number_of
from edgespec.asking.request import PromptInput, Request, drafter_tokens
from edgespec_export.align.alignment import Alignment, Codes, Origin
from edgespec_export.align.settings import Guesses, Text, TrainingOptions
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import DeviceError, RequestError, TokenizerError
from edgespec_models.progress import ProgressCallback
from edgespec_runtimes.memory import give_back_at_once

ALIGNMENT, _STATE = "alignment.safetensors", "training.pt"
_HELD_OUT = 10  # one of so many prompts measures and is never trained on
_LONGEST = 2048  # tokens of a prompt and its answer
_FEWEST = 10  # texts


def torch_device(wanted: Literal["auto", "cpu", "cuda"], threads: int = 0) -> str:
    """PyTorch's name of the device for training. PyTorch is set to this number of threads; with 0 it decides.

    ``auto`` is a GPU that PyTorch can use, or else the CPU.

    Raises:
        DeviceError: there is no such device.
    """
    import torch

    if threads:
        torch.set_num_threads(threads)
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DeviceError("PyTorch finds no CUDA device here; use --device cpu, or install its CUDA build")
    return "cuda" if wanted == "auto" and torch.cuda.is_available() else wanted.replace("auto", "cpu")


def text_of(answer: Answer, drafter: Bundle) -> Text | None:
    """An answer as the drafter reads it while it drafts; None if it cannot."""
    prompt = [{"role": "user", "content": answer.prompt}]
    text = answer.text.encode(errors="replace")
    return turn_text(prompt, text, drafter, ended=answer.complete, category=answer.category)


def turn_text(
    prompt: PromptInput, answer: bytes, drafter: Bundle, *, ended: bool, category: str = ""
) -> Text | None:
    """A prompt and its answer as the drafter reads them while it drafts; None if it cannot.

    Of a long prompt and answer the beginning is left out.
    """
    try:
        read = drafter_tokens(drafter, prompt, Request())
        written = drafter.tokenizer.encode_bytes(answer)
    except (RequestError, TokenizerError):
        return None
    ends = drafter.manifest.special_tokens.eos[:1] if ended else ()
    left_out = max(0, len(read) + len(written) + len(ends) - _LONGEST)
    tokens = (*read, *written, *ends)[left_out:]
    start = max(len(read) - left_out, 1)
    return Text(tokens, start, category) if read and start < len(tokens) else None


def split_texts(answers: Iterable[Answer], drafter: Bundle) -> tuple[list[Text], list[Text]]:
    """Texts to train on, and held-out ones; on which side a prompt is depends on its own words alone."""
    sides: tuple[list[Text], list[Text]] = [], []
    for answer in answers:
        text = text_of(answer, drafter)
        if text is not None:
            sides[number_of(answer.prompt) % _HELD_OUT == 0].append(text)
    return sides


def align(
    source: Path,
    texts: tuple[Sequence[Text], Sequence[Text]],
    options: TrainingOptions,
    out: Path,
    *,
    device: str,
    facts: dict[str, str],
    progress: ProgressCallback,
) -> dict[str, Any]:
    """Train the drafter ``source`` and write its alignment to ``out``, a directory that exists.

    ``device`` is a name of :func:`torch_device`. ``facts`` are the ``model``, ``target`` and ``licence`` that
    the alignment records. Returns the results as JSON values; docs/json.md lists the keys.

    Raises:
        RequestError: too few texts; or the directory holds a training run of other texts or options.
        EdgespecError: the drafter cannot be read, or the file cannot be written, for another reason.
    """
    kept, held = texts
    if len(kept) < _FEWEST or not held:
        raise RequestError(
            f"there are {len(kept)} answers to train on and {len(held)} held out; give at least "
            f"{10 * _FEWEST} prompts, better thousands"
        )
    result = trained(source, texts, options, out / _STATE, device=device, progress=progress)
    before, after = (count_guesses(held, guesses) for guesses in (result.before, result.after))
    path, made = out / ALIGNMENT, result.alignment(facts, kept, options)
    size = made.write(path)
    return {
        "path": str(path),
        "size_bytes": size,
        "texts": len(kept),
        "tokens": made.origin.tokens,
        "held_out": len(held),
        "steps": result.steps,
        "before": before,
        "after": after,
        "share_before": made.origin.right_before,
        "share_after": made.origin.right_after,
    }


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained change of the checkpoint ``digest``.

    ``before`` and ``after`` say of each answer token of each held-out text whether it is the first guess.
    """

    digest: str
    changes: dict[str, Codes]
    steps: int
    before: list[list[bool]]
    after: list[list[bool]]

    def alignment(self, facts: dict[str, str], texts: Sequence[Text], options: TrainingOptions) -> Alignment:
        """The alignment, which was trained on ``texts``; ``facts`` are those of :func:`align`."""
        tokens = sum(len(text.tokens) - text.start for text in texts)
        recipe = {name: str(value) for name, value in asdict(options).items()}
        shares = share(self.before), share(self.after)
        names = facts["model"], self.digest, facts["target"]
        return Alignment(Origin(*names, tokens, *shares, recipe, facts["licence"]), self.changes)


def trained(
    source: Path,
    texts: tuple[Sequence[Text], Sequence[Text]],
    options: TrainingOptions,
    file: Path,
    *,
    device: str,
    progress: ProgressCallback,
    start: Alignment | None = None,
    sparing: bool = False,
) -> Trained:
    """Train the drafter ``source`` on the first of ``texts``, measure it on the second.

    It begins with the change ``start``, if there is one. A run that was stopped goes on from ``file``.
    ``sparing`` takes less memory and more time.
    """
    from edgespec_export.align.decoder import TorchDecoder
    from edgespec_export.align.training import SparingDecoder, first_guesses, train

    taught, held = texts
    measure = partial(first_guesses, texts=held, device=device, progress=progress)
    kind = SparingDecoder if sparing else TorchDecoder
    if sparing:
        give_back_at_once()
    with open_checkpoint(source) as checkpoint:
        digest = known = checkpoint.digest(progress)
        decoder = kind(checkpoint, rank=options.rank, seed=options.seed, device=device)
        if start is not None:
            decoder.load(start.parts)
            known += start.digest
        before = measure(decoder)
        steps = train(decoder, taught, options, file=file, known=known, device=device, progress=progress)
        changes = decoder.changes()
        decoder.load(changes)  # which rounds them as the file keeps them
        return Trained(digest, changes, steps, before, measure(decoder))


def count_guesses(texts: Sequence[Text], guesses: Sequence[Sequence[bool]]) -> Guesses:
    """The number of right first guesses, and of all, by category."""
    counts: Guesses = {}
    for text, right in zip(texts, guesses, strict=True):
        before, of = counts.get(text.category, (0, 0))
        counts[text.category] = before + sum(right), of + len(right)
    return dict(sorted(counts.items()))


def share(guesses: Sequence[Sequence[bool]]) -> float:
    """The share of right guesses."""
    return sum(map(sum, guesses)) / max(1, sum(map(len, guesses)))


def share_right(guesses: Guesses, category: str | None = None) -> float:
    """The share of right first guesses, in a category or in all."""
    chosen = [counts for name, counts in guesses.items() if category in (name, None)]
    return sum(right for right, _ in chosen) / max(1, sum(of for _, of in chosen))
