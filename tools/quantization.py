"""What each way to store the weights costs and keeps: `python tools/quantization.py --gguf FILE [SPEC ...]`.

A SPEC is a policy (`exact`, `close`, ...) or a quantization as `edgespec inspect` names it: `4/32/fit`,
`4/64/k-quant/mixed=none/minimums=integer`; either with `+kv8` for an int8 KV cache, a policy with `+whole`
for the whole LM head where it has a coarse one. Each is exported into a temporary folder (TMPDIR chooses
where); the table has, by row: megabytes and bytes per weight of a pass;
milliseconds of a pass over 1, 2, 4 and 8 rows behind 256 tokens (least of several, the bundles in turn);
top-1 agreement and KL divergence (nats a token, whole vocabulary) against the file's own weights, which the
`exact` export stands for; perplexity; and KL against the stored reference logits, which another
implementation computed, where there are some. Texts: the stored reference's and `--text FILE`.

`--alternate PASSES` only times passes over one row, of all SPECs in turn, pass by pass, so that what the
machine does meanwhile meets all of them. What a coarse LM head saves:
`python tools/quantization.py --gguf FILE --alternate 200 close+whole close`.
"""

import argparse
import hashlib
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import numpy.typing as npt

from edgespec_export.export import ExportOptions, export_model
from edgespec_export.parity import find_golden
from edgespec_export.plan import POLICIES
from edgespec_export.quantization import Quantization
from edgespec_models.bundle import Bundle
from edgespec_models.errors import ParityError, RequestError
from edgespec_runtimes.cost import measure_cost
from edgespec_runtimes.cpu import CpuSession

ROWS = (1, 2, 4, 8)
PAST = 256
WARM_UP = 3
WINDOW = 256
CHUNK = 16
REFERENCE = "exact"
DEFAULT = (*POLICIES, "4/32/rtn", "4/32/fit", "4/32/k-quant", "4/32/hqq", "4/64/k-quant", "8/64/fit")

F32 = npt.NDArray[np.float32]


@dataclass
class Row:
    """One way to store the weights; KL in nats a token, times in milliseconds."""

    spec: str
    bytes_per_pass: int
    bytes_per_weight: float
    ms: dict[int, float]
    top1: float
    kl: float
    perplexity: float
    stored_kl: float | None


def parse(spec: str) -> ExportOptions:
    """What a SPEC asks for; RequestError where it is none."""
    weights, *extras = spec.split("+")
    policy = POLICIES.get(weights)
    if not set(extras) <= {"kv8", "whole"} or ("whole" in extras and not (policy and policy.refined)):
        refined = ", ".join(name for name, known in POLICIES.items() if known.refined)
        raise RequestError(f"{spec!r}: allowed are +kv8, and +whole behind {refined}")
    options = ExportOptions(kv="int8" if "kv8" in extras else "float32")
    if policy is None:
        return replace(options, quantization=Quantization.parse(weights))
    if "whole" in extras:
        return replace(options, quantization=replace(policy, name=f"{weights}+whole", refined=False))
    return replace(options, weights=weights)


def export(gguf: Path, out: Path, spec: str) -> str | None:
    """Export as ``spec`` says; returns why not where the parity check refuses what comes out."""
    options = parse(spec)
    try:
        export_model(gguf, out, options=options)
    except ParityError as error:
        return str(error)
    return None


def find_texts(gguf: Path, bundle: Bundle, extra: Path | None) -> list[tuple[int, ...]]:
    """Token ids: the stored reference's texts, and ``extra`` in windows."""
    with gguf.open("rb") as file:
        golden = find_golden(hashlib.file_digest(file, "sha256").hexdigest())
    texts = [] if golden is None else list(golden.texts)
    if extra is not None:
        tokens = bundle.tokenizer.encode(extra.read_text(encoding="utf-8"))
        texts += [tuple(tokens[at : at + WINDOW]) for at in range(0, len(tokens), WINDOW)]
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise SystemExit(f"no reference is stored for {gguf.name}; give --text FILE")
    return texts


def log_laws(session: CpuSession, texts: Sequence[Sequence[int]]) -> Iterator[F32]:
    """Log-probabilities of the next token, float32 ``(rows, vocab)``, a few rows at a time."""
    for tokens in texts:
        session.prefill([])
        for at in range(0, len(tokens), CHUNK):
            logits = session.forward(tokens[at : at + CHUNK])
            shifted = logits - logits.max(axis=-1, keepdims=True)
            yield shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def store_reference(bundle: Bundle, texts: Sequence[Sequence[int]], path: Path) -> npt.NDArray[np.float32]:
    """The reference's log-probabilities of all texts, in a file rather than in memory."""
    session = CpuSession(bundle)
    shape = sum(map(len, texts)), session.vocab_size
    stored: npt.NDArray[np.float32] = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    at = 0
    for part in log_laws(session, texts):
        stored[at : at + len(part)] = part
        at += len(part)
    session.close()
    return stored


