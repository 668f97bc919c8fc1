"""Text of targets: shipped, read from files, or written now."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.errors import RequestError
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.schema import read_lines
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from edgespec_runtimes.cost import CostCurve, measure_cost
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.session import Session

_SHIPPED = "calibration.jsonl.gz"
_PROMPTS = 64
_TOKENS = 96


@dataclass(frozen=True, slots=True)
class _Text:
    text: str


def prompt_start(special: SpecialTokens) -> list[int]:
    """The beginning of every prompt of a model: BOS, or nothing."""
    return [special.bos] if special.add_bos and special.bos is not None else []


def shipped_texts() -> list[str]:
    """Text of the catalogue's targets (docs/lab/drafters.md), for any drafter."""
    return [record["text"] for record in _shipped()]


def shipped_prompts() -> list[str]:
    """The prompts of some of these texts, each once."""
    return list(dict.fromkeys(record["prompt"] for record in _shipped() if "prompt" in record))


def read_texts(path: Path) -> list[str]:
    """The texts of a JSON Lines file; RequestError if it has none, or a line is without a ``text``."""
    remedy = 'Write one JSON object on each line, with a "text" of a target'
    texts = [line.text for line in read_lines(_Text, path, remedy)]
    if not texts:
        raise RequestError(f"{path} holds no calibration text; give some hundred texts of a target")
    return texts


def calibration_tokens(
    tokenizer: Tokenizer, special: SpecialTokens, files: Sequence[Path], *, count: int, longest: int
) -> list[list[int]]:
    """Token ids of beginnings of some texts in JSON Lines ``files``, or of the shipped ones without any.

    They are at most ``count`` texts from all parts of the files, begin as prompts do, and have ``longest``
    tokens at most.

    Raises:
        RequestError: as :func:`read_texts`.
    """
    texts = [text for file in files for text in read_texts(file)] if files else shipped_texts()
    start, chosen = prompt_start(special), texts[:: max(1, len(texts) // count)][:count]
    return [(start + tokenizer.encode(text))[:longest] for text in chosen]


def written_by(target: Path, progress: ProgressCallback) -> tuple[list[str], CostCurve]:
    """Answer some prompts with the bundle ``target``, greedily; return the answers and the costs of its
    passes.

    Raises:
        BundleError: the target cannot be opened.
        RequestError: it is a trimmed drafter.
    """
    bundle = open_bundle(target)
    if bundle.head_tokens is not None:
        raise RequestError(f"{target} is a trimmed drafter; calibrate with a target")
    session = open_cpu(bundle, CpuOptions(exact_rows=False))
    try:
        curve = measure_cost(session)
        prompts = shipped_prompts()
        texts = []
        for number, prompt in enumerate(prompts[:: max(1, len(prompts) // _PROMPTS)][:_PROMPTS]):
            progress(Progress("Writing calibration text", number, _PROMPTS, "text"))
            texts.append(_answer(bundle, session, prompt))
        progress(Progress("Writing calibration text", _PROMPTS, _PROMPTS, "text"))
        return texts, curve
    finally:
        session.close()


def _answer(bundle: Bundle, session: Session, prompt: str) -> str:
    tokenizer, special = bundle.tokenizer, bundle.manifest.special_tokens
    if bundle.chat_template is None:
        ids = tokenizer.encode(prompt + "\n\n")
    else:
        ids = bundle.chat_template.encode([{"role": "user", "content": prompt}], tokenizer)
    if ids[:1] != prompt_start(special):
        ids = prompt_start(special) + ids
    start = len(ids)
    token = session.predict_next(ids).best(0)
    while token not in special.eos and len(ids) - start < _TOKENS:
        ids.append(token)
        token = session.predict([token]).best(0)
    return tokenizer.decode(ids[start:])


def _shipped() -> list[dict[str, Any]]:
    packed = (resources.files("edgespec_models") / _SHIPPED).read_bytes()
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]
