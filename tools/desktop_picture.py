"""Draws docs/figures/desktop.png: ``QT_QPA_PLATFORM=offscreen python -m tools.desktop_picture``.

Runs the example of a desktop window over real models (pulled at first use), asks two questions, and saves
what the window shows when one is answered and the other in part.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from PySide6.QtCore import QEventLoop, QTimer
from PySide6.QtWidgets import QApplication

import edgespec
from docs.examples.desktop.main import Window

ROOT = Path(__file__).parents[1]
QUESTIONS = (
    "Write a Python function that reverses the words of a sentence, with a docstring.",
    "What are the differences between a list and a tuple in Python?",
)


def wait_until(true: Callable[[], bool], seconds: int) -> None:
    """Let the window live until ``true()``."""
    give_up = monotonic() + seconds
    while not true():
        if monotonic() > give_up:
            raise TimeoutError(f"the window was not ready within {seconds} s")
        # QTest.qWait would hold Python's lock, without which the model's thread stands still.
        loop = QEventLoop()
        QTimer.singleShot(50, loop.quit)
        loop.exec()


def main() -> None:
    """Ask, wait, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "desktop.png")
    options = parser.parse_args()
    app = QApplication([])  # noqa: F841 - it lives as long as its windows
    window = Window(lambda report: edgespec.load(options.model, progress=report))
    window.show()
    wait_until(lambda: bool(window.chats), 1800)
    done, writing = window.chats
    for chat, question in zip(window.chats, QUESTIONS, strict=True):
        chat.entry.setText(question)
        chat.ask()
        wait_until(lambda: done.status.text() == "Writes ...", 600)  # so that it is the first in the queue
    wait_until(lambda: done.button.text() == "Send", 600)
    answer = writing._answer
    wait_until(lambda: answer.height() > 200 or writing.button.text() == "Send", 600)
    window.grab().save(str(options.out))
    window.close()


if __name__ == "__main__":
    main()
