"""A bundle: the directory an export leaves and a session opens.

``edgespec.json``      the manifest: everything below, with the size and sha256 of every other file, and a
                       sha256 of its own content
``model.onnx``         the graph, its weights in ``model.onnx.data``; or ``model-CxN.onnx``, several graphs of
                       fixed shapes (:mod:`static_graphs`) over the same file of weights, and
                       ``model-CxN.context.onnx`` with ``model-CxN.context_qnn.bin`` where compiled for a chip
``tokenizer.json``     as the `tokenizers` library reads it
``chat_template.jinja`` where the model has one, ``chat_template.NAME.jinja`` for tools or documents
``head_tokens.npy``    of a trimmed drafter: the token of every row of the LM head
``vision.onnx``        of a model that reads pictures: what makes vectors of them, with ``vision.onnx.data``
``rank_head.npy``      of a reranker: the row whose product with a text's last state is its score's logit
``report.json``        the measurements of the export, with the parity check

Nothing in a bundle is executed but the graph; the chat template runs in Jinja's sandbox.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from edgespec_models import storage
from edgespec_models.bundles.graph_contract import GraphTensors
from edgespec_models.bundles.static_graphs import ExportDevice, GraphKind, StaticGraphs
from edgespec_models.decoders.config import AGAIN, Count, DecoderShape, FloatType
from edgespec_models.decoders.kept import KeptTensor, bytes_per_sequence, bytes_per_token, in_bytes
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import BundleError, naming, shell_word
from edgespec_models.families import decoder_named, tower_named
from edgespec_models.families.towers import Tower
from edgespec_models.files.facts import Facts
from edgespec_models.schema import check_fields, length, matching, parse, read, read_text, shown, within
from edgespec_models.text.template_files import DEFAULT, FILE, NAMED, file_of
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer

if TYPE_CHECKING:
    from edgespec_models.text.chat_template import ChatTemplate


MANIFEST, GRAPH, TOKENIZER = "edgespec.json", "model.onnx", "tokenizer.json"
VISION, VISION_DATA = "vision.onnx", "vision.onnx.data"
TEMPLATE, REPORT, HEAD_TOKENS, RANK_HEAD = FILE, "report.json", "head_tokens.npy", "rank_head.npy"
GENAI, HF_CONFIG = "genai_config.json", "config.json"
"""Files that mark directories of other exporters."""
FORMAT_VERSION = 7

Role = Literal["target", "drafter"]
Operators = Literal["edgespec", "standard"]
WEIGHTS: Final = ("exact", "portable")
"""Policies of exports: the file's own blocks, for edgespec's kernels on CPUs; or the nearest formats that
ONNX Runtime's operators have."""
_Amount = Annotated[int, within(0, 1 << 60)]
_GRAPHS = "model"  # graphs and weights begin so
_NOT_MULTIPLIED = ("embedding", "other")
_DIGEST = "sha256"
_LOG = logging.getLogger("edgespec")


def _marks(sources: Mapping[str, str]) -> frozenset[str]:
    """The texts that chat templates write around turns."""
    if not sources:
        return frozenset()
    from edgespec_models.text.tokenizer_files import written_marks  # few bundles have further templates

    return frozenset(written_marks(sources))


