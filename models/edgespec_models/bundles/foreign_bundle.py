"""Directories that other exporters wrote, run as they are.

- onnxruntime-genai's builder and mobius: ``genai_config.json`` names the graph and its tensors.
- Optimum: ``config.json`` of the checkpoint beside ``model.onnx``, with Optimum's names for tensors.

Nothing is written into the directory. The configuration is compared with the graph's own header before any
weight is loaded, so a model that edgespec cannot run is refused at once, with the reason.
"""

import hashlib
from functools import cached_property
from pathlib import Path, PurePath

from edgespec_models.bundles.bundle import GENAI, GRAPH, HF_CONFIG, TOKENIZER, Bundle, Manifest, Sampling
from edgespec_models.bundles.foreign_graph import Stated, count_weights, judge, weight_files
from edgespec_models.errors import BundleError, TokenizerError, UnsupportedModelError, naming
from edgespec_models.files.facts import Facts
from edgespec_models.files.onnx_header import read_header
from edgespec_models.schema import read_text
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.tokenizer_files import TokenizerFiles

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
# Keys of genai_config.json for the names of the graph's inputs and outputs.
_NAMES = {
    "ids": ("inputs", "input_ids"),
    "mask": ("inputs", "attention_mask"),
    "positions": ("inputs", "position_ids"),
    "logits": ("outputs", "logits"),
    "past_key": ("inputs", "past_key_names"),
    "past_value": ("inputs", "past_value_names"),
    "present_key": ("outputs", "present_key_names"),
    "present_value": ("outputs", "present_value_names"),
}
# Parts of a model besides its decoder.
_OTHER_PARTS = ("encoder", "vision", "speech", "embedding")


class ForeignBundle(Bundle):
    """A directory that another exporter wrote, seen as a bundle whose manifest lists no files.

    ``optimum`` is the graph in it, if Optimum wrote it. Raises as :func:`open_bundle` does.
    """

    def __init__(self, path: Path, optimum: Path | None = None) -> None:
        self.path = path
        self.graph, stated, facts = _genai(path) if optimum is None else _optimum(optimum, path)
        header = read_header(self.graph)
        self.tensors, kept, shape = judge(self.graph, header, stated)
        self._weight_files = weight_files(self.graph, header)
        self._files = TokenizerFiles(path, facts, shape.vocab_size)
        where = path / TOKENIZER
        with naming(where):
            text = read_text(where, TokenizerError, "Download or copy it again")
            self.tokenizer = self._files.complete(text)[1]
        special = self._files.special_tokens(self.tokenizer)
        weights = count_weights(header)
        self.manifest = Manifest(
            name=path.resolve().name,
            role="target",
            config=shape,
            weights="as they are",
            formats=weights["formats"],
            bytes_by_class=weights["bytes_by_class"],
            parameters_by_class=weights["parameters_by_class"],
            special_tokens=special,
            provenance={"source": facts.where},
            files={},
            kept=kept,
            sampling=Sampling.advised(self._files.generation),
        )

    @cached_property
    def digest(self) -> str:
        """Names the graph and its weights, the weights by size and time: reading them takes seconds."""
        hasher = hashlib.sha256(self.graph.read_bytes() if self._weight_files else b"")
        for file in self._weight_files or [self.graph]:
            stat = file.stat()
            hasher.update(repr((file.name, stat.st_size, stat.st_mtime_ns)).encode())
        return hasher.hexdigest()[:16]

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The template in the files beside the tokenizer; None without one."""
        sources = self._files.chat_templates()
        return self._compile(sources, self.path) if sources else None


def _genai(folder: Path) -> tuple[Path, Stated, Facts]:
    """The graph that ``genai_config.json`` names, its facts, and the file's ``model``."""
    model = Facts.read(folder / GENAI).section("model")
    decoder = model.section("decoder")
    others = [part for part in _OTHER_PARTS if model.value(part)]
    if others:
        raise UnsupportedModelError(
            f"{model.where} has {', '.join(others)}; edgespec runs decoders of text, in one graph"
        )
    if decoder.value("pipeline"):
        raise UnsupportedModelError(f"{decoder.where} is a pipeline of graphs; edgespec runs single graphs")
    window = decoder.section("sliding_window")
    if window.keys and window.boolean("slide_key_value_cache", default=True):
        raise UnsupportedModelError(
            f"{window.where}: the KV cache slides, so it cannot be rolled back. Build the model without "
            "slide_key_value_cache."
        )
    sections = {name: decoder.section(name) for name in ("inputs", "outputs")}
    names = {
        field: sections[section].text(key)
        for field, (section, key) in _NAMES.items()
        if sections[section].value(key) is not None
    }
    stated = Stated(
        architecture=model.text("type", "unknown"),
        vocab_size=model.integer("vocab_size"),
        context_length=model.integer("context_length"),
        num_layers=decoder.integer("num_hidden_layers"),
        **names,
    )
    return _within(folder, decoder.text("filename", GRAPH)), stated, model


def _optimum(graph: Path, folder: Path) -> tuple[Path, Stated, Facts]:
    """Optimum's graph, and its facts in ``config.json``."""
    config = Facts.read(folder / HF_CONFIG)
    if config.boolean("is_encoder_decoder", default=False):
        raise UnsupportedModelError(f"{config.where}: an encoder and a decoder; edgespec runs decoders")
    stated = Stated(
        architecture=config.text("model_type", "unknown"),
        vocab_size=config.integer("vocab_size"),
        context_length=_first(config, _CONTEXT_KEYS),
    )
    return graph, stated, config


def _first(config: Facts, keys: tuple[str, ...]) -> int:
    """The number under the first of ``keys`` that exists."""
    return config.integer(next((key for key in keys if config.value(key) is not None), keys[0]))


def _within(folder: Path, name: str) -> Path:
    relative = PurePath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise BundleError(f"{folder / GENAI} names a graph outside the directory: {name!r}")
    return folder / relative
