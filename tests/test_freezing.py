"""Apps that PyInstaller froze answer, in one folder and in one file; ``-s`` shows size and time.

Windows are on the screen that ``DISPLAY`` names, which may be Xvfb's, or on none.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from threading import Timer
from time import perf_counter

import pytest

import edgespec
from tests.kit.gguf import tiny_gguf

ROOT = Path(__file__).parents[1]
PROMPT = "one two one two one"
CONSOLE = """
import sys
import edgespec

catalogue = edgespec.plan("qwen2.5-coder-1.5b-instruct")
with edgespec.load(sys.argv[1], "ngram") as model:
    for record in model.stream("{prompt}", max_new_tokens=16).records():
        if record.tokens:
            print(*(token.id for token in record.tokens), flush=True)
""".replace("{prompt}", PROMPT)
DESKTOP = """
import sys
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication
import edgespec
import main

def look():
    if window.chats and not asked:
        asked.append(window.chats[0])
        asked[0].entry.setText("{prompt}")
        asked[0].ask()
    elif asked and asked[0]._text and not shown:
        shown.append(print("answers", flush=True))
    elif shown and asked[0].button.text() == "Send":
        print(asked[0].status.text(), flush=True)
        window.close()

app, asked, shown, timer = QApplication(sys.argv), [], [], QTimer(interval=5)
window = main.Window(lambda report: edgespec.load(sys.argv[1], "ngram", progress=report))
window.show()
timer.timeout.connect(look)
timer.start()
app.exec()
""".replace("{prompt}", PROMPT)
SPEC = """
analysis = Analysis([{app!r}], pathex={paths!r})
pyz = PYZ(analysis.pure)
parts = [analysis.binaries, analysis.datas]
EXE(pyz, analysis.scripts, *parts, name="one_file")
COLLECT(EXE(pyz, analysis.scripts, exclude_binaries=True, name="app"), *parts, name="folder")
"""


def environment(folder: Path) -> dict[str, str]:
    """Where PyInstaller finds this checkout as an installed package would be: by its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = folder / "site" / f"edgespec-{project['version']}.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Name: edgespec\nVersion: {project['version']}\n", encoding="utf-8")
    hooks = project["entry-points"]["pyinstaller40"]["hook-dirs"]
    (installed / "entry_points.txt").write_text(f"[pyinstaller40]\nhook-dirs = {hooks}\n", encoding="utf-8")
    paths = os.pathsep.join([str(installed.parent), *sys.path])
    return os.environ | {"PYTHONPATH": paths, "PYINSTALLER_CONFIG_DIR": str(folder / "cache")}


def frozen(folder: Path, code: str) -> tuple[Path, Path]:
    """The program in one folder and in one file."""
    app, spec = folder / "app.py", folder / "app.spec"
    app.write_text(code, encoding="utf-8")
    spec.write_text(SPEC.format(app=str(app), paths=[str(ROOT / "docs/examples/desktop")]), encoding="utf-8")
    command = (sys.executable, "-m", "PyInstaller", "--log-level", "ERROR", str(spec))
    where = environment(folder)
    done = subprocess.run(command, cwd=folder, env=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    suffix = ".exe" if os.name == "nt" else ""
    return folder / f"dist/folder/app{suffix}", folder / f"dist/one_file{suffix}"


def answer(program: Path, model: Path, home: Path) -> list[str]:
    """The lines that the program writes, started as a user does; the first has the first token."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    screen = "xcb" if "DISPLAY" in kept else "offscreen"
    started = perf_counter()
    process = subprocess.Popen(
        (program, model),
        env=kept | {"EDGESPEC_HOME": str(home), "QT_QPA_PLATFORM": screen},
        stdout=subprocess.PIPE,
        text=True,
    )
    late = Timer(120, process.kill)
    late.start()
    with process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        seconds = perf_counter() - started
        lines += process.stdout.readlines()
    late.cancel()
    assert process.returncode == 0, lines
    files = [program] if program.name.startswith("one_file") else program.parent.rglob("*")
    size = sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())
    sys.stdout.write(f"{program.name}: {size / 1e6:.0f} MB, first token after {seconds:.2f} s\n")
    return lines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = tiny_gguf("llama", "Q8_0")
    model.metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
    return model.write(tmp_path / "tiny.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("code", [CONSOLE, DESKTOP], ids=["console", "desktop"])
def test_a_frozen_app_exports_a_model_and_answers(tmp_path: Path, source: Path, code: str) -> None:
    pytest.importorskip(
        "PyInstaller", reason="takes minutes; needs the extra 'release', which the gate does without"
    )
    if code is DESKTOP:
        pytest.importorskip("PySide6.QtWidgets", reason="Qt does not start here", exc_type=ImportError)
    for program in frozen(tmp_path, code):
        home = tmp_path / f"home-{program.stem}"
        first, again = (answer(program, source, home) for _ in range(2))  # the second finds the bundle
        if code is DESKTOP:
            assert first[0] == again[0] == "answers\n" and "times plain decoding" in first[1]
            continue
        with edgespec.load(source, None) as model:
            said = model.generate(PROMPT, max_new_tokens=16).tokens
        assert " ".join(first).split() == " ".join(again).split() == [str(token) for token in said]
