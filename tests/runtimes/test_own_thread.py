"""Sessions whose passes run in a thread of their own; test_manners.py has Ctrl-C."""

import os
import subprocess
import sys
from threading import current_thread
from types import SimpleNamespace

import pytest

from edgespec_runtimes.own_thread import OwnThread

AFTER_MAIN = """
from threading import Thread
from time import sleep
from types import SimpleNamespace
from edgespec_runtimes.own_thread import OwnThread
inner = SimpleNamespace(run_with_iobinding=lambda binding, options: print(binding))
session = OwnThread(lambda: inner, "low")
def later():
    sleep(0.3)
    session.run_with_iobinding("a pass", None)
Thread(target=later).start()
"""


def recording() -> tuple[OwnThread, list[tuple[str, str]]]:
    """A session, and for each of its calls the thread and what was asked."""
    calls = list[tuple[str, str]]()

    def run(binding: str, options: object) -> None:
        calls.append((current_thread().name, binding))
        if binding == "bad":
            raise ValueError(binding)

    return OwnThread(lambda: SimpleNamespace(run_with_iobinding=run, name="inner"), "low"), calls


def test_passes_run_in_one_thread_and_errors_come_back() -> None:
    session, calls = recording()
    session.run_with_iobinding("good")
    with pytest.raises(ValueError, match="bad"):
        session.run_with_iobinding("bad")
    session.run_with_iobinding("good")
    assert calls == [("low", "good"), ("low", "bad"), ("low", "good")]
    assert session.name == "inner"


def test_an_open_that_fails_raises_its_error() -> None:
    def fail() -> object:
        raise OSError("no file")

    with pytest.raises(OSError, match="no file"):
        OwnThread(fail, "low")


def test_threads_that_outlive_the_main_one_are_served() -> None:
    run = subprocess.run([sys.executable, "-c", AFTER_MAIN], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("a pass\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_has_a_thread_of_its_own() -> None:
    session, calls = recording()
    session.run_with_iobinding("before")
    if (child := os.fork()) == 0:
        session.run_with_iobinding("behind")
        os._exit(7 if calls == [("low", "before"), ("low", "behind")] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
