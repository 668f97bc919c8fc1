"""What models take, before they are loaded: compared with what sessions reserve and exports write."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import edgespec
from edgespec.cli import app
from edgespec.loading import drafters, planning
from edgespec.loading import footprint as footprints
from edgespec.loading.footprint import CacheSize, Footprint, Plan, footprint_of, room_for
from edgespec.loading.planning import footprint, look_up, plan
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.decoders.kept import KeptTensor
from edgespec_models.decoders.record import record
from edgespec_models.downloads.catalog import entries, find, hub_names
from edgespec_models.downloads.download import pull
from edgespec_models.errors import CatalogueError, DeviceError, RequestError
from edgespec_models.families import read_config
from edgespec_models.files.facts import Facts
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.devices import CPU, Device
from edgespec_runtimes.memory import MachineMemory, machine_memory
from edgespec_runtimes.static import open_static
from tests.kit import heads as heads
from tests.kit import seeing as seeing
from tests.kit.foreign import ForeignSpec, write_genai, write_optimum, write_written_out
from tests.kit.gguf import tiny_gguf
from tests.kit.hf import config_of, write_checkpoint
from tests.kit.native import tiny_native
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import GEMMA, INT8, tiny_bundle


def _exported(folder: Path) -> None:
    source = tiny_gguf("qwen2", "Q4_K").write(folder.with_suffix(".gguf"))
    export_model(source, folder, options=ExportOptions(weights="portable"))


ONE_THREAD = CpuOptions(threads=1)
LENGTHS = (1, 255, 256, 257, 500, 640)
KINDS: dict[str, Callable[[Path], object]] = {
    "own kernels": tiny_native,
    "own kernels, sliding windows": lambda folder: tiny_native(folder, GEMMA),
    "standard operators": tiny_bundle,
    "standard operators, int8 weights": lambda folder: tiny_bundle(folder, form=INT8),
    "genai, in place": lambda folder: write_genai(folder, ForeignSpec()),
    "genai, float16": lambda folder: write_genai(folder, ForeignSpec(kv="float16")),
    "genai, concatenating": lambda folder: write_genai(folder, ForeignSpec(attention="concat")),
    "Optimum": lambda folder: write_optimum(folder, ForeignSpec(attention="concat")),
    "an export of standard operators": _exported,
    "written out": write_written_out,
}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def has(available: int) -> None:
        for module in (footprints, planning):
            monkeypatch.setattr(module, "machine_memory", lambda: MachineMemory(8 * 10**9, available))

    return has


@pytest.mark.parametrize("exact_rows", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_takes_what_its_session_reserves(tmp_path: Path, kind: str, exact_rows: bool) -> None:
    KINDS[kind](tmp_path / "m")
    bundle = open_bundle(tmp_path / "m")
    planned = footprint_of(bundle, exact_rows=exact_rows).cache
    for tokens in LENGTHS:
        session = open_cpu(bundle, replace(ONE_THREAD, exact_rows=exact_rows), row_exact=True)
        session.reserve(tokens)
        if session.model.takes_several:  # blocks come as texts grow
            session.prefill([1] * min(tokens, session.model.longest))
        assert planned.bytes(tokens) == session.model.kv_bytes, tokens
        session.close()


def test_so_do_the_caches_of_fixed_shapes(tmp_path: Path) -> None:
    source = tiny_gguf("llama").write(tmp_path / "m.gguf")
    export_model(source, tmp_path / "m", options=ExportOptions(device="npu-openvino", buckets=(64, 128)))
    bundle = Bundle(tmp_path / "m")
    planned = footprint_of(bundle, exact_rows=True).cache
    session = open_static(bundle, Device(CPU, "ready"), ONE_THREAD)
    for tokens in (10, 64, 65, 128):
        session.reserve(tokens)
        assert planned.bytes(tokens) == session.kv_bytes
    assert planned.bytes(1000) == planned.bytes(128)
    session.close()


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("weights", ["exact", "portable"])
@pytest.mark.parametrize("source", ["llama", "qwen2", "directory"])
def test_a_checkpoint_is_planned_as_its_export_will_be(
    tmp_path: Path, source: str, weights: Any, role: Any
) -> None:
    if source == "directory":
        path = write_checkpoint(tmp_path / "m", config_of("qwen3"))
        (path / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
    else:
        path = tiny_gguf(source, "Q4_K").write(tmp_path / "m.gguf")
    options = ExportOptions(role=role, weights=weights)
    before = footprint(look_up(path, options), options)
    export_model(path, tmp_path / "out", options=options)
    bundle = Bundle(tmp_path / "out")
    after = footprint_of(bundle, exact_rows=role == "target")
    assert (before.state, after.state) == ("to be exported", "here")
    assert before.export_bytes == bundle.manifest.files["model.onnx.data"].size_bytes
    assert replace(before, state="here", export_bytes=0, name=after.name) == after


def test_a_plan_asks_no_disk_for_room(tmp_path: Path, free_disk: Callable[..., None]) -> None:
    """Neither for weights nor for a tower's."""
    free_disk(0)
    made = plan(seeing.write(tmp_path / "m"), "ngram")
    assert made.target.export_bytes > made.disk_free == 0


