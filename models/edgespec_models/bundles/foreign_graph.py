"""A decoder graph that another exporter wrote, and whether edgespec can run it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import cast

from edgespec_models.bundles.graph_contract import GraphTensors
from edgespec_models.decoders.config import DecoderShape
from edgespec_models.decoders.kept import KeptTensor, KeptType
from edgespec_models.errors import BundleError, UnsupportedModelError, naming
from edgespec_models.files.onnx_header import FLOAT_TYPES, Graph, Node, Tensor
from edgespec_models.storage import is_file

_CACHE_TYPES = ("float32", "float16", "int8")
_ID_TYPES = ("int64", "int32")
# Operators that return a weight unchanged, or unpacked.
_PASSING = ("Cast", "DequantizeLinear", "Identity", "Reshape", "Transpose")
_CLASSES = ("other", "embedding", "matrices")  # a tensor that several read belongs to the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """The facts of a configuration about a decoder graph; names of tensors are Optimum's by default.

    The graph may lack ``mask`` and ``positions``. In names of keys and values ``%d`` stands for the layer.
    ``num_layers`` is None if the graph has it.
    """

    architecture: str
    vocab_size: int
    context_length: int
    num_layers: int | None = None
    ids: str = "input_ids"
    mask: str = "attention_mask"
    positions: str = "position_ids"
    logits: str = "logits"
    past_key: str = "past_key_values.%d.key"
    past_value: str = "past_key_values.%d.value"
    present_key: str = "present.%d.key"
    present_value: str = "present.%d.value"


def judge(
    path: Path, header: Graph, stated: Stated
) -> tuple[GraphTensors, tuple[KeptTensor, ...], DecoderShape]:
    """The names of tensors, the kept tensors, and the shape of the decoder graph at ``path``.

    Raises:
        BundleError: a file with weights is missing.
        UnsupportedModelError: a graph that edgespec cannot run.
    """
    for file in weight_files(path, header):
        if not is_file(file):
            raise BundleError(f"{path} keeps weights in {file.name}, which is missing; copy it too")
    with naming(path):
        tensors, kept = _find_tensors(header, stated)
        return tensors, kept, _shape(header, kept, stated)


def weight_files(path: Path, header: Graph) -> list[Path]:
    """Files with weights, besides the graph itself."""
    locations = {weight.location for weight in header.weights.values()} - {""}
    return [path.parent / name for name in sorted(locations)]


def count_weights(header: Graph) -> dict[str, dict[str, int]]:
    """The weights for a manifest: bytes and parameters by class, formats."""
    sizes, parameters = dict.fromkeys(_CLASSES, 0), dict.fromkeys(_CLASSES, 0)
    formats: dict[str, int] = {}
    uses = dict.fromkeys(header.weights, ("other", "", 0))
    for name, use in _uses(header):
        uses[name] = max(uses[name], use, key=lambda known_use: _CLASSES.index(known_use[0]))
    for name, (kind, form, elements) in uses.items():
        sizes[kind] += header.weights[name].size_bytes
        parameters[kind] += elements
        if elements:
            formats[form] = formats.get(form, 0) + elements
    return {"bytes_by_class": sizes, "parameters_by_class": parameters, "formats": formats}


def _find_tensors(header: Graph, stated: Stated) -> tuple[GraphTensors, tuple[KeptTensor, ...]]:
    layers = range(stated.num_layers) if stated.num_layers is not None else _layers(header, stated)
    names = (stated.past_key, stated.present_key), (stated.past_value, stated.present_value)
    kept = tuple(
        _kept_tensor(header, _of_layer(past, layer), _of_layer(present, layer))
        for layer in layers
        for past, present in names
    )
    known = {stated.ids, stated.mask, stated.positions, *(tensor.input for tensor in kept)}
    unknown = sorted(header.inputs.keys() - known)
    if not kept or unknown:
        what = f"the inputs {', '.join(unknown)}" if unknown else "no KV cache"
        raise UnsupportedModelError(
            f"the graph has {what}; edgespec runs decoders that read {stated.ids}, {stated.mask}, "
            f"{stated.positions} and the KV cache {stated.past_key}, {stated.past_value}"
        )
    if any(node.op_type == "If" for node in header.nodes):
        raise UnsupportedModelError(
            "the graph branches (If), by the context's length or in its first pass. Export the model "
            "without a branch (of the Phi models, one with a context of 4k)."
        )
    _check_types(header, stated, kept)
    named = {"input_ids": stated.ids, "attention_mask": stated.mask, "position_ids": stated.positions}
    inputs = {name: called for name, called in named.items() if called in header.inputs}
    return GraphTensors(inputs=inputs, logits=stated.logits), kept


def _layers(header: Graph, stated: Stated) -> range:
    return range(next(layer for layer in count() if _of_layer(stated.past_key, layer) not in header.inputs))


def _of_layer(name: str, layer: int) -> str:
    return name.replace("%d", str(layer))


def _kept_tensor(header: Graph, past: str, present: str) -> KeptTensor:
    entry = header.inputs.get(past)
    if entry is None or present not in header.outputs:
        missing = f"input {past}" if entry is None else f"output {present}"
        raise UnsupportedModelError(
            f"the graph lacks the {missing}; edgespec runs decoders whose every layer keeps keys and values, "
            "apart from each other"
        )
    dims = entry.dims
    if len(dims) != 4 or not isinstance(dims[1], int) or not isinstance(dims[3], int):
        raise UnsupportedModelError(
            f"{past} has the shape {dims}; it must be (batch, heads, past, head size), with heads and head "
            "size fixed"
        )
    if isinstance(dims[2], int):
        raise UnsupportedModelError(f"{past} has room for exactly {dims[2]} tokens; the number must be free")
    shape, kind = (dims[1], dims[3]), cast(KeptType, entry.type)  # which is checked later
    return KeptTensor(input=past, output=present, per="token", shape=shape, type=kind)


def _check_types(header: Graph, stated: Stated, kept: Sequence[KeptTensor]) -> None:
    if stated.ids not in header.inputs or stated.logits not in header.outputs:
        raise UnsupportedModelError(
            f"the graph must read {stated.ids} and write {stated.logits}; it reads "
            f"{', '.join(header.inputs)}, and writes {', '.join(header.outputs)}"
        )
    named = (stated.ids, stated.mask, stated.positions)
    ids = [header.inputs[name] for name in named if name in header.inputs]
    kv = [header.inputs[tensor.input] for tensor in kept]
    logits = [header.outputs[stated.logits]]
    for tensors, allowed in ((ids, _ID_TYPES), (logits, FLOAT_TYPES), (kv, _CACHE_TYPES)):
        for tensor in tensors:
            if tensor.type not in allowed:
                raise UnsupportedModelError(
                    f"{tensor.name} is {tensor.type}; on CPUs it must be {' or '.join(allowed)}"
                )
    if len({tensor.type for tensor in kv}) > 1:
        raise UnsupportedModelError("the KV cache is kept in several types; it must be one")
    for tensor in ids:
        if len(tensor.dims) != 2 or isinstance(tensor.dims[1], int):
            raise UnsupportedModelError(
                f"{tensor.name} has the shape {tensor.dims}; it must be (batch, tokens), with any number of "
                "tokens"
            )


def _shape(header: Graph, kept: Sequence[KeptTensor], stated: Stated) -> DecoderShape:
    dims = header.outputs[stated.logits].dims
    if len(dims) not in (0, 3) or (dims and isinstance(dims[1], int)):
        raise UnsupportedModelError(
            f"{stated.logits} has the shape {dims}; to check drafts edgespec needs logits of every token, "
            "(batch, tokens, vocabulary). Build the model without prune_lm_head."
        )
    vocab_size = dims[-1] if dims and isinstance(dims[-1], int) else stated.vocab_size
    sizes = {"vocabulary": vocab_size, "context": stated.context_length}
    for what, size in sizes.items():
        if not 0 < size < 1 << 31:
            raise UnsupportedModelError(f"{size} as size of {what}; it must be a positive number")
    return DecoderShape(
        architecture=stated.architecture,
        vocab_size=vocab_size,
        num_layers=len(kept) // 2,
        context_length=stated.context_length,
    )


def _uses(header: Graph) -> Iterator[tuple[str, tuple[str, str, int]]]:
    """Every use of a weight: its name; class, format and how many weights of the model it holds."""
    source = {name: name for name in header.weights}
    for node in header.nodes:
        origin = source.get(node.inputs[0]) if node.inputs else None
        if node.op_type in _PASSING and origin is not None and node.outputs:
            source[node.outputs[0]] = origin
            continue
        for position, name in enumerate(node.inputs):
            if (weight := source.get(name)) is not None:
                yield weight, _use(node, position, header.weights[weight])


def _use(node: Node, position: int, weight: Tensor) -> tuple[str, str, int]:
    quantized = node.attributes.get("bits", 0) > 0 and "block_size" in node.attributes
    form = weight.type
    if quantized:
        form = f"int{node.attributes['bits']}/{node.attributes['block_size']}"
    if node.op_type == "MatMulNBits":
        size = node.attributes.get("K", 0) * node.attributes.get("N", 0)
        return "matrices", form, size if position == 1 else 0
    elements = weight.elements if len(weight.dims) > 1 else 0
    if "MatMul" in node.op_type or node.op_type == "Gemm":
        return "matrices", form, elements
    if node.op_type.startswith("Gather") and weight.type not in _ID_TYPES:
        packed = 8 // node.attributes["bits"] if quantized and weight.type == "uint8" else 1
        return "embedding", form, elements * packed if position == 0 else 0
    return "other", form, 0
