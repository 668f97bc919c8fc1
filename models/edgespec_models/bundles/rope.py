"""Rotary tables: the cosine and sine of every position and frequency."""

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.config import ModelConfig

__all__ = ["rotary_tables"]


def rotary_tables(config: ModelConfig, positions: int) -> dict[str, npt.NDArray[np.float32]]:
    """Cosines and sines of ``positions`` from 0 on (Su et al. 2021, section 3.4.2), by their names in graphs.

    ``rope_cos`` and ``rope_sin``, and where windowed layers have a base of their own ``rope_local_cos`` and
    ``rope_local_sin``: float32 ``(positions, rotary width / 2)`` each.
    """
    width = config.rotary_width
    bases = {"rope": config.rope_theta, "rope_local": config.rope_local_theta}
    tables = {}
    for name, theta in bases.items():
        if theta is None:
            continue
        frequencies = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
        if name == "rope" and config.rope_factors:
            frequencies /= config.rope_factors
        angles = np.outer(np.arange(positions, dtype=np.float64), frequencies)
        for part, function in (("cos", np.cos), ("sin", np.sin)):
            tables[f"{name}_{part}"] = (function(angles) * config.rope_magnitude).astype(np.float32)
    return tables
