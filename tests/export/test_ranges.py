"""What float16 would have to hold is seen, wherever a graph computes it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edgespec_export.graphs import ranges
from edgespec_export.graphs.ranges import LARGEST_FLOAT16, ActivationRanges, measure_ranges, precision_for
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.errors import UnsupportedModelError
from edgespec_models.progress import ignore_progress
from tests.kit.gguf import TinyGGUF, tiny_gguf


def measured(model: TinyGGUF, folder: Path) -> ActivationRanges:
    with open_checkpoint(model.write(folder / "m.gguf")) as checkpoint:
        return measure_ranges(checkpoint, (), folder / "scratch", ignore_progress)


def with_large_input(norm: float) -> TinyGGUF:
    """The first layer's projections are given the embedding times ``norm``, and make little of it."""
    model = tiny_gguf("llama", layers=1)
    factors = {"attn_norm": norm, "attn_q": 1e-6, "attn_k": 1e-6, "attn_v": 1e-6}
    for name, factor in factors.items():
        kind, weight = model.tensors[f"blk.0.{name}.weight"]
        model.tensors[f"blk.0.{name}.weight"] = kind, (weight * np.float32(factor)).astype(np.float32)
    return model


def test_what_the_first_projections_are_given_is_seen(tmp_path: Path) -> None:
    assert measured(with_large_input(1e5), tmp_path).inner > LARGEST_FLOAT16


def test_sums_over_blocks_of_what_is_multiplied_are_seen(tmp_path: Path) -> None:
    """Formats with remainders multiply sums of 32 inputs each, which are larger where signs agree."""
    model = with_large_input(2000.0)
    kind, table = model.tensors["token_embd.weight"]
    signs = np.sign(model.values("blk.0.attn_norm.weight"))
    model.tensors["token_embd.weight"] = kind, (np.abs(table) * signs).astype(np.float32)
    assert 2000.0 * np.sqrt(table.shape[1]) < LARGEST_FLOAT16  # what a single input can be
    assert measured(model, tmp_path).inner > LARGEST_FLOAT16


def test_not_a_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(pieces: Any, config: Any, texts: Any) -> Iterator[Any]:
        for name in pieces:
            for value in (np.nan, 1.0):
                yield mock.Mock(left={name: np.full((1, 1, 1), value, np.float32)}, last=True)

    monkeypatch.setattr(ranges, "cut", lambda graph, watched: list(watched))
    monkeypatch.setattr(ranges, "walk", walk)
    activations = measured(tiny_gguf("llama", layers=1), tmp_path)
    with pytest.raises(UnsupportedModelError, match="float16 ends at 65,504"):
        precision_for(activations)