def _digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the manifest's content, independent of its formatting."""
    content = {key: value for key, value in manifest.items() if key != _DIGEST}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and digest of one file."""

    size_bytes: _Amount
    sha256: Annotated[str, matching("[0-9a-f]{64}")]

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        """Read a file's size and digest."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """How a model makes a vector of a text's last token, by its files.

    ``end`` is a token behind every text; None where there is none.
    """

    pooling: Literal["last"] = "last"
    end: Annotated[int, within(0)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How a model scores a text for a query, by its files.

    ``template`` is what it reads: ``{query}`` and ``{document}``, and perhaps ``{instruction}``, for which
    ``instruction`` stands unless a request has another.
    """

    template: Annotated[str, matching(r"(?s).*\{query\}.*\{document\}.*", "with {query} before {document}")]
    instruction: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling that the makers of a model advise, by options of requests; None where they say nothing."""

    temperature: Annotated[float, within(0, 100)] | None = None
    top_k: Annotated[int, within(0, 2**31 - 1)] | None = None
    top_p: Annotated[float, within(0, 1)] | None = None
    min_p: Annotated[float, within(0, 1)] | None = None
    repetition_penalty: Annotated[float, within(0.1, 10)] | None = None

    def __post_init__(self) -> None:
        check_fields(self, BundleError)

    @classmethod
    def advised(cls, facts: Facts) -> "Sampling | None":
        """The advice of a model's file; None without. Other values than allowed are left out and logged."""
        if facts.value("do_sample") is False:
            return None
        options: dict[str, Any] = {} if facts.value("do_sample") is None else {"temperature": 1.0}
        for name in (field.name for field in fields(cls)):
            value: Any = facts.value(name)
            try:
                options |= {} if value is None else cls(**{name: value}).options()
            except BundleError as error:
                _LOG.warning("%s advises a sampling that is left out: %s", facts.where, error)
        return cls(**options) if options else None

    def options(self) -> dict[str, Any]:
        """The options of a request. Numbers have six digits, as files with float32 mean them."""
        return {name: round(value, 6) for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.options().items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of ``edgespec.json``.

    Attributes:
        weights: the export's policy, such as ``exact``.
        formats: how many weights got which format.
        bytes_by_class: bytes of ``embedding``, ``attention`` or another mixer, ``mlp``, ``experts``,
            ``lm_head``, ``other``. Matrices of a foreign graph have no such names; it has ``embedding``,
            ``matrices``, ``other``.
        parameters_by_class: weights of the same classes.
        provenance: source file, its sha256, the exporter's version.
        files: every file of the bundle but the manifest.
        head_rows: rows of a trimmed LM head; None where it has one for every token.
        kept: tensors that a sequence keeps between passes, layer by layer.
        static: the graphs of fixed shapes that a bundle for an NPU has; None without.
        activations: the number type of a graph of any shape.
        device: the device of a graph of any shape, if it is not the CPU.
        choices: whether the graph returns the most likely columns.
        operators: of a graph of any shape: ``edgespec`` for its own kernels, ``standard`` for ONNX Runtime's.
        embedding: how texts become vectors; None for other models.
        ranking: how texts get scores for a query; None for other models.
        sampling: the sampling that the model's files advise; None if they advise none.
        vision: what makes vectors of pictures; None for models of text, whose manifests leave it out.
    """

    name: Annotated[str, length(1)]
    role: Role
    config: DecoderShape
    weights: str
    formats: Mapping[str, _Amount]
    bytes_by_class: Mapping[str, _Amount]
    parameters_by_class: Mapping[str, _Amount]
    special_tokens: SpecialTokens
    provenance: Mapping[str, str]
    files: Mapping[str, FileRecord]
    kept: tuple[KeptTensor, ...]
    head_rows: Count | None = None
    static: StaticGraphs | None = None
    activations: FloatType = "float32"
    device: Literal["cuda"] | None = None
    choices: bool = False
    operators: Operators = "standard"
    embedding: Embedding | None = None
    ranking: Ranking | None = None
    sampling: Sampling | None = None
    vision: Tower | None = None

    def __post_init__(self) -> None:
        ends, size = self.special_tokens, self.config.vocab_size
        end = None if self.embedding is None else self.embedding.end
        named = {"special_tokens.bos": (ends.bos or 0,), "special_tokens.eos": ends.eos}
        if self.vision is not None:
            named["vision"] = (self.vision.marker, *self.vision.around)
        named["special_tokens.suppressed"] = (*ends.suppressed, *ends.suppressed_first)
        named["special_tokens.bad_words"] = tuple(chain.from_iterable(ends.bad_words))
        for name, ids in (named | {"embedding.end": (end or 0,)}).items():
            if any(id_ >= size for id_ in ids):
                raise BundleError(f"{name} is {shown(ids)}; allowed: ids from 0 to {size - 1}")
        if not self.kept and not self.config.reads_cache:
            raise BundleError("kept is empty; an assistant alone keeps nothing of its own")

    @property
    def graph_kind(self) -> GraphKind:
        """The kind of the graphs."""
        if self.static is not None:
            return self.static.graph_kind
        return "dynamic" if self.activations == "float32" else "dynamic-float16"

    @property
    def made_for(self) -> ExportDevice | None:
        """The device of ``edgespec export --device``; None is the CPU."""
        return self.device if self.static is None else self.static.device

    @property
    def size_bytes(self) -> int:
        """Bytes of the bundle's files, without the manifest."""
        return sum(file.size_bytes for file in self.files.values())

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache a token takes."""
        return bytes_per_token(self.kept)

    def kept_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of this many tokens keeps."""
        return bytes_per_sequence(self.kept) + tokens * self.kv_bytes_per_token

    @property
    def bytes_per_pass(self) -> int:
        """Bytes of weights that a one-row pass multiplies by: of experts and clusters those that it uses."""
        return self._of_a_row(self.bytes_by_class)

    @property
    def parameters_per_pass(self) -> int:
        """The number of weights that a row is multiplied by."""
        return self._of_a_row(self.parameters_by_class)

    @property
    def expert_bytes(self) -> float:
        """Bytes of an expert in a layer, the mean; 0 without."""
        experts = self.config.experts if isinstance(self.config, Transformer) else None
        if experts is None:
            return 0.0
        layers = self.config.num_layers - experts.dense_layers
        return self.bytes_by_class.get("experts", 0) / (experts.count * layers)

    def _of_a_row(self, amounts: Mapping[str, int]) -> int:
        shares = record(self.config).shares if isinstance(self.config, Transformer) else {}
        multiplied = {name: value for name, value in amounts.items() if name not in _NOT_MULTIPLIED}
        return sum(round(value * shares.get(name, 1.0)) for name, value in multiplied.items())

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        value = {"format_version": FORMAT_VERSION, **asdict(self)}
        if self.vision is None:
            del value["vision"]
        return value | {_DIGEST: _digest(value)}

    @classmethod
    def from_json(cls, value: Any, where: Path) -> "Manifest":
        """Read :meth:`to_json`'s form; BundleError for another version, and missing or wrong fields."""
        version = value.get("format_version") if isinstance(value, dict) else None
        if version != FORMAT_VERSION:
            own = f"bundle format {FORMAT_VERSION}, which this version of edgespec reads"
            if isinstance(version, int) and version > FORMAT_VERSION:
                raise BundleError(
                    f"{where} was made by a newer edgespec: it is of bundle format {version}, not of {own}; "
                    "update edgespec, or export the model again to another directory"
                )
            made_of = value.get("provenance") if isinstance(value, dict) else None
            source = made_of.get("source") if isinstance(made_of, dict) else None
            known = isinstance(source, str) and source and not source.startswith("-")
            raise BundleError(
                f"{where} is not of {own}; export the model again: edgespec export "
                f"{shell_word(source) if known else 'SOURCE'} -o {shell_word(where.parent)} --overwrite"
            )
        facts = value.get("config")
        name = facts.get("architecture") if isinstance(facts, dict) else None
        decoder = decoder_named(name)
        if decoder is None:
            raise BundleError(f"{where}, config: architecture is {shown(name)}, which is not known. {AGAIN}.")
        config = read(decoder, facts, f"{where}, config", BundleError, AGAIN)
        fields = {key: field for key, field in value.items() if key not in ("format_version", _DIGEST)}
        if (vision := value.get("vision")) is not None:
            name = vision.get("architecture") if isinstance(vision, dict) else None
            tower = tower_named(name)
            if tower is None:
                raise BundleError(
                    f"{where}, vision: architecture is {shown(name)}, which is not known. {AGAIN}."
                )
            fields["vision"] = read(tower, vision, f"{where}, vision", BundleError, AGAIN)
        return read(cls, fields | {"config": config}, str(where), BundleError, AGAIN)


class Bundle:
    """An opened bundle: the checked manifest, and access to the other files."""

    def __init__(self, path: Path, *, verify_digests: bool = False) -> None:
        """Open the directory ``path``; with ``verify_digests`` every file is read, the manifest included.

        Raises:
            BundleError: it is no bundle, a file is missing, or differs from the manifest.
        """
        self.path = path
        where = path / MANIFEST
        try:
            value = json.loads(storage.read_text(where))
        except (OSError, ValueError, RecursionError) as error:
            raise BundleError(f"{path} is not a bundle: cannot read {MANIFEST} ({error})") from error
        self.manifest = Manifest.from_json(value, where)
        if verify_digests and value.get(_DIGEST) != _digest(value):
            raise BundleError(
                f"{where} has changed since the export (sha256 differs); export the model again"
            )
        for name, stated in self.manifest.files.items():
            self._check(name, stated, verify_digests)
        static = self.manifest.static
        of_tower = () if self.manifest.vision is None else (VISION, VISION_DATA)
        for name in (TOKENIZER, *of_tower, *([GRAPH] if static is None else static.files)):
            if name not in self.manifest.files:
                raise BundleError(f"{where} does not list {name}; export the model again")

    def _check(self, name: str, record: FileRecord, digest: bool) -> None:
        if name in ("", "..") or name != Path(name).name:
            raise BundleError(f"{self.path / MANIFEST} names a file outside the bundle: {name!r}")
        file = self.path / name
        if not storage.is_file(file):
            raise BundleError(f"{self.path} lacks {name}; export the model again")
        size = file.stat().st_size
        if size != record.size_bytes:
            raise BundleError(f"{file} has {size:,} bytes, not {record.size_bytes:,}; export the model again")
        if digest and FileRecord.of(file) != record:
            raise BundleError(f"{file} has changed since the export (sha256 differs); export the model again")

    def verify(self, name: str) -> None:
        """Compare a file with the manifest; BundleError where it is missing or its size or sha256 differs."""
        self._check(name, self.manifest.files[name], True)

    @property
    def config(self) -> DecoderShape:
        """Architecture facts."""
        return self.manifest.config

    @cached_property
    def graph(self) -> Path:
        """The ONNX file; of a bundle with graphs of fixed shapes, the first of them."""
        static = self.manifest.static
        return self.path / (GRAPH if static is None else static.files[0])

    @property
    def embeds(self) -> bool:
        """Whether texts become vectors: the files say how, and the graph returns the states."""
        return self.manifest.embedding is not None and self.manifest.operators == "edgespec"

    @property
    def reads_images(self) -> bool:
        """Whether messages may have pictures."""
        return self.manifest.vision is not None

    @property
    def ranks(self) -> bool:
        """Whether texts get scores for a query."""
        return self.manifest.ranking is not None

    @cached_property
    def tensors(self) -> GraphTensors:
        """Names of the inputs and outputs of a graph of any shape."""
        return GraphTensors(own=True)

    @property
    def digest(self) -> str:
        """Digest of weights and graph; measurements are stored under it."""
        files = sorted(
            (name, r.sha256) for name, r in self.manifest.files.items() if name.startswith(_GRAPHS)
        )
        return hashlib.sha256(repr(files).encode()).hexdigest()[:16]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; TokenizerError where it cannot be read, or has more tokens than the model rows."""
        tokenizer = Tokenizer.from_file(self.path / TOKENIZER, vocab_size=self.config.vocab_size)
        return tokenizer.with_special(self.marks)

    @cached_property
    def marks(self) -> frozenset[str]:
        """The marks of chat templates that did not come with the model: special tokens, if it has them."""
        return _marks(self._templates(besides=self.manifest.files))

    @cached_property
    def head_tokens(self) -> npt.NDArray[np.int32] | None:
        """Tokens of a trimmed LM head's rows, ascending, int32 ``(head_rows,)``; None if it is whole.

        Raises:
            BundleError: the list cannot be read, or does not fit the model.
        """
        rows = self.manifest.head_rows
        if rows is None:
            return None
        tokens = self._vector(HEAD_TOKENS, np.dtype(np.int32), rows)
        if not rows or tokens[0] < 0 or tokens[-1] >= self.config.vocab_size or (np.diff(tokens) < 1).any():
            raise BundleError(f"{self.path / HEAD_TOKENS} does not fit the model; export it again")
        return tokens

    def rank_head(self) -> npt.NDArray[np.float32]:
        """The row of a reranker's score, float32 ``(hidden_size,)``; errors as :attr:`head_tokens` has."""
        assert isinstance(self.config, Transformer)  # of bundles with a ranking
        return self._vector(RANK_HEAD, np.dtype(np.float32), self.config.hidden_size)

    def _vector(self, name: str, dtype: np.dtype[Any], size: int) -> npt.NDArray[Any]:
        where = self.path / name
        try:
            with where.open("rb") as file:
                vector: npt.NDArray[Any] = npy.read_array(file, allow_pickle=False)
        except Exception as error:  # NumPy reads the header as Python, which may raise anything
            raise BundleError(f"cannot read {where} ({error}); export the model again") from error
        if vector.dtype != dtype or vector.shape != (size,) or not np.isfinite(vector).all():
            raise BundleError(f"{where} does not fit the model; export it again")
        return vector

    @cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """The chat template; None without one. A file that was added later counts too."""
        sources = self._templates()
        return self._compile(sources, self.path / TEMPLATE) if DEFAULT in sources else None

    def keep_bytes(self) -> None:
        """Keep keys and values in 8 bits from now on, instead of 16.

        Raises:
            BundleError: the graph is not of edgespec's operators, or a head has other than whole scales.
        """
        if self.manifest.operators != "edgespec":
            raise BundleError(
                f"{self.manifest.name} does not run on edgespec's kernels, which alone keep keys and values "
                "in 8 bits; load it without kv, or a model exported with --weights exact"
            )
        self.manifest = replace(self.manifest, kept=in_bytes(self.manifest.kept))

    def use_template(self, file: Path) -> None:
        """Use the chat template in ``file`` in place of the model's own.

        Raises as :func:`read_template` does.
        """
        from edgespec_models.text.chat_template import read_template

        sources = {DEFAULT: read_template(file)}
        self.marks |= _marks(sources)
        self.tokenizer = self.tokenizer.with_special(self.marks)
        self.chat_template = self._compile(sources, file)

    def _templates(self, besides: Collection[str] = ()) -> dict[str, str]:
        """Jinja source by name, of files other than ``besides``."""
        paths = {name: self.path / file_of(name) for name in (DEFAULT, *NAMED)}
        return {
            name: read_text(path, BundleError, "Export the model again")
            for name, path in paths.items()
            if path.name not in besides and storage.is_file(path)
        }

    def _compile(self, sources: Mapping[str, str], where: Path) -> "ChatTemplate":
        from edgespec_models.text.chat_template import ChatTemplate  # and Jinja, which texts do without

        special, tokenizer = self.manifest.special_tokens, self.tokenizer
        bos = "" if special.bos is None else tokenizer.token_bytes(special.bos).decode(errors="replace")
        eos = "" if not special.eos else tokenizer.token_bytes(special.eos[0]).decode(errors="replace")
        with naming(where):
            return ChatTemplate(sources[DEFAULT], bos=bos, eos=eos, named=sources)

    def report(self) -> dict[str, Any]:
        """The measurements of the export; empty without a report, BundleError if it is damaged."""
        if REPORT not in self.manifest.files:
            return {}
        where = self.path / REPORT
        remedy = "Export the model again"
        report: object = parse(read_text(where, BundleError, remedy), str(where), BundleError, remedy)
        if not isinstance(report, dict):
            raise BundleError(f"{where} is no JSON object; export the model again")
        return report
