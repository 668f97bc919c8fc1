"""T(n) of a bundle on a GPU, behind texts of several lengths: a table in Markdown.

Usage, from the repository's root: ``python -m tools.cuda_table BUNDLE [--behind 2000 --behind 8000]``, with a
bundle of ``edgespec export SOURCE -o BUNDLE --device cuda``. ``--device cpu`` runs it on the CPU: slow, and
of use to check this script only. Answers with drafts are measured by ``edgespec bench --device cuda``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import EdgespecError
from edgespec_runtimes.cuda import open_cuda
from edgespec_runtimes.discovery import resolve
from edgespec_runtimes.ort import ort
from edgespec_runtimes.session import Session
from tools.arguments import arguments

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
REPEATS = 12
SHORTEST = 64  # tokens


def times_behind(session: Session, behind: int) -> list[float]:
    """Medians of passes over rows, each row's most likely token included, in milliseconds."""
    tokens = [5 + at % 1000 for at in range(behind)]
    session.rewind(0)
    session.reserve(behind + max(ROWS))
    session.prefill(tokens)
    medians = []
    for rows in ROWS:
        times = []
        for _ in range(REPEATS):
            session.rewind(behind)
            began = perf_counter()
            predictions = session.predict(tokens[:rows])
            for row in range(rows):
                predictions.best(row)
            times.append(perf_counter() - began)
        medians.append(median(times) * 1e3)
    return medians


def measure(options: argparse.Namespace) -> None:
    """Print the table, a line as soon as it is measured."""
    session = open_cuda(Bundle(Path(options.bundle)), resolve(options.device))
    print(f"ONNX Runtime {ort.__version__}; same bits for any rows: {session.model.row_exact}\n")
    print(f"| ms, by rows | {' | '.join(map(str, ROWS))} |\n|---|{'---|' * len(ROWS)}")
    for behind in (SHORTEST, *options.behind):
        cells = " | ".join(f"{ms:.2f}" for ms in times_behind(session, behind))
        print(f"| behind {behind:,} tokens | {cells} |", flush=True)
    session.close()


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    options = arguments(__doc__, "bundle", words=words, device="cuda", behind=[int])
    try:
        measure(options)
    except EdgespecError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
