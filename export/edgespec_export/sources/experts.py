"""Experts in files: their facts, and their matrices, brought one below the other.

GGUF files hold a tensor of three dimensions for a layer's experts, gates and their factors apart or fused.
Directories hold the same, or a tensor for each expert, or gpt-oss's codes and exponents.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from types import MappingProxyType
from typing import Any, Final

from edgespec_export.sources.architectures import Family
from edgespec_export.sources.safetensors_file import Raw, SafetensorsFile
from edgespec_models.bundles.config import Experts, ModelConfig
from edgespec_models.decoders.record import record
from edgespec_models.errors import ModelFileError, UnsupportedModelError, naming
from edgespec_models.files.blocks import Blocks, unpack
from edgespec_models.files.facts import Facts
from edgespec_models.files.tensors import Columns, GGMLType, SplitBlocks, Stack, Tensor

_GATINGS: Final[Mapping[int, dict[str, Any]]] = MappingProxyType(
    {
        0: {},
        1: {"gating": "softmax"},
        2: {"gating": "sigmoid"},
        3: {"gating": "softmax", "normalized": True},  # over the logits of the chosen ones
    }
)
"""By ``expert_gating_func`` in GGUF files; 0 leaves it to the family."""
_GPT_OSS: Final = re.compile(
    r"model\.(layers\.\d+\.)mlp\.experts\.(gate_up|down)_proj(?:_(blocks|scales|bias))?"
)
_ONE: Final = re.compile(r"(layers\.\d+\.experts_\w+)\.(\d+)")
_CLAMPED: Final = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
_AGAIN: Final = "download or convert it again"


def experts_of(facts: Facts, family: Family) -> dict[str, Any]:
    """The experts of a model of ``family``, as fields of :class:`ModelConfig`.

    Raises:
        ModelFileError: facts are missing or contradict each other.
        UnsupportedModelError: edgespec lacks the experts' choice or layout.
    """
    if family.experts is None:
        return {}
    count = facts.integer("num_experts", facts.integer("num_local_experts", 0))
    if count == 0 and family.name == "granite":
        return {}  # a dense one, of the same architecture
    beside = family.experts.get("beside_mlp", False)
    if not facts.boolean("enable_moe_block", default=not beside):
        return {}
    _refuse_others(facts, family)
    shared = facts.integer("shared_expert_intermediate_size", 0) if "shared_gate" in family.experts else 0
    scale = facts.number("routed_scaling_factor", 1.0)
    own = {
        "normalized": facts.boolean("norm_topk_prob", default=True),
        "selection_bias": family.experts.get("gating") == "sigmoid"
        and facts.boolean("use_expert_bias", default=True),
        "shared_width": shared,
        **family.experts,
        **_gating(facts),
    }
    with naming(facts.where):
        experts = Experts(
            count=count,
            used=facts.integer("top_k_experts" if beside else "num_experts_per_tok"),
            width=facts.integer("moe_intermediate_size", facts.integer("intermediate_size", 0)),
            dense_layers=facts.integer("num_dense_layers", 0),
            scale=scale or 1.0,  # 0 stands for none in GGUF files
            **own,
        )
    return {"experts": experts, "intermediate_size": facts.integer("intermediate_size", experts.width)}


def _gating(facts: Facts) -> dict[str, Any]:
    number = facts.integer("expert_gating_func", 0)
    if number not in _GATINGS:
        raise UnsupportedModelError(
            f"{facts.where}: expert_gating_func is {number}; allowed: 1 (softmax), 2 (sigmoid) and 3 "
            "(softmax of the used experts)"
        )
    return _GATINGS[number]


def _refuse_others(facts: Facts, family: Family) -> None:
    """Refuse layouts and choices of experts that edgespec lacks."""
    plain: dict[str, float] = {"decoder_sparse_step": 1, "n_group": 1, "expert_group_count": 1}
    if family.experts and family.experts.get("clamped"):
        plain |= _CLAMPED
    for key, value in plain.items():
        if facts.value(key) not in (None, 0, value):
            raise UnsupportedModelError(
                f"{facts.where}: {key} is {facts.value(key)!r}; {family.name} with experts is supported with "
                f"{value}"
            )
    if facts.value("mlp_only_layers"):
        raise UnsupportedModelError(
            f"{facts.where}: mlp_only_layers is {facts.value('mlp_only_layers')!r:.80}; layers without "
            "experts are supported at a model's beginning only"
        )


def one_below_the_other(tensors: Mapping[str, Tensor], config: ModelConfig, where: str) -> dict[str, Tensor]:
    """``tensors`` with each kind of a layer's expert matrices in one tensor of two dimensions.

    Raises:
        ModelFileError: experts are missing or too many, a tensor has another shape, or is there twice.
        UnsupportedModelError: experts of a layer have different formats.
    """
    experts = config.experts
    if experts is None:
        return dict(tensors)
    shapes = record(config).tensors
    joined, apart = dict[str, Tensor](), dict[str, dict[int, Tensor]]()

    def add(name: str, tensor: Tensor) -> None:
        if name in joined:
            raise ModelFileError(
                f"{where} has {name} in {joined[name].name!r} and in {tensor.name!r}; {_AGAIN}"
            )
        joined[name] = tensor

    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if match := _ONE.fullmatch(name):
            apart.setdefault(match[1], {})[int(match[2])] = tensor
        elif kind == "experts_gate_up":
            check_shape(tensor, (experts.count, 2 * experts.width, config.hidden_size), where)
            for part, start in (("gate", 0), ("up", experts.width)):
                rows = [matrix.rows(start, start + experts.width) for matrix in tensor.matrices()]
                add(f"{layer}.experts_{part}", Stack.of(rows))
        elif kind.startswith("experts_") and name in shapes:
            shape = shapes[name]
            check_shape(tensor, (experts.count, shape[0] // experts.count, *shape[1:]), where)
            add(name, replace(tensor, shape=shapes[name]))
        elif kind == "shared_router":
            add(name, replace(tensor, shape=(1, *tensor.shape[-1:])))  # a vector in GGUF files
        else:
            add(name, tensor)
    for name, matrices in apart.items():
        missing = [str(number) for number in range(experts.count) if number not in matrices]
        if missing or len(matrices) > experts.count:
            raise ModelFileError(
                f"{where} has {len(matrices)} of the {experts.count} experts of {name}"
                f"{f', and lacks number {missing[0]}' if missing else ''}; {_AGAIN}"
            )
        below, *columns = shapes.get(name, (0,))  # tensors of no layer fit nothing
        for tensor in matrices.values():
            check_shape(tensor, (below // experts.count, *columns), where)
        add(name, Stack.of([matrices[number] for number in range(experts.count)]))
    return joined


def check_shape(tensor: Tensor, shape: tuple[int, ...], where: str) -> None:
    """Raise ModelFileError if a tensor of the file ``where`` has another shape."""
    if tensor.shape != shape:
        raise ModelFileError(
            f"tensor {tensor.name!r} of {where} has shape {tensor.shape}; its metadata ask for {shape}. "
            "Download or convert it again."
        )


def gpt_oss_tensors(stored: Mapping[str, SafetensorsFile]) -> tuple[dict[str, Tensor], set[str]]:
    """The experts of gpt-oss's directories by edgespec's names, and the names of the files' tensors.

    Weights are MXFP4 in two tensors, or floats whose rows are columns; gates and their factors alternate, as
    rows and in biases.

    Raises:
        ModelFileError: a tensor lacks the other one, has a wrong shape, or is there twice.
    """
    named, taken = dict[str, Tensor](), set[str]()
    for name, file in stored.items():
        parts = _GPT_OSS.fullmatch(name)
        if parts is None:
            continue
        layer, product, kind = parts.groups()
        names = [f"{layer}experts_{part}" for part in ("gate", "up") if product == "gate_up"]
        names = names or [f"{layer}experts_down"]
        if kind is None:
            if f"{name}_blocks" in stored:
                raise ModelFileError(f"{file.path.name} has {name!r} and {name + '_blocks'!r}; {_AGAIN}")
            named |= _columns(file.tensor(name), names)
        elif kind == "bias":
            named |= _biases(file.tensor(name), [f"{name}_bias" for name in names])
        elif kind == "blocks":
            scales = f"{name.removesuffix('blocks')}scales"
            if scales not in stored:
                raise ModelFileError(f"{file.path.name} has {name!r} without {scales!r}; {_AGAIN}")
            whole = _mxfp4(name, file.raw(name), stored[scales].raw(scales))
            named |= {name: whole.every(len(names), place) for place, name in enumerate(names)}
            taken.add(scales)
        elif name.replace("_scales", "_blocks") not in stored:
            raise ModelFileError(f"{file.path.name} has {name!r} without its codes; {_AGAIN}")
        taken.add(name)
    return named, taken


def _mxfp4(name: str, codes: Raw, exponents: Raw) -> SplitBlocks:
    (shape, file, offset), scaled = codes, exponents[0]
    if len(shape) != 4 or shape[3] != 16 or scaled != shape[:3]:
        raise ModelFileError(
            f"tensor {name!r} has shape {shape} and its scales {scaled}, which do not fit; {_AGAIN}"
        )
    kind = GGMLType.MXFP4
    whole = *shape[:2], shape[2] * kind.block
    return SplitBlocks(name, whole, kind, file, offset, exponents=exponents[1:])


def _columns(tensor: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Columns of matrices that alternate, as the rows of one tensor each."""
    if len(tensor.shape) != 3 or tensor.shape[2] % len(names):
        raise ModelFileError(f"tensor {tensor.name!r} has shape {tensor.shape}; {_AGAIN}")
    count, inputs, columns = tensor.shape
    place, shape = (tensor.type, tensor.file, tensor.offset), (count, columns // len(names), inputs)
    return {
        name: Columns(tensor.name, shape, *place, before=first, step=len(names), file_columns=columns)
        for first, name in enumerate(names)
    }


def _biases(tensor: Tensor, names: list[str]) -> dict[str, Tensor]:
    """The alternating columns of a small tensor, each kind in memory."""
    values = unpack(tensor.type, tensor.read())
    assert not isinstance(values, Blocks)  # safetensors are floats
    apart = {name: values[:, place :: len(names)] for place, name in enumerate(names)}
    return {
        name: Tensor(tensor.name, part.shape, GGMLType.F32, BytesIO(part.tobytes()), 0)
        for name, part in apart.items()
    }
