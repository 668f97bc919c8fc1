"""What a foreign decoder graph is, read from its header and compared with what its configuration says."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path

from edgespec_models.bundles.config import DecoderShape
from edgespec_models.bundles.graph_contract import CacheTensor, GraphTensors
from edgespec_models.errors import BundleError, UnsupportedModelError
from edgespec_models.files.onnx_header import FLOAT_TYPES, Graph, Node, Tensor, read_header
from edgespec_models.paths import is_file

__all__ = ["ForeignGraph", "ForeignShape", "ModelFacts", "TensorNames", "WeightFacts"]

_CACHE_TYPES = ("float32", "float16", "int8")
_ID_TYPES = ("int64", "int32")
# Operators that hand a weight on as it is, or unpacked.
_PASSING = ("Cast", "DequantizeLinear", "Identity", "Reshape", "Transpose")
_CLASSES = ("other", "embedding", "matrices")  # a tensor that several read belongs to the last


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """How a graph names its inputs and outputs; ``%d`` stands for the layer. The defaults are Optimum's.

    Attributes:
        ids: token ids.
        mask: the attention mask; the graph may lack it.
        positions: position ids; the graph may lack them.
        logits: the logits.
        past: keys and values that go in.
        present: keys and values that come out.
    """

    ids: str = "input_ids"
    mask: str = "attention_mask"
    positions: str = "position_ids"
    logits: str = "logits"
    past: tuple[str, str] = ("past_key_values.%d.key", "past_key_values.%d.value")
    present: tuple[str, str] = ("present.%d.key", "present.%d.value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a configuration says; ``num_layers`` is None where the graph tells."""

    architecture: str
    vocab_size: int
    num_heads: int
    context_length: int
    num_layers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignShape(DecoderShape):
    """A foreign decoder; its layers may differ in their heads, of which the first layer's are named.

    Attributes:
        kv_values_per_token: numbers of KV cache a token takes, all layers together.
    """

    kv_values_per_token: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache a token would take in float32."""
        return self.kv_values_per_token * 4


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Weights by class, ``matrices``, ``embedding`` and ``other``, and how many have which format."""

    bytes_by_class: Mapping[str, int]
    parameters_by_class: Mapping[str, int]
    formats: Mapping[str, int]


class ForeignGraph:
    """A decoder graph that edgespec can run.

    Args:
        path: the ONNX file.
        names: of its inputs and outputs.
        facts: of the model.

    Attributes:
        path: as given.
        tensors: the inputs and outputs found.
        shape: what running it needs to know.

    Raises:
        BundleError: a file is missing or damaged.
        UnsupportedModelError: a graph that edgespec cannot run.
    """

    def __init__(self, path: Path, names: TensorNames, facts: ModelFacts) -> None:
        self.path = path
        self._header = read_header(path)
        for file in self.data_files:
            if not is_file(file):
                raise BundleError(f"{path} keeps weights in {file.name}, which is not there; copy it too")
        self.tensors = _find_tensors(path, self._header, names, facts)
        self.shape = _shape(path, self._header, self.tensors, facts)

    @cached_property
    def data_files(self) -> tuple[Path, ...]:
        """Files that hold weights, besides the graph itself."""
        locations = {weight.location for weight in self._header.weights.values()} - {""}
        return tuple(self.path.parent / name for name in sorted(locations))

    @cached_property
    def weights(self) -> WeightFacts:
        """Counts of the weights."""
        return _count_weights(self._header)


def _find_tensors(path: Path, header: Graph, names: TensorNames, facts: ModelFacts) -> GraphTensors:
    layers = range(_layers(header, names) if facts.num_layers is None else facts.num_layers)
    cache = tuple(
        _cache_tensor(path, header, _of_layer(past, layer), _of_layer(present, layer))
        for layer in layers
        for past, present in zip(names.past, names.present, strict=True)
    )
    known = {names.ids, names.mask, names.positions, *(tensor.past for tensor in cache)}
    unknown = sorted(header.inputs.keys() - known)
    if not cache or unknown:
        found = f"the inputs {', '.join(unknown)}" if unknown else "no KV cache"
        raise UnsupportedModelError(
            f"{path} has {found}; edgespec runs decoders that read {names.ids}, {names.mask}, "
            f"{names.positions} and the KV cache {names.past[0]}, {names.past[1]}"
        )
    if any(node.op_type == "If" for node in header.nodes):
        raise UnsupportedModelError(
            f"{path} takes one of two ways (If), by the context's length or in its first pass; both must "
            "compute the same in every pass. Export the model without (of the Phi models, one of 4k context)."
        )
    _check_types(path, header, names, cache)
    return GraphTensors(
        ids=names.ids,
        mask=names.mask if names.mask in header.inputs else None,
        positions=names.positions if names.positions in header.inputs else None,
        logits=names.logits,
        cache=cache,
    )


def _layers(header: Graph, names: TensorNames) -> int:
    return next(layer for layer in count() if _of_layer(names.past[0], layer) not in header.inputs)


def _of_layer(name: str, layer: int) -> str:
    return name.replace("%d", str(layer))


