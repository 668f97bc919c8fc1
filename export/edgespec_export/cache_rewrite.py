"""Graphs that concatenate their KV cache, rewritten to attention that writes it in place.

A graph that concatenates copies the whole cache in every pass, and cannot leave the mask out of its sums.
Where every layer's attention is shown to be what ONNX Runtime's GroupQueryAttention computes
(:mod:`edgespec_export.cache_graph`, :mod:`edgespec_export.cache_probe`), it is put in its place. Rotary
embeddings stay where they are, before it. The lengths come from the attention mask, as in graphs for
onnxruntime-genai, so the graph is called as before. All layers are rewritten or none, and the rewritten
graph takes the other's place only if its logits are the same but for float noise.
"""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from edgespec_export.cache_graph import GraphIndex, UnsuitableError, find_attention
from edgespec_export.cache_in_place import put_in_place
from edgespec_export.cache_parts import GraphParts
from edgespec_export.cache_probe import examine
from edgespec_models.bundle import Bundle
from edgespec_models.errors import EdgespecError
from edgespec_models.foreign import open_bundle
from edgespec_models.graph_tensors import GraphTensors
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from edgespec_runtimes.session import Logits

__all__ = ["CacheRewrite", "rewrite_cache"]

_ASIDE = "concatenating.onnx"
_PREFILL, _STEPS, _ROWS, _BACK = 24, 4, 5, 7
_SHORTEST = 64  # context in which all of that can be tried
_NOISE = 2e-4  # of the largest logit


@dataclass(frozen=True, slots=True)
class CacheRewrite:
    """What came of it.

    Attributes:
        layers: how many write the KV cache in place now; 0 where the graph is as it was.
        reason: why keys and values are concatenated still; empty where they are not.
    """

    layers: int
    reason: str


def rewrite_cache(folder: Path) -> CacheRewrite:
    """Rewrite the graph in ``folder``, if all of its attention can be; else leave it as it is.

    Args:
        folder: what Optimum wrote, opened by nobody.

    Raises:
        EdgespecError: edgespec cannot run what is in ``folder``.
        OSError: the rewritten graph cannot be written.
    """
    bundle = open_bundle(folder)
    graph, tensors, context = bundle.graph, bundle.tensors, bundle.config.context_length
    try:
        if context < _SHORTEST:
            raise UnsuitableError(f"a context of {context} tokens is too short to try it")
        expected, copies = _trial(bundle)
        if not copies or tensors is None:
            return CacheRewrite(0, "")
        _replace(graph, _rewritten(graph, tensors, context), folder, expected)
    except UnsuitableError as error:
        return CacheRewrite(0, str(error))
    return CacheRewrite(len(tensors.cache) // 2, "")


def _replace(graph: Path, rewritten: onnx.ModelProto, folder: Path, expected: Logits) -> None:
    """Put ``rewritten`` in the place of ``graph``, which comes back whatever fails."""
    aside = graph.with_name(_ASIDE)
    graph.rename(aside)
    try:
        onnx.save(rewritten, str(graph))
        _check(folder, expected)
    except BaseException:
        aside.replace(graph)
        raise
    aside.unlink()


def _rewritten(path: Path, tensors: GraphTensors, context: int) -> onnx.ModelProto:
    if any(tensor.type != "float32" for tensor in tensors.cache):
        raise UnsuitableError(f"the KV cache is {tensors.cache[0].type}, not float32")
    model = onnx.load(str(path), load_external_data=False)
    index = GraphIndex(model.graph)
    pairs = zip(tensors.cache[::2], tensors.cache[1::2], strict=True)
    layers = [find_attention(index, *pair) for pair in pairs]
    facts = examine(GraphParts(model, path, tensors), layers, context)
    put_in_place(model, tensors, layers, facts)
    return model


def _trial(bundle: Bundle) -> tuple[Logits, bool]:
    """Logits of random tokens, and whether the cache is copied.

    They are read in one pass, in single steps, in a few rows at a time and after a rollback.
    """
    count = _PREFILL + _STEPS + 2 * _ROWS
    with closing(CpuSession(bundle, CpuOptions(threads=1))) as session:  # Windows moves no open files
        tokens: list[int] = np.random.default_rng(0).integers(0, session.vocab_size, count).tolist()
        seen = [session.forward(tokens[:_PREFILL]).copy()]
        seen += [session.forward([token]).copy() for token in tokens[_PREFILL : _PREFILL + _STEPS]]
        seen.append(session.forward(tokens[-2 * _ROWS : -_ROWS]).copy())
        session.truncate(session.length - _BACK)
        seen.append(session.forward(tokens[-_ROWS:]).copy())
        return np.concatenate(seen), session.copies_cache


def _check(folder: Path, expected: Logits) -> None:
    """Compare the rewritten graph with the logits of the graph that it replaces."""
    try:
        given, copies = _trial(open_bundle(folder))
    except EdgespecError as error:
        raise UnsuitableError(f"the rewritten graph does not run: {error}") from error
    if copies:
        raise UnsuitableError("the rewritten graph does not write in place")
    difference = float(np.abs(given - expected).max() / np.abs(expected).max())
    if not difference <= _NOISE:
        raise UnsuitableError(f"the rewritten graph's logits differ by {difference:.1e} of the largest")
