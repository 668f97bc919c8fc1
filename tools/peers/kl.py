"""How near another exporter's graph is to the file: `python -m tools.peers.kl --graph FILE --gguf FILE`.

For decoders with the Hugging Face names of inputs and outputs (mobius, onnxruntime-genai's builder), against
the stored reference of the GGUF file; the same figures as an export's own parity check.
"""

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from edgespec_export.parity import check_parity, find_golden, session_logits
from edgespec_runtimes.ort import ort


class OneShot:
    """Just enough of a session for the parity check: every pass runs the whole text again."""

    def __init__(self, graph: Path) -> None:
        self._session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
        self._tokens: list[int] = []

    def prefill(self, tokens: list[int]) -> None:
        """Begin a text."""
        self._tokens = list(tokens)

    def forward(self, tokens: list[int]) -> Any:
        """Append tokens; their logits."""
        self._tokens += tokens
        total = len(self._tokens)
        feeds: dict[str, Any] = {
            "input_ids": np.array([self._tokens], np.int64),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(total, dtype=np.int64)[None],
        }
        inputs = {value.name: value for value in self._session.get_inputs()}
        feeds = {name: array for name, array in feeds.items() if name in inputs}
        for name, value in inputs.items():
            if name.startswith("past_key_values"):
                feeds[name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
        return self._session.run(["logits"], feeds)[0][0, total - len(tokens) :]


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    options = parser.parse_args()
    with options.gguf.open("rb") as file:
        golden = find_golden(hashlib.file_digest(file, "sha256").hexdigest())
    if golden is None:
        parser.error(f"no reference is stored for {options.gguf}")
    session: Any = OneShot(options.graph)
    report = check_parity(session_logits(session, golden), golden)
    print(f"top-1 {report.top1_agreement:.3f}, KL {report.kl:.4f}, {report.positions} positions")


if __name__ == "__main__":
    main()
