"""From a GGUF file to a bundle: what the graph then computes, what the report says, where files end up."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec_export import staging
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.formats import plan
from edgespec_export.graphs import writer
from edgespec_export.graphs.parity import Golden
from edgespec_models.bundles.bundle import MANIFEST, REPORT, WEIGHTS, Bundle
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import ModelFileError, RequestError
from edgespec_models.files.blocks import WITHIN
from edgespec_models.progress import Progress
from edgespec_models.storage import move, own_name
from edgespec_runtimes.cpu import open_cpu
from tests.kit.gguf import ARCHITECTURES, CONTEXT, FORMATS, TinyGGUF, reference_weights, tiny_gguf
from tests.kit.machines import X86
from tests.kit.toy import TinyModel
from tests.models.test_graphs import reference_logits

TOKENS = [5, 17, 300, 2, 2, 41, 17, 300, 99, 250, 7, 63, 11, 380]
NEVER_A_PROCESS = 2**22 + 1
Patch = pytest.MonkeyPatch


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with nothing but this file."""
    return tiny_gguf("llama").write(tmp_path / "m.gguf")


def logits_error(model: TinyGGUF, bundle: Path) -> float:
    """Relative error of the bundle's logits against numpy over the ``gguf`` package's weights."""
    opened = Bundle(bundle, verify_digests=True)
    assert isinstance(opened.config, Transformer)
    expected = reference_logits(TinyModel(bundle, opened.config, reference_weights(model)), TOKENS)
    session = open_cpu(opened)
    actual = session.predict(TOKENS).logits.copy()
    session.close()
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def exported(model: TinyGGUF, folder: Path, **options: Any) -> dict[str, Any]:
    """Write the model to ``m.gguf`` and export it to ``out``."""
    return export_model(model.write(folder / "m.gguf"), folder / "out", options=ExportOptions(**options))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_portable_floats_compute_what_the_file_says(tmp_path: Path, architecture: str) -> None:
    model = tiny_gguf(architecture)
    assert exported(model, tmp_path, weights="portable")["row_exact"]
    assert logits_error(model, tmp_path / "out") < 1e-5


def test_floats_are_rounded_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_gguf("llama", "F16").write(tmp_path / "m.gguf")
    export_model(source, tmp_path / "small")
    assert Bundle(tmp_path / "small").manifest.formats.keys() == {"Q8_0"}
    monkeypatch.setattr(plan, "_LARGE", 1000)
    export_model(source, tmp_path / "large")
    assert Bundle(tmp_path / "large").manifest.formats.keys() == {"Q4_1", "Q8_0"}
    mixed = tiny_gguf("llama", "Q4_K")  # whoever quantized it has left this one as it was
    mixed.tensors["blk.1.ffn_up.weight"] = tiny_gguf("llama", "BF16").tensors["blk.1.ffn_up.weight"]
    export_model(mixed.write(tmp_path / "mixed.gguf"), tmp_path / "mixed")
    assert "Q4_1" not in Bundle(tmp_path / "mixed").manifest.formats


