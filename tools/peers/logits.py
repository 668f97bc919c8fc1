"""How near the logits are to llama.cpp's, of the same file: top-1 and KL over the whole vocabulary.

``llama-server`` says how probable it finds every token behind each beginning of a random text, which it
reads anew each time; edgespec reads the text once. Both round activations, each in its own way.

Usage, from the repository's root: ``python -m tools.peers.logits --gguf FILE --bundle DIR
--server peers/llama.cpp/bin/llama-server [--tokens 32] [--seed 0]``
"""

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.cpu import open_cpu
from tools.arguments import arguments

F64 = npt.NDArray[np.float64]


@contextmanager
def running(server: Path, gguf: Path) -> Iterator[str]:
    """The address of a server that has loaded the file."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    model = ["-m", str(gguf), "-c", "1024", "-t", "2", "--parallel", "1", "--no-warmup"]
    command = [str(server), *model, "--host", "127.0.0.1", "--port", address.partition(":")[2]]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"http://{address}/health").close()
                break
            time.sleep(0.2)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def of_server(address: str, tokens: list[int], vocabulary: int, written: int) -> F64:
    """The log probability of every token behind ``tokens``; ``written`` is one that is text by itself."""
    asked = {
        "prompt": tokens,
        "n_predict": 1,
        "n_probs": vocabulary,
        "cache_prompt": False,
        "logit_bias": [[written, 1e4]],
    }
    body = json.dumps(asked).encode()
    request = urllib.request.Request(f"{address}/completion", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        answer: Any = json.load(reply)
    row = np.full(vocabulary, -np.inf)
    for each in answer["completion_probabilities"][0]["top_logprobs"]:
        row[each["id"]] = each["logprob"]
    return row


def main() -> None:
    """Print a line."""
    options = arguments(__doc__, gguf=Path, bundle=Path, server=Path, tokens=32, seed=0)
    bundle = Bundle(options.bundle)
    session, written = open_cpu(bundle), bundle.tokenizer.encode("a")[0]
    vocabulary = session.model.vocab_size
    tokens = np.random.default_rng(options.seed).integers(0, vocabulary, options.tokens).tolist()
    logits = session.predict(tokens).logits.astype(np.float64)
    own = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    same, divergence = list[bool](), list[float]()
    with running(options.server, options.gguf) as address:
        for count in range(1, len(tokens) + 1):
            theirs = of_server(address, tokens[:count], vocabulary, written)
            chances = np.exp(theirs)
            same.append(int(theirs.argmax()) == int(own[count - 1].argmax()))
            divergence.append(float(np.sum(chances * (np.where(chances > 0, theirs, 0.0) - own[count - 1]))))
    print(
        f"{options.gguf.name}: {len(tokens)} tokens, the same most likely token behind {sum(same)}, KL "
        f"{np.mean(divergence):.5f} on average, {max(divergence):.5f} at most"
    )


if __name__ == "__main__":
    main()
