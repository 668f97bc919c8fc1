"""Runs tests for tools/mutate.py, in a process and a copy of the tree of its own.

    python -P mutant_worker.py lines JOB    which lines each test executes
    python -P mutant_worker.py trials JOB   which mutants the tests notice

Tests are collected once; each mutant is a fork of that process, in which its functions get the mutant's code.
"""

import gc
import json
import marshal
import os
import resource
import signal
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

__all__ = ["lines", "trials"]

Verdict = tuple[str, str]
Codes = list[tuple[CodeType, CodeType]]
_SLACK = 30.0  # seconds that pass for one of the processor, on a busy machine


class _Notes:
    """How tests end."""

    def __init__(self) -> None:
        self.passed = dict[str, bool]()
        self.told = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and report.passed
        if report.failed:
            self.told = str(report.longrepr)


class _Lines(_Notes):
    """Has the lines noted for each test, and its seconds of the processor."""

    def __init__(self, coverage: Any) -> None:
        super().__init__()
        self._coverage = coverage
        self.seconds = dict[str, float]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._coverage.switch_context(item.nodeid)
        start = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = sum(os.times()[:4]) - start


def lines(job: dict[str, Any]) -> None:
    """Write, for each file of tests, the seconds of those that pass and the lines that they execute."""
    from coverage import Coverage

    root = Path.cwd()
    coverage = Coverage(data_file=None, config_file=False, source=[str(root)], omit=[f"{root}/tests/*"])
    notes = _Lines(coverage)
    coverage.start()
    pytest.main([*job["pytest"], "-q", *job["tests"]], plugins=[notes])
    coverage.stop()
    data = coverage.get_data()
    found: dict[str, dict[str, Any]] = {name: {"seconds": {}, "lines": {}} for name in job["tests"]}
    for test, seconds in notes.seconds.items():
        if notes.passed.get(test):
            found[test.partition("::")[0]]["seconds"][test] = seconds
    for file in sorted(data.measured_files()):
        source = Path(file).relative_to(root).as_posix()
        for line, tests in data.contexts_by_lineno(file).items():
            for test in tests:
                home = found.get(test.partition("::")[0])
                if home and test in home["seconds"]:
                    home["lines"].setdefault(source, {}).setdefault(test, []).append(line)
    Path(job["results"]).write_text(json.dumps(found) + "\n", "utf-8")


class _Trials(_Notes):
    """Runs the tests of one mutant after another, until one fails."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        self._job = job
        self._functions = dict[CodeType, list[FunctionType]]()
        self._killers = dict[str, bool]()
        """Tests that failed with a mutant, and whether they pass without."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for each in gc.get_objects():
            if type(each) is FunctionType:
                self._functions.setdefault(each.__code__, []).append(each)
        gc.freeze()  # or every fork copies what its collector looks at
        with Path(self._job["results"]).open("a", encoding="utf-8") as results:
            for mutant in self._job["mutants"]:
                if session.testsfailed:
                    verdict = "killed", "import"
                else:
                    verdict = self._verdict(
                        mutant, [items[test] for test in mutant["tests"] if test in items]
                    )
                print(json.dumps(verdict), file=results, flush=True)
        return True

    def _verdict(self, mutant: dict[str, Any], items: list[pytest.Item]) -> Verdict:
        """As :func:`_fork` has it, with tests that fail by themselves left out."""
        items = [item for item in items if self._killers.get(item.nodeid, True)]
        items.sort(key=lambda item: item.nodeid not in self._killers)
        codes = [(_code(old), _code(new)) for old, new in mutant["codes"]]
        verdict, test = self._fork(codes, items, mutant["seconds"])
        killer = [item for item in items if item.nodeid == test]
        if not killer or not codes:
            return verdict, test
        if test not in self._killers:
            self._killers[test] = self._fork([], killer, mutant["seconds"])[0] == "survived"
        return (verdict, test) if self._killers[test] else self._verdict(mutant, items)

    def _fork(self, codes: Codes, items: list[pytest.Item], seconds: float) -> Verdict:
        receive, send = get_context("fork").Pipe(duplex=False)
        process = get_context("fork").Process(target=self._child, args=(send, codes, items, seconds))
        process.start()
        send.close()
        try:
            verdict: Verdict = receive.recv() if receive.poll(_SLACK * seconds) else ("timed out", "")
        except EOFError:
            process.join()
            verdict = ("timed out" if process.exitcode == -signal.SIGXCPU else "killed"), "the process ended"
        try:
            os.killpg(process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.join()
        receive.close()
        return verdict

    def _child(self, send: Connection, codes: Codes, items: list[pytest.Item], seconds: float) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 2)
        for old, new in codes:
            for function in self._functions.get(old, ()):
                function.__code__ = new
        verdict = "survived", ""
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if not self.passed.get(item.nodeid, False):
                verdict = "timed out" if "Timeout (>" in self.told else "killed", item.nodeid
                break
        send.send(verdict)
        os._exit(0)


def _code(digits: str) -> CodeType:
    code: CodeType = marshal.loads(bytes.fromhex(digits))  # noqa: S302
    return code


def trials(job: dict[str, Any]) -> None:
    """Append a verdict for each mutant, and the test that has noticed it."""
    pytest.main([*job["pytest"], "-p", "no:terminal", *job["tests"]], plugins=[_Trials(job)])


if __name__ == "__main__":
    {"lines": lines, "trials": trials}[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text("utf-8")))
