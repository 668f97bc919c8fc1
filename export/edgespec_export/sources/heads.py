"""EAGLE-3's heads (Li et al. 2025, arXiv 2503.01840) as their makers publish them, seen as checkpoints.

A head drafts from what its target computes. Directories are EAGLE's own, AngelSlim's, SpecForge's, and those of
the ``speculators`` package; GGUF files are llama.cpp's (``conversion/llama.py``, ``src/models/eagle3.cpp``).
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgespec_export.sources import gguf_checkpoint, hf_checkpoint
from edgespec_export.sources.architectures import HEAD, Family
from edgespec_export.sources.blocks import Tensor
from edgespec_export.sources.checkpoint import Checkpoint, own_name
from edgespec_export.sources.gguf import GGUFFile
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.hf_checkpoint import CONFIG, INDEX, SINGLE, HFCheckpoint
from edgespec_export.sources.hf_config import config_of, head_facts
from edgespec_export.sources.safetensors_file import SafetensorsFile
from edgespec_export.sources.torch_file import TorchFile
from edgespec_models.errors import ModelFileError, RequestError, UnsupportedModelError
from edgespec_models.files.facts import Facts
from edgespec_models.progress import ProgressCallback
from edgespec_models.storage import model_name
from edgespec_models.text.tokenizer import SpecialTokens

_IDS: Final = "eagle_aux_hidden_state_layer_ids"
_TOKENS, _KEPT = (
    "d2t",
    "t2d",
)  # the target's token of each of the head's, and whether it has one of the target's
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


def is_head(source: Path) -> bool:
    """Whether a checkpoint's file or directory holds a head. Raises as opening it does."""
    if source.is_file():
        with GGUFFile(source) as file:
            return file.metadata.get("general.architecture") == HEAD.gguf
    return head_facts(Facts.read(source / CONFIG)) is not None


class _Head(Checkpoint):
    """What both forms have in common. Tokens, texts and the matrices that it lacks are the target's."""

    target: Checkpoint

    def tokenizer_json(self) -> str:
        """The target's."""
        return self.target.tokenizer_json()

    def special_tokens(self) -> SpecialTokens:
        """The target's."""
        return self.target.special_tokens()

    def chat_template(self) -> str | None:
        """The target's."""
        return self.target.chat_template()

    def digest(self, progress: ProgressCallback) -> str:
        """Of the head's own files; the target's becomes one of :attr:`changes`."""
        self.changes = {"target_sha256": self.target.digest(progress)}
        return super().digest(progress)

    def _complete(self, tokens: npt.NDArray[np.int64] | None) -> None:
        """Take from the target what the files lack, cut matrices that read two inputs, and check all.

        ``tokens`` are the target's, of each row of the LM head; None where there is no such list.
        """
        config, own, where, given = self.config, dict(self.tensors), self.path.name, self.target.config
        if tokens is not None:
            self.head_tokens = _ascending(tokens, config.vocab_size, where)
            if "lm_head" not in own:
                raise ModelFileError(
                    f"{where} lists tokens ({_TOKENS}) for an LM head that it lacks; download it again"
                )
        for name in {"embed", "lm_head"} - own.keys():
            if given.hidden_size != config.hidden_size:
                raise RequestError(
                    f"{where} has no {name}, is {config.hidden_size} wide, and {self.target.path.name} "
                    f"{given.hidden_size}. {_OTHER_TARGET}"
                )
            own[name] = self.target.tensor(name)
        if own["lm_head"] is own["embed"]:
            del own["lm_head"]  # of a target that ties them
        if "fuse" in own and own["fuse"].shape[1:] != (len(config.feature_layers) * config.feature_width,):
            raise RequestError(
                f"{where} reads {own['fuse'].shape[-1]} numbers of {len(config.feature_layers)} layers; "
                f"{self.target.path.name} has {config.feature_width} in each. {_OTHER_TARGET}"
            )
        hidden = config.hidden_size
        for name in "qkv":
            tensor = own.get(f"layers.0.{name}")
            if tensor is not None:
                self._check_shape(
                    tensor, (config.query_width if name == "q" else config.kv_width, 2 * hidden)
                )
                own[f"layers.0.embed_{name}"] = tensor.columns(0, hidden)
                own[f"layers.0.{name}"] = tensor.columns(hidden, 2 * hidden)
        self.tensors = own
        self.check_shapes()


class GGUFHead(_Head, GGUFCheckpoint):
    """A head in a GGUF file, and the target that it drafts for, which is closed with it.

    Raises, beside what opening a checkpoint does, RequestError where the file is no head, or one of another target.
    """

    def __init__(self, path: Path, target: Checkpoint) -> None:
        self.path, self.files, self.model_name, self.target = path, (path,), path.stem, target
        with ExitStack() as stack:
            stack.enter_context(target)
            file = stack.enter_context(GGUFFile(path))
            self.metadata = file.metadata
            if self.metadata.get("general.architecture") != HEAD.gguf:
                raise RequestError(_no_head(path.name))
            prefix = f"{HEAD.gguf}."
            own: dict[str, object] = {
                key.removeprefix(prefix): value.tolist() if isinstance(value, np.ndarray) else value
                for key, value in self.metadata.items()
            }
            family = _reading(Facts(own, path.name, {_IDS: "target_layers"}), target)
            tokens = file.integers.pop(_TOKENS, None)
            named = gguf_checkpoint.named(file, family, _GGUF_GLOBAL, _GGUF_LAYER)
            self.tensors = {"embed": target.tensor("embed"), **named}
            self.config = self._read_config(family)
            self._complete(tokens)
            self.stack = stack.pop_all()


