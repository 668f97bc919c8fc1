"""Reference logits of tiny Hugging Face models: `python tools/make_hf_golden.py`.

Needs torch and transformers. Writes the checkpoints that ``tests/hf_for_tests.py`` describes into a temporary
folder, lets transformers read them, and stores ``config.json`` and the logits of some positions in
``tests/golden_hf/NAME.npz``.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.hf_for_tests import CASES, ROWS, TOKENS, config_of, write_checkpoint  # noqa: E402


def logits(folder: Path) -> npt.NDArray[np.float32]:
    """What transformers computes in float32 for TOKENS, at the positions of ROWS.

    Raises:
        SystemExit: transformers found other tensors than it expected.
    """
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: sorted(names) for key, names in found.items() if names}
    if wrong:
        raise SystemExit(f"{folder.name}: {wrong}")
    with torch.no_grad():
        result = model.eval()(input_ids=torch.tensor([TOKENS]), use_cache=False).logits
    rows: npt.NDArray[np.float32] = result[0, list(ROWS)].numpy()
    return rows


def main() -> None:
    """Write one file for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "golden_hf")
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows = logits(write_checkpoint(Path(folder) / case, config_of(case)))
        config = json.dumps(config_of(case), sort_keys=True)
        np.savez_compressed(options.out / f"{case}.npz", config=config, logits=rows)
        print(f"{case}: std {rows.std():.3f}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
