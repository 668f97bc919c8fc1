"""Inference asks no network: where every socket is forbidden a process loads, answers, chats and learns."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.machines import LINUX
from tests.kit.native import tiny_native
from tests.kit.toy import LLAMA

CHAT = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    tiny_native(folder / "target", LLAMA, "Q4_1", template=CHAT)
    tiny_native(folder / "drafter", replace(LLAMA, num_layers=1), "Q8_0", role="drafter")
    return folder


def offline(folder: Path, way: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-X", "utf8", "-m", "tests.kit.offline", str(folder), way]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)


def test_inference_needs_no_network(folder: Path) -> None:
    done = offline(folder, "use")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100
    assert list((folder / "home").rglob("me.history"))  # it learned


def test_the_test_would_see_a_socket(folder: Path) -> None:
    done = offline(folder, "by_python")
    assert done.returncode != 0
    assert "is forbidden here" in done.stderr or done.returncode == -signal.SIGSYS


@LINUX
def test_the_test_would_see_a_librarys_socket(folder: Path) -> None:
    assert offline(folder, "by_library").returncode == -signal.SIGSYS
