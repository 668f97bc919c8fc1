"""Granite 4 H: keys of files that contradict each other."""

from pathlib import Path
from typing import Any

import pytest

from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_models.errors import EdgespecError
from tests.kit.gguf_cases import gguf_of


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
