"""Compare a running bundle of fixed shapes with the CPU's run of the same graphs, for other tools."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from edgespec_models.bundle import Bundle
from edgespec_runtimes.devices import CPU
from edgespec_runtimes.discovery import Device
from edgespec_runtimes.session import Logits, Session
from edgespec_runtimes.static_io import StaticIO
from edgespec_runtimes.static_session import StaticSession

__all__ = ["Comparison", "check", "compare", "timed_session"]

TEXT = (
    "The lighthouse stood at the end of a long gravel path. Every evening the keeper climbed 214 steps, "
    "trimmed the wick and wrote the weather into a grey book: wind from the north, 12 knots, fog by nine."
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Over some rows: share with the same most likely token, largest difference over the largest logit."""

    rows: int
    top1_agreement: float
    largest_difference: float


def compare(session: Session, reference: Session, tokens: Sequence[int]) -> Comparison:
    """Run ``tokens`` through both in passes of eight, the third of them after a roll-back."""
    found, expected = list[Logits](), list[Logits]()
    for each, rows in ((session, found), (reference, expected)):
        each.prefill([])
        for start in range(0, len(tokens), 8):
            if start == 16:
                each.predict(tokens[:4])
                each.truncate(start)
            rows.append(each.predict(tokens[start : start + 8]).logits.copy())
    ours, theirs = np.concatenate(found), np.concatenate(expected)
    return Comparison(
        len(ours),
        float((ours.argmax(1) == theirs.argmax(1)).mean()),
        float(np.abs(ours - theirs).max() / np.abs(theirs).max()),
    )


def timed_session(bundle: Bundle, device: Device) -> StaticSession:
    """Open a session, and print how long that and its passes take."""
    started = perf_counter()
    session = StaticSession(bundle, device)
    print(f"{device.name} ({device.state}): opened and tested in {perf_counter() - started:.1f} s")
    if session.compiled:
        print(f"  {session.compiled}")
    assert isinstance(session._io, StaticIO)
    for rows, seconds in session._io.seconds.items():
        print(f"  a pass over {rows:2} rows: {seconds * 1e3:,.0f} ms")
    print(f"  same bits for any rows: {'yes' if session.row_exact else 'no'}")
    return session


def check(bundle: Bundle, device: Device, rows: int, new_tokens: int) -> None:
    """Print how near ``device`` comes to the CPU, and a few tokens that it writes."""
    session = timed_session(bundle, device)
    reference = timed_session(bundle, Device(CPU, "ready"))
    tokens = bundle.tokenizer.encode(TEXT)[:rows]
    result = compare(session, reference, tokens)
    print(
        f"against the CPU's run of the same graphs, {result.rows} rows: {result.top1_agreement:.1%} same "
        f"most likely token, largest difference {result.largest_difference:.2%} of the largest logit"
    )
    written = list(tokens)
    for _ in range(new_tokens):
        written.append(session.predict_next(written).best(0))
    print(f"{new_tokens} tokens it writes: {bundle.tokenizer.decode(written[len(tokens) :])!r}")
    session.close()
    reference.close()
