"""Clients as the package indexes have them, each at a task with a tool: before a release.

    python -m tools.try_clients [--only NAME]... [--folder FOLDER] [--installed] [--json FILE]

Starts ``edgespec serve`` on a free port of this machine, installs each client into an environment of its own
and runs its program of ``tools/client_programs`` there, with a home of its own. The program asks for a number
that only its tool knows, then which article that was about. Both answers have to be right, and where the tool
is the program's, its arguments. Prints a table, then what the server's log says of fields and tools that it
leaves out. Needs npm for some. With ``--installed`` it takes what an earlier run left in the folder.

Exit code 1 if one fails. A cause with errors of the server's log is the server's; else the model is too weak
or the client has changed.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

from tools.arguments import arguments

PROGRAMS = Path(__file__).resolve().parent / "client_programs"
STARTS_S, LOOK_S, INSTALL_S = 600, 30, 900
TASK = {
    "INSTRUCTIONS": "You answer questions about the stock of a shop. Only the tool stock_level knows how "
    "many pieces there are. When it has answered, answer in one sentence and call nothing more.",
    "FIRST": "How many blue teapots are in stock?",
    "SECOND": "Which article did I ask about? Answer in one sentence, and call nothing.",
}
AI_SDK = ("npm", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic")
LANGCHAIN = ("pip", "langchain-openai", "langchain-anthropic")
PYDANTIC = ("pip", "pydantic-ai-slim[openai,anthropic]")
CHAT, RESPONSES, MESSAGES, OLLAMA = "Chat Completions", "Responses", "Messages", "Ollama"
TOOL, FILE = "calls a tool, and is asked on", "reads a file, and is asked on"
EDITS = "writes a file, then edits it"


@dataclass(frozen=True)
class Client:
    """A client: the API it speaks, its packages behind the index that has them, its program and the limit."""

    name: str
    api: str
    packages: tuple[str, ...]
    program: str
    argument: str = ""
    task: str = TOOL
    minutes: float = 5


CLIENTS = (
    Client("openai", CHAT, ("pip", "openai"), "openai_chat.py"),
    Client("openai Responses", RESPONSES, ("pip", "openai"), "openai_responses.py"),
    Client("anthropic", MESSAGES, ("pip", "anthropic"), "anthropic_messages.py"),
    Client("openai-agents", RESPONSES, ("pip", "openai-agents"), "openai_agents.py", "responses"),
    Client("openai-agents chat", CHAT, ("pip", "openai-agents"), "openai_agents.py", "chat"),
    Client("pydantic-ai", CHAT, PYDANTIC, "pydantic_agent.py", "chat"),
    Client("pydantic-ai Responses", RESPONSES, PYDANTIC, "pydantic_agent.py", "responses"),
    Client("pydantic-ai Messages", MESSAGES, PYDANTIC, "pydantic_agent.py", "messages"),
    Client("instructor", CHAT, ("pip", "instructor"), "instructor_forms.py", task="fills in a type, twice"),
    Client("langchain-openai", CHAT, LANGCHAIN, "langchain_tools.py", "chat"),
    Client("langchain-openai Responses", RESPONSES, LANGCHAIN, "langchain_tools.py", "responses"),
    Client("langchain-anthropic", MESSAGES, LANGCHAIN, "langchain_tools.py", "messages"),
    Client("litellm", CHAT, ("pip", "litellm"), "litellm_tools.py", "hosted_vllm"),
    Client("litellm Messages", MESSAGES, ("pip", "litellm"), "litellm_tools.py", "anthropic"),
    Client("llm", CHAT, ("pip", "llm"), "llm_command.py", "chat"),
    Client("llm Responses", RESPONSES, ("pip", "llm"), "llm_command.py", "responses"),
    Client("AI SDK", RESPONSES, AI_SDK, "ai_sdk.mjs", "responses"),
    Client("AI SDK, store false", RESPONSES, AI_SDK, "ai_sdk.mjs", "unstored"),
    Client("AI SDK, openai.chat", CHAT, AI_SDK, "ai_sdk.mjs", "chat"),
    Client("AI SDK, openai-compatible", CHAT, AI_SDK, "ai_sdk.mjs", "compatible"),
    Client("AI SDK, anthropic", MESSAGES, AI_SDK, "ai_sdk.mjs", "anthropic"),
    Client("aider", CHAT, ("pip", "aider-chat"), "aider_edit.py", "openai", EDITS),
    Client("ollama", OLLAMA, ("pip", "ollama"), "ollama_chat.py"),
    Client("ollama, JavaScript", OLLAMA, ("npm", "ollama"), "ollama_chat.mjs"),
    Client("langchain-ollama", OLLAMA, ("pip", "langchain-ollama"), "langchain_tools.py", "ollama"),
    Client("litellm Ollama", OLLAMA, ("pip", "litellm"), "litellm_tools.py", "ollama_chat"),
    Client("aider Ollama", OLLAMA, ("pip", "aider-chat"), "aider_edit.py", "ollama_chat", EDITS),
    Client("opencode", CHAT, ("npm", "opencode-ai"), "opencode.py", task=FILE, minutes=20),
    Client("Codex", RESPONSES, ("npm", "@openai/codex"), "codex.py", task=FILE, minutes=20),
    Client(
        "Claude Code", MESSAGES, ("npm", "@anthropic-ai/claude-code"), "claude_code.py", task=FILE, minutes=30
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What came of a client: ``cause`` is empty if all was right."""

    client: str
    version: str
    api: str
    task: str
    seconds: float
    cause: str
    answers: tuple[str, ...] = ()


