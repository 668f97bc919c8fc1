"""ONNX Runtime sends usage data unless told not to before it starts: edgespec tells it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native_for_tests import tiny_native
from tests.toy import LLAMA

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
from edgespec_runtimes.cpu import CpuSession
CpuSession(Bundle(Path(sys.argv[2]))).predict([1, 2])
"""


@pytest.mark.parametrize(
    "first",
    [
        "edgespec",
        "edgespec.engine",
        "edgespec_export.devices.device_bundle",
        "edgespec_runtimes.discovery",
    ],
)
def test_nothing_is_sent_or_kept(tmp_path: Path, first: str) -> None:
    model, home = tiny_native(tmp_path / "m", LLAMA, "Q4_1"), tmp_path / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in (_VARIABLE, "XDG_CACHE_HOME")}
    environment = kept | {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", _RUN, first, str(model.path)], check=True, env=environment)
    assert list(home.rglob("*")) == []  # with telemetry on: a device identifier and a queue of events


def test_onnxruntime_may_be_imported_after_edgespec_and_before_any_model() -> None:
    kept = {name: value for name, value in os.environ.items() if name != _VARIABLE}
    code = (
        "import os, sys, edgespec; sys.exit('onnxruntime' in sys.modules or os.environ[sys.argv[1]] != '1')"
    )
    environment = kept | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, _VARIABLE], check=True, env=environment)
