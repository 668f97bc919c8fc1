"""Nemotron-H: keys of files and configurations, right and wrong ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_models.errors import EdgespecError
from tests.kit.gguf_cases import gguf_of
from tests.kit.hf import config_of, write_checkpoint


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