def test_a_head_is_planned_where_its_targets_source_is(tmp_path: Path) -> None:
    source, head = heads.target(tmp_path / "m"), heads.Head.random().write(tmp_path / "head")
    with pytest.raises(RequestError, match=r"^head is a head, whose plan needs its target's source"):
        plan(tiny_native(tmp_path / "bundle").path, head)
    assert plan(source, head).drafter is not None


def test_a_catalogue_model_is_planned_before_it_is_pulled(own_home: Path) -> None:
    made = plan("qwen2.5-coder-1.5b-instruct")
    entry = find("qwen2.5-coder-1.5b-instruct")
    assert made.target.state == "to be pulled"
    assert made.target.weights_bytes == made.target.download_bytes == entry.size_bytes
    assert made.target.cache.bytes(1) == 32 * 28 * 2 * 2 * 128 * 2  # two bytes a number
    assert made.drafter is not None and made.drafter.name == "smollm2-135m-qwen2.5-coder"
    assert made.disk_bytes == 2 * (entry.size_bytes + find("smollm2-135m-instruct").size_bytes)
    assert [fit.tokens for fit in made.contexts] == [2048, 8192, 32768]
    assert not own_home.exists()


@pytest.mark.parametrize(
    ("name", "kv_bytes", "state_bytes", "drafter"),
    [
        ("qwen3.5-4b", 32_768, True, "qwen3.5-4b-mtp"),
        ("qwen3.6-35b-a3b", 20_480, True, "qwen3.6-35b-a3b-mtp"),
        ("gemma-4-e2b-it", 18_432, False, "smollm2-135m-instruct"),
        ("gpt-oss-20b", 49_152, False, "smollm2-135m-instruct"),
        ("granite-4.0-h-micro", 8_192, True, "smollm2-135m-instruct"),
    ],
)
def test_a_model_of_the_hub_with_a_name_is_planned_before_it_is_pulled(
    own_home: Path, name: str, kv_bytes: int, state_bytes: bool, drafter: str
) -> None:
    made, model = plan(name), hub_names()[name]
    size = model.size_bytes
    assert (made.target.state, made.target.download_bytes) == ("to be pulled", size + model.mmproj_bytes)
    assert size - 3 < made.target.weights_bytes + made.target.table_bytes <= size
    assert made.target.cache.bytes_per_token == kv_bytes
    assert (made.target.cache.bytes_per_sequence > 0) == state_bytes
    assert made.drafter is not None and made.drafter.name == drafter
    assert made.drafter.download_bytes < 2e8  # an MTP layer comes with the model
    assert not own_home.exists()


@pytest.mark.parametrize("name", [name for name, model in hub_names().items() if model.config])
def test_names_of_the_hub_have_sizes_of_their_family(name: str) -> None:
    model = hub_names()[name]
    target = footprint(model, ExportOptions())
    assert target.cache.bytes_per_token
    assert 0.3 < model.size_bytes / _weights_of(name) < 1.2  # bytes a weight, of 4 to 8 bits


@pytest.mark.parametrize(
    "name", [name for name, model in hub_names().items() if model.architecture in ("qwen35", "gemma4")]
)
def test_a_tower_counts_before_it_is_pulled(name: str) -> None:
    """Its file is fetched; a target keeps it in 8 bits."""
    model = hub_names()[name]
    target, blind = footprint(model, ExportOptions()), footprint(model, ExportOptions("drafter"))
    assert 0 < 1.5 * model.tower_bytes < model.mmproj_bytes  # of 16 bits, some with a tower for sounds
    assert target.download_bytes == blind.download_bytes == model.size_bytes + model.mmproj_bytes
    assert target.export_bytes - blind.export_bytes == model.tower_bytes
    assert target.working_bytes - blind.working_bytes == model.tower_bytes


