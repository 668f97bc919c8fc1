"""What edgespec weighs in an app: ``python -m tools.neighbourhood [--wheel FILE]``.

Installs it into a fresh environment, without extras, and prints what that takes of the disk, how long
``import edgespec`` and ``edgespec --help`` take there, and what the SDK and the server add to each token. The
last two are measured over a made-up model with a vocabulary of 404 tokens, whose passes cost next to nothing,
against a loop that does nothing but its passes; the client of the server is in the same process.
"""

import argparse
import json
import os
import subprocess
import tempfile
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any
from urllib.request import Request, urlopen

from tests.kit.models import toy_model, toy_session
from tests.kit.serving import serving

ROOT = Path(__file__).resolve().parents[1]
JSON = {"Content-Type": "application/json"}
RUNS = 11
TOKENS = 2000
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # not this checkout
SIZES = """
import importlib.metadata, json
print(json.dumps({
    dist.name: sum(file.locate().stat().st_size for file in dist.files or () if file.locate().is_file())
    for dist in importlib.metadata.distributions()
}))
"""


def seconds(command: Sequence[str]) -> float:
    """How long a command takes, the median of several."""

    def once() -> float:
        started = perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=OUTSIDE)
        return perf_counter() - started

    return median(once() for _ in range(RUNS))


def installed(folder: Path, wheel: str) -> Path:
    """The programs of a new environment with edgespec in it."""
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", wheel], check=True, env=OUTSIDE)
    return programs


def decode() -> None:
    """The plain loop, with nothing around it."""
    session, tokens = toy_session(), [1]
    for _ in range(TOKENS):
        tokens.append(int(session.forward(tokens[-1:])[-1].argmax()))


def microseconds(ask: Callable[[], object]) -> float:
    """Processor time of a token, in all threads, the median of several answers."""

    def once() -> float:
        started = process_time()
        ask()
        return (process_time() - started) / TOKENS * 1e6

    return median(once() for _ in range(RUNS))


def overheads() -> dict[str, float]:
    """Microseconds a token beyond the plain loop, by what answers."""
    options: Any = {"max_new_tokens": TOKENS, "speculate": False}
    body = {"model": "toy", "prompt": "Hello", "stream": True, "max_tokens": TOKENS, "speculate": False}
    loop = microseconds(decode)
    with toy_model() as model, serving(model) as url:

        def serve() -> None:
            request = Request(f"{url}/v1/completions", json.dumps(body).encode(), JSON)
            with urlopen(request) as answer:
                events = answer.read().count(b"data: {")
            assert events >= TOKENS, f"{events} events"

        return {
            "generate": microseconds(lambda: model.generate("Hello", **options)) - loop,
            "a stream": microseconds(lambda: list(model.stream("Hello", **options))) - loop,
            "the server's stream": microseconds(serve) - loop,
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", default=str(ROOT), help="what to install; else this checkout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        programs = installed(Path(folder) / "env", options.wheel)
        python = str(programs / "python")
        sizes: dict[str, int] = json.loads(subprocess.check_output([python, "-c", SIZES], env=OUTSIDE))
        bare, imported = (seconds([python, "-c", code]) for code in ("pass", "import edgespec"))
        shown = seconds([str(programs / "edgespec"), "--help"])
    sizes = {name: size for name, size in sizes.items() if name not in {"pip", "setuptools"}}
    print(f"base install: {sum(sizes.values()) / 1e6:.1f} MB in {len(sizes)} packages")
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:10]:
        print(f"  {name:<20} {size / 1e6:6.1f} MB")
    print(f"import edgespec: {(imported - bare) * 1e3:.1f} ms (Python itself: {bare * 1e3:.1f} ms)")
    print(f"edgespec --help: {shown * 1e3:.0f} ms")
    print("processor time beyond the passes, microseconds a token:")
    for name, cost in overheads().items():
        print(f"  {name:<20} {cost:6.0f}")


if __name__ == "__main__":
    main()
