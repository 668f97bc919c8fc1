"""How large an export will be, before it is made."""

from pathlib import Path

from edgespec_export.formats.plan import plan_decoder
from edgespec_export.graphs.writer import allocate, bytes_by_class
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.bundles.bundle import Role
from edgespec_models.graphs.decoder import build_decoder
from edgespec_models.graphs.native import build_native

__all__ = ["weight_bytes"]


def weight_bytes(checkpoint: Checkpoint, role: Role, weights: str | None) -> tuple[dict[str, int], int]:
    """What an export for the CPU would write, the whole LM head kept: bytes by class, and of the file."""
    tied, tunable = False, role == "drafter"
    if weights in (None, "exact"):
        plan = plan_decoder(checkpoint, native=True, tunable=tunable)
        model, tied = build_native(checkpoint.config, plan), plan.tied
    else:
        model = build_decoder(checkpoint.config, plan_decoder(checkpoint, tunable=tunable))
    named, _, size = allocate(model, Path())
    by_class = bytes_by_class(named)
    if tied:  # a pass reads all of it
        by_class["lm_head"], by_class["embedding"] = by_class["embedding"], 0
    return by_class, size
