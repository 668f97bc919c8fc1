"""What is left of an alignment's change in each block format, where a file's weights are quantized already?

Usage: ``python -m tools.aligned_formats DRAFTER.gguf``. Random changes of rank 8 and of three sizes are added
to the first layer's matrices, which are then rounded. ``kept`` is the share of the change that is there
afterwards, ``error`` what else has changed, over the change and over the weights.
"""

from pathlib import Path

import numpy as np

from edgespec_export.formats.rounding import round_matrix
from edgespec_export.sources.blocks import F32
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.weight_format import WeightFormat
from tools.arguments import arguments

_FORMATS = {
    "Q4_1": WeightFormat(4, 32, minimums=True),
    "Q8_0": WeightFormat(8, 32),
}
_RANK = 8


def change(rng: np.random.Generator, values: F32, share: float) -> F32:
    """Of low rank, and of ``share`` of the norm of ``values``."""
    rows, columns = values.shape
    product = rng.normal(size=(rows, _RANK)) @ rng.normal(size=(_RANK, columns))
    product *= share * np.linalg.norm(values) / np.linalg.norm(product)
    return product.astype(np.float32)


def main() -> None:
    """A line for each size of the change and each format."""
    args, rng = arguments(__doc__, "drafter"), np.random.default_rng(0)
    with open_checkpoint(Path(args.drafter)) as checkpoint:
        matrices = [checkpoint.values(f"layers.0.{name}") for name in ("q", "o", "gate", "down")]
    print("change   format      kept   error   of the weights")
    for share in (0.01, 0.03, 0.1):
        changes = [change(rng, values, share) for values in matrices]
        for name, form in _FORMATS.items():
            kept, error, whole = [], [], []
            for values, added in zip(matrices, changes, strict=True):
                got = round_matrix(values + added, form).values() - values
                kept.append(float((got * added).sum() / np.square(added).sum()))
                error.append(np.linalg.norm(got - added) / np.linalg.norm(added))
                whole.append(np.linalg.norm(got - added) / np.linalg.norm(values))
            print(f"{share:6.2f}   {name}    {np.mean(kept):8.2f}{np.mean(error):8.2f}{np.mean(whole):17.4f}")


if __name__ == "__main__":
    main()
