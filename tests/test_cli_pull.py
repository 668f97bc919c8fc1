"""The command line: listing, pulling, and how failures end it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import edgespec_models.downloads.catalog
from edgespec.cli import COMMANDS, app
from edgespec_models.downloads.catalog import entries
from tests.downloads_for_tests import running_hub

TOY = """
title = "Toy"
architecture = "llama"
role = "drafter"
parameters = 7
licence = "MIT"
licence_url = "https://example.org/licence"
filename = "toy.gguf"
size_bytes = 5
sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"

[[sources]]
kind = "hub"
repository = "someone/toy"
filename = "toy.gguf"
"""  # the digest of b"hello"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and a catalogue of one toy model."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    (tmp_path / "toy.toml").write_text(TOY, encoding="utf-8")
    known = entries(tmp_path)
    monkeypatch.setattr(edgespec_models.downloads.catalog, "entries", lambda directory=None: known)
    monkeypatch.setattr(edgespec_models.downloads.catalog, "_installed", lambda: known)
    return tmp_path / "home" / "models"


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_help_lists_every_command_and_imports_none() -> None:
    run_help = "from edgespec.cli import app; app(['--help'], standalone_mode=False)"
    code = f"import sys; {run_help}; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name, line in COMMANDS.items():
        assert name in out
        assert line in " ".join(out.split())
    loaded = set(out.splitlines()[-1].split())
    assert not {"numpy", "onnxruntime", "huggingface_hub", "edgespec.cli.models"} & loaded


def test_models_shows_what_is_pulled() -> None:
    assert run("models")[1].split()[-1] == "-"
    (model,) = json.loads(run("models", "--json")[1])
    assert (model["name"], model["size_bytes"], model["path"]) == ("toy", 5, None)
    with running_hub() as hub, pytest.MonkeyPatch.context() as patch:
        hub.content = b"hello"
        patch.setenv("HF_ENDPOINT", hub.address)
        assert run("pull", "toy")[0] == 0
    assert run("models")[1].split()[-1] == "yes"


def test_pull_prints_path_and_licence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub() as hub:
        hub.content = b"hello"
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        code, out, err = run("pull", "toy")
        assert code == 0
        assert out.splitlines() == [
            f"toy: {home / 'toy.gguf'}",
            "  licence: MIT, https://example.org/licence",
        ]
        assert err.splitlines() == ["Downloading toy", "Checking toy"]

        (home / "toy.gguf").write_bytes(b"hullo")
        code, out, err = run("pull", "--check", "--json")
        assert code == 0
        assert "toy is damaged and will be replaced" in err
        assert [model["path"] for model in json.loads(out)] == [str(home / "toy.gguf")]
    assert (home / "toy.gguf").read_bytes() == b"hello"


def test_a_failure_is_one_line_and_exit_code_1() -> None:
    code, out, err = run("pull", "toy")
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith("error: no source could deliver toy: could not reach the Hugging Face hub")


def test_an_unknown_model_fails_before_anything_is_fetched(home: Path) -> None:
    code, _, err = run("pull", "toy", "tov")
    assert code == 1
    assert err.splitlines() == ["error: no model 'tov' in the catalogue. Did you mean 'toy'? It has: toy"]
    assert not home.exists()


def test_misuse_is_exit_code_2_and_the_version_is_told() -> None:
    assert run("pull")[0] == 2
    assert run("--version")[1].startswith("edgespec ")
    code, _, err = run("pul")
    assert code == 2
    assert "Did you mean 'pull'?" in err


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_ctrl_c_is_exit_code_130(tmp_path: Path) -> None:
    with running_hub() as hub:
        hub.silent = True
        environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HUB_ETAG_TIMEOUT": "60"}
        # A shell starts what it runs in the background with the signal ignored, and children inherit that.
        heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        program = f"{heed}; from edgespec.cli import main; main()"
        command = [sys.executable, "-c", program, "pull", "gemma-3-270m"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as child:
            while not hub.requests and child.poll() is None:
                pass
            begun = time.monotonic()
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=30)
            assert time.monotonic() - begun < 5
    assert (child.returncode, err.splitlines()[-1]) == (130, "interrupted")
