"""Run what the docs print, as a reader would: the Python blocks of each page, and its commands.

Runs in an environment where edgespec is installed, away from the checkout, with an empty home and an empty
folder for each page; models are pulled. The text below a Python block has to be what the block prints: in it
``...`` stands for anything, such as speeds. Blocks below a comment ``<!-- not run: REASON -->`` are left out,
and so are commands that name something of the reader's: a word in capitals, a file that is not there, a model
on the hub, a device. ``edgespec serve`` is started, answers the page's code, and is ended. Prints each block
with its seconds; exits with 1 if one failed.

Usage, from the repository's root::

    python -m tools.try_docs --python ENVIRONMENT/bin/python README.md docs/quickstart.md

--home keeps downloads for another run. Without pages it takes all that have code.
"""

import doctest
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
from urllib.request import urlopen

from tools.arguments import arguments

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    r"^(<!-- not run: .+ -->\n)?```(\w*)\n(.*?)^```$(?:\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE
)
"""A block: the comment above it, its language, its code, and the text that it prints."""
LONGEST_S = 900
_OF_THE_READER = re.compile(r"\b[A-Z][A-Z_]+\b|hf:|~/|\.gguf|\.jsonl|\./|--device|--alignment|--answers-from")
_SERVER = "http://127.0.0.1:8642/health"
_MARK = "\x1eend of a block"


@dataclass(frozen=True, slots=True)
class Block:
    """A page's Python, all of it as one program, or one command; ``prints`` are the texts of its blocks."""

    title: str
    command: list[str]
    prints: tuple[str, ...] = ()


def blocks_of(page: Path, python: Path) -> Iterator[Block]:
    """What a page prints to be run: its commands in order, then its Python."""
    fences = [fence for fence in FENCE.findall(page.read_text("utf-8")) if not fence[0]]
    for line in (line for _, name, text, _ in fences if name in ("", "sh") for line in text.splitlines()):
        command = re.sub(r"\s{2,}.*|\s+#.*", "", line)
        if command.startswith("edgespec ") and not _OF_THE_READER.search(command):
            yield Block(command, [str(python.with_name("edgespec")), *shlex.split(command)[1:]])
    code = [(text, prints) for _, name, text, prints in fences if name == "python"]
    if code:
        program = "import edgespec\n" + "".join(f"{text}\nprint({_MARK!r})\n" for text, _ in code)
        texts = tuple(prints for _, prints in code)
        yield Block(f"Python of {page.name}", [str(python), "-c", program], texts)


def run(block: Block, folder: Path, home: Path) -> tuple[int, str]:
    """The exit status of a block, and the end of what it printed; 1 for other texts than ``prints``."""
    try:
        ended = subprocess.run(
            block.command,
            cwd=folder,
            env=_environment(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"it ran for more than {LONGEST_S} s"
    if ended.returncode:
        return ended.returncode, f"{ended.stdout}{ended.stderr}".strip()[-500:]
    printed = ended.stdout.split(f"{_MARK}\n")
    problems = "".join(map(differences, block.prints, printed))
    return (1 if problems else 0), problems


def differences(documented: str, printed: str) -> str:
    """How ``printed`` differs from the text of a page, of which ``...`` is anything; empty if it does not."""
    checker, options = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not documented or checker.check_output(documented, printed, options):
        return ""
    return f"the page says:\n{documented}it printed:\n{printed}\n"


def serve(block: Block, folder: Path, home: Path) -> "subprocess.Popen[bytes]":
    """Start a server, and return when it answers or has ended."""
    server = subprocess.Popen(block.command, cwd=folder, env=_environment(home), stdin=subprocess.DEVNULL)
    end = monotonic() + LONGEST_S
    while server.poll() is None and monotonic() < end:
        try:
            urlopen(_SERVER, timeout=5).close()
            break
        except OSError:
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


def _environment(home: Path) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return others | {"EDGESPEC_HOME": str(home), "PYTHONUTF8": "1"}


if __name__ == "__main__":
    main()
