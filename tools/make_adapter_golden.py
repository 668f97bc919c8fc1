"""Adapters that PEFT writes, and what transformers computes with them: `python -m tools.make_adapter_golden`.

Needs torch, transformers and peft. ``tests/golden_hf/adapters.npz`` holds for each case of
``tests/kit/adapters.py`` PEFT's files, the GGUF file that llama.cpp's converter (its sources are
``--llama-cpp DIR``) makes of these, and logits of the tiny model with the adapter.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

from tests.kit.adapters import CASES
from tests.kit.hf import ROWS, TOKENS, config_of, write_checkpoint

OUT = Path(__file__).parents[1] / "tests/golden_hf/adapters.npz"


def made(folder: Path, case: str, llama_cpp: Path) -> dict[str, Any]:
    """PEFT's two files, llama.cpp's file, and logits in float32 at the positions of ROWS."""
    base = write_checkpoint(folder / "base", config_of(CASES[case]["base"]))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **CASES[case]["lora"]))
    random = np.random.default_rng(7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.tensor(random.integers(-7, 8, tuple(parameter.shape)) / 64))
        logits = model.eval()(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, list(ROWS)]
    place = folder / "adapter"
    model.save_pretrained(place, save_embedding_layers=False)
    facts = json.loads((place / "adapter_config.json").read_text())
    facts["base_model_name_or_path"] = CASES[case]["base"]
    facts["target_modules"] = sorted(facts["target_modules"])
    converter = [sys.executable, str(llama_cpp / "convert_lora_to_gguf.py"), str(place)]
    config = json.loads((base / "config.json").read_text())
    config["architectures"] = [type(model.get_base_model()).__name__]
    (base / "config.json").write_text(json.dumps(config))
    out = folder / "adapter.gguf"
    subprocess.run([*converter, "--base", str(base), "--outfile", str(out)], check=True)
    return {
        "config": json.dumps(facts, sort_keys=True),
        "weights": np.frombuffer((place / "adapter_model.safetensors").read_bytes(), np.uint8),
        "gguf": np.frombuffer(out.read_bytes(), np.uint8),
        "logits": logits.numpy(),
    }


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-cpp", type=Path, required=True)
    llama_cpp, found = parser.parse_args().llama_cpp, dict[str, Any]()
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found |= {f"{case}.{key}": value for key, value in made(Path(folder), case, llama_cpp).items()}
    np.savez_compressed(OUT, **found)
    print(f"{OUT}: {OUT.stat().st_size:,} bytes, peft {peft.__version__}")


if __name__ == "__main__":
    main()
