"""Published EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840) as checkpoints.

Directories have the forms of EAGLE, AngelSlim, SpecForge and the ``speculators`` package. GGUF files have
llama.cpp's form (``conversion/llama.py``, ``src/models/eagle3.cpp``).
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_export.sources import gguf_checkpoint, hf_checkpoint
from edgespec_export.sources.architectures import HEAD, Family
from edgespec_export.sources.checkpoint import Checkpoint, own_name
from edgespec_export.sources.experts import check_shape, one_below_the_other
from edgespec_export.sources.gguf import GGUFFile
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.hf_checkpoint import CONFIG, INDEX, SINGLE, HFCheckpoint
from edgespec_export.sources.hf_config import config_of, trained_facts
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.layers import outer_shapes
from edgespec_models.errors import EdgespecError, ModelFileError, RequestError, UnsupportedModelError
from edgespec_models.files.facts import Facts
from edgespec_models.files.tensors import GGMLType, Tensor
from edgespec_models.progress import ProgressCallback
from edgespec_models.storage import model_name

_IDS: Final = "eagle_aux_hidden_state_layer_ids"
PICKLED: Final = "pytorch_model.bin"
_FLOATS = {"float32": GGMLType.F32, "float16": GGMLType.F16, "bfloat16": GGMLType.BF16}
OTHER: Final = "Give the target that the head was trained for, or a head of this target"
_GLOBAL = {
    "embed_tokens.weight": "embed",
    "norm.weight": "final_norm",
    "lm_head.weight": "lm_head",
    "fc.weight": "fuse",
    "input_norm.weight": "fuse_norm",
}
_LAYER = hf_checkpoint.LAYER | {"input_layernorm.weight": "embed_norm", "hidden_norm.weight": "attn_norm"}
_GGUF_GLOBAL = gguf_checkpoint.GLOBAL | {"fc.weight": "fuse", "enc.output_norm.weight": "fuse_norm"}
_GGUF_LAYER = gguf_checkpoint.LAYER | {"attn_norm.weight": "embed_norm", "attn_norm_2.weight": "attn_norm"}


class Head(Checkpoint):
    """The common part of heads. Their base is the target, which is closed with them.

    Opening one also raises RequestError for one of another target.
    """

    base: Checkpoint

    @contextmanager
    def opening(self, path: Path, target: Checkpoint) -> Iterator[ExitStack]:
        """Open files within, on the stack. An error closes them and the target."""
        self.path, self.base, self.stack = path, target, ExitStack()
        with self.stack as opened:
            opened.enter_context(target)
            yield opened
            self.stack = opened.pop_all()

    def digest(self, progress: ProgressCallback) -> str:
        """Digest of the head's own files; the target's becomes one of :attr:`changes`."""
        of_target = self.base.digest(progress)
        self.changes = {"target_sha256": of_target}
        return of_target if self.files == self.base.files else super().digest(progress)

    def tiles_of(self, name: str) -> str | None:
        """Four bits and a minimum, because a step costs what it reads, and the head only guesses."""
        return {"embed": None, "chain_in": "Q8_0"}.get(name, "Q4_1")

    def fit(self, tensors: dict[str, Tensor]) -> None:
        """Have these tensors, which are checked, and the target's texts.

        ``both``, a product with embedding and state side by side, is cut into two.
        """
        both = tensors.pop("both", None)
        if both is not None:
            rows, width = outer_shapes(self.config)["fuse"]
            check_shape(both, (rows, 2 * width), self.path.name)
            tensors |= {"embed_fuse": both.columns(0, width), "fuse": both.columns(width, 2 * width)}
        self.tensors = one_below_the_other(tensors, self.config, self.path.name)
        self.take_texts(self.base)
        try:
            self.check_shapes()
        except ModelFileError as error:
            raise ModelFileError(f"{error} Or {OTHER.lower()}, {self.base.path.name}.") from error


class _Trained(Head):
    """The common part of heads that others have trained for a target."""

    def complete(self, tokens: npt.NDArray[np.int64] | None) -> None:
        """Borrow, cut apart what EAGLE multiplies embedding and state side by side by, and check all.

        ``tokens`` are the target's, of each row of the LM head; None where there is no such list.
        """
        own, size = dict(self.tensors), self.config.vocab_size
        if tokens is not None and len(tokens) != size:
            self.head_tokens = tokens.astype(np.int32)
            if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= size or (np.diff(tokens) < 1).any():
                raise ModelFileError(
                    f"{self.path.name}: d2t must name tokens from 0 to {size - 1}, ascending. {OTHER}"
                )
        for name in {"embed", "lm_head"} - own.keys():
            own[name] = self.base.tensor(name)
        if own["lm_head"] is own["embed"]:
            del own["lm_head"]  # of a target that ties them
        if "confidence" in own:  # which may have no bias
            zero = Tensor("confidence_bias", (1,), GGMLType.F32, BytesIO(bytes(4)), 0)
            own.setdefault("confidence_bias", zero)
        for name in "qkv" if self.config.architecture == HEAD.name else "":
            both = own.get(f"layers.0.{name}")
            if both is not None and len(both.shape) == 2:
                half, whole = both.shape[1] // 2, both.shape[1]
                own[f"layers.0.embed_{name}"] = both.columns(0, half)
                own[f"layers.0.{name}"] = both.columns(half, whole)
        self.fit(own)


class GGUFHead(_Trained, GGUFCheckpoint):
    """A head in a GGUF file; ``names`` has the names of tensors outside and within layers."""

    kind, names = HEAD, (_GGUF_GLOBAL, _GGUF_LAYER)

    def __init__(self, path: Path, target: Checkpoint) -> None:
        with self.opening(path, target) as stack:
            file = self._open_file(path, stack)
            own = file.facts(self.kind.gguf)
            family = self.reading(file, own, target)
            tokens = file.integers.pop("d2t", None)
            named = gguf_checkpoint.named(file, family, *self.names)
            self.tensors = {"embed": target.tensor("embed"), **named}
            self.config = self._read_config(family, own)
            self.complete(tokens)

    def reading(self, file: GGUFFile, own: dict[str, object], target: Checkpoint) -> Family:
        """The family of heads that read ``target`` as the file's keys say."""
        return _reading(Facts(own, file.path.name, {_IDS: "target_layers"}), target)


