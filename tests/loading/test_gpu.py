"""Whether ``auto`` takes a GPU, and what plans count of its memory. No GPU is needed."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import edgespec
from edgespec import LoadOptions
from edgespec.loading import footprint
from edgespec.loading.gpu import choose_gpu
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import DeviceError
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.discovery import Runtime
from edgespec_runtimes.memory import MachineMemory
from tests.kit.gguf_cases import gguf_of
from tests.kit.machines import PLAIN, WORKSTATION, Machine, on_machine
from tests.kit.native import tiny_native
from tests.kit.toy import tiny_bundle

LAPTOP = replace(WORKSTATION, memory=MachineMemory(8 << 30, 6 << 30))
OPTIONS = LoadOptions()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_of("llama", "Q8_0").write(tmp_path_factory.mktemp("gpu") / "m.gguf")


def test_a_gpu_that_holds_the_model_is_taken(model: Path) -> None:
    takes, why = choose_gpu(model, "auto", OPTIONS, LAPTOP)
    assert takes and why.startswith("the GPU holds the model: 60") and why.endswith("free memory")


@pytest.mark.parametrize(
    ("machine", "drafter", "options", "reason"),
    [
        (PLAIN, "auto", OPTIONS, ""),  # whose ONNX Runtime has no provider for one
        (LAPTOP, "auto", LoadOptions(weights="exact"), ""),
        (
            replace(LAPTOP, hardware=()),
            "auto",
            OPTIONS,
            "no GPU: device cuda is not available: .* finds no such",
        ),
        (replace(LAPTOP, memory=None), "auto", OPTIONS, "no GPU: its memory is unknown; device='cuda' takes"),
        (
            replace(LAPTOP, memory=MachineMemory(8 << 30, 1 << 20)),
            *("auto", OPTIONS, r"no GPU: the model needs 60\d.* of its 1\.0.* free memory"),
        ),
        (LAPTOP, "drafter.gguf", OPTIONS, "no GPU, because a drafter is named"),
    ],
)
def test_else_it_is_the_cpu_and_the_reason_is_told(
    model: Path, machine: Machine, drafter: str, options: LoadOptions, reason: str
) -> None:
    takes, why = choose_gpu(model, drafter, options, machine)
    assert not takes
    assert re.match(reason or "$", why)


@pytest.mark.parametrize("case", ["lfm2", "qwen35", "gpt_oss"])
def test_families_without_a_graph_for_it_stay_on_the_cpu(tmp_path: Path, case: str) -> None:
    source = gguf_of(case, "F32").write(tmp_path / "m.gguf")
    takes, why = choose_gpu(source, None, OPTIONS, LAPTOP)
    assert not takes and why.startswith("no GPU: ") and "ONNX Runtime's operators" in why


def test_rerankers_and_bundles_stay_where_they_are(tmp_path: Path) -> None:
    file = gguf_of("qwen3", "Q8_0")
    file.metadata["qwen3.pooling_type"] = 3
    takes, why = choose_gpu(file.write(tmp_path / "m.gguf"), "auto", OPTIONS, LAPTOP)
    assert not takes and "vectors and scores of texts are made on CPUs" in why
    bundle = tiny_native(tmp_path / "bundle").path
    assert choose_gpu(bundle, "auto", OPTIONS, LAPTOP) == (False, "")


def test_a_load_says_why_there_is_no_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, replace(LAPTOP, memory=None))
    with edgespec.load(model, None, options=LoadOptions(threads=1)) as loaded:
        assert str(loaded.placement).startswith("cpu (the bundle was made for the CPU; no GPU: its memory is")


def test_plans_and_loads_count_a_gpus_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle(tiny_bundle(tmp_path / "bundle").path)
    bundle.manifest = replace(bundle.manifest, device="cuda")
    monkeypatch.setattr(Runtime, "gpu_memory", lambda self, number=0: MachineMemory(8 << 30, 1 << 20))
    made = footprint.plan_of(bundle, None)
    assert made.gpu_bytes > footprint.GPU_BYTES and made.to_json()["gpu_available_bytes"] == 1 << 20
    with pytest.raises(DeviceError, match=r"the GPU has no room.* need 60\d.*device='cpu'"):
        footprint.room_for(bundle, None, CpuOptions())
    assert footprint.plan_of(Bundle(tiny_native(tmp_path / "cpu").path), None).gpu_bytes == 0
