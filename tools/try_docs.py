"""Run what the docs print, as a reader would: the Python blocks of each page, and its commands.

Runs in an environment where edgespec is installed, away from the checkout, with an empty home and an empty
folder for each page; models are pulled. Blocks below a comment ``<!-- not run: REASON -->`` are left out, and
so are commands that name something of the reader's: a word in capitals, a file that is not there, a model on
the hub, a device. ``edgespec serve`` is started, answers the page's code, and is ended. Prints each block
with its seconds; exits with 1 if one failed.

Usage, from the repository's root::

    python -m tools.try_docs --python ENVIRONMENT/bin/python README.md docs/quickstart.md

--home keeps downloads for another run. Without pages it takes all that have code.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from urllib.error import URLError
from urllib.request import urlopen

from tools.arguments import arguments

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^(<!-- not run: .+ -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LONGEST_S = 900
_OF_THE_READER = re.compile(r"\b[A-Z][A-Z_]+\b|hf:|~/|\.gguf|\.jsonl|\./|--device|--alignment|--answers-from")
_SERVER = "http://127.0.0.1:8642/health"


@dataclass(frozen=True, slots=True)
class Block:
    """A page's Python, all of it as one program, or one command."""

    title: str
    command: list[str]


def blocks_of(page: Path, python: Path) -> Iterator[Block]:
    """What a page prints to be run: its commands in order, then its Python."""
    fences = [(name, text) for marked, name, text in FENCE.findall(page.read_text("utf-8")) if not marked]
    for line in (line for name, text in fences if name in ("", "sh") for line in text.splitlines()):
        command = re.sub(r"\s{2,}.*|\s+#.*", "", line)
        if command.startswith("edgespec ") and not _OF_THE_READER.search(command):
            yield Block(command, [str(python.with_name("edgespec")), *shlex.split(command)[1:]])
    code = "\n".join(text for name, text in fences if name == "python")
    if code:
        yield Block(f"Python of {page.name}", [str(python), "-c", f"import edgespec\n{code}"])


def run(block: Block, folder: Path, home: Path) -> tuple[int, str]:
    """The exit status of a block, and the end of what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"EDGESPEC_HOME": str(home)}
    try:
        ended = subprocess.run(
            block.command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"it ran for more than {LONGEST_S} s"
    return ended.returncode, ended.stdout.strip()[-500:]


def serve(block: Block, folder: Path, home: Path) -> "subprocess.Popen[bytes]":
    """Start a server, and return when it answers or has ended."""
    environment = os.environ | {"EDGESPEC_HOME": str(home)}
    server = subprocess.Popen(block.command, cwd=folder, env=environment, stdin=subprocess.DEVNULL)
    end = monotonic() + LONGEST_S
    while server.poll() is None and monotonic() < end:
        try:
            urlopen(_SERVER, timeout=5).close()
            break
        except (URLError, OSError):
            sleep(0.5)
    return server


def try_page(page: Path, python: Path, home: Path) -> bool:
    """Run a page's blocks; whether all succeeded."""
    passed, servers = True, list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            for block in blocks_of(page, python):
                started, output = monotonic(), ""
                if block.command[1] == "serve":
                    if any(server.poll() is None for server in servers):
                        continue  # one server answers the page's clients
                    servers.append(serve(block, folder, home))
                    status = servers[-1].poll() or 0
                else:
                    status, output = run(block, folder, home)
                passed &= status == 0
                print(f"{monotonic() - started:7.1f} s  {status:3}  {block.title}", flush=True)
                if status:
                    print(output, flush=True)
        finally:
            for server in servers:
                server.terminate()
                server.wait(30)
    return passed


def main() -> None:
    """Try the pages."""
    args = arguments(__doc__, "pages*", python=Path(sys.executable), home=(Path,))
    pages = [*map(Path, args.pages)] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    with tempfile.TemporaryDirectory() as empty:
        home = args.home or Path(empty)
        results = [try_page(page.resolve(), args.python.absolute(), home) for page in pages]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
