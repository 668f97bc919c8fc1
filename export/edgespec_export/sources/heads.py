"""Published heads as checkpoints."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_export.sources import gguf_checkpoint, hf_checkpoint
from edgespec_export.sources.checkpoint import Checkpoint, own_name
from edgespec_export.sources.experts import check_shape, one_below_the_other
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.hf_checkpoint import CONFIG, INDEX, SINGLE, HFCheckpoint
from edgespec_export.sources.latent import matrices_of_heads
from edgespec_models.decoders.record import record
from edgespec_models.errors import EdgespecError, ModelFileError, UnsupportedModelError
from edgespec_models.families import head_of, in_gguf
from edgespec_models.families.heads import OTHER, Target, check_target
from edgespec_models.families.names import own_names
from edgespec_models.families.reading import config_of
from edgespec_models.files.blocks import F32
from edgespec_models.files.facts import Facts
from edgespec_models.files.tensors import GGMLType, Tensor
from edgespec_models.progress import ProgressCallback
from edgespec_models.storage import model_name

PICKLED: Final = "pytorch_model.bin"
_FLOATS = {"float32": GGMLType.F32, "float16": GGMLType.F16, "bfloat16": GGMLType.BF16}


class Head(Checkpoint):
    """The common part of heads. Their base is the target, which is closed with them.

    Opening one also raises RequestError for one of another target.
    """

    base: Checkpoint

    @property
    def target(self) -> Target:
        """What the head's family needs to know of the target."""
        return Target(self.base.config, self.base.path.name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

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

    def values(self, name: str, start: int = 0, stop: int | None = None) -> F32:
        """Rows of a tensor; the target's norm is read as the target's file has it."""
        if name == "target_norm" and self.tensors[name] is self.base.tensors["final_norm"]:
            return self.base.values("final_norm", start, stop) / np.float32(self.base.logits_factor)
        return super().values(name, start, stop)

    def tiles_of(self, name: str) -> str | None:
        """Four bits and a minimum, because a step costs what it reads, and the head only guesses."""
        return {"embed": None, "chain_in": "Q8_0"}.get(name, "Q4_1")

    def fit(self, tensors: dict[str, Tensor]) -> None:
        """Have these tensors, which are checked, and the target's texts.

        ``both``, a product with embedding and state side by side, is cut into two.
        """
        both = tensors.pop("both", None)
        if both is not None:
            rows, width = record(self.config).tensors["fuse"]
            check_shape(both, (rows, 2 * width), self.path.name)
            tensors |= {"embed_fuse": both.columns(0, width), "fuse": both.columns(width, 2 * width)}
        whole = one_below_the_other(tensors, self.config, self.path.name)
        self.tensors = matrices_of_heads(whole, self.config, self.path.name)
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
        shapes = record(self.config).tensors
        for name in "qkv":
            both = own.get(f"layers.0.{name}")
            if f"layers.0.embed_{name}" in shapes and both is not None and len(both.shape) == 2:
                half, whole = both.shape[1] // 2, both.shape[1]
                own[f"layers.0.embed_{name}"] = both.columns(0, half)
                own[f"layers.0.{name}"] = both.columns(half, whole)
        self.fit(own)


class GGUFHead(_Trained, GGUFCheckpoint):
    """A head in a GGUF file."""

    def __init__(self, path: Path, target: Checkpoint) -> None:
        with self.opening(path, target) as stack:
            file = self._open_file(path, stack)
            self.family = in_gguf(self.metadata["general.architecture"], path.name)
            own = file.facts(self.family.gguf)
            check_target(Facts(own, path.name), self.target)
            own["mask_token_id"] = self.metadata.get("tokenizer.ggml.mask_token_id")
            tokens = file.integers.pop("d2t", None)
            self.tensors = {"embed": target.tensor("embed"), **gguf_checkpoint.named(file, self.family)}
            self.config = self._read_config(file, own, shapes=self.shapes(), target=self.target)
            self.complete(tokens)


class HFHead(_Trained, HFCheckpoint):
    """A head in a directory. EdgespecError for a ``pytorch_model.bin`` where torch is not installed."""

    def __init__(self, path: Path, target: Checkpoint) -> None:
        self.model_name, self._shards = model_name(path), {}
        with self.opening(path, target):
            head = head_of(Facts.read(path / CONFIG))
            assert head is not None  # whoever opens it has looked
            self.family, facts = head
            facts = facts.over({"vocab_size": target.config.vocab_size})
            check_target(facts, self.target)
            if (path / "mask_embedding.pt").is_file():
                raise UnsupportedModelError(
                    f"{facts.where} has a mask of its own (mask_embedding.pt); not supported"
                )
            self.tensors, offsets = tensors_of(self, "d2t", "such a head")
            self.config = config_of(facts, self.family, shapes=self.shapes(), target=self.target)
            tokens = None
            if offsets is not None:  # of each token from its row
                tokens = offsets.reshape(-1).astype(np.int64) + np.arange(offsets.size)
            self.complete(tokens)
        self.files = self._files_with(path / PICKLED)


def tensors_of(
    head: HFCheckpoint, listing: str, kind: str
) -> tuple[dict[str, Tensor], npt.NDArray[Any] | None]:
    """The tensors of a directory by edgespec's names, and the whole numbers of the tensor ``listing``.

    UnsupportedModelError names a tensor that no head of this ``kind`` has.
    """
    outer, layer = own_names(head.family.outer, "hub"), own_names(head.family.layer, "hub")
    numbers, unknown, named = None, [], dict[str, Tensor]()
    for name, value in _stored(head, listing):
        alone = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        own = own_name(alone, r"layers\.", outer, layer)
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
