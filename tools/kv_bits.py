"""Compare a KV cache of 8 bits with one of 16: the next tokens' distributions, seconds and bytes.

Run ``python -m tools.kv_bits MODEL TEXT [TEXT ...] --tokens 64,2000``. The texts are read one after the
other. Behind so many of their tokens it compares predictions of the next 64, in KL (nats) and in the share
of equal first guesses.
"""

import argparse
from pathlib import Path
from time import perf_counter

import numpy as np

from edgespec.loading.opening import open_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Session

_COMPARED = 64  # tokens
_TIMED = 5  # passes over one row, of which the least counts


def main() -> None:
    """Compare, and print a line for each length and form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a name, a file or a bundle")
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT")
    parser.add_argument("--tokens", default="64,2000", help="lengths of the text before (64,2000)")
    arguments = parser.parse_args()
    bundle = open_model(arguments.model, "target")
    tokens = bundle.tokenizer.encode("\n".join(path.read_text(encoding="utf-8") for path in arguments.texts))
    in_bytes = Bundle(bundle.path)
    in_bytes.keep_bytes()
    sessions = {"16bit": open_cpu(bundle), "8bit": open_cpu(in_bytes)}
    for length in map(int, arguments.tokens.split(",")):
        if len(tokens) < length + _COMPARED:
            parser.error(f"the texts have {len(tokens):,} tokens; {length + _COMPARED:,} are needed")
        logs = [_predicted(name, session, tokens, length) for name, session in sessions.items()]
        kl = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1).mean()
        same = (logs[0].argmax(axis=1) == logs[1].argmax(axis=1)).mean()
        print(f"{length:,} tokens: KL {kl:.5f}, equal first guesses {same:.3f}", flush=True)


def _predicted(name: str, session: Session, tokens: list[int], length: int) -> np.ndarray:
    """Log probabilities of the compared tokens, float64 ``(64, vocabulary)``."""
    session.rewind(0)
    began = perf_counter()
    session.prefill(tokens[:length])
    read_s = perf_counter() - began
    rows = session.predict(tokens[length : length + _COMPARED]).logits.astype(np.float64)
    times = list[float]()
    for _ in range(_TIMED):
        began = perf_counter()
        session.predict(tokens[:1])
        times.append(perf_counter() - began)
    ms, size = 1e3 * min(times), session.kv_bytes / 1e6
    print(f"{length:,} tokens, {name}: read in {read_s:.1f} s, a row {ms:.1f} ms, {size:.0f} MB", flush=True)
    rows -= rows.max(axis=1, keepdims=True)
    logs: np.ndarray = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return logs


if __name__ == "__main__":
    main()
