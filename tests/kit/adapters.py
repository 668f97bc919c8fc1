"""Cases of ``tools/make_adapter_golden.py``, and the adapters' files in a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.hf import F32

GOLDEN = Path(__file__).parents[1] / "golden_hf/adapters.npz"
_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: Mapping[str, Mapping[str, Any]] = {
    "plain": {"base": "llama", "lora": {"r": 2, "lora_alpha": 4, "target_modules": _ALL}},
    "stabilized": {
        "base": "qwen2",
        "lora": {
            "r": 3,
            "lora_alpha": 2,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "alpha_pattern": {"layers.1.mlp.down_proj": 5},
            "rank_pattern": {"v_proj": 2},
        },
    },
    "stacked": {"base": "phi3", "lora": {"r": 2, "target_modules": ["qkv_proj", "gate_up_proj", "lm_head"]}},
}
"""Each with a case of ``tests/kit/hf.py``, and arguments of PEFT's configuration."""


def write_adapter(folder: Path, case: str) -> Path:
    """The directory that PEFT wrote."""
    folder.mkdir(parents=True)
    with np.load(GOLDEN) as data:
        (folder / "adapter_config.json").write_text(str(data[f"{case}.config"]), encoding="utf-8")
        (folder / "adapter_model.safetensors").write_bytes(data[f"{case}.weights"].tobytes())
    return folder


def write_gguf_adapter(path: Path, case: str) -> Path:
    """The file that llama.cpp's converter made of it."""
    with np.load(GOLDEN) as data:
        path.write_bytes(data[f"{case}.gguf"].tobytes())
    return path


def golden(case: str) -> F32:
    """Logits of the model with the adapter."""
    with np.load(GOLDEN) as data:
        logits: F32 = data[f"{case}.logits"]
    return logits
