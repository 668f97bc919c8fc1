"""Which format each weight gets: a policy or a quantization the user chose, applied to a checkpoint.

What they cost and what they keep is measured in docs/benchmarks.md, "Weight formats".
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from types import MappingProxyType

from edgespec_export.checkpoint import FLOATS, Checkpoint
from edgespec_export.gguf import GGMLType
from edgespec_export.quantization import Quantization
from edgespec_export.recipe import DEFAULT_WEIGHTS
from edgespec_models.bundle import Role
from edgespec_models.graphs.decoder import FULL, DecoderPlan, Precision, Refinement
from edgespec_models.graphs.linear import EmbeddingSpec, LinearPart, LinearSpec
from edgespec_models.weight_format import Method, WeightFormat

__all__ = ["POLICIES", "Policy", "default_weights", "plan_decoder"]

_LARGE = 1_000_000_000  # weights; smaller models lose too much by 4 bits that nobody chose for them
_INT4 = WeightFormat(4, 32)
_INT4_COLUMNS = WeightFormat(4, 32, zero_points=True, remainder="columns")
_INT4_MATMUL = WeightFormat(4, 32, zero_points=True, remainder="matmul")
_INT8 = WeightFormat(8, 32)
_INT8_64 = WeightFormat(8, 64)
_INT8_128 = WeightFormat(8, 128)
_INT8_16 = WeightFormat(8, 16)
_FLOAT = WeightFormat(32)
_HALF = WeightFormat(16)
_GPU_BLOCK = 32  # CUDA's kernels are made and measured for blocks of 32, and have no use for larger ones
_COARSE = WeightFormat(4, 128)
_REFINED_FROM = 32_768  # tokens; smaller LM heads take too little of a pass
_REFINED_WEIGHTS = 1 << 18  # of the rows looked up for a token; more cost time, fewer nearness
_LEAST_REFINED = 128  # rows
_MATRICES = frozenset(("q", "k", "v", "o", "gate", "up", "down"))

_EXACT: Mapping[GGMLType, WeightFormat] = MappingProxyType(
    {
        GGMLType.F32: _FLOAT,
        GGMLType.F16: _FLOAT,
        GGMLType.BF16: _FLOAT,
        GGMLType.Q4_0: _INT4,
        GGMLType.Q4_1: _INT4_MATMUL,
        GGMLType.Q5_0: _INT8,
        GGMLType.Q8_0: _INT8,
        GGMLType.Q4_K: _INT4_MATMUL,
        GGMLType.Q6_K: _INT8_16,
    }
)


@dataclass(frozen=True, slots=True)
class Policy:
    """A format for every source format: ``layers`` for the blocks' matrices, ``head`` for the LM head.

    The manifest tells its ``name``, the command line its ``summary``. ``refined`` targets have a coarse LM
    head where the vocabulary is large, and the exact rows of the most probable tokens
    (:class:`~edgespec_models.graphs.decoder.Refinement`).
    """

    name: str
    summary: str
    layers: Mapping[GGMLType, WeightFormat]
    head: Mapping[GGMLType, WeightFormat]
    method: Method = "keep"
    refined: bool = False

    def format_of(self, name: str, kind: GGMLType, columns: int, layers: int) -> WeightFormat:
        """The format of tensor ``name``, which the source has as ``kind``, in a model of ``layers``."""
        return _fitting((self.head if name == "lm_head" else self.layers)[kind], columns)

    def in_blocks_up_to(self, block: int) -> "Policy":
        """The same in smaller blocks."""
        layers, head = (
            {kind: replace(form, block=min(form.block, block)) for kind, form in forms.items()}
            for forms in (self.layers, self.head)
        )
        return replace(self, layers=layers, head=head)


_CLOSE = {
    **_EXACT,
    GGMLType.Q4_1: _INT4_COLUMNS,
    GGMLType.Q4_K: _INT4_COLUMNS,
    GGMLType.Q6_K: _INT8_64,
}
_FAST = {kind: _INT4 if kind is GGMLType.Q4_0 else _INT4_COLUMNS for kind in GGMLType}
_INT8_ALL = {kind: _INT4 if kind is GGMLType.Q4_0 else _INT8_64 for kind in GGMLType}
_QUICK = {kind: _INT4 if kind is GGMLType.Q4_0 else _INT8_128 for kind in GGMLType}
_8_BITS = dict.fromkeys(GGMLType, _INT8)

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Policy("exact", "every weight keeps the value it has in the file", _EXACT, _EXACT),
            Policy(
                "close",
                "what 4 bits cannot hold is rounded to a hundredth of a step or to 8 bits",
                _CLOSE,
                _CLOSE,
                refined=True,
            ),
            Policy(
                "balanced",
                "4 bits in the layers, 8 bits in the LM head and the embedding",
                _FAST,
                _8_BITS,
                refined=True,
            ),
            Policy(
                "int8",
                "8 bits everywhere, but 4 where the file has 4 that fit",
                _INT8_ALL,
                _INT8_ALL,
                refined=True,
            ),
            Policy("quick", "like int8, in larger blocks: for drafters", _QUICK, _QUICK),
            Policy("fast", "4 bits everywhere", _FAST, _FAST, refined=True),
        )
    }
)
"""Policies by name."""


def _fitting(form: WeightFormat, columns: int) -> WeightFormat:
    """``form``, in smaller blocks where the width has no whole ones of its own, or in floating point."""
    while not form.is_float and columns % form.block:
        form = replace(form, block=form.block // 2) if form.block > 16 else _FLOAT
    return form


def default_weights(checkpoint: Checkpoint, role: Role) -> str:
    """The policy for a role, and for a target by what its layers' matrices are and how many weights."""
    names = [name for name in checkpoint.tensors if name.rpartition(".")[2] in _MATRICES]
    matrices = [checkpoint.tensor(name) for name in names]
    if role == "drafter" or not all(matrix.type in FLOATS for matrix in matrices):
        return DEFAULT_WEIGHTS[role]
    return "balanced" if sum(prod(matrix.shape) for matrix in matrices) >= _LARGE else "int8"


