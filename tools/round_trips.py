"""From every kind of source to text: `python tools/round_trips.py`.

Writes a tiny model with random weights in each format, exports it (or opens it, where it runs as it is),
compares its logits with what transformers computed for the same weights where a reference is stored
(``tests/golden_hf``), else a pass over all tokens with passes over few, and generates 16 tokens plain and
with n-grams of the text. Prints a Markdown table and exits with 1 if anything differs: with float weights
logits by more than 2e-5 of their standard deviation, otherwise tokens, where the bundle says that its rows
are exact. ``--catalogue NAME`` does the same with models of the catalogue, pulled and exported as by default.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import edgespec  # noqa: E402
from edgespec.loading import open_model  # noqa: E402
from edgespec_export.export import ExportOptions, export_model  # noqa: E402
from edgespec_models.bundle import Bundle  # noqa: E402
from edgespec_models.foreign import is_model, open_bundle  # noqa: E402
from edgespec_runtimes.cpu import CpuSession  # noqa: E402
from tests import foreign_for_tests as foreign  # noqa: E402
from tests.gguf_for_tests import ARCHITECTURES, FORMATS, tiny_gguf  # noqa: E402
from tests.hf_for_tests import CASES, ROWS, TOKENS, config_of, write_checkpoint  # noqa: E402
from tests.sentencepiece_for_tests import trained  # noqa: E402
from tests.tokenizers_for_tests import byte_level_json  # noqa: E402
from tests.written_out_for_tests import WrittenOut, write_written_out  # noqa: E402

F32 = npt.NDArray[np.float32]
GOLDEN = ROOT / "tests" / "golden_hf"
PROMPT = "the cat and the dog and the cat and the"
NEW_TOKENS = 16
MOST = 2e-5
"""Of the logits' standard deviation: what float32 sums in another order differ by."""


@dataclass(frozen=True)
class Source:
    """Something to start from: what to call it, how to write it, and the stored reference's name."""

    kind: str
    architecture: str
    write: Callable[[Path], Path]
    golden: str | None = None
    weights: str = "portable"