def _weights_of(name: str) -> int:
    model = hub_names()[name]
    config = read_config(Facts(model.config, name).over({"vocab_size": model.vocabulary}))
    tensors = record(config).tensors
    return sum(prod(shape) for tensor, shape in tensors.items() if tensor != "embed")


@pytest.mark.models
@pytest.mark.parametrize("name", [name for name, entry in entries().items() if entry.alignment is None])
def test_the_catalogue_knows_what_the_files_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan(name, None).target
    monkeypatch.undo()  # the machine's own home
    pull(find(name))
    planned = footprint(look_up(name, ExportOptions()), ExportOptions())
    assert before.cache == planned.cache
    assert before.working_bytes == planned.working_bytes
    assert 0.8 < before.weights_bytes / planned.weights_bytes < 1.3


def test_what_cannot_be_planned_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="run 'edgespec pull hf:someone/model' first"):
        plan("hf:someone/model")
    with pytest.raises(RequestError, match="no sizes of nemotron-3-nano-4b; run 'edgespec pull"):
        plan("nemotron-3-nano-4b")
    with pytest.raises(CatalogueError, match="no model 'nothing'"):
        plan("nothing")
    with pytest.raises(RequestError, match="context is 0"):
        plan("gemma-3-270m", context=0)
    source = tiny_gguf("llama").write(tmp_path / "m.gguf")
    with pytest.raises(RequestError, match="context is 641; allowed: 1 to 640"):
        plan(source, context=641)
    assert plan(source).drafter is None  # n-grams
    assert plan(source, source).drafter is not None


def test_for_a_file_a_drafter_that_is_not_here_is_not_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def one_that_is_not_here(_: object, n_bytes: int, *facts: object, in_bytes: bool) -> tuple[str, float]:
        sizes.append(n_bytes)
        return "qwen3-8b", 2.0

    monkeypatch.setattr(drafters, "recommended", one_that_is_not_here)
    made = plan(tiny_gguf("llama").write(tmp_path / "m.gguf"))
    assert made.drafter is None and sizes == [made.target.export_bytes]  # what passes will read


