"""Run what the docs print, as a reader would: the Python blocks of each page, and its commands.

Runs in an environment where edgespec is installed, away from the checkout, with an empty home and an empty
folder for each page; models are pulled. The text below a Python block has to be what the block prints: in it
``...`` stands for anything, such as speeds. Blocks below a comment ``<!-- not run: REASON -->`` are left out,
and so are commands that name something of the reader's: a word in capitals, a file that is not there, a model
on the hub, a device. ``edgespec serve`` is started, answers the page's code, and is ended. Prints each block
with its seconds; exits with 1 if one failed.

Usage, from the repository's root::

    python -m tools.try_docs --python ENVIRONMENT/bin/python README.md docs/quickstart.md

--home keeps downloads for another run. Without pages it takes all that have code. --update writes what blocks
print into the pages, in place of texts that are missing or wrong: a few lines, without fractions.
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
LINES, WIDTH = 4, 100
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
    """A page's Python, all of it as one program, or one command; ``texts`` are what blocks should print."""

    title: str
    command: list[str]
    texts: tuple[str, ...] = ()


def blocks_of(page: Path, python: Path) -> Iterator[Block]:
    """What a page prints to be run: its commands in order, then its Python."""
    fences = [fence for fence in FENCE.findall(page.read_text("utf-8")) if not fence[0]]
    for line in (line for _, name, text, _ in fences if name in ("", "sh") for line in text.splitlines()):
        command = re.sub(r"\s{2,}.*|\s+#.*", "", line)
        if command.startswith("edgespec ") and not _OF_THE_READER.search(command):
            yield Block(command, [str(python.with_name("edgespec")), *shlex.split(command)[1:]])
    code = [(lines, text) for _, name, lines, text in fences if name == "python"]
    if code:
        program = "import edgespec\n" + "".join(f"{lines}\nprint({_MARK!r})\n" for lines, _ in code)
        texts = tuple(text for _, text in code)
        yield Block(f"Python of {page.name}", [str(python), "-c", program], texts)


def run(block: Block, folder: Path, home: Path) -> tuple[int, str]:
    """The exit status of a block, and what it printed."""
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
    return ended.returncode, ended.stdout + (ended.stderr[-500:] if ended.returncode else "")


def differences(documented: str, printed: str) -> str:
    """How ``printed`` differs from the text of a page, of which ``...`` is anything; empty if it does not."""
    checker, options = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not documented or checker.check_output(documented, printed, options):
        return ""
    return f"the page says:\n{documented}it printed:\n{printed}\n"


def updated(page: str, printed: list[str]) -> str:
    """A page in which the texts below its Python blocks are what these ``printed``."""
    rest = iter(printed)

    def shown(match: re.Match[str]) -> str:
        if match[1] or match[2] != "python":
            return match[0]
        now = next(rest, "")
        if not now.strip() or (match[4] and not differences(match[4], now)):
            return match[0]
        text = re.sub(r"\d+\.\d+(e-\d+)?", "...", now).strip("\n").rstrip()
        lines = [
            line if len(line) <= WIDTH else f"{line[:WIDTH].rpartition(' ')[0]} ..."
            for line in text.partition("```")[0].splitlines()[:LINES]
        ]
        end = [] if text == "\n".join(lines) else ["..."]
        return "\n".join([match[0].partition("\n```text\n")[0], "```text", *lines, *end, "```"])

    return FENCE.sub(shown, page)


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


def try_page(page: Path, python: Path, home: Path, *, update: bool = False) -> bool:
    """Run a page's blocks; whether all succeeded, and printed what the page says or is told to say."""
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
                    printed = output.split(f"{_MARK}\n")
                    if block.texts and status == 0 and update:
                        page.write_text(updated(page.read_text("utf-8"), printed), "utf-8")
                    elif block.texts and status == 0:
                        output = "".join(map(differences, block.texts, printed))
                        status = 1 if output else 0
                passed &= status == 0
                print(f"{monotonic() - started:7.1f} s  {status:3}  {block.title}", flush=True)
                if status:
                    print(output[-2000:].replace(_MARK, ""), flush=True)
        finally:
            for server in servers:
                server.terminate()
                server.wait(30)
    return passed


def main() -> None:
    """Try the pages."""
    args = arguments(__doc__, "pages*", python=Path(sys.executable), home=(Path,), update=False)
    pages = [*map(Path, args.pages)] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    with tempfile.TemporaryDirectory() as empty:
        home = args.home or Path(empty)
        results = [try_page(at.resolve(), args.python.absolute(), home, update=args.update) for at in pages]
    sys.exit(0 if all(results) else 1)


def _environment(home: Path) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return others | {"EDGESPEC_HOME": str(home), "PYTHONUTF8": "1"}


if __name__ == "__main__":
    main()
