"""Clients as the package indexes have them, each at a question that only a tool can answer.

    python -m tools.try_clients [--only NAME]... [--model NAME] [--folder FOLDER]

Starts ``edgespec serve`` on a free port, installs each client once, into an environment of its own in the
folder, and runs its program of ``tools/client_programs.py`` there, with a home of its own. Prints a table.
Those for Node need npm. Continue and Copilot are no packages; programs ask and read streams as they do.

Exit code 1 if a client fails. ``answered wrong`` is the model's fault.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from tools.arguments import arguments

PROGRAMS = Path(__file__).resolve().parent / "client_programs.py"
STARTS_S, INSTALL_S, MINUTES = 300, 900, 20
NODE = "node@22"  # which the agents of npm want


@dataclass(frozen=True)
class Client:
    """A client: its program, and its packages, which are npm's where the first is Node."""

    name: str
    program: str
    packages: tuple[str, ...] = ()


LLAMA_INDEX = ("llama-index-core", "llama-index-llms-openai-like")
CLIENTS = (
    Client("openai", "openai_chat", ("openai",)),
    Client("openai, Responses", "openai_responses", ("openai",)),
    Client("anthropic", "anthropic_messages", ("anthropic",)),
    Client("ollama", "ollama_chat", ("ollama",)),
    Client("llama-index, an agent", "llama_index_agent", LLAMA_INDEX),
    Client("llama-index, a structure", "llama_index_structure", LLAMA_INDEX),
    Client("LangGraph", "langgraph", ("langgraph", "langchain-openai")),
    Client("haystack", "haystack", ("haystack-ai",)),
    Client("smolagents", "smolagents", ("smolagents[openai]",)),
    Client("dspy", "dspy", ("dspy",)),
    Client("openai-agents with MCP", "openai_agents", ("openai-agents",)),
    Client("Continue", "continue_editor"),
    Client("Copilot", "copilot"),
    Client("qwen-code", "qwen", (NODE, "@qwen-code/qwen-code")),
    Client("pi", "pi", (NODE, "@earendil-works/pi-coding-agent")),
)


@contextmanager
def serving(model: str, log: Path) -> Iterator[str]:
    """A server of its own on a free port; yields its address."""
    command = (sys.executable, "-m", "edgespec", "serve", model, "--port", "0", "--timeout", "3600")
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        try:
            ends = monotonic() + STARTS_S
            while not (address := re.search(r"a page at (http://127\.0\.0\.1:\d+)", log.read_text())):
                with suppress(subprocess.TimeoutExpired):
                    server.wait(1)
                if server.returncode is not None or monotonic() > ends:
                    raise SystemExit(f"the server did not start; see {log}: {log.read_text()[-500:]}")
            yield address[1]
        finally:
            server.terminate()


def installed(client: Client, folder: Path) -> tuple[Path, str]:
    """The folder of the client's commands, and its version. OSError if it cannot be had."""
    if not client.packages:
        return Path(sys.executable).parent, "by its requests"
    home, is_node = folder / re.sub(r"\W+", "-", " ".join(client.packages)), client.packages[0] == NODE
    scripts, done = home / "node_modules" / ".bin" if is_node else home / "venv" / "bin", home / "installed"
    main = client.packages[-1] if is_node else client.packages[0].partition("[")[0]
    tool, npm = str(scripts / "pip"), ("npm", "--prefix", str(home), "--no-audit", "--no-fund")
    if not done.exists():
        home.mkdir(parents=True, exist_ok=True)
        if not is_node:
            venv.create(home / "venv", with_pip=True)
        _run(*((*npm, "install") if is_node else (tool, "install", "--quiet")), *client.packages)
        done.touch()
    version = re.search(
        r"(?:@|Version: )(\d\S+)", _run(*((*npm, "list") if is_node else (tool, "show")), main)
    )
    return scripts, version[1] if version else "?"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command[:3])} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def outcome(client: Client, scripts: Path, url: str, model: str, work: Path) -> str:
    """Have a client ask; what came of it."""
    python = scripts / "python" if (scripts / "python").exists() else Path(sys.executable)
    pieces = str(random.randrange(1000, 9999))
    environment = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    environment |= {"TASK_URL": url, "TASK_MODEL": model, "TASK_PIECES": pieces, "HOME": str(work)}
    environment |= {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    command = (str(python), str(PROGRAMS), client.program)
    with (work / "out").open("w+") as out, (work / "errors").open("w+") as errors:
        process = subprocess.Popen(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(MINUTES * 60)
        except subprocess.TimeoutExpired:
            return f"failed: not done after {MINUTES} minutes"
        finally:
            with suppress(ProcessLookupError):  # also what it left running, and after Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            return f"failed: {' '.join(errors.read().split())[-300:]}"
        report = json.loads(out.read().splitlines()[-1])
    calls, answer = report["calls"], report["answer"].replace(",", "")
    if not any("teapot" in call.lower() for call in calls):
        return f"answered wrong: the tool was called for {calls}, {answer[:200]!r}"
    return "right" if pieces in answer else f"answered wrong: {answer[-200:]!r}"


def main() -> None:
    """Try all clients, print the table."""
    options = arguments(__doc__, only=[str], model="qwen2.5-coder-1.5b-instruct", folder=(Path,))
    if unknown := {*options.only} - {client.name for client in CLIENTS}:
        raise SystemExit(f"{unknown} are no clients; there are: {', '.join(c.name for c in CLIENTS)}")
    folder = (options.folder or Path(tempfile.gettempdir()) / "edgespec-clients").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    log, failed = folder / "server.log", False
    with serving(options.model, log) as url:
        print("| client | version | seconds | outcome |\n|---|---|---|---|", flush=True)
        for client in CLIENTS:
            if options.only and client.name not in options.only:
                continue
            version, began, before = "", monotonic(), len(log.read_text())
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
                try:
                    scripts, version = installed(client, folder)
                    began = monotonic()
                    result = outcome(client, scripts, url, options.model, Path(work))
                except (OSError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
                    result = f"failed: {' '.join(str(error).split())}"
            refused = re.findall(r"(?:POST|GET) \S+ [45]\d\d .*", log.read_text()[before:])
            result += f" (the server: {'; '.join(refused[:3])})" if refused else ""
            failed |= result.startswith("failed")
            print(f"| {client.name} | {version} | {monotonic() - began:.0f} | {result} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
