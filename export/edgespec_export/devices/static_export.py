"""From a checkpoint to graphs with fixed shapes: weights, ranges of activations, graphs, checks.

Checks run a few layers at a time, like :mod:`edgespec_export.graphs.pieces` with graphs of any shape, so they
take less memory than the model: all texts go through the first layers, which are freed, and so on; the last
piece is the LM head. Nothing is cut here: pieces are built, so weights need not exist before their piece
runs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec_export.devices.static_weights import WeightFile, write_static_weights
from edgespec_export.graphs.parity import Golden, check_parity, compare
from edgespec_export.graphs.pieces import PIECE_BYTES
from edgespec_export.journal import DATA_FILE
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.bundles.graph_contract import StaticInputs
from edgespec_models.bundles.static_graphs import PREFILL_ROWS, VERIFY_ROWS, StaticDevice, StaticGraphs
from edgespec_models.decoders.kept import KeptTensor
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.files.blocks import F32
from edgespec_models.graphs.static_decoder import StaticPlan, build_static_decoder
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_runtimes.cpu import CpuOptions, open_graph
from edgespec_runtimes.ort import TYPES
from edgespec_runtimes.predictions import Logits

MASKED = -10_000.0
"""The mask's value in floating point; 16-bit floats hold it, too."""
ROWS = 128
"""The most tokens of a text for calibration or comparison."""
_MARGIN = 15.0  # a masked score's share is below a 16-bit step: exp(-15) = 3e-7
_SCORES, _MASKED, _KEY = ".scores", ".masked", ".key"
_CODES = 255  # of 8 bits
_LARGEST_STEP = 0.25
_Ranges = dict[str, tuple[float, float]]
_Values = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class _Watched:
    """The observed values of points.

    Attributes:
        ranges: their least and largest values.
        spreads: for each layer's keys, the standard deviation of the median channel, the least of all texts.
    """

    ranges: _Ranges = field(default_factory=dict)
    spreads: dict[int, float] = field(default_factory=dict)

    def add(self, name: str, value: F32) -> None:
        """Add values of the point ``name``."""
        low, high = self.ranges.get(name, (0.0, 0.0))
        self.ranges[name] = min(low, float(value.min())), max(high, float(value.max()))
        if name.endswith(_KEY):  # (1, heads, head_dim, rows)
            layer, spread = int(name.split(".")[1]), float(np.median(value.std(axis=-1)))
            self.spreads[layer] = min(spread, self.spreads.get(layer, spread))

    @property
    def wide_keys(self) -> tuple[int, ...]:
        """Layers with a few very large channels of keys: steps of 8 bits would lose most other channels."""
        wide = []
        for layer, spread in sorted(self.spreads.items()):
            low, high = self.ranges[f"layers.{layer}{_KEY}"]
            if high - low > _CODES * _LARGEST_STEP * spread:
                wide.append(layer)
        return tuple(wide)


@dataclass(frozen=True, slots=True)
class StaticPieces:
    """A graph, a few of its layers at a time.

    ``masked`` is the attention mask's value for hidden places. ``weights`` returns the file in ``folder``
    with the weights of some parts; it is called for each piece when the piece before is closed.
    """

    config: Transformer
    plan: StaticPlan
    masked: float
    weights: Callable[[range], WeightFile]
    folder: Path

    @property
    def pieces(self) -> list[range]:
        """The parts of each piece."""
        return split(self.config)

    def run(self, texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, _Values]]:
        """Run ``texts``, with at most as many tokens as the plan has rows, through all pieces.

        Yields, piece by piece, every text's number and the results of its pass: the values of points, the new
        rows of the KV cache, and from the last piece ``logits``, float32 ``(1, rows, vocab)``. The dictionary
        is emptied before the next.

        Raises:
            BundleError: ONNX Runtime cannot load a piece.
        """
        carried: list[_Values] = [{} for _ in texts]
        tables = record(self.config).tables(self.config.context_length)
        host = StaticInputs(self.config, tables, self.masked)
        for parts in self.pieces:
            session = self._open(parts)
            inputs = {value.name: np.zeros(value.shape, TYPES[value.type]) for value in session.get_inputs()}
            names = [value.name for value in session.get_outputs()]
            for index, tokens in enumerate(texts):
                host.fill(inputs, tokens, 0)
                values = dict(zip(names, session.run(names, inputs | carried[index]), strict=True))
                if "residual_out" in values:
                    carried[index] = {"residual_in": values.pop("residual_out")}
                yield index, values
                values.clear()  # or the next pass would run beside them
            del session  # the next piece may lie in the same file

    def _open(self, parts: range) -> Any:
        path = self.folder / f"piece-{parts.start}.onnx"
        save_static(self.config, replace(self.plan, parts=parts), self.weights(parts), path)
        try:
            return open_graph(path, CpuOptions(keep_memory=False))
        finally:
            path.unlink()


