"""Layers of Mamba-2 from file to text: what a sequence keeps, rollback, and drafts."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec_export.export import export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.kept import LOGGED, bytes_per_sequence
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Session
from tests.kit.drafters import same_with_drafts
from tests.kit.gguf_cases import gguf_of
from tests.kit.native import tiny_native
from tests.kit.states import check_rows, rows_in_one_pass
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import LLAMA


@pytest.fixture(scope="module", params=["granite4_h", "granite4_h_moe", "nemotron_h", "nemotron_h_moe"])
def sessions(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Session]]:
    """Three sequences of one model, the last of which reads texts in one pass."""
    folder = tmp_path_factory.mktemp(request.param)
    export_model(gguf_of(request.param, "Q8_0").write(folder / "m.gguf"), folder / "bundle")
    first = open_cpu(Bundle(folder / "bundle"))
    opened = [first, first.model.session(), first.model.session()]
    yield opened
    for session in opened:
        session.close()


def test_a_sequence_keeps_states_of_one_size(sessions: list[Session]) -> None:
    config = sessions[0].model.config
    assert isinstance(config, Transformer)
    layers, groups = config.layer_types.count("mamba"), 2 if config.architecture.startswith("nemotron") else 1
    state, row, inputs = 4 * 32 * 16, groups * 16 + 4 * 32 + 4, 4 * 32 + 2 * groups * 16
    expected = layers * 4 * (state + LOGGED * row + (LOGGED + 3) * inputs)
    assert layers > 0 and bytes_per_sequence(record(config).kept) == expected


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_have_the_bits_of_one_plain_run(sessions: list[Session], data: st.DataObject) -> None:
    """Drafts, of which some stay, and rewinds, of several sequences in common passes or alone."""
    reference = sessions[-1]
    check_rows(data, reference.model, partial(rows_in_one_pass, reference), place_behind=lambda length: 0)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("case", ["granite4_h", "nemotron_h", "nemotron_h_moe"])
def test_texts_are_those_without_drafts(tmp_path: Path, case: str, options: dict[str, Any]) -> None:
    """With n-grams, a drafter that has such layers itself, and one of another vocabulary."""
    for name in ("target", "alike"):
        export_model(gguf_of(case).write(tmp_path / f"{name}.gguf"), tmp_path / name)
    other = byte_level_json(size=330)
    bridged = tiny_native(tmp_path / "bridged", LLAMA, role="drafter", tokenizer_json=other).path
    prompts = "one two three " * 3, "one two three " * 3 + "four", "x"
    drafters = "ngram", tmp_path / "alike", bridged
    counts = same_with_drafts(tmp_path / "target", drafters, prompts, max_new_tokens=32, **options)
    assert all(drafted > 10 for drafted, _ in counts[1:])
    drafted, accepted = counts[1]
    assert options or case != "granite4_h" or accepted > 0.9 * drafted  # n-grams may be wrong
