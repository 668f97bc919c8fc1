"""What rounds with a head take: ``python -m tools.rounds TARGET HEAD``, two bundles.

A round is a pass of the target over one row and some drafted ones, behind 256 tokens, and then as many steps
of the head, or one over a block of as many masks; the first also reads what the round is expected to have
committed. Every row names a number of drafted tokens, the median milliseconds of the pass and of each step,
and how many times plain decoding the round gives with the acceptance that ``--accepted`` states: how often
the first, the first two, ... drafted tokens are accepted. ``--offered``: tokens for a trimmed LM head.
"""

from contextlib import closing
from pathlib import Path
from time import perf_counter

import numpy as np

from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Rows, Session
from tools.arguments import arguments

BEHIND = 256
"""Tokens."""


def round_of(target: Session, head: Session, drafted: int, committed: int) -> list[float]:
    """Seconds of the target's pass, and of each of the steps behind it."""
    began = perf_counter()
    predictions, times = target.predict([5 + row for row in range(1 + drafted)]), list[float]()
    target.keep(0)
    times.append(perf_counter() - began)
    head.rewind(BEHIND)
    assert predictions.hidden is not None
    features, block = predictions.hidden, head.model.config.block
    other = target if head.model.config.reads_cache else None
    committed = committed if other is None else 1
    rows = Rows(head, [9] * committed, 1, features=features[:committed], target=other)
    if block is not None:
        tokens = [9] * (committed + 1) + [block.mask] * drafted
        rows = Rows(head, tokens, drafted, features[:committed], injected=committed)
    for _ in range(drafted if block is None else min(drafted, 1)):
        began = perf_counter()
        (said,) = head.model.predict_together([rows])
        said.best(0)
        rows = Rows(head, [9], 1, states=said.hidden, target=other)
        times.append(perf_counter() - began)
    return times


def main() -> None:
    """Read the command line; print the table."""
    options = arguments(__doc__, "target", "head", accepted="0.763,0.623,0.459,0.396", rounds=12, offered=0)
    accepted = [float(share) for share in options.accepted.split(",")]
    tokens = [1 + sum(accepted[:drafted]) for drafted in range(1 + len(accepted))]
    bundle = Bundle(Path(options.head))
    target = open_cpu(Bundle(Path(options.target)), read_layers=bundle.config.feature_layers)
    with closing(target), closing(open_cpu(bundle)) as head:
        head.model.offer(range(options.offered))
        for session in (target, head):
            session.reserve(2 * BEHIND)
            session.prefill([7] * BEHIND)
        measured = [
            [
                round_of(target, head, drafted, min(round(each), 1 + drafted))
                for drafted, each in enumerate(tokens)
            ]
            for _ in range(options.rounds)
        ]
    for drafted, expected in enumerate(tokens):
        median = 1000 * np.median([times[drafted] for times in measured], axis=0)
        if drafted == 0:
            plain = median.sum()
        steps = " ".join(f"{step:.2f}" for step in median[1:])
        print(f"{drafted}: {median[0]:.1f} {steps}: {expected * plain / median.sum():.2f}")


if __name__ == "__main__":
    main()
