"""What rounding does to outputs: `python tools/output_error.py --gguf FILE --layers 2,3 --block 128`.

For projections of a few layers, near the beginning since all before them must run: the mean square by which
4-bit rounding changes their outputs on text that was not calibrated with, as a part of the outputs' mean
square (`fit`), and of what it is with `fit` (all others). `gptq` is calibrated with 16,384, 8,192, 4,096 and
2,048 tokens. The text is the shipped one, weights as the reader of the calibration has them (8 bits).
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec_export.activations import linears_by_input, write_reader
from edgespec_export.blocks import Blocks, unpack
from edgespec_export.calibration import shipped_texts
from edgespec_export.checkpoint import Checkpoint
from edgespec_export.encode import Encoded, decode_linear, encode_linear
from edgespec_export.gptq import factor
from edgespec_export.pieces import cut, watch_pieces
from edgespec_export.sources import open_checkpoint
from edgespec_models.tokenizer import Tokenizer
from edgespec_models.weight_format import Method, WeightFormat

F32 = npt.NDArray[np.float32]

PROJECTIONS = {"attention.qkv": "v", "attention.o": "o", "mlp.gate_up": "up", "mlp.down": "down"}
METHODS: tuple[Method, ...] = ("rtn", "fit", "k-quant", "hqq")
CALIBRATED = (16_384, 8_192, 4_096, 2_048)
HELD = 3_000
SPAN = 2048
LONGEST = 192
ROWS = 256


def texts(checkpoint: Checkpoint) -> tuple[list[list[int]], int]:
    """Token ids, those to calibrate with first; and how many those are."""
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json(), vocab_size=checkpoint.config.vocab_size)
    encoded = [tokenizer.encode(text)[:LONGEST] for text in shipped_texts()]
    order = np.random.default_rng(0).permutation(len(encoded))
    shuffled = [encoded[i] for i in order if len(encoded[i]) > 1]
    ends = np.cumsum([len(tokens) for tokens in shuffled])
    first, last = (int(np.searchsorted(ends, size)) for size in (CALIBRATED[0], CALIBRATED[0] + HELD))
    return shuffled[:last], first


def observe(
    checkpoint: Checkpoint, folder: Path, wanted: Sequence[str], tokens: Sequence[Sequence[int]]
) -> Mapping[str, list[F32]]:
    """What the projections ``wanted`` are given for each text, but for its first token."""
    graph = write_reader(checkpoint, folder)
    linears = linears_by_input(graph, set(wanted))
    seen: dict[str, list[F32]] = {}

    def keep(value: str, given: F32) -> None:
        for linear in linears.get(value, ()):
            seen.setdefault(linear, []).append(given[1:].copy())

    for _ in watch_pieces(cut(graph, piece_bytes=1, watched=linears.keys()), checkpoint.config, tokens, keep):
        if len(seen) == len(wanted):
            break
    return seen


def weights(checkpoint: Checkpoint, tensor: str) -> F32:
    """The first rows of a matrix."""
    kind, raw = checkpoint.read(tensor, 0, min(ROWS, checkpoint.tensor(tensor).shape[0]))
    source = unpack(kind, raw)
    return source.values() if isinstance(source, Blocks) else source


def roundings(matrix: F32, form: WeightFormat, given: F32) -> Iterator[tuple[str, Encoded]]:
    """The matrix in every way; ``given`` are the activations to calibrate with."""
    for method in METHODS:
        yield method, encode_linear(matrix, form, method)
    for count in CALIBRATED:
        spans = [given[:count, at : at + SPAN] for at in range(0, matrix.shape[1], SPAN)]
        factors = [factor(x.T @ x / np.float32(len(x))) for x in spans]
        yield f"gptq, {count:,}", encode_linear(matrix, form, "gptq", factors=factors)


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--layers", default="2,3")
    parser.add_argument("--block", type=int, default=128)
    options = parser.parse_args()
    form = WeightFormat(4, options.block, zero_points=True, remainder="columns")
    layers = [f"layers.{layer}." for layer in options.layers.split(",")]
    wanted = [at + name for at in layers for name in PROJECTIONS]
    with open_checkpoint(options.gguf) as checkpoint, tempfile.TemporaryDirectory() as folder:
        tokens, first = texts(checkpoint)
        seen = observe(checkpoint, Path(folder), wanted, tokens)
        for number, (at, name) in enumerate((at, name) for at in layers for name in PROJECTIONS):
            matrix = weights(checkpoint, at + PROJECTIONS[name])
            calibrating, held = (
                np.concatenate(part) for part in (seen[at + name][:first], seen[at + name][first:])
            )
            errors = {}
            for method, encoded in roundings(matrix, form, calibrating):
                change = decode_linear(encoded, form, matrix.shape[1]) - matrix
                errors[method] = float(np.square(held @ change.T).sum() / np.square(held @ matrix.T).sum())
            if number == 0:
                print(f"| projection | {' | '.join(errors)} |\n|{'---|' * (len(errors) + 1)}")
            cells = [
                f"{error / errors['fit']:.2f}" if each != "fit" else f"{error:.5f}"
                for each, error in errors.items()
            ]
            print(f"| {at}{PROJECTIONS[name]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