def of(weights: int, *, per_token: int = 1000, longest: int = 100_000, **facts: Any) -> Footprint:
    keys = KeptTensor(input="k", output="k", per="token", shape=(1, per_token // 2), type="float16")
    cache = CacheSize(kept=(keys,), longest=longest, step=32)
    sizes = {"mapped": True, "table_bytes": 0, "working_bytes": 10} | facts
    return Footprint(name="m", state="here", weights_bytes=weights, cache=cache, **sizes)


def plan_of(target: Footprint, available: int, drafter: Footprint | None = None) -> Plan:
    return Plan(target, drafter, MachineMemory(10**7, available), 0, program_bytes=0)


def test_verdicts() -> None:
    def verdict(available: int, *, mapped: bool = True) -> str:
        return plan_of(of(10**6, mapped=mapped), available).fit(256).verdict

    whole = 10**6 + 10 + 256_000
    assert [verdict(available) for available in (whole, whole - 1)] == ["fits", "from disk"]
    assert [verdict(available) for available in (256_010, 256_009)] == ["from disk", "no"]
    assert verdict(whole - 1, mapped=False) == "no"
    on_gpu = of(10**9, device="cuda")  # whose weights do not count here
    assert plan_of(on_gpu, 10**7, of(1000)).fit(256).memory_bytes < 10**6


@given(
    st.integers(0, 2 * 10**6), st.integers(1, 3000), st.integers(16, 4000), st.none() | st.integers(16, 4000)
)
def test_the_longest_context_is_the_longest_that_fits(
    available: int, per_token: int, longest: int, second: int | None
) -> None:
    drafter = None if second is None else of(10**5, per_token=50, longest=second)
    target = of(10**5, per_token=per_token, longest=longest)
    made = plan_of(target, available, drafter)
    found = made.longest_context
    assert 0 <= found <= longest
    assert found == 0 or made.fit(found).verdict == "fits"
    assert found == longest or made.fit(found + 1).verdict != "fits"


def test_loading_keeps_weights_mapped_where_copies_have_no_room(
    tmp_path: Path, memory: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    bundle = tiny_native(tmp_path / "m").bundle
    need = footprint_of(bundle, exact_rows=True)
    least = need.working_bytes + need.cache.bytes(256)
    memory(least + need.weights_bytes)
    assert room_for(bundle, None, ONE_THREAD) is ONE_THREAD and not caplog.records
    memory(least)
    assert room_for(bundle, None, ONE_THREAD) == replace(ONE_THREAD, copied_bytes=0)
    assert "a pass will read about 3.0 kB from the disk" in caplog.text and " kB; in all" in caplog.text


def test_where_not_all_weights_fit_those_of_every_pass_are_copied_first() -> None:
    """Half of a row's experts are in memory where half of all experts are."""

    def mixture(available: int) -> Plan:
        target = replace(of(10**6, per_token=16), expert_bytes=800_000, experts_used=0.125)
        return plan_of(target, available, of(50_000, per_token=16))

    least = 20 + 2 * 16 * 256
    for spare, read in ((250_000, 100_000), (650_000, 50_000)):
        fit = mixture(least + spare).fit(256)
        assert (fit.verdict, fit.read_bytes) == ("from disk", read)
    assert mixture(least + 1_050_000).fit(256).read_bytes == 0
    long = 20 + 2 * 16 * 8192
    copied = mixture(long + 600_000).copied_bytes
    assert copied == 375_000 and copied + 50_000 <= 600_000  # three quarters, without the drafter's, in steps
    assert mixture(long + 40_000).copied_bytes == 0
    scarce = mixture(long + 240_000)
    assert scarce.copied_bytes == 125_000
    assert (
        scarce.fit(8192).read_bytes == 75_000 + 100_000
    )  # a row reads all experts from the disk, and the rest


@pytest.mark.parametrize("make", [tiny_native, tiny_bundle])
def test_loading_refuses_what_cannot_work(
    tmp_path: Path, memory: Callable[[int], None], make: Callable[[Path], object]
) -> None:
    make(tmp_path / "m")
    memory(10_000)
    with pytest.raises(DeviceError, match=r"no room for these models: weights: m .* kB; .* 'edgespec plan'"):
        edgespec.load(tmp_path / "m", "ngram")
    memory(10**9)
    with edgespec.load(tmp_path / "m", "ngram") as model:
        assert model.generate("a", max_new_tokens=2).tokens


def _grouped(root: Path, second: bool, limit: str, place: str = "/") -> MachineMemory:
    """The memory of a machine with a control group of the second version or of the first."""
    folder = root / "sys/fs/cgroup" / ("" if second else "memory")
    files = {folder / "memory.max": limit, folder / "memory.current": "300000"}
    line, prefix = f"0::{place}", ""
    if not second:
        files = {folder / "memory.limit_in_bytes": limit, folder / "memory.usage_in_bytes": "300000"}
        line, prefix = f"5:cpu:/x\n4:cpu,memory:{place}", "total_"
    files[root / "proc/self/cgroup"] = line
    files[folder / "memory.stat"] = f"{prefix}inactive_file 99999\n{prefix}active_file 1\nanon 7"
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return machine_memory(root)


@pytest.mark.parametrize("second", [True, False])
def test_a_containers_limit_is_this_machines_memory(tmp_path: Path, second: bool) -> None:
    assert not machine_memory(tmp_path / "nothing").limited
    for place in ("/", "/service/one", "/service:1/one", "/../elsewhere"):
        found = _grouped(tmp_path, second, "1000000", place)
        assert found == MachineMemory(1_000_000, 800_000, limited=True)
    for none in ("max", str(1 << 62), "a lot"):
        found = _grouped(tmp_path, second, none)
        assert not found.limited and found.total > 10**8


@settings(deadline=None)
@given(tokens=st.integers(1, 3000))
def test_rooms_are_never_too_small(tokens: int) -> None:
    own = of(1).cache
    for cache in (own, replace(own, spare=1, step=256), replace(own, buckets=(9, 5000))):
        bounded = replace(cache, longest=5000)
        assert tokens <= bounded.room(tokens) <= bounded.room(tokens + 1)


@pytest.mark.usefixtures("consoles")
def test_the_command_shows_it(tmp_path: Path) -> None:
    target, drafter = tiny_native(tmp_path / "t").path, tiny_native(tmp_path / "d", role="drafter").path
    arguments = ["plan", str(target), "--drafter", str(drafter), "--context", "300"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0 and "float16, 512 bytes a token" in shown.stdout
    assert "longest text that fits: 640" in shown.stdout
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [fit["tokens"] for fit in found["contexts"]] == [300, 640] and found["longest_context"] == 640
    assert (found["target"]["kv_bytes_per_token"], found["drafter"]["name"]) == (512, "d")
    unpulled = CliRunner().invoke(app, ["plan", "gemma-3-270m", "--drafter", "none"]).stdout
    assert "disk: 253.1 MB to download, 253.1 MB to export" in unpulled and "to be pulled" in unpulled
