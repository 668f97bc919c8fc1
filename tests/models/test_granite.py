"""Granite 4 H's layers of Mamba-2 from file to text: what a sequence keeps, rollback, and drafts."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec_export.export import export_model
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.kept import LOGGED, bytes_per_sequence
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import EdgespecError
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Session
from tests.kit.drafters import same_with_drafts
from tests.kit.gguf import F32
from tests.kit.gguf_cases import gguf_of
from tests.kit.native import tiny_native
from tests.kit.states import check_rows
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import LLAMA


@pytest.fixture(scope="module", params=["granite4_h", "granite4_h_moe"])
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


def _plain(session: Session, text: list[int]) -> F32:
    session.rewind(0)
    return session.predict(text).logits.copy()


def test_a_sequence_keeps_states_of_one_size(sessions: list[Session]) -> None:
    state, row, inputs = 4 * 32 * 16, 16 + 4 * 32 + 4, 4 * 32 + 2 * 16
    expected = 3 * 4 * (state + LOGGED * row + (LOGGED + 3) * inputs)
    config = sessions[0].model.config
    assert isinstance(config, Transformer)
    assert bytes_per_sequence(record(config).kept) == expected


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_have_the_bits_of_one_plain_run(sessions: list[Session], data: st.DataObject) -> None:
    """Drafts, of which some stay, and rewinds, of several sequences in common passes or alone."""
    reference = sessions[-1]
    check_rows(data, reference.model, partial(_plain, reference), place_behind=lambda length: 0)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
def test_texts_are_those_without_drafts(tmp_path: Path, options: dict[str, Any]) -> None:
    """With n-grams, a drafter that has such layers itself, and one of another vocabulary."""
    for name in ("target", "alike"):
        export_model(gguf_of("granite4_h").write(tmp_path / f"{name}.gguf"), tmp_path / name)
    other = byte_level_json(size=330)
    bridged = tiny_native(tmp_path / "bridged", LLAMA, role="drafter", tokenizer_json=other).path
    prompts = "one two three " * 3, "one two three " * 3 + "four", "x"
    drafters = "ngram", tmp_path / "alike", bridged
    counts = same_with_drafts(tmp_path / "target", drafters, prompts, max_new_tokens=32, **options)
    assert all(drafted > 10 for drafted, _ in counts[1:])
    drafted, accepted = counts[1]
    assert options or accepted > 0.9 * drafted  # n-grams may be wrong


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ssm.inner_size", 130, "4 heads of Mamba-2 are 32 wide; allowed: 130 in all"),
        ("ssm.time_step_rank", 0, "0 heads of Mamba-2"),
        ("ssm.group_count", 2, "mamba_n_groups is 2"),
        ("ssm.state_size", 32, "shape"),
        ("attention.head_count_kv", [0, 0, 0, 0], "num_kv_heads is 0"),
        ("attention.head_count_kv", [0, 0], "layer_types must say"),
    ],
)
def test_keys_that_contradict_the_file_are_named(tmp_path: Path, key: str, value: Any, message: str) -> None:
    file = gguf_of("granite4_h", **{key: value}).write(tmp_path / "m.gguf")
    with pytest.raises(EdgespecError, match=message):
        GGUFCheckpoint(file)