def format_for(device: StaticDevice) -> tuple[bool, bool]:
    """Whether ``device`` wants int8 weights, which compilers of NPUs keep, and quantized activations."""
    return True, device == "npu-qnn"


def format_name(device: StaticDevice) -> str:
    """For manifests and tables."""
    int8, quantized = format_for(device)
    weights = "int8/channel" if int8 else "float32"
    return f"{weights}, uint16 activations" if quantized else weights


def export_static(
    checkpoint: Checkpoint,
    folder: Path,
    graphs: StaticGraphs,
    texts: Sequence[Sequence[int]],
    *,
    golden: Golden | None = None,
    progress: ProgressCallback = ignore_progress,
) -> tuple[StaticGraphs, tuple[KeptTensor, ...], dict[str, int], dict[str, Any], dict[str, Any] | None]:
    """Write the weights and every graph of ``graphs`` to ``folder``.

    With quantized activations the mask's value is computed here. ``texts`` are token ids of two texts or
    more; every fourth is kept for the comparison.

    Returns:
        The graphs, their kept tensors, bytes of weights by class, the loss by the format, and the nearness of
        logits to the reference.

    Raises:
        ParityError: the logits are far from the reference.
    """
    config, int8 = checkpoint.config, format_for(graphs.device)[0]
    held_out = [tokens[:ROWS] for tokens in texts[::4]]
    calibrated = [tokens[:ROWS] for index, tokens in enumerate(texts) if index % 4]
    scratch = folder / "float"
    watched = _float_run(checkpoint, scratch, (calibrated, held_out), progress)
    weights = write_static_weights(checkpoint, folder, int8=int8, progress=progress)
    graphs, plan = _settled(checkpoint, graphs, watched, weights)
    _save_all(config, plan, weights, folder, graphs)
    # The golden texts take the same way, a pass each.
    compared = [*held_out, *(() if golden is None else golden.texts)]
    whole = replace(plan, rows=max(map(len, compared)))
    pieces = StaticPieces(config, whole, graphs.masked, lambda parts: weights, folder)
    results = _logits(pieces, compared, progress)
    references = (np.load(_reference(scratch, number)) for number in range(len(held_out)))
    report = compare(references, islice(results, len(held_out))) | {"calibration_texts": len(calibrated)}
    parity = None if golden is None else check_parity(([rows] for rows in results), golden)
    rmtree(scratch)
    return graphs, plan.kept(config), weights.bytes_by_class, report, parity


def _settled(
    checkpoint: Checkpoint, graphs: StaticGraphs, watched: _Watched, weights: WeightFile
) -> tuple[StaticGraphs, StaticPlan]:
    """``graphs`` and the plan of all graphs, with the ranges of quantized activations."""
    int8, quantized = format_for(graphs.device)
    plan = StaticPlan(rows=1, capacity=1, all_logits=True, int8=int8, biases=checkpoint.has_biases)
    if not quantized:
        return graphs, plan
    graphs = replace(graphs, masked=_mask_value(watched.ranges))
    ranges = _all_ranges(checkpoint.config, watched.ranges | weights.ranges, graphs.masked)
    return graphs, replace(plan, ranges=ranges, wide_keys=watched.wide_keys)


def _mask_value(ranges: _Ranges) -> float:
    """A value with which any masked score has no share beside an unmasked one."""
    span = max(high - low for name, (low, high) in ranges.items() if name.endswith(_SCORES))
    return round(-span - _MARGIN, 1)


