"""From answers to an alignment file: texts in the drafter's tokens, training, and the gain."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from edgespec.align.answers import Answer, number_of
from edgespec.requests.request import Request, drafter_tokens
from edgespec_export.align.alignment import Alignment, Origin
from edgespec_export.align.settings import Guesses, Text, TrainingOptions
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import DeviceError, RequestError, TokenizerError
from edgespec_models.progress import ProgressCallback

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
    try:
        prompt = drafter_tokens(drafter, [{"role": "user", "content": answer.prompt}], Request())
        written = drafter.tokenizer.encode_bytes(answer.text.encode(errors="replace"))
    except (RequestError, TokenizerError):
        return None
    ends = drafter.manifest.special_tokens.eos[:1] if answer.complete else ()
    tokens = (*prompt, *written, *ends)[:_LONGEST]
    return Text(tokens, len(prompt), answer.category) if 0 < len(prompt) < len(tokens) else None


def split_texts(answers: Iterable[Answer], drafter: Bundle) -> tuple[list[Text], list[Text]]:
    """Texts to train on, and held-out ones; on which side a prompt is depends on its own words alone."""
    sides: tuple[list[Text], list[Text]] = [], []
    for answer in answers:
        text = text_of(answer, drafter)
        if text is not None:
            sides[is_held_out(answer.prompt)].append(text)
    return sides


def is_held_out(prompt: str) -> bool:
    """Whether ``prompt`` is held out for measuring; its text alone decides, so this never changes."""
    return number_of(prompt) % _HELD_OUT == 0


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
    from edgespec_export.align.decoder import TorchDecoder
    from edgespec_export.align.training import count_right, train

    kept, held = texts
    if len(kept) < _FEWEST or not held:
        raise RequestError(
            f"there are {len(kept)} answers to train on and {len(held)} held out; give at least "
            f"{10 * _FEWEST} prompts, better thousands"
        )
    with open_checkpoint(source) as checkpoint:
        digest = checkpoint.digest(progress)
        decoder = TorchDecoder(checkpoint, rank=options.rank, seed=options.seed, device=device)
        before = count_right(decoder, held, device=device, progress=progress)
        state = out / _STATE
        steps = train(decoder, kept, options, place=state, known=digest, device=device, progress=progress)
        changes = decoder.changes()
        decoder.take(changes)  # which rounds them as the file keeps them
        after = count_right(decoder, held, device=device, progress=progress)
    tokens = sum(len(text.tokens) - text.start for text in kept)
    recipe = {name: str(value) for name, value in asdict(options).items()}
    shares = share_right(before), share_right(after)
    origin = Origin(facts["model"], digest, facts["target"], tokens, *shares, recipe, facts["licence"])
    path = out / ALIGNMENT
    size = Alignment(origin, changes).write(path)
    return {
        "path": str(path),
        "size_bytes": size,
        "texts": len(kept),
        "tokens": tokens,
        "held_out": len(held),
        "steps": steps,
        "before": before,
        "after": after,
        "share_before": shares[0],
        "share_after": shares[1],
    }


def share_right(guesses: Guesses, category: str | None = None) -> float:
    """The share of right first guesses, in a category or in all."""
    chosen = [counts for name, counts in guesses.items() if category in (name, None)]
    return sum(right for right, _ in chosen) / max(1, sum(of for _, of in chosen))