class HFHead(_Trained, HFCheckpoint):
    """A head in a directory. EdgespecError for a ``pytorch_model.bin`` where torch is not installed."""

    names = _GLOBAL, _LAYER

    def __init__(self, path: Path, target: Checkpoint) -> None:
        self.model_name, self._shards = model_name(path), {}
        with self.opening(path, target):
            facts = trained_facts(Facts.read(path / CONFIG))
            assert facts is not None  # whoever opens it has looked
            facts = facts.over({"vocab_size": target.config.vocab_size})
            self.tensors, offsets = tensors_of(self, self.names, "d2t", "such a head")
            self.config = self.read_config(facts, target)
            tokens = None
            if offsets is not None:  # of each token from its row
                tokens = offsets.reshape(-1).astype(np.int64) + np.arange(offsets.size)
            self.complete(tokens)
        self.files = self._files_with(path / PICKLED)

    def read_config(self, facts: Facts, target: Checkpoint) -> ModelConfig:
        """What the head's graph has to compute."""
        return config_of(facts, _reading(facts, target))


def tensors_of(
    head: HFCheckpoint, names: tuple[Mapping[str, str], Mapping[str, str]], listing: str, kind: str
) -> tuple[dict[str, Tensor], npt.NDArray[Any] | None]:
    """The tensors of a directory by edgespec's names, and the whole numbers of the tensor ``listing``.

    ``names`` has the names of tensors outside and within layers. UnsupportedModelError names a tensor that no
    head of this ``kind`` has.
    """
    numbers, unknown, named = None, [], dict[str, Tensor]()
    for name, value in _stored(head, listing):
        alone = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        own = own_name(alone, r"layers\.", *names)
        if name == listing and not isinstance(value, Tensor):
            numbers = value
        elif own is not None and isinstance(value, Tensor):
            named[own] = value
        elif name != "t2d" and not hf_checkpoint.COMPUTED.fullmatch(name):
            unknown.append(name)
    if unknown:
        raise UnsupportedModelError(
            f"{head.path.name} has {len(unknown)} tensors that edgespec has no use for in {kind}, such as "
            f"{unknown[0]!r}"
        )
    return named, numbers


