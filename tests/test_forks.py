"""Processes that were forked from one with a loaded model: they end, and get one error at once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from edgespec import Models, RequestError
from edgespec.history.store import Store
from edgespec.history.use import Writer
from edgespec_models.bundles.tiles import pack
from edgespec_runtimes.ort import open_session, ort
from tests.kit.histories import SCOPE, delta_of, passage_of, stored, text_of
from tests.kit.kernels import graph, random_blocks, session
from tests.kit.models import queue_of, toy_model
from tests.kit.toy import settle

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]
TOLD = "this process was forked"


def status_of(child: Callable[[], int]) -> int:
    """The exit status of a forked process that runs ``child``."""
    pid = os.fork()
    if not pid:
        status = 99
        try:
            signal.alarm(20)
            status = child()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_process_forked_from_an_idle_model_is_told_so_and_closes_nothing() -> None:
    with toy_model() as model:
        model.generate("a", max_new_tokens=4)
        settle()
        assert queue_of(model).thread is None

        def child() -> int:
            asks: list[Callable[[], object]] = [
                model.forget,
                model.trim,
                model.pause,
                lambda: model.generate("b"),
            ]
            for ask in asks:
                with pytest.raises(RequestError, match=TOLD):
                    ask()
            model.close()
            return 0

        assert status_of(child) == 0
        assert model.generate("a", max_new_tokens=4).tokens


def test_models_by_name_are_the_parents() -> None:
    with Models({"a": "a"}) as models:

        def child() -> int:
            with pytest.raises(RequestError, match=TOLD), models.use("a"):
                pass
            models.close()
            return 0

        assert status_of(child) == 0


def test_a_history_is_written_by_the_process_that_opened_it(tmp_path: Path) -> None:
    path = tmp_path / "me.history"
    writer = Writer(Store.open(path), path, scope=SCOPE, text_of=text_of, flush_s=600.0)
    with closing(writer):
        writer.tell(lambda delta: delta.changes.update(delta_of(passage_of(1)).changes))

        def child() -> int:
            writer.close()
            return 0

        assert status_of(child) == 0
        assert not stored(path).entries
    assert [entry.uses for entry in stored(path).entries] == [1.0]


PROGRAM = """
import os, signal, sys
import numpy as np
from tests.test_forks import *
run = {making}()
run()
if not os.fork():
    signal.alarm(20)
    {does}
    sys.exit(7)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def pooled() -> Callable[[], object]:
    """A pass on ONNX Runtime's own threads."""
    shape = [256, 256]
    node = helper.make_node("MatMul", ["x", "x"], ["y"])
    inputs, outputs = ([helper.make_tensor_value_info(n, TensorProto.FLOAT, shape)] for n in "xy")
    written = helper.make_graph([node], "test", inputs, outputs)
    made = helper.make_model(written, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 2
    opened = open_session(made.SerializeToString(), settings, ["CPUExecutionProvider"])
    return lambda: opened.run(None, {"x": np.ones(shape, np.float32)})


def crewed() -> Callable[[], object]:
    """A pass on the threads of edgespec's kernels."""
    raw = random_blocks(np.random.default_rng(0), "Q8_0", 1024, 256)
    x = np.ones((1, 4, 256), np.float32)
    attributes = {"inputs": 256, "epsilon": 1e-5, "gate": "", "parts": "Q8_0:1024"}
    made = graph("Linear", {"y": TensorProto.FLOAT}, {"x": x}, {"w": pack("Q8_0", raw)}, attributes)
    opened = session(made, 2)
    return lambda: opened.run(None, {"x": x})[0]


@pytest.mark.parametrize(("making", "does"), [("pooled", "pass"), ("crewed", "pass"), ("crewed", "run()")])
def test_a_forked_process_ends_whatever_threads_its_sessions_had(making: str, does: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(making=making, does=does)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_kernels_have_all_their_threads_in_a_forked_process() -> None:
    run = crewed()
    whole = run()

    def threads() -> int:
        return len([*Path("/proc/self/task").iterdir()])

    def child() -> int:
        before = threads()
        np.testing.assert_array_equal(run(), whole)
        return threads() - before

    time.sleep(0.01)  # its helper sleeps
    assert status_of(child) == 1
