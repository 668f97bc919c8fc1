"""What one model takes: memory for its weights, its KV cache and its passes; disk until it can be opened."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.loading import Located
from edgespec_export.extra import require_extra
from edgespec_models.bundle import Bundle, CacheType, Role
from edgespec_models.catalog import CatalogueEntry, CatalogueShape
from edgespec_models.config import DecoderShape
from edgespec_models.download import is_pulled
from edgespec_models.errors import RequestError
from edgespec_models.graph_tensors import GraphTensors
from edgespec_models.onnx_header import read_header
from edgespec_runtimes.graph_session import KV_STEP
from edgespec_runtimes.kv_buffers import KEY_TILE

__all__ = ["CacheSize", "Footprint", "footprint", "footprint_of"]

State = Literal["here", "to be exported", "to be pulled"]

_WORKING_BYTES = 950  # for each token of the vocabulary, as measured (docs/plan.md)


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


def footprint(located: Located, role: Role, weights: str | None = None) -> Footprint:
    """What the model takes that :func:`edgespec.loading.look_up` found; ``weights`` as given there.

    Raises:
        EdgespecError: a checkpoint that cannot be exported, or not without the ``export`` extra.
        RequestError: a model of the catalogue that was not pulled, and whose entry has no shape.
    """
    if located.bundle is not None:
        return footprint_of(located.bundle, exact_rows=role == "target")
    if located.entry is not None and not is_pulled(located.entry):
        return _of_entry(located.entry, role, weights)
    return _of_checkpoint(located, role, weights)


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
        working_bytes=_WORKING_BYTES * manifest.config.vocab_size,
        cache=_cache_of(bundle, exact_rows),
        device=manifest.made_for,
    )


def _cache_of(bundle: Bundle, exact_rows: bool) -> CacheSize:
    manifest, tensors, static = bundle.manifest, bundle.tensors, bundle.manifest.static
    size, context = manifest.kv_bytes_per_token, bundle.config.context_length
    if static is not None:
        return CacheSize(
            kind=manifest.kv, bytes_per_token=size, longest=static.longest, buckets=static.buckets
        )
    spare = int(exact_rows and manifest.operators == "standard")
    if tensors is None:
        return CacheSize(kind=manifest.kv, bytes_per_token=size, longest=context, spare=spare, tile=KEY_TILE)
    copies = 1 if _shares_cache(bundle, tensors) else 2
    return CacheSize(kind=manifest.kv, bytes_per_token=size, longest=context, spare=spare, copies=copies)


def _shares_cache(bundle: Bundle, tensors: GraphTensors) -> bool:
    """Whether a foreign graph writes its cache in place, as attention does that takes it whole.

    A session tries it out (:class:`edgespec_runtimes.graph_io.MaskedIO`); this is read from the header.
    """
    written = {tensor.present for tensor in tensors.cache}
    writers = [node for node in read_header(bundle.graph).nodes if written & set(node.outputs)]
    return all(node.op_type == "GroupQueryAttention" for node in writers)


def _of_checkpoint(located: Located, role: Role, weights: str | None) -> Footprint:
    """A checkpoint that is here: what its export will be."""
    require_extra()
    from edgespec_export.graph_files import weight_bytes
    from edgespec_export.sources import open_checkpoint

    with open_checkpoint(located.source) as checkpoint:
        by_class, file_bytes = weight_bytes(checkpoint, role, weights)
        config = checkpoint.config
    return _planned(located.name, config, (role, weights), by_class, (0, file_bytes))


def _of_entry(entry: CatalogueEntry, role: Role, weights: str | None) -> Footprint:
    """A model that is not here: its file's size stands for its weights, which an export keeps as they are."""
    shape = entry.shape
    if shape is None:
        raise RequestError(
            f"the catalogue does not say what {entry.name} takes; run 'edgespec pull {entry.name}' first"
        )
    disk = entry.size_bytes, entry.size_bytes
    return _planned(
        entry.name, _shape_of(entry, shape), (role, weights), {"matrices": entry.size_bytes}, disk
    )


def _shape_of(entry: CatalogueEntry, shape: CatalogueShape) -> DecoderShape:
    return DecoderShape(
        architecture=entry.architecture,
        vocab_size=shape.vocabulary,
        num_layers=shape.layers,
        num_heads=shape.kv_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        context_length=shape.context,
    )


def _planned(
    name: str,
    config: DecoderShape,
    wanted: tuple[Role, str | None],
    by_class: Mapping[str, int],
    disk: tuple[int, int],
) -> Footprint:
    """What an export for the CPU will take; ``disk`` are bytes to download and to write."""
    role, weights = wanted
    native = weights in (None, "exact")
    kind: CacheType = "float16" if native else "float32"
    tables = sum(by_class.get(name, 0) for name in ("embedding", "other"))
    cache = CacheSize(
        kind=kind,
        bytes_per_token=config.kv_bytes_per_token // (2 if native else 1),
        longest=config.context_length,
        spare=int(not native and role == "target"),
        tile=KEY_TILE,
    )
    return Footprint(
        name=name,
        state="to be pulled" if disk[0] else "to be exported",
        weights_bytes=sum(by_class.values()) - tables,
        mapped=native,
        table_bytes=tables,
        twice_bytes=by_class.get("lm_head", 0) if native else 0,
        working_bytes=_WORKING_BYTES * config.vocab_size,
        cache=cache,
        download_bytes=disk[0],
        export_bytes=disk[1],
    )