@dataclass(frozen=True)
class Row:
    """What came of one source; ``difference`` is of logits, in their standard deviations."""

    source: Source
    against: str
    formats: str
    difference: float
    row_exact: bool
    drafted: int
    same: bool
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether something is not as it must be."""
        exact_weights = self.formats == "float32"
        return (exact_weights and not self.difference <= MOST) or (self.row_exact and not self.same)


def hf(case: str, **how: object) -> Callable[[Path], Path]:
    """A Hugging Face directory of a stored reference's weights, with a ``tokenizer.json``."""

    def write(folder: Path) -> Path:
        write_checkpoint(folder, config_of(case), **how)  # type: ignore[arg-type]
        (folder / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
        return folder

    return write


def sentencepiece(folder: Path) -> Path:
    """The same with SentencePiece's ``tokenizer.model`` alone."""
    write_checkpoint(folder, config_of("llama"))
    (folder / "tokenizer.model").write_bytes(trained("bpe"))
    return folder


def gguf(architecture: str, kind: str) -> Callable[[Path], Path]:
    """A GGUF file whose matrices are all of one format."""
    return lambda folder: tiny_gguf(architecture, kind).write(folder.with_suffix(".gguf"))


def sources() -> Iterator[Source]:
    """Every kind there is."""
    for architecture in ARCHITECTURES:
        yield Source("GGUF F32", architecture, gguf(architecture, "F32"))
    for kind in FORMATS[1:]:
        yield Source(f"GGUF {kind}", "llama", gguf("llama", kind), weights="exact")
    yield Source("GGUF Q4_K, portable", "llama", gguf("llama", "Q4_K"))
    for case in CASES:
        architecture = config_of(case)["model_type"]
        yield Source(f"Hugging Face, {case}", architecture, hf(case), golden=case)
    yield Source("Hugging Face, BF16, 3 shards", "phi3", hf("phi4", dtype="BF16", shards=3), golden="phi4")
    yield Source("Hugging Face, F16", "qwen3", hf("qwen3", dtype="F16"), golden="qwen3")
    yield Source("Hugging Face, rounded", "qwen2", hf("qwen2"), golden="qwen2", weights="exact")
    yield Source("Hugging Face, tokenizer.model", "llama", sentencepiece, golden="llama")
    specs = {
        "float": foreign.ForeignSpec(),
        "4 bits": foreign.ForeignSpec(weights="int4"),
        "float16 cache": foreign.ForeignSpec(kv="float16"),
    }
    for name, spec in specs.items():
        yield Source(f"genai_config.json, {name}", "llama", partial(foreign.write_genai, spec=spec))
    yield Source("Optimum", "gpt2", foreign.write_optimum)
    written_out = partial(write_written_out, how=WrittenOut(window=12))
    yield Source("Optimum, attention written out", "llama", written_out)
    in_place = foreign.ForeignSpec(attention="gqa", positions=True)
    yield Source("Optimum, GroupQueryAttention", "gpt2", partial(foreign.write_optimum, spec=in_place))


def reference(case: str) -> F32:
    """Stored logits of TOKENS at ROWS."""
    with np.load(GOLDEN / f"{case}.npz") as data:
        if json.loads(str(data["config"])) != config_of(case):
            raise SystemExit(f"{case} has changed; run tools/make_hf_golden.py")
        logits: F32 = data["logits"]
    return logits


def difference(bundle: Bundle, golden: str | None) -> tuple[float, bool]:
    """The largest difference from the reference, or of short passes from a long one; and row_exact."""
    session = CpuSession(bundle)
    logits = session.predict(TOKENS).logits.copy()
    if golden is None:
        session.truncate(0)
        starts = range(0, len(TOKENS), 3)
        expected = np.concatenate([session.predict(TOKENS[at : at + 3]).logits.copy() for at in starts])
    else:
        logits, expected = logits[list(ROWS)], reference(golden)
    exact = session.row_exact
    session.close()
    return float(np.abs(logits - expected).max() / expected.std()), exact


def generate(bundle: Path) -> tuple[bool, int]:
    """Whether tokens with and without drafts are the same, and how many were drafted."""
    with edgespec.load(bundle, "ngram", options=edgespec.LoadOptions(threads=1)) as model:
        made = [
            model.generate(PROMPT, max_new_tokens=NEW_TOKENS, stop_at_eos=False, speculate=speculate)
            for speculate in (False, True)
        ]
    return made[0].tokens == made[1].tokens, made[1].stats.drafted


def round_trip(source: Source, folder: Path) -> Row:
    """Write, export, compare, generate."""
    started = time.perf_counter()
    written = source.write(folder / "source")
    out = written
    if not is_model(written):
        out = folder / "bundle"
        export_model(written, out, options=ExportOptions(weights=source.weights))
    return check(source, out, started)


def check(source: Source, out: Path, started: float) -> Row:
    """Compare and generate."""
    bundle = open_bundle(out)
    far, exact = difference(bundle, source.golden)
    same, drafted = generate(out)
    formats = ", ".join(sorted(bundle.manifest.formats))
    seconds = time.perf_counter() - started
    return Row(source, reference_of(source, bundle), formats, far, exact, drafted, same, seconds)


def reference_of(source: Source, bundle: Bundle) -> str:
    """What the logits are compared with, and what an export with a stored reference measured."""
    if source.golden is not None:
        return "transformers"
    parity = bundle.report().get("parity")
    if parity is None:
        return "itself"
    return f"itself; transformers: KL {parity['kl']:.4f}, top-1 {parity['top1_agreement']:.3f}"


def pulled(names: Sequence[str]) -> Iterator[Row]:
    """Models of the catalogue, exported with the default policy."""
    for name in names:
        started = time.perf_counter()
        bundle = open_model(name, "target")
        source = Source(f"catalogue, {name}", bundle.config.architecture, lambda folder: folder)
        yield check(source, bundle.path, started)


def rows(names: Sequence[str]) -> Iterator[Row]:
    """All of them, each in a folder of its own."""
    for source in sources():
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            yield round_trip(source, Path(folder))
    yield from pulled(names)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--catalogue", nargs="*", default=[], metavar="NAME", help="these models too")
    options = parser.parse_args()
    print("| source | architecture | weights run as | against | difference ", end="")
    print("| same bits for any rows | same 16 tokens | s |\n|---|---|---|---|---|---|---|---|")
    failed = []
    for row in rows(options.catalogue):
        words = ["yes" if value else "no" for value in (row.row_exact, row.same)]
        known = f"{row.source.kind} | {row.source.architecture} | {row.formats} | {row.against}"
        found = f"{row.difference:.1e} | {words[0]} | {words[1]}, {row.drafted} drafted | {row.seconds:.1f}"
        print(f"| {known} | {found} |", flush=True)
        failed += [row.source.kind] if row.failed else []
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
