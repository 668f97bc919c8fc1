"""A chat window in Qt: two conversations with one model, written as they come, stopped at a click.

pip install "edgespec[examples]"
python main.py [MODEL]
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from PySide6 import QtWidgets
from PySide6.QtCore import Qt, QThread, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QTextDocument

import edgespec

STYLE = """
QWidget { background: palette(base) }
QScrollArea { border: none }
QLineEdit { padding: 7px; border: 1px solid gray; border-radius: 8px }
QPushButton { padding: 8px; min-width: 60px; border-radius: 8px; color: white; background: #3465c0 }
QPushButton[text="Stop"] { background: #b23b3b }
QLabel[who="user"] { background: palette(window); border-radius: 10px; padding: 9px }
QLabel[who="error"] { color: #d04545 }
"""


class Task(QThread):
    """Works beside the window, which stays awake; what it finds arrives in the window's thread."""

    found = Signal(object)
    failed = Signal(str)

    def __init__(self, work: Callable[[], Iterable[object]], parent: QtWidgets.QWidget) -> None:
        super().__init__(parent)
        self._work = work
        self.finished.connect(self.deleteLater)

    def run(self) -> None:
        """What the thread does."""
        try:
            for item in self._work():
                self.found.emit(item)
        except edgespec.EdgespecError as error:
            self.failed.emit(str(error))


class Message(QtWidgets.QLabel):
    """What one of the two said; the mouse can select it."""

    def __init__(self, who: str, text: str = "") -> None:
        super().__init__(text)
        self.setProperty("who", who)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.setWordWrap(True)

    def show_markdown(self, text: str) -> None:
        """Show ``text`` as Markdown, whose HTML stays text: a model may write anything."""
        document = QTextDocument()
        document.setDefaultFont(self.font())
        features = QTextDocument.MarkdownFeature
        document.setMarkdown(text, features.MarkdownDialectGitHub | features.MarkdownNoHTML)
        self.setTextFormat(Qt.TextFormat.RichText)
        self.setText(document.toHtml().replace('<pre style="', '<pre style="white-space: pre-wrap;'))


class Chat(QtWidgets.QWidget):
    """One conversation: what was said, a line to type in, and a button that sends, and stops."""

    def __init__(self, model: edgespec.Model) -> None:
        super().__init__()
        self._conversation = model.conversation(max_new_tokens=1024)
        self._plain_s = model.cost_curve.seconds(1)  # of a token without drafts, as measured at load
        self._stream: edgespec.Stream | None = None
        self._answer, self._text = Message("model"), ""
        self._later = QTimer(self, singleShot=True, interval=150)  # drawing takes time from the model
        self._later.timeout.connect(self._draw)
        self.status = Message("status", f"{model.name} with {model.drafter_name or 'no drafter'}")
        self.entry = QtWidgets.QLineEdit(placeholderText="Ask something")
        self.button = QtWidgets.QPushButton("Send")
        self.drafts = QtWidgets.QCheckBox("Drafts")
        self.drafts.setChecked(True)
        self.drafts.setToolTip("Without drafts the answer is the same, only slower.")
        self.entry.returnPressed.connect(self.ask)
        self.button.clicked.connect(lambda: self._stream.cancel() if self._stream else self.ask())
        self._arrange()

    def _arrange(self) -> None:
        said, area, grid = QtWidgets.QWidget(), QtWidgets.QScrollArea(), QtWidgets.QGridLayout(self)
        self.said = QtWidgets.QVBoxLayout(said)
        self.said.setSpacing(14)
        self.said.addStretch()
        area.setWidget(said)
        area.setWidgetResizable(True)
        bar = area.verticalScrollBar()
        bar.rangeChanged.connect(lambda _, end: bar.setValue(end))
        grid.addWidget(area, 0, 0, 1, 2)
        grid.addWidget(self.entry, 1, 0)
        grid.addWidget(self.button, 1, 1)
        grid.addWidget(self.status, 2, 0)
        grid.addWidget(self.drafts, 2, 1)

    def _say(self, who: str, text: str) -> Message:
        message = Message(who, text)
        self.said.insertWidget(self.said.count() - 1, message)
        return message

    def ask(self) -> None:
        """Ask what was typed, unless an answer is being written."""
        question = self.entry.text().strip()
        if self._stream is not None or not question:
            return
        self.entry.clear()
        self._say("user", question)
        self._answer, self._text = self._say("model", ""), ""
        stream = self._conversation.stream(question, speculate=self.drafts.isChecked())
        task = Task(lambda: answer_of(stream), self)
        task.found.connect(self._show)
        task.failed.connect(lambda problem: self._say("error", problem))
        task.finished.connect(self._end)  # no lambda: that would be lost where the task is deleted first
        self.status.setText("Waits for its turn, reads ...")
        self._wait_for(stream)
        task.start()

    def _show(self, news: edgespec.Record | edgespec.Generation) -> None:
        if isinstance(news, edgespec.Record):
            self._text += news.text
            self.status.setText("Writes ...")
            if not self._later.isActive():
                self._later.start()
            return
        speed, stopped = news.stats.tokens_per_s, "Stopped. " * (news.finish_reason == "cancelled")
        times = speed * self._plain_s
        self.status.setText(f"{stopped}{speed:.1f} tokens/s, {times:.2f} times plain decoding")

    def _draw(self) -> None:
        self._later.stop()
        self._answer.show_markdown(self._text)

    def _end(self) -> None:
        self._draw()
        self._wait_for(None)

    def _wait_for(self, stream: edgespec.Stream | None) -> None:
        """Let the button stop ``stream``, if there is one to stop."""
        self._stream = stream
        self.button.setText("Send" if stream is None else "Stop")
        self.button.style().polish(self.button)  # its colour goes by its text


def answer_of(stream: edgespec.Stream) -> Iterator[edgespec.Record | edgespec.Generation]:
    """The answer round by round, then as a whole."""
    yield from stream.records()
    yield stream.result


class Window(QtWidgets.QMainWindow):
    """Loads a model with ``load``, which is given a function to report to; then shows two conversations."""

    progressed = Signal(str)

    def __init__(self, load: Callable[[Callable[[Any], None]], edgespec.Model]) -> None:
        super().__init__()
        self.model: edgespec.Model | None = None
        self.chats: list[Chat] = []
        self.setWindowTitle("edgespec")
        self.setStyleSheet(STYLE)
        self.resize(1040, 620)
        loading = Message("status", "Loading the model ...")
        self.setCentralWidget(loading)
        self.progressed.connect(loading.setText)
        task = Task(lambda: [load(self._report)], self)
        task.found.connect(self._begin)
        task.failed.connect(loading.setText)
        task.start()

    def _report(self, progress: Any) -> None:
        if QThread.currentThread().isInterruptionRequested():
            raise edgespec.Cancelled("the window was closed")
        self.progressed.emit(f"{progress.stage} {progress.done / (progress.total or 1):.0%}")

    def _begin(self, model: edgespec.Model) -> None:
        self.model, self.chats = model, [Chat(model), Chat(model)]
        both = QtWidgets.QSplitter()
        for chat in self.chats:
            both.addWidget(chat)
        self.setCentralWidget(both)

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802 - Qt's name
        """Closing the model ends the answers, and with them the threads that read them."""
        if self.model is not None:
            self.model.close()
        for task in self.findChildren(Task):
            task.requestInterruption()
            task.wait()
        super().closeEvent(event)


def main() -> None:
    """Show the window until it is closed."""
    name = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-1.5b-instruct"
    app = QtWidgets.QApplication(sys.argv)
    window = Window(lambda report: edgespec.load(name, progress=report))
    window.show()
    sys.exit(app.exec())


if __name__ == "__main__":
    main()