def planned(device: StaticDevice, buckets: tuple[int, ...]) -> StaticGraphs:
    """The graphs of a bundle for ``device``."""
    _, quantized = format_for(device)
    return StaticGraphs(
        device=device,
        verify=VERIFY_ROWS,
        prefill=PREFILL_ROWS,
        buckets=buckets,
        activations="uint16" if quantized else "float32",
        masked=MASKED,
    )


def _float_run(
    checkpoint: Checkpoint,
    scratch: Path,
    texts: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
    progress: ProgressCallback,
) -> _Watched:
    """The values of points on the first texts, in float32.

    The logits of the texts for comparison go to ``scratch``, a file each.
    """
    scratch.mkdir()
    config, biases = checkpoint.config, checkpoint.has_biases
    plan = StaticPlan(rows=ROWS, capacity=1, all_logits=True, biases=biases, watched=True)
    watched = _Watched()

    def weights(parts: range) -> WeightFile:
        return write_static_weights(checkpoint, scratch, int8=False, progress=ignore_progress, parts=parts)

    # Texts are repeated to fill a pass, so that no range comes from spare rows.
    every = [*((list(tokens) * ROWS)[:ROWS] for tokens in texts[0]), *texts[1]]
    pieces = StaticPieces(config, plan, MASKED, weights, scratch)
    for index, values in _reported(pieces, every, "Calibrating", progress):
        held_out = index - len(texts[0])
        if held_out < 0:
            for output, value in values.items():
                if ":" in output:
                    watched.add(output.partition(":")[2], value)
        elif "logits" in values:
            np.save(_reference(scratch, held_out), values["logits"][0, : len(every[index])])
    (scratch / DATA_FILE).unlink()
    return watched


def _reference(scratch: Path, number: int) -> Path:
    return scratch / f"{number}.npy"


def _reported(
    pieces: StaticPieces, texts: Sequence[Sequence[int]], stage: str, progress: ProgressCallback
) -> Iterator[tuple[int, dict[str, F32]]]:
    total = len(texts) * len(pieces.pieces)
    for done, result in enumerate(pieces.run(texts)):
        progress(Progress(stage, done, total, "step"))
        yield result
    progress(Progress(stage, total, total, "step"))


def _logits(
    pieces: StaticPieces, texts: Sequence[Sequence[int]], progress: ProgressCallback
) -> Iterator[Logits]:
    """The logits of each text in turn."""
    for index, values in _reported(pieces, texts, "Checking", progress):
        if "logits" in values:
            yield values["logits"][0, : len(texts[index])]


def _all_ranges(config: Transformer, ranges: _Ranges, masked: float) -> _Ranges:
    """The observed ranges, and the known ones."""
    turned = {
        name.removesuffix(_SCORES) + _MASKED: (low + masked, high)
        for name, (low, high) in ranges.items()
        if name.endswith(_SCORES)
    }
    known = {
        "mask": (masked, 0.0),
        "probabilities": (0.0, 1.0),
        "rope": (-config.rope.magnitude, config.rope.magnitude),
        "embedding_scale": (0.0, config.embedding_scale),
    }
    return ranges | turned | known


def _save_all(
    config: Transformer, plan: StaticPlan, weights: WeightFile, folder: Path, graphs: StaticGraphs
) -> None:
    for bucket in graphs.buckets:
        for rows in graphs.widths:
            shape = replace(plan, rows=rows, capacity=bucket, all_logits=rows != graphs.prefill)
            save_static(config, shape, weights, folder / graphs.file(bucket, rows))


def split(config: Transformer, piece_bytes: int = PIECE_BYTES) -> list[range]:
    """The parts of each piece: layers of ``piece_bytes`` in float32; the LM head is a piece."""
    shapes = record(config).tensors
    layer = sum(4 * prod(shape) for name, shape in shapes.items() if name.startswith("layers.0."))
    count, layers = max(1, piece_bytes // layer), config.num_layers
    starts = range(0, layers, count)
    return [*(range(start, min(start + count, layers)) for start in starts), range(layers, layers + 1)]


def save_static(config: Transformer, plan: StaticPlan, weights: WeightFile, path: Path) -> None:
    """Write the graph of ``plan``, over ``weights``, which lie in the same folder."""
    model = build_static_decoder(config, plan)
    weights.fill(model)
    ir.save(model, path)