def plan_decoder(
    checkpoint: Checkpoint,
    policy: Policy | Quantization,
    *,
    hidden_states: bool = False,
    spare_rows: bool = True,
    head_tokens: tuple[int, ...] | None = None,
    precision: Precision = FULL,
) -> DecoderPlan:
    """Assign formats; neighbouring projections with one format are fused into one matrix."""
    config = checkpoint.config
    if precision.activations == "float16" and isinstance(policy, Policy):
        policy = policy.in_blocks_up_to(_GPU_BLOCK)
    head, embedding = _linear(checkpoint, policy, ("lm_head",), ()), _table(checkpoint, policy, "embed")
    coarse, refinement = _fitting(_COARSE, head.in_features), None
    if head_tokens is not None:
        head = replace(head, parts=(replace(head.parts[0], out_features=len(head_tokens)),))
    elif spare_rows and policy.refined and head.out_features >= _REFINED_FROM and coarse.bits == 4:
        head = replace(head, parts=(replace(head.parts[0], format=coarse, method="fit"),))
        rows = embedding if checkpoint.tied_head else _table(checkpoint, policy, "lm_head")
        columns = max(_LEAST_REFINED, _REFINED_WEIGHTS // head.in_features)
        refinement = Refinement(rows, min(columns, head.out_features))
    linears = {"lm_head": head}
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        biases = ("q_bias", "k_bias", "v_bias") if f"{prefix}q_bias" in checkpoint.tensors else ()
        for name, sources, its_biases in (
            ("qkv", ("q", "k", "v"), biases),
            ("o", ("o",), ()),
            ("gate_up", ("gate", "up"), ()),
            ("down", ("down",), ()),
        ):
            named = (tuple(prefix + tensor for tensor in group) for group in (sources, its_biases))
            linears[prefix + name] = _linear(checkpoint, policy, *named)
    context = head_tokens is not None and checkpoint.tied_head
    plan = DecoderPlan(embedding, linears, hidden_states, spare_rows, head_tokens, context, refinement)
    return plan if precision == FULL else _with_precision(plan, precision)


def _with_precision(plan: DecoderPlan, precision: Precision) -> DecoderPlan:
    """Matrices in floating point are kept in the type that they are multiplied in."""
    linears = {
        name: replace(
            spec, parts=tuple(replace(p, format=_HALF) if p.format.is_float else p for p in spec.parts)
        )
        for name, spec in plan.linears.items()
    }
    embedding = replace(plan.embedding, zero_points=not plan.embedding.format.is_float)
    if embedding.format.is_float and precision.residual == "float16":
        embedding = replace(embedding, format=_HALF)
    return replace(plan, linears=linears, embedding=embedding, precision=precision)


def _linear(
    checkpoint: Checkpoint,
    policy: Policy | Quantization,
    sources: tuple[str, ...],
    biases: tuple[str, ...],
) -> LinearSpec:
    columns, layers = checkpoint.tensor(sources[0]).shape[1], checkpoint.config.num_layers

    def form(source: str) -> WeightFormat:
        return policy.format_of(source, checkpoint.tensor(source).type, columns, layers)

    parts, at = [], 0
    for chosen, group in groupby(sources, form):
        names = tuple(group)
        rows = sum(checkpoint.tensor(name).shape[0] for name in names)
        its_biases = biases[at : at + len(names)] if biases else ()
        parts.append(LinearPart(names, rows, chosen, its_biases, policy.method))
        at += len(names)
    return LinearSpec(columns, tuple(parts))


def _table(checkpoint: Checkpoint, policy: Policy | Quantization, name: str) -> EmbeddingSpec:
    """Rows are gathered, not multiplied, so exactness costs no time: a quantized table stays as it is.

    One in floating point takes 8 bits where the LM head would be quantized.
    """
    tensor = checkpoint.tensor(name)
    kind = tensor.type
    if kind in FLOATS:
        head = policy.format_of("lm_head", kind, tensor.shape[1], checkpoint.config.num_layers)
        quantized = head.bits != 32 and tensor.shape[1] % _INT8.block == 0
        return EmbeddingSpec(name, _INT8 if quantized else _FLOAT)
    if kind in (GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q4_K):
        return EmbeddingSpec(name, _INT4, offsets=kind is not GGMLType.Q4_0)
    return EmbeddingSpec(name, _INT8_16 if kind is GGMLType.Q6_K else _INT8)