def _cache_tensor(path: Path, header: Graph, past: str, present: str) -> CacheTensor:
    read, written = header.inputs.get(past), header.outputs.get(present)
    if read is None or written is None:
        missing = f"input {past}" if read is None else f"output {present}"
        raise UnsupportedModelError(
            f"{path} lacks the {missing}; edgespec runs decoders whose every layer keeps keys and values, "
            "apart from each other"
        )
    dims = read.dims
    if len(dims) != 4 or not isinstance(dims[1], int) or not isinstance(dims[3], int):
        raise UnsupportedModelError(
            f"{path}: {past} has the shape {dims}; it must be (batch, heads, past, head size), with heads "
            "and head size fixed"
        )
    if isinstance(dims[2], int):
        raise UnsupportedModelError(
            f"{path}: {past} has room for exactly {dims[2]} tokens; the number must be free"
        )
    return CacheTensor(past, present, dims[1], dims[3], read.type)


def _check_types(path: Path, header: Graph, names: TensorNames, cache: tuple[CacheTensor, ...]) -> None:
    if names.ids not in header.inputs or names.logits not in header.outputs:
        raise UnsupportedModelError(
            f"{path} must read {names.ids} and write {names.logits}; it reads {', '.join(header.inputs)}, "
            f"and writes {', '.join(header.outputs)}"
        )
    optional = (names.mask, names.positions)
    ids = [header.inputs[name] for name in (names.ids, *optional) if name in header.inputs]
    kv = [header.inputs[tensor.past] for tensor in cache]
    for tensors, allowed in (
        (ids, _ID_TYPES),
        ([header.outputs[names.logits]], FLOAT_TYPES),
        (kv, _CACHE_TYPES),
    ):
        for tensor in tensors:
            if tensor.type not in allowed:
                raise UnsupportedModelError(
                    f"{path}: {tensor.name} is {tensor.type}; on CPUs it must be {' or '.join(allowed)}"
                )
    if len({tensor.type for tensor in kv}) > 1:
        raise UnsupportedModelError(f"{path} keeps its KV cache in several types; it must be one")
    for tensor in ids:
        if len(tensor.dims) != 2 or isinstance(tensor.dims[1], int):
            raise UnsupportedModelError(
                f"{path}: {tensor.name} has the shape {tensor.dims}; it must be (batch, tokens), with any "
                "number of tokens"
            )


def _shape(path: Path, header: Graph, tensors: GraphTensors, facts: ModelFacts) -> ForeignShape:
    logits, first = header.outputs[tensors.logits], tensors.cache[0]
    vocab_size = logits.dims[-1] if logits.dims and isinstance(logits.dims[-1], int) else facts.vocab_size
    if len(logits.dims) not in (0, 3) or (logits.dims and isinstance(logits.dims[1], int)):
        raise UnsupportedModelError(
            f"{path}: {tensors.logits} has the shape {logits.dims}; to check drafts edgespec needs logits of "
            "every token, (batch, tokens, vocabulary). Build the model without prune_lm_head."
        )
    numbers = {"vocabulary": vocab_size, "context": facts.context_length, "attention heads": facts.num_heads}
    for what, number in numbers.items():
        if not 0 < number < 1 << 31:
            raise UnsupportedModelError(f"{path}: {number} as size of {what}; it must be a positive number")
    return ForeignShape(
        architecture=facts.architecture,
        vocab_size=vocab_size,
        num_layers=len(tensors.cache) // 2,
        num_heads=facts.num_heads,
        num_kv_heads=first.heads,
        head_dim=first.head_dim,
        context_length=facts.context_length,
        kv_values_per_token=sum(tensor.values_per_token for tensor in tensors.cache),
    )


def _count_weights(header: Graph) -> WeightFacts:
    sizes, parameters = dict.fromkeys(_CLASSES, 0), dict.fromkeys(_CLASSES, 0)
    formats: dict[str, int] = {}
    uses = dict.fromkeys(header.weights, ("other", "", 0))
    for name, use in _uses(header):
        uses[name] = max(uses[name], use, key=lambda found: _CLASSES.index(found[0]))
    for name, (kind, form, elements) in uses.items():
        weight = header.weights[name]
        sizes[kind] += weight.size_bytes
        parameters[kind] += elements
        if elements:
            formats[form] = formats.get(form, 0) + elements
    return WeightFacts(sizes, parameters, formats)


def _uses(header: Graph) -> Iterator[tuple[str, tuple[str, str, int]]]:
    """Every use of a weight: its name; class, format and how many weights of the model it holds."""
    source = {name: name for name in header.weights}
    for node in header.nodes:
        origin = source.get(node.inputs[0]) if node.inputs else None
        if node.op_type in _PASSING and origin is not None and node.outputs:
            source[node.outputs[0]] = origin
            continue
        for position, name in enumerate(node.inputs):
            if (found := source.get(name)) is not None:
                yield found, _use(node, position, header.weights[found])


def _use(node: Node, position: int, weight: Tensor) -> tuple[str, str, int]:
    quantized = node.attributes.get("bits", 0) > 0 and "block_size" in node.attributes
    form = weight.type
    if quantized:
        form = f"int{node.attributes['bits']}/{node.attributes['block_size']}"
    if node.op_type == "MatMulNBits":
        return "matrices", form, _matrix_size(node) if position == 1 else 0
    elements = weight.elements if len(weight.dims) > 1 else 0
    if "MatMul" in node.op_type or node.op_type == "Gemm":
        return "matrices", form, elements
    if node.op_type.startswith("Gather") and weight.type not in _ID_TYPES:
        packed = 8 // node.attributes["bits"] if quantized and weight.type == "uint8" else 1
        return "embedding", form, elements * packed if position == 0 else 0
    return "other", form, 0


def _matrix_size(node: Node) -> int:
    return node.attributes.get("K", 0) * node.attributes.get("N", 0)
