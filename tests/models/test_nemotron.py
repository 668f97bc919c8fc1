"""Nemotron-H from file to text: layers of one sublayer, Mamba-2 in groups, rollback, and drafts."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec_export.export import export_model
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import EdgespecError
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Session
from tests.kit.drafters import same_with_drafts
from tests.kit.gguf import F32
from tests.kit.gguf_cases import gguf_of
from tests.kit.hf import config_of, write_checkpoint
from tests.kit.native import tiny_native
from tests.kit.states import check_rows
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import LLAMA


@pytest.fixture(scope="module", params=["nemotron_h", "nemotron_h_moe"])
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


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_have_the_bits_of_one_plain_run(sessions: list[Session], data: st.DataObject) -> None:
    """Drafts, of which some stay, and rewinds, of several sequences in common passes or alone."""
    reference = sessions[-1]
    check_rows(data, reference.model, partial(_plain, reference), place_behind=lambda length: 0)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("case", ["nemotron_h", "nemotron_h_moe"])
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


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ssm.group_count", 3, "4 heads of Mamba-2 cannot share 3 groups"),
        ("ssm.inner_size", 130, "4 heads of Mamba-2 are 32 wide; allowed: 130 in all"),
        ("ssm.time_step_rank", 0, "0 heads of Mamba-2"),
        ("attention.head_count_kv", [0, 2, 0, 2, 0], "layer 1 has 2 heads of keys and is 96 wide"),
        ("attention.head_count_kv", [0, 0, 0, 2], "must be lists with a number for each layer"),
        ("attention.head_count_kv", [1, 0, 0, 2, 0], "attention.head_count_kv is .1, 2."),
        ("feed_forward_length", [0, 96, 0, 0, 64], "feed_forward_length is .64, 96."),
        ("feed_forward_length", 96, "must be lists"),
        ("block_count", 6, "layer_types must say"),
    ],
)
def test_keys_that_contradict_the_file_are_named(tmp_path: Path, key: str, value: Any, message: str) -> None:
    file = gguf_of("nemotron_h", **{key: value}).write(tmp_path / "m.gguf")
    with pytest.raises(EdgespecError, match=message):
        GGUFCheckpoint(file)


def test_the_epsilon_may_have_the_name_of_other_norms(tmp_path: Path) -> None:
    """Published directories state ``layer_norm_epsilon`` alone, and so do files made of them."""
    keys: dict[str, Any] = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 0.25}
    with GGUFCheckpoint(gguf_of("nemotron_h", **keys).write(tmp_path / "m.gguf")) as checkpoint:
        assert checkpoint.config.norm_epsilon == 0.25


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("moe_latent_size", 32, "moe_latent_size is 32"),
        ("mlp_hidden_act", "silu", "mlp_hidden_act is 'silu'"),
        ("use_bias", True, "mamba_proj_bias is True"),
        ("n_group", 2, "n_group is 2"),
        ("n_groups", 3, "4 heads of Mamba-2 cannot share 3 groups"),
        ("layers_block_type", ["linear_attention", "sliding"], "layer_types must say"),
    ],
)
def test_configs_that_edgespec_lacks_are_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    folder = write_checkpoint(tmp_path / "model", config_of("nemotron_h_moe"))
    config = {**config_of("nemotron_h_moe"), key: value}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(EdgespecError, match=message):
        HFCheckpoint(folder)
