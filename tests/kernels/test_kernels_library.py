"""The library of edgespec's kernels: finding it, choosing instructions, weights in huge pages."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, load_from_string, numpy_helper, save_model

from edgespec_models.bundles.tiles import pack
from edgespec_models.errors import DeviceError, RequestError
from edgespec_runtimes import cpu
from edgespec_runtimes.memory import peak_memory_bytes
from edgespec_runtimes.ort import ort
from tests.kit.kernels import EPSILON, graph, model_of, node_of, random_blocks, same_bits, session, sets
from tests.kit.machines import LINUX, X86


def test_the_best_instructions_are_the_first_this_processor_has() -> None:
    assert cpu.best_instructions() == min(sets(), key=cpu.INSTRUCTIONS.index)
    assert sets()[0] == "plain"


@X86
@LINUX
def test_the_sets_are_those_that_the_system_lists() -> None:
    needed = {"plain": "", "avx2": "avx2 fma f16c", "avxvnni": "avx2 fma f16c avx_vnni"}
    needed["avx512"] = "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni"
    listed = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    assert set(sets()) == {name for name, flags in needed.items() if listed.issuperset(flags.split())}


def test_instructions_that_are_unknown_or_another_processors() -> None:
    with pytest.raises(RequestError, match=r"sse9.*avx512.*plain"):
        cpu.CpuOptions(instructions="sse9")
    other = next(name for name in cpu.INSTRUCTIONS if name not in sets())
    with pytest.raises(DeviceError, match=f"lacks the instructions '{other}'.*{sets()[-1][:3]}"):
        cpu.register_operators(ort.SessionOptions(), cpu.CpuOptions(instructions=other))


@pytest.mark.parametrize(("platform", "name"), [("win32", "dll"), ("darwin", "dylib"), ("linux", "so")])
def test_a_missing_library(platform: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    with pytest.raises(DeviceError, match=rf"no \S*edgespec_kernels.{name}. Install .*--weights portable"):
        cpu.library()


def test_a_library_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / cpu.library().name
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(cpu, "library", lambda: broken)
    with pytest.raises(DeviceError, match=r"cannot be loaded: .*Install"):
        cpu.register_operators(ort.SessionOptions(), cpu.CpuOptions())
    with pytest.raises(DeviceError, match=r"cannot be loaded: .*Install"):
        cpu.best_instructions()


@pytest.mark.parametrize(
    ("rows", "width", "zeros"), [(3000, 256, 0), (3000, 256, 4096), (3000, 256, 3 << 16), (9000, 4096, 0)]
)
def test_weights_in_huge_pages(rows: int, width: int, zeros: int) -> None:
    """What reads them where they were, as the embedding does, still finds them, whatever they begin with.

    Two copies of the largest are more than a block of pages holds.
    """
    rng = np.random.default_rng(0)
    tiles = pack("Q8_0", random_blocks(rng, "Q8_0", rows, width))
    tiles[:zeros] = 0
    rest = {"width": width, "rows": rows, "format": "Q8_0", "factor": 1.0}
    nodes = [node_of("Embedding", ["ids", "table"], ["x"], rest)]
    rest = {"inputs": width, "epsilon": EPSILON, "gate": "", "parts": f"Q8_0:{rows}"}
    nodes += [node_of("Linear", ["x", "table"], [y], rest) for y in ("y0", "y1")]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y0", "y1")]
    fed = [helper.make_tensor_value_info("ids", TensorProto.INT64, None)]
    model = model_of(helper.make_graph(nodes, "test", fed, made, [numpy_helper.from_array(tiles, "table")]))
    feeds = {"ids": rng.integers(0, rows, (1, 8))}
    wanted = session(model).run(None, feeds)
    assert wanted[1].any()
    for _ in range(2):
        for copied in (None, 0, tiles.nbytes):  # all; none; that of the first product
            made_so = session(model, huge_pages=True, copied_bytes=copied)
            for one, other in zip(wanted, made_so.run(None, feeds), strict=True):
                same_bits(one, other)


@LINUX
@pytest.mark.parametrize(("copied", "least", "most"), [(None, 1.0, 1.7), (0, 0.0, 0.3)])
def test_no_matrix_is_in_memory_twice(tmp_path: Path, copied: int | None, least: float, most: float) -> None:
    """What is copied into huge pages leaves the mapped file's pages piece by piece; the rest is not read."""
    tiles, fed = np.ones(48_000 * 1024 // 32 * 34, np.uint8), {"x": np.ones((1, 1, 1024), np.float32)}
    rest = {"inputs": 1024, "epsilon": EPSILON, "gate": "", "parts": "Q8_0:48000"}
    model = graph("Linear", {"y": TensorProto.FLOAT}, fed, {"w": tiles}, rest)
    save_model(load_from_string(model), tmp_path / "m.onnx", save_as_external_data=True, location="m.data")
    del model
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is what is used now
    before = peak_memory_bytes()
    options = cpu.CpuOptions(threads=1, copied_bytes=copied)
    opened = cpu.open_graph(tmp_path / "m.onnx", options, native=True)
    assert opened is not None
    assert least * tiles.nbytes <= peak_memory_bytes() - before < most * tiles.nbytes


@LINUX
def test_the_library_stays_in_the_process() -> None:
    """Each time that it is loaded anew its threads would take one of the process's thousand keys."""
    code = """
import gc
from onnxruntime import SessionOptions
from edgespec_runtimes import cpu
settings = SessionOptions()
cpu.register_operators(settings, cpu.CpuOptions())
del settings
gc.collect()
assert "edgespec_kernels" in open("/proc/self/maps").read()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
