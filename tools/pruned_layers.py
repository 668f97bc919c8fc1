"""What would a drafter with fewer layers be worth? ``python -m tools.pruned_layers FILE.gguf --most 4``.

Each layer is left out alone, and then the least missed ones together: how often the first guess is right on
every fourth shipped calibration text, and milliseconds of a step. Nothing is trained afterwards.
"""

import argparse
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from edgespec_export.calibration import shipped_texts
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.gguf import GGUFTensor
from edgespec_export.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.trim import TrimOptions
from edgespec_models.bundle import Bundle
from edgespec_models.config import ModelConfig
from edgespec_runtimes.cost import measure_cost
from edgespec_runtimes.cpu import CpuOptions, CpuSession

_LONGEST, _UNJUDGED = 120, 8  # tokens of a text; of these, the first


class Pruned(GGUFCheckpoint):
    """A checkpoint without some of its layers."""

    def __init__(self, path: Path, dropped: Collection[int]) -> None:
        self._dropped = dropped
        super().__init__(path)

    def _rename(self) -> dict[str, GGUFTensor]:
        renamed = {}
        for name, tensor in super()._rename().items():
            if not name.startswith("layers."):
                renamed[name] = tensor
                continue
            _, layer, kind = name.split(".")
            if int(layer) not in self._dropped:
                before = sum(dropped < int(layer) for dropped in self._dropped)
                renamed[f"layers.{int(layer) - before}.{kind}"] = tensor
        return renamed

    def _read_config(self) -> ModelConfig:
        config = super()._read_config()
        return replace(config, num_layers=config.num_layers - len(self._dropped))


def judge(gguf: Path, dropped: Collection[int]) -> tuple[float, float]:
    """Share of right first guesses, and milliseconds of a step, without these layers."""
    options = ExportOptions(role="drafter", trim=TrimOptions("full"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pruned"
        with (
            mock.patch("edgespec_export.sources.open_checkpoint", lambda path: Pruned(path, dropped)),
            mock.patch("edgespec_export.parity.find_golden", lambda digest: None),
        ):
            export_model(gguf, out, options=options)
        bundle = Bundle(out)
        session = CpuSession(bundle, CpuOptions(exact_rows=False))
        step_ms = measure_cost(session, (1,), repeats=8).seconds(1) * 1e3
        right = total = 0
        for text in shipped_texts()[::4]:
            ids = bundle.tokenizer.encode(text)[:_LONGEST]
            if len(ids) > 2 * _UNJUDGED:
                session.prefill(ids[:_UNJUDGED])
                guesses = session.forward(ids[_UNJUDGED:-1]).argmax(axis=-1)
                right += int((guesses == np.array(ids[_UNJUDGED + 1 :])).sum())
                total += len(guesses)
        session.close()
    return right / total, step_ms


def main() -> None:
    """Judge and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--most", type=int, default=4, help="layers left out together")
    args = parser.parse_args()
    with GGUFCheckpoint(args.gguf) as checkpoint:
        layers = range(checkpoint.config.num_layers)
    print("without layers | first guess right | ms a step")
    print("none | {:.3f} | {:.2f}".format(*judge(args.gguf, ())))
    alone = {}
    for layer in layers:
        alone[layer], step_ms = judge(args.gguf, (layer,))
        print(f"{layer} | {alone[layer]:.3f} | {step_ms:.2f}", flush=True)
    order = sorted(layers, key=lambda layer: alone[layer], reverse=True)
    for count in range(2, args.most + 1):
        print("{} | {:.3f} | {:.2f}".format(sorted(order[:count]), *judge(args.gguf, order[:count])))


if __name__ == "__main__":
    main()
