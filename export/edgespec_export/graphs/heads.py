"""What an export of a head finds out by running it, on numbers that stand for a target's."""

import numpy as np

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.bundles.graph_contract import cache_names
from edgespec_models.errors import BundleError, ParityError
from edgespec_runtimes.cpu import CpuOptions, open_graph
from edgespec_runtimes.ort import RUN_ERRORS

_TOKENS, _READ = 7, 4  # of the check, and those at their beginning that have features; the others have states


def check_head(bundle: Bundle) -> bool:
    """Whether a token at a time gives the bits that all of them in one pass give.

    Raises:
        BundleError: ONNX Runtime cannot load or run the graph.
        ParityError: numbers that are not finite, or others a token at a time.
    """
    config, rng = bundle.config, np.random.default_rng(0)
    assert isinstance(config, ModelConfig)
    width = len(config.feature_layers) * config.feature_width
    features = rng.normal(0, 1, (1, _READ, width)).astype(np.float32)
    states = rng.normal(0, 1, (1, _TOKENS, config.hidden_size)).astype(np.float32)
    session, names = open_graph(bundle.graph, CpuOptions(), native=True), cache_names(config.num_layers)
    outputs = ["logits", "new_states", *(present for _, present in names)]
    ids = rng.integers(0, config.vocab_size, (1, _TOKENS))
    empty = np.zeros((1, config.num_kv_heads, 16, config.head_dim), np.float16)
    cache = {past: empty for past, _ in names}

    def run(start: int, stop: int) -> list[np.ndarray]:
        feeds = {
            **cache,
            "input_ids": ids[:, start:stop],
            "sequences": np.array([(0, start, stop - start)]),
            "logits_rows": np.arange(stop - start),
            "features": features[:, start:stop],
            "states": states[:, max(start, _READ) : max(stop, _READ)],
        }
        logits, new_states, *present = session.run(outputs, feeds)
        cache.update((past, array) for (past, _), array in zip(names, present, strict=True))
        return [logits, new_states]

    try:
        together, cache = run(0, _TOKENS), {past: empty for past, _ in names}
        steps = [run(start, start + 1) for start in range(_TOKENS)]
    except RUN_ERRORS as error:
        raise BundleError(
            f"ONNX Runtime cannot run {bundle.graph} ({error}); export the head again"
        ) from error
    alone = [np.concatenate(rows, axis=1) for rows in zip(*steps, strict=True)]
    for found, expected in zip(alone, together, strict=True):
        scale = np.abs(expected).max()
        if not np.isfinite(expected).all() or not np.allclose(found, expected, atol=1e-2 * scale):
            raise ParityError("the exported head gives other logits a token at a time; nothing was kept")
    return all(map(np.array_equal, alone, together))