class HFHead(_Head, HFCheckpoint):
    """A head in a directory, and the target that it drafts for, which is closed with it.

    Raises, beside what opening a checkpoint does, RequestError where the directory holds no head, or another
    target's; EdgespecError for a ``pytorch_model.bin`` where torch is not installed.
    """

    def __init__(self, path: Path, target: Checkpoint) -> None:
        self.path, self.model_name, self.target = path, model_name(path), target
        self._shards = {}
        self.stack = ExitStack()
        with self.stack as opened:
            opened.enter_context(target)
            facts = head_facts(Facts.read(path / CONFIG))
            if facts is None:
                raise RequestError(_no_head(str(path / CONFIG)))
            self.config = config_of(
                facts.over({"vocab_size": target.config.vocab_size}), _reading(facts, target)
            )
            self.tensors = {}
            self._complete(self._read())
            self.stack = opened.pop_all()
        files = path / CONFIG, path / INDEX, self._torch, *(shard.path for shard in self._shards.values())
        self.files = tuple(sorted({file for file in files if file is not None and file.is_file()}))

    def _read(self) -> npt.NDArray[np.int64] | None:
        """Name the tensors; returns the target's tokens of the LM head's rows."""
        tokens, unknown, named = None, [], dict[str, Tensor]()
        for name, file in self._found():
            own = own_name(name.replace("midlayer.", "layers.0.", 1), r"layers\.", _GLOBAL, _LAYER)
            if name == _TOKENS:
                offsets = file.integers(name, ("I64", "I32")).reshape(-1).astype(np.int64)
                tokens = offsets + np.arange(len(offsets))
            elif own is not None:
                named[own] = file.tensor(name)
            elif name != _KEPT and not hf_checkpoint.COMPUTED.fullmatch(name):
                unknown.append(name)
        if unknown:
            raise UnsupportedModelError(
                f"{self.path.name} has {len(unknown)} tensors that EAGLE-3 lacks, such as {unknown[0]!r}"
            )
        self.tensors = named
        return tokens

    def _found(self) -> Iterator[tuple[str, SafetensorsFile | TorchFile]]:
        """Every tensor's name and file."""
        if self._torch is None:
            yield from self._stored()
        else:
            file = self.stack.enter_context(closing(TorchFile(self._torch)))
            yield from ((name, file) for name in sorted(file.names))

    @property
    def _torch(self) -> Path | None:
        """The file that torch reads, where there is no other."""
        path, others = self.path / "pytorch_model.bin", (self.path / SINGLE, self.path / INDEX)
        return path if path.is_file() and not any(other.is_file() for other in others) else None


_OTHER_TARGET: Final = "Give the target that the head was trained for, or the head of this target"


def _no_head(where: str) -> str:
    return f"{where} is no EAGLE-3 head, and only those are exported for a target; leave out --target"


def _reading(facts: Facts, target: Checkpoint) -> Family:
    """The family of heads that read ``target`` as ``facts`` say."""
    config = target.config
    for what, has in {"vocab_size": config.vocab_size, "target_hidden_size": config.hidden_size}.items():
        if facts.integer(what, has) != has:
            raise RequestError(
                f"{facts.where}: {what} is {facts.integer(what)}, of {target.path.name} it is {has}. "
                f"{_OTHER_TARGET}"
            )
    fixed: dict[str, Any] = {
        "feature_layers": _layers(facts, target),
        "feature_width": config.hidden_size,
        "normed_features": facts.boolean("norm_before_fc", default=False),
        "normed_residual": facts.boolean("norm_before_residual", default=False),
    }
    return HEAD._replace(fixed=fixed)


def _layers(facts: Facts, target: Checkpoint) -> tuple[int, ...]:
    """The layers of ``target`` whose input the head reads.

    A list at the top says just that for vLLM, llama.cpp and the ``speculators`` package. SGLang reads one in
    ``eagle_config``, in which a first id of 1 says that layers are named whose output is meant, as SpecForge
    and ModelOpt train them (sgl-project/sglang, pull request 25454). None stands for EAGLE's own choice.
    """
    count = target.config.num_layers
    ids = facts.value(_IDS)
    if ids is None:
        ids = facts.section("eagle_config").value(_IDS)
        if isinstance(ids, list) and ids[:1] == [1] and all(type(i) is int for i in ids):
            ids = [i + 1 for i in ids]
    if ids is None:
        ids = [2, count // 2, count - 3]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < count for i in ids):
        raise RequestError(
            f"{facts.where}: the head reads what enters the layers {ids!r:.80}; {target.path.name} has 0 to "
            f"{count - 1}. {_OTHER_TARGET}"
        )
    return tuple(ids)


def _ascending(tokens: npt.NDArray[np.int64], size: int, where: str) -> npt.NDArray[np.int32] | None:
    """The tokens as a trimmed head's; None where they are all of the target's."""
    if not len(tokens) or tokens.min() < 0 or tokens.max() >= size or (np.diff(tokens) < 1).any():
        raise ModelFileError(
            f"{where}: {_TOKENS} must name tokens from 0 to {size - 1}, each once, in ascending order. "
            f"{_OTHER_TARGET}"
        )
    return None if len(tokens) == size else tokens.astype(np.int32)