def _stored(head: HFCheckpoint, listing: str) -> Iterator[tuple[str, Tensor | npt.NDArray[Any]]]:
    """Every tensor by its name; t2d says what d2t says."""
    pickled = head.path / PICKLED
    if pickled.is_file() and not any((head.path / name).is_file() for name in (SINGLE, INDEX)):
        yield from _read_torch(pickled).items()
        return
    for name, file in head.stored():
        if name != "t2d":
            yield name, file.integers(name, ("I64", "I32")) if name == listing else file.tensor(name)


def _reading(facts: Facts, target: Checkpoint) -> Family:
    """The family of heads that read ``target`` as ``facts`` say.

    For vLLM, llama.cpp and the ``speculators`` package a list of layers at the top means the inputs of these
    layers. SGLang reads a list in ``eagle_config``: if its first id is 1, it means the outputs of its layers,
    as SpecForge and ModelOpt train them (sgl-project/sglang, pull request 25454). Without a list the layers
    are EAGLE's own choice.
    """
    ids = facts.value(_IDS)
    if ids is None:
        ids = facts.section("eagle_config").value(_IDS)
        if isinstance(ids, list) and ids[:1] == [1] and all(type(i) is int for i in ids):
            ids = [i + 1 for i in ids]
    if ids is None:
        count = target.config.num_layers
        ids = [2, count // 2, count - 3]
    fixed = {
        "feature_layers": fitting(facts, target, ids),
        "feature_width": target.config.hidden_size,
        "normed_features": facts.boolean("norm_before_fc", default=False),
        "normed_residual": facts.boolean("norm_before_residual", default=False),
    }
    return HEAD._replace(fixed=fixed)


def fitting(facts: Facts, target: Checkpoint, ids: object) -> tuple[int, ...]:
    """The layers of ``target`` whose input a head reads, ``ids``, where the head fits it as ``facts`` say."""
    config, count = target.config, target.config.num_layers
    for what, has in {"vocab_size": config.vocab_size, "target_hidden_size": config.hidden_size}.items():
        if facts.integer(what, has) != has:
            raise RequestError(
                f"{facts.where}: {what} is {facts.integer(what)}, of {target.path.name} it is {has}. {OTHER}"
            )
    known = isinstance(ids, list) and all(type(i) is int and 0 <= i <= count for i in ids)
    if not isinstance(ids, list) or not known or len(set(ids)) < max(2, len(ids)):
        raise RequestError(
            f"{facts.where}: the head reads what enters the layers {ids!r:.80}; {target.path.name} has 0 to "
            f"{count - 1}, and {count} for what leaves the last. {OTHER}"
        )
    return tuple(ids)


def _read_torch(path: Path) -> dict[str, Tensor | npt.NDArray[Any]]:
    """The tensors of a ``pytorch_model.bin``, which become no other objects; whole numbers as arrays."""
    try:
        import torch
    except ImportError as error:
        raise EdgespecError(
            f'{path} needs torch, which is not installed: pip install "edgespec[align]", or take safetensors'
        ) from error

    def taken(name: str, value: Any) -> Tensor | npt.NDArray[Any]:
        kind = _FLOATS.get(str(value.dtype).removeprefix("torch."))
        if kind is None:
            return np.array(value.numpy())
        data = BytesIO(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return Tensor(name, tuple(value.shape), kind, data, 0)

    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {str(name): taken(str(name), value) for name, value in tensors.items()}
    except Exception as error:  # errors of zip files, of pickles and of torch share no base class
        raise ModelFileError(f"cannot read {path}: {error!r:.200}. Download or copy it again.") from error
