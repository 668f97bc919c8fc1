"""Reference logits of tiny Hugging Face models: `python -m tools.make_hf_golden`.

Needs torch and transformers. Writes the checkpoints that ``tests/hf_for_tests.py`` describes into a temporary
folder, lets transformers read them, and stores ``config.json`` and the logits of some positions in
``tests/golden_hf/NAME.npz``.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tests.hf_for_tests import CASES, ROWS, TOKENS, config_of, write_checkpoint

OUT = Path(__file__).parents[1] / "tests/golden_hf"


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
    OUT.mkdir(exist_ok=True)
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows = logits(write_checkpoint(Path(folder) / case, config_of(case)))
        config = json.dumps(config_of(case), sort_keys=True)
        np.savez_compressed(OUT / f"{case}.npz", config=config, logits=rows)
        print(f"{case}: std {rows.std():.3f}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
