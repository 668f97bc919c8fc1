"""The worker processes of compare.py: started, asked, kept as long as memory allows, ended.

A worker that stays keeps what its runtime learned and pays for loading once. Those that memory has no room
for, and those that burn CPU while they idle, are started for each of their turns instead.
"""

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import psutil

from tools.peers.protocol import Reply, Request

LIMIT_S = 900.0
IDLE_S, MAX_IDLE_CPU_S = 1.0, 0.05
WARM_UP, WARM_UP_TOKENS = "Once upon a time, in a land of one and two and one and two and", 8
QUIET = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}

Command = tuple[str, ...]


class WorkerError(Exception):
    """A worker could not load or answer; says what it said."""


class Worker:
    """A running process that answers requests. Ends with the first error."""

    def __init__(self, command: Command) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - close() does
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                env=os.environ | QUIET,
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(str(error)) from error
        self.facts: dict[str, Any] = self._read()["ready"]

    def ask(self, request: Request) -> Reply:
        """Run one request to its end. Raises WorkerError."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(asdict(request)), file=self._process.stdin, flush=True)
        except OSError as error:
            raise self._failure("it ended") from error
        return Reply(**self._read())

    def cpu_s(self) -> float:
        """Processor seconds used so far, child processes included."""
        process = psutil.Process(self._process.pid)
        times = [member.cpu_times() for member in (process, *process.children(recursive=True))]
        return float(sum(spent.user + spent.system for spent in times))

    def close(self) -> None:
        """Let the worker end by itself, then make sure."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(LIMIT_S, self._process.terminate)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise self._failure(f"it ended with {self._process.wait()}")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise self._failure(message["error"])
        return message

    def _failure(self, message: str) -> WorkerError:
        """With the last line of its log, where that says more; the process is closed."""
        try:
            self._process.wait(timeout=20)  # it is writing its traceback
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        self.close()
        return WorkerError(message if not lines or message in lines[-1] else f"{message}; {lines[-1]}")


class Workers:
    """The workers by command: kept, or started for each turn."""

    def __init__(self, reserve_bytes: int, report: Callable[[str], None]) -> None:
        self._reserve, self._report = reserve_bytes, report
        self._kept: dict[Command, Worker] = {}
        self.facts: dict[Command, dict[str, Any]] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._kept.values():
            worker.close()
        self._kept.clear()

    def open(self, command: Command, options: Mapping[str, Any]) -> None:
        """Start a worker unless it was, see whether it runs, keep it if it may stay. Raises WorkerError."""
        if command in self.facts:
            return
        worker = _warm(command, options)
        self.facts[command] = worker.facts
        reason = self._why_not(worker)
        if reason is None:
            self._kept[command] = worker
        else:
            self._report(f"started for each turn, because {reason}")
            worker.close()

    def ask(self, command: Command, request: Request) -> Reply:
        """The worker's answer. Raises WorkerError; such a worker is gone."""
        worker = self._kept.get(command)
        if worker is None:
            worker = _warm(command, request.options)
            try:
                return worker.ask(request)
            finally:
                worker.close()
        try:
            return worker.ask(request)
        except WorkerError:
            del self._kept[command]
            raise

    def _why_not(self, worker: Worker) -> str | None:
        if psutil.virtual_memory().available < self._reserve:
            return "memory is short"
        time.sleep(IDLE_S)  # threads that spin for a while after a pass may end
        start = worker.cpu_s()
        time.sleep(IDLE_S)
        used = worker.cpu_s() - start
        return f"it used {used:.2f} s of CPU while it idled" if used > MAX_IDLE_CPU_S else None


def _warm(command: Command, options: Mapping[str, Any]) -> Worker:
    worker = Worker(command)
    worker.ask(Request(WARM_UP, WARM_UP_TOKENS, options=options))
    return worker