@contextmanager
def serving(model: str, log: Path) -> Iterator[str]:
    """A server of its own on a free port; yields its address."""
    command = (
        sys.executable,
        "-c",
        "from edgespec.cli import main; main()",
        "serve",
        model,
        "--port",
        "0",
        "--timeout",
        "3600",
    )
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


def install(client: Client, folder: Path, *, fetch: bool) -> tuple[Path, str]:
    """The folder of the client's commands, and the versions of its packages."""
    index, *packages = client.packages
    home = folder / re.sub(r"\W+", "-", " ".join(client.packages))
    home.mkdir(parents=True, exist_ok=True)
    shutil.copytree(PROGRAMS, home / "programs", dirs_exist_ok=True)
    if index == "npm":
        if fetch:
            latest = [f"{package}@latest" for package in packages]
            _run(("npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), *latest), home)
        files = [home / "node_modules" / package / "package.json" for package in packages]
        versions = [json.loads(file.read_text())["version"] for file in files]
        scripts = home / "node_modules" / ".bin"
    else:
        scripts = home / "venv" / "bin"
        python = str(scripts / "python")
        if fetch:
            venv.create(home / "venv", with_pip=True)
            _run((python, "-m", "pip", "install", "--quiet", "--upgrade", *packages), home)
        names = [package.partition("[")[0] for package in packages]
        show = f"from importlib.metadata import version; print(*map(version, {names}))"
        versions = _run((python, "-c", show), home).split()
    bare = [package.partition("[")[0] for package in packages]
    return scripts, ", ".join(f"{name} {version}" for name, version in zip(bare, versions, strict=True))


def _run(command: tuple[str, ...], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command[:4])} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def ask(client: Client, scripts: Path, task: Mapping[str, str], work: Path) -> Mapping[str, list[str]]:
    """What the client's program reports; OSError if it fails or takes too long."""
    home = scripts.parents[1]
    runner = "node" if client.program.endswith(".mjs") else str(scripts / "python")
    if runner != "node" and client.packages[0] == "npm":
        runner = sys.executable  # it runs a command of the package
    command = (runner, str(home / "programs" / client.program), client.argument)
    environment = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    environment |= {f"TASK_{name}": value for name, value in task.items()}
    environment |= {"HOME": str(work / "home"), "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    (work / "home").mkdir()
    began = monotonic()
    with (work / "out").open("w+") as out, (work / "errors").open("w+") as errors:
        process = subprocess.Popen(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
                    break
                seconds = monotonic() - began
                print(f"  {client.name}: {seconds:.0f} s of {client.minutes * 60:.0f}", file=sys.stderr)
                if seconds > client.minutes * 60:
                    raise OSError(f"not done after {client.minutes:g} minutes")
        finally:
            with suppress(ProcessLookupError):  # also what it left running, and after Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            raise OSError(f"exit code {process.returncode}: {errors.read().strip()[-300:]}")
        report: Mapping[str, list[str]] = json.loads(out.read().splitlines()[-1])
    return report


def cause_of(report: Mapping[str, list[str]], pieces: str) -> str:
    """What is wrong with a report; empty if nothing is."""
    calls, (first, second) = report.get("calls"), report["answers"]
    if calls is not None and not calls:
        return f"the tool was not called: {first!r}"
    if calls and "teapot" not in calls[0].lower():
        return f"the tool was called for {calls[0]!r}"
    if pieces not in first.replace(",", ""):
        return f"the first answer has not the number: {first!r}"
    if "teapot" not in second.lower():
        return f"the second answer does not name the article: {second!r}"
    return ""


def tried(client: Client, version: str, scripts: Path, task: Mapping[str, str], log: Path) -> Outcome:
    """Have a client do the task."""
    pieces, before, began = str(random.randrange(1000, 9999)), len(log.read_text()), monotonic()
    answers, cause = tuple[str, ...](), ""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        try:
            report = ask(client, scripts, {**task, "PIECES": pieces}, Path(work))
            answers, cause = tuple(report["answers"]), cause_of(report, pieces)
        except (OSError, ValueError, LookupError) as error:  # also where the report is none
            cause = str(error)
    seconds = monotonic() - began
    if cause and (refused := re.findall(r"(?:POST|GET) \S+ [45]\d\d .*", log.read_text()[before:])):
        cause += f" (the server: {'; '.join(refused[:3])})"
    return Outcome(client.name, version, client.api, client.task, seconds, " ".join(cause.split()), answers)


def main() -> None:
    """Try all clients, print the table."""
    options = arguments(
        __doc__,
        only=[str],
        folder=(Path,),
        installed=False,
        model="qwen2.5-coder-1.5b-instruct",
        json=(Path,),
    )
    if unknown := set(options.only) - {client.name for client in CLIENTS}:
        raise SystemExit(
            f"{unknown} are no clients; there are: {', '.join(client.name for client in CLIENTS)}"
        )
    folder = (options.folder or Path(tempfile.gettempdir()) / "edgespec-clients").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    log, outcomes = folder / "server.log", list[Outcome]()
    with serving(options.model, log) as url:
        print("| client | API | what it did | seconds | outcome |\n|---|---|---|---|---|", flush=True)
        for client in CLIENTS:
            if options.only and client.name not in options.only:
                continue
            print(f"  {client.name}: begins", file=sys.stderr)
            task = {**TASK, "URL": url, "MODEL": options.model}
            try:
                scripts, version = install(client, folder, fetch=not options.installed)
                outcome = tried(client, version, scripts, task, log)
            except (OSError, subprocess.TimeoutExpired) as error:
                outcome = Outcome(client.name, "", client.api, client.task, 0.0, f"not installed: {error}")
            outcomes.append(outcome)
            verdict = f"failed: {outcome.cause}" if outcome.cause else "ok"
            print(
                f"| {client.name} ({outcome.version}) | {client.api} | {client.task} | {outcome.seconds:.0f} "
                f"| {verdict} |",
                flush=True,
            )
    print("\nThe server's log:")
    print("\n".join(line for line in log.read_text().splitlines() if re.search(r"\d requests have ", line)))
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    sys.exit(any(outcome.cause for outcome in outcomes))


if __name__ == "__main__":
    main()
