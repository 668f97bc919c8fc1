"""The threads of kernels, in a program of their own: they race for nothing, and errors keep their words."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ROOT / "tests" / "kit" / "crew.cpp"


def compiler(folder: Path) -> str | None:
    """A C++ compiler whose programs run with ThreadSanitizer."""
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}", encoding="utf-8")
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if shutil.which(name) is not None and runs(name, probe, folder / "probe"):
            return name
    return None


def runs(name: str, source: Path, program: Path) -> bool:
    command = (name, "-fsanitize=thread", source, "-o", program)
    made = subprocess.run(command, capture_output=True, check=False).returncode == 0
    return made and subprocess.run((program,), capture_output=True, check=False).returncode == 0


def test_threads_of_a_pass_race_for_nothing_and_keep_the_words_of_errors(tmp_path: Path) -> None:
    name = compiler(tmp_path)
    if name is None:
        pytest.skip("no C++ compiler here has ThreadSanitizer")
    flags = ("-std=c++20", "-O1", "-g", "-pthread", "-fsanitize=thread", "-I", ROOT / "runtimes" / "kernels")
    program = tmp_path / "crew"
    made = subprocess.run((name, *flags, CODE, "-o", program), capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    done = subprocess.run((program,), capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0 wrong\n"), done.stdout + done.stderr
