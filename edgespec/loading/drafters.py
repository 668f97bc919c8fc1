"""The choice of ``"auto"``: the catalogue's drafter for a file that it knows, else the fastest expected one.

A drafter's price is its bytes over the target's, since bytes are what passes on a CPU cost. How often
guesses are right was measured for two kinds (docs/lab/drafters.md): of the target's family, and of another.
For heads that others have trained, their authors' figures count. None was tried here, so such a head drafts
only if it was pulled. For MTP layers, which come with a model, users' measurements count (docs/sources.md).
"""

import logging
from math import prod
from pathlib import Path
from typing import Final

from edgespec.loading import first_use
from edgespec.loading.opening import NGRAM, Reference
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.config import MTP_ROWS, DecoderShape
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.downloads.catalog import entries, find, hub_heads, hub_names
from edgespec_models.downloads.download import pulled_path
from edgespec_models.families import named

_FAMILY, _OTHER = 0.84, 0.71
"""Right first guesses on Spec-Bench: of Qwen2.5-Coder-0.5B for the 1.5B, and of SmolLM2-135M for the same."""
_MTP: Final = 0.77
"""Its powers are nearly 0.763, 0.623 and 0.459: how often the first, the first two and three are right."""
_ROW: Final = 0.05  # of a one-row pass, which each further row adds
_LONGEST: Final = 8
_WORTH: Final = 1.2  # times plain decoding; below that, a drafter model is not worth its memory
_LOG: Final = logging.getLogger("edgespec")


def choose(target: Bundle, reference: Reference, *, in_bytes: bool = False) -> str:
    """Choose the drafter for ``target``, which ``reference`` named. The log says why, and what is missing.

    For a model with a name the drafter is fetched, like the model. For a user's own file or folder nothing is
    fetched without being asked for. ``in_bytes`` is as in :func:`recommended`.
    """
    n_bytes, provenance = target.manifest.size_bytes, target.manifest.provenance
    layer, of_heads = None, ""
    if target.manifest.operators == "edgespec":  # others return no states
        layer = first_use.mtp_layer(target.config, provenance.get("left_out"), reference)
        of_heads = str(reference)
    name, speed = recommended(
        target.config, n_bytes, provenance.get("sha256"), of_heads, layer, in_bytes=in_bytes
    )
    if layer is not None and name == str(layer):
        _LOG.info("the MTP layer in %s drafts for %s: %.1f times as fast", name, reference, speed)
        return name
    if name == NGRAM:
        _LOG.info("n-grams draft for %s: no model promises %.1f times its plain speed", reference, speed)
        return name
    if pulled_path(name):
        _LOG.info("%s drafts for %s: decoding should be %.1f times as fast", name, reference, speed)
        return name
    if not Path(reference).exists():
        _LOG.warning("%s, %.1f GB, drafts for %s and is fetched", name, _bytes_of(name) / 1e9, reference)
        return name
    _LOG.warning(
        "n-grams draft for %s. With %s (%.1f GB) decoding should be %.1f times as fast; 'edgespec pull %s' "
        "brings it",
        *(reference, name, _bytes_of(name) / 1e9, speed, name),
    )
    return NGRAM


def recommended(
    shape: DecoderShape,
    n_bytes: float,
    digest: object = None,
    reference: str = "",
    layer: Path | None = None,
    *,
    in_bytes: bool = False,
) -> tuple[str, float]:
    """The best drafter for a target of this size in bytes, and the speedup of decoding expected from it.

    ``digest`` is the SHA-256 of the file that the target was made of, ``reference`` what heads call it if it
    returns states, ``layer`` where its MTP layer is. ``in_bytes``: it keeps keys and values in 8 bits.
    """
    catalogue = entries().values()
    known = next((entry for entry in catalogue if entry.sha256 == digest), None)
    family = {
        name: model.size_bytes
        for name, model in hub_names().items()
        if model.drafts and (model.architecture, model.vocabulary) == (shape.architecture, shape.vocab_size)
    }
    of_shape = named(shape.architecture)
    one_vocabulary = of_shape is not None and of_shape.one_vocabulary
    n_bytes = max(n_bytes, 1)
    if isinstance(shape, Transformer):  # a pass reads few of the experts, and no table
        n_bytes *= _weights(shape, shape.vocab_size) / _weights(shape, shape.vocab_size, whole=True)
    promised = {NGRAM: _WORTH}
    for entry in catalogue:
        if entry.role == "drafter" and entry.alignment is None:
            if entry.architecture == shape.architecture and one_vocabulary:
                family[entry.name] = entry.size_bytes
            promised[entry.name] = expected_speed(_OTHER, entry.size_bytes / n_bytes)
    promised |= {name: expected_speed(_FAMILY, size / n_bytes) for name, size in family.items()}
    promised |= {
        name: expected_speed(head.acceptance, head.step_bytes / n_bytes, in_blocks=head.in_blocks)
        for name, head in hub_heads().items()
        if reference in head.targets and pulled_path(name) and not (in_bytes and head.reads_cache)
    }
    if layer is not None and isinstance(shape, Transformer):
        promised[str(layer)] = expected_speed(_MTP, mtp_price(shape))
    if known is not None and known.drafter is not None:
        return known.drafter, max(promised.values())
    best = max(promised, key=lambda name: promised[name])
    return best, promised[best]


def mtp_price(target: Transformer, *, whole: bool = False) -> float:
    """The price of a step of the target's MTP layer, as a share of the weights that a target's pass reads.

    With ``whole`` it is the layer's share of all weights.
    """
    layer, rows = target.mtp_layer, target.vocab_size
    assert layer is not None  # of a family with such layers
    return _weights(layer, min(rows, MTP_ROWS), whole=whole) / _weights(target, rows, whole=whole)


def _weights(config: Transformer, rows: int, *, whole: bool = False) -> float:
    """The weights that a pass over one row reads, with so many rows of the LM head; all with ``whole``."""
    made = record(config)
    sizes = {name: prod(shape) for name, shape in made.tensors.items() if name != "embed"}
    of_experts = sum(size for name, size in sizes.items() if ".experts_" in name)
    unread = of_experts * (1 - made.shares.get("experts", 1.0)) + sizes.get("inputs", 0)
    return sum(sizes.values()) - (config.vocab_size - rows) * config.hidden_size - (0 if whole else unread)


def expected_speed(guessed: float, price: float, *, in_blocks: bool = False) -> float:
    """The speedup over plain decoding at the best length of drafts (Leviathan et al. 2023, theorem 3.8).

    Args:
        guessed: the probability that a guess is right.
        price: the price of a drafter's step, in passes of the target; each further row costs 0.05.
        in_blocks: whether a step drafts all tokens, so that each further one costs 0.05 of a step.
    """

    def drafting(length: int) -> float:
        return price * (1 + _ROW * length if in_blocks else length)

    return max(
        (1 - guessed ** (length + 1)) / (1 - guessed) / (1 + drafting(length) + length * _ROW)
        for length in range(1, _LONGEST + 1)
    )


def _bytes_of(name: str) -> int:
    return (hub_names().get(name) or find(name)).size_bytes
