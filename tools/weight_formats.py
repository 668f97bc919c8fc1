"""What each weight policy costs and keeps: `python tools/weight_formats.py --gguf FILE`.

Exports the file once per policy into a temporary folder; prints bytes a pass reads, milliseconds of a pass
over 1, 4 and 8 rows behind 256 tokens (least of several, the policies in turn), and KL divergence and
top-1 agreement against the stored reference.
"""

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter

from edgespec_export.export import ExportOptions, ExportReport, export_model
from edgespec_export.plan import POLICIES
from edgespec_models.bundle import Bundle
from edgespec_models.errors import ParityError
from edgespec_runtimes.cpu import CpuSession

ROWS = (1, 4, 8)
PAST = 256


def passes_ms(session: CpuSession, repeats: int) -> dict[int, list[float]]:
    """Milliseconds of passes over each of ROWS behind PAST tokens."""
    tokens = [index * 7919 % session.vocab_size for index in range(PAST + max(ROWS))]
    session.prefill(tokens[:PAST])
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(repeats):
        for rows in ROWS:
            session.truncate(PAST)
            started = perf_counter()
            session.forward(tokens[PAST : PAST + rows])
            times[rows].append((perf_counter() - started) * 1e3)
    return times


def export(gguf: Path, folder: Path, policy: str) -> ExportReport | None:
    """Export with one policy; None if the parity check refuses what comes out."""
    try:
        return export_model(gguf, folder / policy, options=ExportOptions(weights=policy))
    except ParityError as error:
        print(f"{policy}: {error}")
        return None


def main() -> None:
    """Measure every policy and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=3, help="how often each policy is loaded and timed")
    parser.add_argument("--repeats", type=int, default=8, help="passes of each size at every turn")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reports = {policy: report for policy in POLICIES if (report := export(options.gguf, folder, policy))}
        best = {policy: dict.fromkeys(ROWS, float("inf")) for policy in reports}
        for _ in range(options.turns):
            for policy in reports:
                session = CpuSession(Bundle(folder / policy))
                for rows, times in passes_ms(session, options.repeats).items():
                    best[policy][rows] = min(best[policy][rows], *times)
                session.close()
        sizes = {policy: Bundle(folder / policy).manifest.bytes_per_pass for policy in reports}
    print("| policy | MB a pass | ms, n = 1 | n = 4 | n = 8 | top-1 | KL |\n|---|---|---|---|---|---|---|")
    for policy, report in reports.items():
        ms = " | ".join(f"{best[policy][rows]:.1f}" for rows in ROWS)
        parity = report.parity
        kept = "- | -" if parity is None else f"{parity.top1_agreement:.3f} | {parity.kl:.4f}"
        print(f"| {policy} | {sizes[policy] / 1e6:.0f} | {ms} | {kept} |")
    if options.json:
        figures = {p: {"ms": best[p], "bytes": sizes[p], "report": r.to_json()} for p, r in reports.items()}
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
