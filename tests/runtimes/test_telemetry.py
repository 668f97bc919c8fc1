"""ONNX Runtime sends usage data unless told not to before it starts: edgespec tells it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.native import tiny_native
from tests.kit.toy import LLAMA

_VARIABLE = "ORT_DISABLE_TELEMETRY"
_RUN = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            assert os.environ.get("ORT_DISABLE_TELEMETRY") == "1", "too late"

sys.meta_path.insert(0, Watch())
from importlib import import_module
from pathlib import Path
import_module(sys.argv[1])
from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.cpu import open_cpu
open_cpu(Bundle(Path(sys.argv[2]))).predict([1, 2])
"""


FIRST = ["edgespec", "edgespec.engine", "edgespec_runtimes.discovery"]
FIRST += ["edgespec_export.devices.device_bundle"]


def run(code: str, *arguments: str, **environment: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in (_VARIABLE, "XDG_CACHE_HOME")}
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=kept | environment)


@pytest.mark.parametrize("first", FIRST)
def test_nothing_is_sent_or_kept(tmp_path: Path, first: str) -> None:
    model, home = tiny_native(tmp_path / "m", LLAMA, "Q4_1"), tmp_path / "home"
    home.mkdir()
    run(_RUN, first, str(model.path), HOME=str(home))
    assert list(home.rglob("*")) == []  # with telemetry on: a device identifier and a queue of events


def test_onnxruntime_may_be_imported_after_edgespec_and_before_any_model() -> None:
    code = "import os, sys, edgespec; assert 'onnxruntime' not in sys.modules; "
    run(f"{code}assert os.environ[{_VARIABLE!r}] == '1'")
