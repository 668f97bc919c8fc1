"""The interface of checkpoints for exports, for any kind of file.

Tensors have edgespec's own names (:mod:`edgespec_models.decoders.transformer`).
"""

import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from edgespec_export.sources.experts import check_shape, one_below_the_other
from edgespec_export.sources.latent import matrices_of_heads
from edgespec_models.bundles.bundle import Embedding, Ranking, Sampling
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import ModelFileError, UnsupportedModelError
from edgespec_models.families.family import Family
from edgespec_models.families.towers import Tower
from edgespec_models.files.blocks import F32, unpack, values_of
from edgespec_models.files.tensors import GGMLType, Tensor
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.storage import read_text
from edgespec_models.text.tokenizer import SpecialTokens

_HASH_CHUNK = 1 << 24
_NUMBER = "(0|[1-9][0-9]{0,5})"
_LOG = logging.getLogger("edgespec")


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """A model to export; a context manager over its open files.

    Opening one raises ModelFileError for damaged or missing files and tensors of a wrong shape, and
    UnsupportedModelError for architectures, features and weight formats that edgespec does not know.

    Attributes:
        path: the file or directory.
        files: all files of the model in a fixed order, which its digest covers.
        model_name: the model's name if the user gives none.
        family: what is known of its family.
        config: facts of the graph.
        logits_factor: the factor on the logits, which the gain of the normalization before takes up.
        tensors: the tensors by edgespec's names.
        tokenizer_json: returns the text of a ``tokenizer.json``; raises as opening does, and TokenizerError.
        special_tokens: returns BOS, padding and the tokens that end generation; raises as opening does.
        chat_templates: returns Jinja source by name; raises as opening does.
        head_tokens: the tokens of the LM head's rows, ascending, if it has rows for a part of the tokens.
        clustered: the tokens of the LM head's rows, int64, if these lie in clusters.
        stack: holds the open files.
        changes: changes to the files' weights, for a bundle's provenance.
        sampling: the sampling that the files advise; None for heads too.
        tower: what makes vectors of pictures, and its tensors by the names of its parameters; None without.
            An MTP layer has its target's.
    """

    path: Path
    files: tuple[Path, ...]
    model_name: str
    family: Family
    config: Transformer
    logits_factor: float = 1.0
    tensors: Mapping[str, Tensor]
    tokenizer_json: Callable[[], str]
    special_tokens: Callable[[], SpecialTokens]
    chat_templates: Callable[[], Mapping[str, str]]
    head_tokens: npt.NDArray[np.int32] | None = None
    clustered: npt.NDArray[np.int64] | None = None
    stack: ExitStack
    changes: Mapping[str, str] = MappingProxyType({})
    sampling: Sampling | None = None
    tower: tuple[Tower, Mapping[str, Tensor]] | None = None

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self.stack.close()

    def read(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> tuple[GGMLType, npt.NDArray[np.uint8]]:
        """Format and raw blocks of rows ``start`` to ``stop``, to be unpacked in another thread."""
        tensor = self.tensor(name)
        return tensor.type, tensor.read(start, stop)

    def take_texts(self, other: "Checkpoint") -> None:
        """Use the tokenizer and the chat template of another checkpoint."""
        self.tokenizer_json, self.special_tokens = other.tokenizer_json, other.special_tokens
        self.chat_templates = other.chat_templates

    def embedding(self) -> Embedding | None:
        """How it makes vectors of texts; None unless its files say that it pools the last token."""
        return None

    def ranking(self) -> tuple[Ranking, F32] | None:
        """How it scores texts for a query, and the row of the score's logit, float32 ``(hidden_size,)``; None
        if it does not.
        """
        return None

    def tiles_of(self, name: str) -> str | None:
        """The kernels' format that a tensor in floats needs; None for any."""
        return None

    def warn_of_left_out_tower(self) -> None:
        """Warn that an export for other operators than edgespec's has no tower."""
        if self.tower is not None:
            _LOG.warning(
                "%s: only the text model is exported; pictures need edgespec's own kernels, on CPUs with the "
                "weights 'exact'",
                self.path.name,
            )

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def tied_head(self) -> bool:
        """Whether the LM head is the token embedding."""
        return "lm_head" not in self.tensors

    @property
    def has_biases(self) -> bool:
        """Whether queries, keys and values have biases."""
        return "layers.0.q_bias" in self.tensors

    @property
    def keeps_rows(self) -> bool:
        """Whether the rows of the LM head are settled: trained for a part of the tokens, or in clusters."""
        return self.family.keeps_rows or self.head_tokens is not None or self.clustered is not None

    def tensor(self, name: str) -> Tensor:
        """The tensor called ``name``; ``lm_head`` of a tied model is its embedding."""
        return self.tensors[self.stored_name(name)]

    def stored_name(self, name: str) -> str:
        """``embed`` for the ``lm_head`` of a tied model, else ``name``."""
        return "embed" if name == "lm_head" and self.tied_head else name

    def values(self, name: str, start: int = 0, stop: int | None = None) -> F32:
        """Rows ``start`` to ``stop`` of a tensor, as float32."""
        tensor = self.tensor(name)
        values = values_of(unpack(*self.read(name, start, stop)))
        if not np.isfinite(values).all():
            raise ModelFileError(
                f"tensor {tensor.name!r} of {self.path.name} holds weights that are not finite numbers; "
                "download or convert it again"
            )
        if name == "final_norm":
            values = values * np.float32(self.logits_factor)
        if name.endswith(".router_norm"):  # whose result is divided by the root of its width
            values = values * np.float32(self.config.hidden_size**-0.5)
        return values.reshape(-1, *tensor.shape[1:][-1:])

    def digest(self, progress: ProgressCallback) -> str:
        """SHA-256 (hex) of the bytes of :attr:`files`, one file after the other.

        Raises:
            ModelFileError: a single file is damaged: it does not have the digest beside it, which a pull
                wrote.
        """
        digest, done, total = hashlib.sha256(), 0, self.n_bytes
        for path in self.files:
            with path.open("rb") as file:
                while chunk := file.read(_HASH_CHUNK):
                    digest.update(chunk)
                    done += len(chunk)
                    progress(Progress("Reading", done, total))
        if len(self.files) == 1 and _recorded(self.files[0]) not in (None, digest.hexdigest()):
            (path,) = self.files
            raise ModelFileError(
                f"{path} is damaged or has been replaced: its SHA-256 is not the one in {path.name}.sha256. "
                "'edgespec pull --check' replaces damaged models of the catalogue; of other files, delete "
                "the record if it is out of date"
            )
        return digest.hexdigest()

    def shorten_context(self) -> None:
        """Shorten the context for graphs whose operators know no positions."""
        stated, self.config = self.config.context_length, self.config.without_growth
        self.warn_if_shorter(self.config, stated)

    def warn_if_shorter(self, config: Transformer, stated: int) -> None:
        """Warn that an export has a shorter context than the files state."""
        if config.context_length < stated:
            _LOG.warning(
                "%s: exported for %d tokens; its attention changes for longer texts, up to %d",
                *(self.path.name, config.context_length, stated),
            )

    def leave_out_mtp(self) -> None:
        """Say in the bundle that its source holds a drafter, too (:mod:`edgespec_export.sources.mtp`)."""
        self.changes = MappingProxyType({"left_out": "mtp"})
        _LOG.info("%s: its MTP layer is left out of the target; it becomes a drafter", self.path.name)

    def split_stacked(self) -> None:
        """Replace tensors of several matrices, which have a product's name, by their rows.

        Matrices of experts, which files hold in many ways, count as one matrix.

        Raises:
            ModelFileError: such a tensor has another shape, or its rows occur twice or in part.
            UnsupportedModelError: experts of a layer have different formats.
        """
        whole = one_below_the_other(self.tensors, self.config, self.path.name)
        self.tensors = matrices_of_heads(whole, self.config, self.path.name)
        made, tensors = record(self.config), dict(self.tensors)
        for name, tensor in self.tensors.items():
            shape = made.tensors.get(name, ())
            if len(shape) == 1 and shape == (prod(tensor.shape),):
                tensors[name] = replace(tensor, shape=shape)  # which has more dimensions in some files
        for name, stacked in self.tensors.items():
            product = made.products.get(name)
            if product is None or len(product.matrices) < 2:
                continue
            parts = {part: made.tensors[part][0] for part in product.matrices}
            for twice in sorted(tensors.keys() & parts.keys()):
                raise ModelFileError(
                    f"{self.path.name} has the rows of {stacked.name!r} in {tensors[twice].name!r} too; "
                    "download or convert it again"
                )
            check_shape(tensors.pop(name), (sum(parts.values()), self.config.hidden_size), self.path.name)
            start = 0
            for part, rows in parts.items():
                tensors[part] = stacked.rows(start, start := start + rows)
        self.tensors = tensors

    def check_shapes(self) -> None:
        """Compare ``tensors`` with the shapes of ``config``.

        Raises:
            ModelFileError: a tensor is missing or has another shape.
            UnsupportedModelError: there are more.
        """
        config, made = self.config, record(self.config)
        shared = [n for n, facts in made.attentions.items() if n != facts.layer and not config.reads_cache]
        unread = {f"layers.{n}.{kind}" for n in shared for kind in ("k", "v", "k_norm")}
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name not in unread}
        shapes = made.tensors | (made.biases if self.has_biases else {})
        outer_first = sorted(shapes, key=lambda name: ("layers." in name, len(shapes[name]) < 2))
        expected = {name: shapes[name] for name in outer_first}
        if "score" in self.tensors:  # of a reranker: a row, or those of yes and no
            expected["score"] = min(self.tensors["score"].shape[0], 2), config.hidden_size
        if self.tied_head:
            del expected["lm_head"]
        elif self.head_tokens is not None:
            expected["lm_head"] = len(self.head_tokens), config.hidden_size
            if "chain_out" in expected:
                expected["chain_out"] = len(self.head_tokens), expected["chain_out"][1]
        for name, shape in expected.items():
            if name not in self.tensors:
                raise ModelFileError(
                    f"{self.path.name} lacks a tensor for {name} ({config.architecture}); "
                    "download or convert it again"
                )
            check_shape(self.tensors[name], shape, self.path.name)
        surplus = self.tensors.keys() - expected.keys()
        if surplus:
            names = ", ".join(sorted(self.tensors[name].name for name in surplus)[:3])
            raise UnsupportedModelError(
                f"{self.path.name} has tensors that a {config.architecture} model does not have: {names}"
            )


def _recorded(path: Path) -> str | None:
    """The digest beside a file, in sha256sum's form; None without one."""
    try:
        words = read_text(path.with_name(f"{path.name}.sha256")).split()
    except (OSError, UnicodeDecodeError):
        return None
    return words[0] if words[1:] == [path.name] and len(words[0]) == 64 else None


def own_name(name: str, layers: str, whole: Mapping[str, str], of_layer: Mapping[str, str]) -> str | None:
    """edgespec's name of the tensor ``name``; None for unknown ones.

    ``layers`` matches the text before a layer's number. ``whole`` has the names outside layers, and
    ``of_layer`` the names behind the number, with ``*`` for an expert's number, which then ends edgespec's
    name.
    """
    layer = re.fullmatch(layers + rf"{_NUMBER}\.(.+)", name)
    if layer is None:
        return whole.get(name)
    if layer[2] in of_layer:
        return f"layers.{layer[1]}.{of_layer[layer[2]]}"
    expert = re.fullmatch(rf"(.*experts\.){_NUMBER}(\..+)", layer[2])
    own = expert and of_layer.get(f"{expert[1]}*{expert[3]}")
    return f"layers.{layer[1]}.{own}.{expert[2]}" if expert and own else None