@pytest.mark.parametrize("weights", ["exact", pytest.param("portable", marks=X86)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_policies_stay_near_the_file(tmp_path: Path, architecture: str, weights: str) -> None:
    kind = {"qwen2": "IQ4_XS", "gemma3": "MXFP4"}.get(architecture, "Q4_K")  # tied heads but for Llama's
    model = tiny_gguf(architecture, kind)
    assert exported(model, tmp_path, weights=weights)["row_exact"]
    assert logits_error(model, tmp_path / "out") < 0.06  # of activations, 8 bits in every product
    manifest = Bundle(tmp_path / "out").manifest
    assert manifest.weights == weights
    assert manifest.operators == ("edgespec" if weights == "exact" else "standard")


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_imported(tmp_path: Path, kind: str, weights: str) -> None:
    model = tiny_gguf("llama", kind)
    report = exported(model, tmp_path, weights=weights)
    assert {loss["source"] for loss in report["weights"]} >= {kind}
    kept = weights == "exact" and kind not in ("F32", "F16", "BF16")
    assert all(loss["relative_error"] < (1e-6 if kept else 1e-2) for loss in report["weights"])
    formats = {(loss["source"], loss["format"]) for loss in report["weights"]}
    assert not kept or all(WITHIN.get(source, source) == form for source, form in formats)
    assert logits_error(model, tmp_path / "out") < 0.06


def test_the_report_and_the_manifest(tmp_path: Path) -> None:
    model, out = tiny_gguf("llama", "Q8_0"), tmp_path / "out"
    source = model.write(tmp_path / "m.gguf")
    report = export_model(source, out, options=ExportOptions(role="drafter"))
    manifest, weights = Bundle(out).manifest, reference_weights(model)
    assert json.loads((out / REPORT).read_text(encoding="utf-8")) == report == Bundle(out).report()
    assert report["parity"] is None  # no reference is stored for a random model
    assert report["bytes"]["source"] == source.stat().st_size
    assert 0 < report["bytes"]["bundle"] <= sum(file.stat().st_size for file in out.iterdir())
    assert report["seconds"] > 0 and report["peak_memory_bytes"] > 1 << 20
    assert (manifest.role, manifest.weights, manifest.name) == ("drafter", "exact", "m")
    mlp = weights["layers.0.gate_up"].size + weights["layers.0.down"].size
    expected = {"lm_head": weights["lm_head"].size, "embedding": weights["embed"].size, "mlp": 2 * mlp}
    assert {name: manifest.parameters_by_class[name] for name in expected} == expected
    rows, columns = weights["lm_head"].shape
    assert manifest.bytes_by_class["lm_head"] == -(-rows // 16) * 16 * columns * 34 // 32  # 32 codes, a scale


def test_what_has_a_reference_is_compared_text_by_text(source: Path, monkeypatch: Patch) -> None:
    seen, out = list[Progress](), source.with_name("out")
    export_model(source, out, progress=seen.append)
    last = {step.stage: step for step in seen}
    assert list(last) == ["Reading", "Exporting", "Checking"]
    assert all(step.done == step.total for step in last.values())
    session = open_cpu(Bundle(out))
    logits = session.predict(TOKENS).logits.astype(np.float64)
    session.close()
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :4].astype(np.int32)
    top = np.take_along_axis(logprobs, ids, 1).astype(np.float32)
    golden = Golden("m", ("en", "code"), (tuple(TOKENS),) * 2, (ids,) * 2, (top,) * 2)
    monkeypatch.setattr("edgespec_export.graph_bundle.find_golden", lambda digest: golden)
    seen.clear()
    report = export_model(source, source.with_name("again"), progress=seen.append)
    assert report["parity"]["positions"] == 2 * len(TOKENS)
    assert report["parity"]["top1_agreement"] == 1.0
    assert report["parity"]["kl"] == pytest.approx(0.0, abs=1e-4)
    checked = [step.done for step in seen if step.stage == "Checking" and step.total == 2]
    assert checked == [0, 1]


@pytest.mark.parametrize("kept", [{}, {"role": "drafter", "trim": 300}], ids=["all", "trimmed"])
def test_a_matrix_that_is_written_in_parts_is_the_same(source: Path, monkeypatch: Patch, kept: Any) -> None:
    digests, out = set[str](), source.with_name("out")
    for weights in (1 << 20, 1, 3000):
        monkeypatch.setattr(writer, "_CHUNK_WEIGHTS", weights)
        export_model(source, out, options=ExportOptions(name="m", overwrite=True, **kept))
        digests.add(Bundle(out).digest)
    assert len(digests) == 1


def test_the_context_comes_from_the_file(source: Path) -> None:
    export_model(source, source.with_name("out"))
    session = open_cpu(Bundle(source.with_name("out")))
    session.reserve(CONTEXT)
    with pytest.raises(RequestError, match="640"):
        session.reserve(CONTEXT + 1)
    session.close()


def test_an_existing_directory_is_refused_then_replaced(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    export_model(source, out, options=ExportOptions(name="first"))
    with pytest.raises(RequestError, match="exists"):
        export_model(source, out)
    export_model(source, out, options=ExportOptions(name="second", overwrite=True))
    assert Bundle(out).manifest.name == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_what_is_no_bundle_or_holds_its_source_is_never_overwritten(tmp_path: Path, source: Path) -> None:
    photos, out = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    (photos / "holiday.jpg").write_bytes(b"dear")
    for target in (photos, photos / "holiday.jpg"):
        with pytest.raises(RequestError, match="not a bundle"):
            export_model(source, target, options=ExportOptions(overwrite=True))
    assert (photos / "holiday.jpg").read_bytes() == b"dear"
    export_model(source, out)
    source = source.rename(out / "m.gguf")
    with pytest.raises(RequestError, match=r"m\.gguf"):
        export_model(source, out, options=ExportOptions(overwrite=True))
    assert source.is_file()


@pytest.mark.parametrize(
    "option",
    ["alignment", "target", "chat_template", "mmproj", "adapters", "calibration", "calibrate_with"],
)
def test_a_bundle_that_holds_another_file_to_read_is_not_overwritten(
    tmp_path: Path, source: Path, option: str
) -> None:
    held = tmp_path / "out" / "held"
    held.parent.mkdir()
    for file in (held, held.with_name(MANIFEST)):
        file.write_bytes(b"dear")
    given: Any = {"adapters": (f"{held}=0.5",)} if option == "adapters" else {option: held}
    given |= {option: (held,)} if option.startswith("calibrat") else {}
    given |= {"role": "drafter"} if option in ("alignment", "target") else {}
    with pytest.raises(RequestError, match="out holds held, which the export reads"):
        export_model(source, held.parent, options=ExportOptions(overwrite=True, **given))
    assert held.read_bytes() == b"dear"


@pytest.mark.parametrize("out", [".", ".."])
def test_a_place_without_a_name_of_its_own_is_refused(
    tmp_path: Path, source: Path, monkeypatch: Patch, out: str
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    with pytest.raises(RequestError, match=rf"^{re.escape(out)} does not name a new directory"):
        export_model(source, Path(out), options=ExportOptions(overwrite=True))
    assert [path.name for path in (tmp_path / "a").rglob("*")] == ["b"]


def test_a_failed_replacement_keeps_the_old_bundle(source: Path, monkeypatch: Patch) -> None:
    out = source.with_name("out")
    export_model(source, out, options=ExportOptions(name="first"))
    replace = Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        if target == out and not path.name.endswith("-old"):
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_model(source, out, options=ExportOptions(overwrite=True))
    assert Bundle(out).manifest.name == "first"
    assert sorted(path.name for path in out.parent.iterdir()) == ["m.gguf", "out"]


@pytest.mark.parametrize("name", ["out", "out [1]"])
def test_leftovers_of_dead_processes_go_only(tmp_path: Path, source: Path, name: str) -> None:
    prefix = f".{name}.partial-"
    dead = tmp_path / f"{own_name(prefix, NEVER_A_PROCESS)}x"
    live = tmp_path / f"{own_name(prefix)}x"
    for folder in (dead, live):
        folder.mkdir()
        (folder / "model.onnx.data").write_bytes(b"half")
    export_model(source, tmp_path / name)
    assert live.exists() and not dead.exists()


def test_a_bundle_that_a_killed_export_was_replacing_comes_back(tmp_path: Path, source: Path) -> None:
    export_model(source, tmp_path / "out", options=ExportOptions(name="first"))
    (tmp_path / "out").rename(tmp_path / f"{own_name('.out.partial-', NEVER_A_PROCESS)}x-old")
    (tmp_path / "wrong.gguf").write_bytes(b"nothing")
    with pytest.raises(ModelFileError):
        export_model(tmp_path / "wrong.gguf", tmp_path / "out", options=ExportOptions(overwrite=True))
    assert Bundle(tmp_path / "out").manifest.name == "first"


def test_what_is_being_made_names_its_process_and_is_gone_at_last(source: Path, monkeypatch: Patch) -> None:
    """By that name :func:`leftovers` tells what a program that was killed has left."""
    seen = list[list[str]]()

    def look(folder: Path, out: Path) -> None:
        assert folder.name.startswith(own_name(".out.partial-"))
        move(folder, out)
        seen.append(sorted(path.name for path in out.parent.iterdir()))

    monkeypatch.setattr(staging, "move", look)
    export_model(source, source.with_name("out"))
    assert seen == [["m.gguf", "out"]]


def test_wrong_requests_are_refused() -> None:
    for wrong, said in (("weights", r"allowed: .*'exact', 'portable'"), ("role", "drafter")):
        with pytest.raises(RequestError, match=said):
            ExportOptions(**{wrong: "tiny"})  # type: ignore[arg-type]
