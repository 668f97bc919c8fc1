"""What one model takes: memory for its weights, its KV cache and its passes; disk until it can be opened."""

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from edgespec_models.bundles.bundle import Bundle, CacheType
from edgespec_runtimes.graph_session import KV_STEP
from edgespec_runtimes.kv_buffers import KEY_TILE

__all__ = ["WORKING_BYTES", "CacheSize", "Footprint", "footprint_of"]

State = Literal["here", "to be exported", "to be pulled"]

WORKING_BYTES: Final = 950
"""For each token of a vocabulary, as measured (docs/plan.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """How large the KV cache of a text is: sessions make room in steps.

    Attributes:
        kind: what it holds.
        bytes_per_token: of one token.
        longest: tokens it can hold at most.
        spare: tokens of room behind the text, which some passes write.
        tile: its room is a multiple of so many tokens.
        copies: how many there are; graphs that concatenate keep two.
        buckets: lengths that graphs of fixed shapes have; empty where any will do.
    """

    kind: CacheType
    bytes_per_token: int
    longest: int
    spare: int = 0
    tile: int = 1
    copies: int = 1
    buckets: tuple[int, ...] = ()

    def room(self, tokens: int) -> int:
        """Tokens of room that a session makes for a text of ``tokens``, or for the longest there can be."""
        wanted = min(tokens, self.longest)
        if self.buckets:
            return next(bucket for bucket in self.buckets if bucket >= wanted)
        rounded = min(-(-wanted // KV_STEP) * KV_STEP, self.longest) + self.spare
        return -(-rounded // self.tile) * self.tile if self.tile > 1 else min(rounded, self.longest)

    def bytes(self, tokens: int) -> int:
        """Bytes that are reserved for a text of ``tokens``."""
        return self.room(tokens) * self.bytes_per_token * self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one model takes.

    Attributes:
        name: the model's.
        state: what is on this machine.
        weights_bytes: weights that a pass reads.
        mapped: whether they may stay in their file, which the system reads piece by piece and drops when
            memory is short; else they are copied when the model is loaded.
        table_bytes: tables of which a pass reads a few rows; mapped.
        twice_bytes: the largest matrix, which is there twice for a moment as weights are copied.
        working_bytes: tokenizer, and what passes compute in; mostly the tokenizer.
        cache: its KV cache.
        download_bytes: to be downloaded before it can be opened.
        export_bytes: that an export writes before.
        device: what else than the CPU the bundle was made for; a GPU has memory of its own.
    """

    name: str
    state: State
    weights_bytes: int
    mapped: bool
    table_bytes: int
    twice_bytes: int
    working_bytes: int
    cache: CacheSize
    download_bytes: int = 0
    export_bytes: int = 0
    device: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "name": self.name,
            "state": self.state,
            "weights_bytes": self.weights_bytes,
            "mapped": self.mapped,
            "table_bytes": self.table_bytes,
            "twice_bytes": self.twice_bytes,
            "working_bytes": self.working_bytes,
            "kv_type": self.cache.kind,
            "kv_bytes_per_token": self.cache.bytes_per_token * self.cache.copies,
            "context_length": self.cache.longest,
            "download_bytes": self.download_bytes,
            "export_bytes": self.export_bytes,
            "device": self.device,
        }


def footprint_of(bundle: Bundle, *, exact_rows: bool) -> Footprint:
    """What a bundle takes; ``exact_rows`` as in :class:`edgespec_runtimes.cpu.CpuOptions`."""
    manifest = bundle.manifest
    by_class = manifest.bytes_by_class
    return Footprint(
        name=manifest.name,
        state="here",
        weights_bytes=manifest.bytes_per_pass,
        mapped=manifest.operators == "edgespec",
        table_bytes=sum(by_class.values()) - manifest.bytes_per_pass,
        twice_bytes=by_class.get("lm_head", 0) if manifest.operators == "edgespec" else 0,
        working_bytes=WORKING_BYTES * manifest.config.vocab_size,
        cache=_cache_of(bundle, exact_rows),
        device=manifest.made_for,
    )


def _cache_of(bundle: Bundle, exact_rows: bool) -> CacheSize:
    manifest, static = bundle.manifest, bundle.manifest.static
    size, context = manifest.kv_bytes_per_token, bundle.config.context_length
    if static is not None:
        longest, buckets = static.longest, static.buckets
        return CacheSize(kind=manifest.kv, bytes_per_token=size, longest=longest, buckets=buckets)
    spare = int(exact_rows and manifest.operators == "standard")
    own = CacheSize(kind=manifest.kv, bytes_per_token=size, longest=context, spare=spare, tile=KEY_TILE)
    if manifest.files:
        return own
    return replace(own, tile=1, copies=1 if _shares_cache(bundle) else 2)  # another exporter's, without files


def _shares_cache(bundle: Bundle) -> bool:
    """Whether a foreign graph writes its cache in place, as attention does that takes it whole.

    A session tries it out (:class:`edgespec_runtimes.graph_io.MaskedIO`); this is read from the header.
    """
    from edgespec_models.files.onnx_header import read_header  # of no use to edgespec's own bundles

    written = {tensor.present for tensor in bundle.tensors.cache} if bundle.tensors is not None else set()
    writers = [node for node in read_header(bundle.graph).nodes if written & set(node.outputs)]
    return all(node.op_type == "GroupQueryAttention" for node in writers)