def compare(
    bundle: Bundle, texts: Sequence[Sequence[int]], reference: npt.NDArray[np.float32]
) -> tuple[float, float, float]:
    """Top-1 agreement, KL divergence from the reference and perplexity, over all texts."""
    nexts = np.concatenate([[*text[1:], -1] for text in texts])  # a text's last token has no next
    session = CpuSession(bundle)
    same = kl = surprise = 0.0
    at = 0
    for got in log_laws(session, texts):
        wanted, following = reference[at : at + len(got)], nexts[at : at + len(got)]
        same += float((got.argmax(axis=-1) == wanted.argmax(axis=-1)).sum())
        kl += float((np.exp(wanted) * (wanted - got)).sum(dtype=np.float64))
        known = np.flatnonzero(following >= 0)
        surprise -= float(got[known, following[known]].sum(dtype=np.float64))
        at += len(got)
    session.close()
    return same / at, kl / at, math.exp(surprise / (at - len(texts)))


def time_passes(folder: Path, specs: Sequence[str], turns: int, repeats: int) -> dict[str, dict[int, float]]:
    """Milliseconds of a pass over each of ROWS, by spec; the bundles in turn."""
    best = {spec: dict.fromkeys(ROWS, math.inf) for spec in specs}
    for _ in range(turns):
        for spec in specs:
            session = CpuSession(Bundle(place(folder, spec)))
            curve = measure_cost(session, ROWS, repeats, past=PAST)
            session.close()
            for rows, seconds in curve.seconds_by_rows.items():
                best[spec][rows] = min(best[spec][rows], seconds * 1e3)
    return best


def alternate(options: argparse.Namespace, folder: Path) -> None:
    """Export every spec, time passes over one row in turn, and print medians and ratios to the first."""
    specs = list(dict.fromkeys(options.specs))
    for spec in specs:
        if reason := export(options.gguf, place(folder, spec), spec):
            raise SystemExit(f"{spec}: {reason}")
    bundles = [Bundle(place(folder, spec)) for spec in specs]
    times = times_in_turn([CpuSession(bundle) for bundle in bundles], options.alternate)
    print(
        "| weights | MB a pass | ms, median | least | to the first, median of turns |\n|---|---|---|---|---|"
    )
    for spec, bundle, mine in zip(specs, bundles, times, strict=True):
        ratio = median(own / first for own, first in zip(mine, times[0], strict=True))
        size = bundle.manifest.bytes_per_pass / 1e6
        print(f"| {spec} | {size:.0f} | {median(mine) * 1e3:.2f} | {min(mine) * 1e3:.2f} | {ratio:.3f} |")


def times_in_turn(sessions: Sequence[CpuSession], passes: int) -> list[list[float]]:
    """Seconds of passes over one row behind PAST tokens, by session; closes the sessions."""
    times: list[list[float]] = [[] for _ in sessions]
    for session in sessions:
        session.prefill([token % session.vocab_size for token in range(PAST)])
    for turn in range(WARM_UP + passes):
        for session, mine in zip(sessions, times, strict=True):
            started = perf_counter()
            session.forward([turn % session.vocab_size])
            if turn >= WARM_UP:
                mine.append(perf_counter() - started)
            session.truncate(PAST)
    for session in sessions:
        session.close()
    return times


def place(folder: Path, spec: str) -> Path:
    """The bundle's directory."""
    return folder / spec.replace("/", "_")


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Export, compare and time every spec; those the parity check refuses are named and left out."""
    refused = {}
    for spec in dict.fromkeys((REFERENCE, *options.specs)):
        if reason := export(options.gguf, place(folder, spec), spec):
            refused[spec] = reason
            print(f"{spec}: {reason}")
    if REFERENCE in refused:
        raise SystemExit("the file's own weights were refused; there is nothing to compare with")
    reference = Bundle(place(folder, REFERENCE))
    texts = find_texts(options.gguf, reference, options.text)
    stored = store_reference(reference, texts, folder / "reference.npy")
    specs = [spec for spec in dict.fromkeys(options.specs) if spec not in refused]
    times = time_passes(folder, specs, options.turns, options.repeats)
    rows = []
    for spec in specs:
        bundle = Bundle(place(folder, spec))
        size, parity = bundle.manifest.bytes_per_pass, bundle.report()["parity"]
        weight = size / bundle.manifest.parameters_per_pass
        kl = None if parity is None else parity["kl"]
        rows.append(Row(spec, size, weight, times[spec], *compare(bundle, texts, stored), kl))
    return rows


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("specs", nargs="*", metavar="SPEC", default=list(DEFAULT))
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="compare on this text too")
    parser.add_argument("--turns", type=int, default=3, help="how often each bundle is loaded and timed")
    parser.add_argument("--repeats", type=int, default=8, help="passes of each size at every turn")
    parser.add_argument(
        "--alternate", type=int, metavar="PASSES", help="only time passes over one row, in turn"
    )
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    for spec in options.specs:
        parse(spec)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        if options.alternate:
            alternate(options, Path(name))
            return
        rows = measure(options, Path(name))
    print("| weights | MB a pass | bytes a weight | ms, n = 1 | n = 2 | n = 4 | n = 8 ", end="")
    print("| top-1 | KL | perplexity | stored KL |\n|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        ms = " | ".join(f"{row.ms[n]:.1f}" for n in ROWS)
        kept = f"{row.top1:.3f} | {row.kl:.4f} | {row.perplexity:.2f}"
        stored = "-" if row.stored_kl is None else f"{row.stored_kl:.4f}"
        size = f"{row.bytes_per_pass / 1e6:.0f} | {row.bytes_per_weight:.3f}"
        print(f"| {row.spec} | {size} | {ms} | {kept} | {stored} |")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
