"""Alignment without PyTorch: its file, a checkpoint with it, exports, and the answers it is made of."""

import errno
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from edgespec.cli import app
from edgespec.loading import first_use
from edgespec.loading.opening import open_model
from edgespec_export.align.alignment import Alignment, Codes, Origin, open_aligned, read_alignment
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.recipe import RECIPES
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.stored_weights import stored_vector
from edgespec_models.downloads import catalog
from edgespec_models.downloads.catalog import CatalogueAlignment, entries, find
from edgespec_models.errors import ModelFileError, RequestError, StorageError
from edgespec_models.files.blocks import F32, Blocks, unpack
from edgespec_models.files.tensors import GGMLType
from edgespec_models.progress import ignore_progress
from tests.kit.gguf import FORMATS, HEAD_DIM, HEADS, HIDDEN, tiny_gguf
from tests.kit.stored import stored_matrix

ORIGIN = Origin("drafter", "0" * 64, "target", 1234, 0.5, 0.625, {"rank": "2"}, "Apache-2.0")


def _codes(rng: np.random.Generator, rows: int, columns: int, size: float = 0.3) -> Codes:
    return Codes.of(rng.normal(0.0, size, (rows, columns)).astype(np.float32))


def _alignment(source: Path, seed: int = 0, size: float = 0.3) -> Alignment:
    """Of two projections and a gain."""
    rng = np.random.default_rng(seed)
    with open_checkpoint(source) as checkpoint:
        digest = checkpoint.digest(ignore_progress)
    parts = {
        "layers.0.q.lora_b": _codes(rng, 2, HEADS * HEAD_DIM),
        "layers.0.q.lora_a": _codes(rng, 2, HIDDEN),
        "layers.1.down.lora_b": _codes(rng, 2, HIDDEN, size / 8),
        "layers.1.down.lora_a": _codes(rng, 2, HIDDEN),
        "final_norm": _codes(rng, 1, HIDDEN),
    }
    return Alignment(replace(ORIGIN, source_sha256=digest), parts)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_gguf("llama", "F16").write(tmp_path / "m.gguf")


@pytest.fixture
def file(tmp_path: Path, source: Path) -> Path:
    _alignment(source).write(tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_a_file_holds_what_was_written(tmp_path: Path, source: Path) -> None:
    written = _alignment(source)
    size = written.write(tmp_path / "a.safetensors")
    assert size == (tmp_path / "a.safetensors").stat().st_size < 90_000  # a byte a number
    result = read_alignment(tmp_path / "a.safetensors")
    assert (result.origin, result.digest, result.tensors) == (written.origin, written.digest, written.tensors)
    for name, part in written.parts.items():
        np.testing.assert_array_equal(result.parts[name].values(), part.values())
    assert result.digest != _alignment(source, seed=1).digest
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_eight_bits_lose_less_than_a_hundredth() -> None:
    values = np.random.default_rng(0).normal(0.0, 1.0, (8, 576)).astype(np.float32)
    values[3] = 0.0
    result = Codes.of(values).values()
    assert np.linalg.norm(result - values) < 0.01 * np.linalg.norm(values) and not result[3].any()


def _edited(file: Path, edit: Any) -> Path:
    """The file with another header; ``edit`` changes header and metadata in place."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    facts = json.loads(header["__metadata__"]["edgespec_alignment"])
    edit(header, facts)
    if isinstance(header.get("__metadata__"), dict):
        header["__metadata__"] = {"edgespec_alignment": json.dumps(facts)}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return file


LORA_B = "layers.0.q.lora_b"
DAMAGES = {
    "of another version": lambda header, facts: facts.update(version=2),
    "a digest that is none": lambda header, facts: facts.update(source_sha256="x"),
    "a share above one": lambda header, facts: facts.update(right_after=1.5),
    "an unknown fact": lambda header, facts: facts.update(code="import os"),
    "no alignment": lambda header, facts: header.pop("__metadata__"),
    "metadata of another kind": lambda header, facts: header.update(__metadata__=[1]),
    "a factor missing": lambda header, facts: header.pop(LORA_B),
    "scales missing": lambda header, facts: header.pop(f"{LORA_B}.scales"),
    "floats as codes": lambda header, facts: header[LORA_B].update(dtype="F16"),
    "a shape too large": lambda header, facts: header[LORA_B].update(shape=[2, 1 << 40]),
    "a vector as codes": lambda header, facts: header[LORA_B].update(shape=[2 * HEADS * HEAD_DIM]),
    "scales of other rows": lambda header, facts: _take(header, LORA_B, "final_norm", ".scales"),
    "ranks that differ": lambda header, facts: _take(header, "final_norm", LORA_B, "", ".scales"),
    "rows of a vector": lambda header, facts: _take(header, LORA_B, "final_norm", "", ".scales"),
}


def _take(header: Any, of: str, to: str, *ends: str) -> None:
    for end in ends:
        header[to + end] = header[of + end]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(file: Path, damage: str) -> None:
    with pytest.raises(ModelFileError):
        read_alignment(_edited(file, DAMAGES[damage]))


def test_a_file_that_is_cut_off_or_not_finite_is_refused(file: Path) -> None:
    data, alignment = file.read_bytes(), read_alignment(file)
    for end in (*range(64), len(data) // 2, len(data) - 1):
        file.write_bytes(data[:end])
        with pytest.raises(ModelFileError):
            read_alignment(file)
    alignment.parts["final_norm"].scales[:] = np.inf
    alignment.write(file)
    with pytest.raises(ModelFileError, match="finite"):
        read_alignment(file)


def test_a_full_disk_leaves_what_was_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, alignment = file.read_bytes(), read_alignment(file)

    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match="disk is full"):
        alignment.write(file)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.glob(".*")] == []


def _merged_by_hand(source: Path, alignment: Alignment, name: str) -> F32:
    with open_checkpoint(source) as checkpoint:
        values = checkpoint.values(name)
    if f"{name}.lora_b" in alignment.parts:
        b, a = (alignment.parts[f"{name}.{end}"].values() for end in ("lora_b", "lora_a"))
        product: F32 = values + np.einsum("ro,ri->oi", b, a)
        return product
    changed: F32 = values + alignment.parts[name].values().reshape(values.shape)
    return changed


def test_a_checkpoint_has_the_alignment_in_it(source: Path, file: Path) -> None:
    alignment = read_alignment(file)
    with open_aligned(source, file) as aligned, open_checkpoint(source) as plain:
        assert (aligned.config, aligned.files) == (plain.config, plain.files)
        assert aligned.tensors.keys() == plain.tensors.keys()
        for name in alignment.tensors:
            expected = _merged_by_hand(source, alignment, name)
            np.testing.assert_allclose(aligned.values(name), expected, rtol=1e-5, atol=1e-6)
            assert aligned.tensor(name).type.name == "F32"
        rows = aligned.values("layers.0.q", 5, 9)
        np.testing.assert_allclose(rows, aligned.values("layers.0.q")[5:9], rtol=1e-5, atol=1e-6)
        kind, raw = aligned.read("layers.1.down", 3, 6)
        assert (kind.name, raw.shape) == ("F32", (3, HIDDEN, 4))
        for name in plain.tensors.keys() - alignment.tensors:
            np.testing.assert_array_equal(aligned.values(name), plain.values(name))
            assert aligned.tensor(name).type == plain.tensor(name).type


SCALES = "layers.1.down.blocks"


def _written(source: Path, file: Path, part: str, rows: int) -> Alignment:
    parts = {part: _codes(np.random.default_rng(0), rows, HIDDEN)}
    Alignment(_alignment(source).origin, parts).write(file)
    return read_alignment(file)


@pytest.mark.parametrize(
    "kind", [kind for kind in FORMATS if kind not in ("F32", "F16", "BF16", "MXFP4", "NVFP4")]
)
def test_scales_of_blocks_grow_and_codes_stay(tmp_path: Path, kind: str) -> None:
    source = tiny_gguf("llama", kind).write(tmp_path / "m.gguf")
    count = HIDDEN // GGMLType[kind].block
    alignment = _written(source, tmp_path / "a.safetensors", SCALES, count * GGMLType[kind].factors)
    bundle = _export(source, tmp_path / "out", alignment=tmp_path / "a.safetensors")
    assert bundle.manifest.formats == _export(source, tmp_path / "plain").manifest.formats
    with open_checkpoint(source) as checkpoint:
        blocks = unpack(*checkpoint.read("layers.1.down"))
    assert isinstance(blocks, Blocks)
    grown = alignment.factors("layers.1.down").reshape(HIDDEN, count, -1)
    each = np.repeat(grown, blocks.scales.shape[1] // count, axis=1)
    minimums = None if blocks.minimums is None else blocks.minimums * each[..., -1]
    expected = replace(blocks, scales=blocks.scales * each[..., 0], minimums=minimums).values()
    result, size = stored_matrix(bundle, "layers.1.mlp.down"), np.linalg.norm(blocks.values())
    assert np.linalg.norm(result - blocks.values()) > 0.1 * size
    assert np.linalg.norm(result - expected) < 1e-3 * size


@pytest.mark.parametrize(
    ("kind", "part", "rows"),
    [
        *((kind, "layers.0.k", 1) for kind in ("F16", "Q4_1")),
        *(("Q4_1", name, 1) for name in ("layers.7.q", "layers.0.nothing")),
        *((kind, SCALES, n) for kind, n in (("F16", 1), ("F32", HIDDEN), ("MXFP4", 8))),
        *(("Q4_1", SCALES, n) for n in (4, 7, 9)),
    ],
)
def test_what_does_not_fit_the_drafter_is_refused(tmp_path: Path, kind: str, part: str, rows: int) -> None:
    source, file = tiny_gguf("llama", kind).write(tmp_path / "m.gguf"), tmp_path / "a.safetensors"
    _written(source, file, part, rows)
    with pytest.raises(ModelFileError, match="Make the alignment again"):
        open_aligned(source, file)
    other = tiny_gguf("llama", kind, seed=1).write(tmp_path / "other.gguf")
    with pytest.raises(ModelFileError, match=r"another checkpoint than other\.gguf: for drafter"):
        open_aligned(other, file)


def _export(source: Path, out: Path, **options: Any) -> Bundle:
    chosen = ExportOptions(role="drafter", trim="full", **options)
    export_model(source, out, options=chosen)
    return Bundle(out, verify_digests=True)


def test_an_export_merges_it_and_says_so(tmp_path: Path, source: Path, file: Path) -> None:
    plain = _export(source, tmp_path / "plain")
    aligned = _export(source, tmp_path / "aligned", alignment=file)
    alignment = read_alignment(file)
    assert aligned.digest != plain.digest
    assert aligned.manifest.provenance["alignment"] == alignment.digest
    assert aligned.manifest.provenance["sha256"] == plain.manifest.provenance["sha256"]
    assert "alignment" not in plain.manifest.provenance
    expected = _merged_by_hand(source, alignment, "layers.0.q")
    both = (stored_matrix(bundle, "layers.0.attention.qkv") for bundle in (aligned, plain))
    (result, others), (_, of_plain) = (np.split(each, [len(expected)]) for each in both)
    assert np.linalg.norm(result - expected) < 0.01 * np.linalg.norm(expected)
    assert aligned.manifest.formats == plain.manifest.formats
    np.testing.assert_array_equal(others, of_plain)
    gain = stored_vector(aligned, "final_norm.weight")
    np.testing.assert_allclose(gain, _merged_by_hand(source, alignment, "final_norm"), rtol=1e-6)


def test_what_is_added_survives_the_rounding(tmp_path: Path, source: Path) -> None:
    alignment = _alignment(source, size=0.03)
    alignment.write(tmp_path / "a.safetensors")
    bundle = _export(source, tmp_path / "out", alignment=tmp_path / "a.safetensors")
    with open_checkpoint(source) as checkpoint:
        before = checkpoint.values("layers.1.down")
    added = _merged_by_hand(source, alignment, "layers.1.down") - before
    result = stored_matrix(bundle, "layers.1.mlp.down") - before
    assert float((result * added).sum() / np.square(added).sum()) == pytest.approx(1.0, abs=0.03)


def test_inspect_and_export_show_it(tmp_path: Path, source: Path, file: Path) -> None:
    arguments = ["-o", str(tmp_path / "out"), "--trim-vocab", "full", "--alignment", str(file)]
    assert CliRunner().invoke(app, ["export", str(source), *arguments]).exit_code == 0
    assert Bundle(tmp_path / "out").manifest.role == "drafter"
    shown = " ".join(CliRunner().invoke(app, ["inspect", str(tmp_path / "out")]).stdout.split())
    assert "with target, on 1,234 tokens of answers; right first guesses 0.500 before, 0.625 after" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [({"role": "target"}, "role=target"), ({"role": "drafter", "device": "npu-qnn"}, "leave out alignment")],
)
def test_where_none_can_be_it_is_refused(
    tmp_path: Path, source: Path, file: Path, options: Any, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        export_model(source, tmp_path / "out", options=ExportOptions(alignment=file, **options))
    assert not (tmp_path / "out").exists()


def test_a_drafter_of_the_catalogue_has_its_alignment(
    tmp_path: Path, source: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    with open_checkpoint(source) as checkpoint:
        digest = checkpoint.digest(ignore_progress)
    aligned = CatalogueAlignment(file.name, hashlib.sha256(file.read_bytes()).hexdigest())
    plain = replace(find("smollm2-135m-instruct"), sha256=digest)
    known = {"plain": replace(plain, name="d"), "aligned": replace(plain, name="d", alignment=aligned)}
    monkeypatch.setattr(catalog, "_FOLDER", tmp_path)
    monkeypatch.setattr(first_use, "find", known.get)
    monkeypatch.setattr(first_use, "pull", lambda *_, **__: source)
    monkeypatch.setattr("edgespec.loading.first_use.locate", lambda *_, native: (source, known["aligned"]))
    first, second, again = (open_model(name, "drafter") for name in ("plain", "aligned", "aligned"))
    assert first.path.name == f"d-{digest[:8]}-drafter-exact-r{RECIPES[None]}"
    assert aligned.sha256[:8] in second.path.name and again.path == second.path
    assert "alignment" not in first.manifest.provenance
    assert second.manifest.provenance["alignment"] == read_alignment(file).digest
    exported = CliRunner().invoke(app, ["export", "d", "-o", str(tmp_path / "out")])
    assert exported.exit_code == 0 and Bundle(tmp_path / "out").digest == second.digest
    assert first_use.alignment_of(known["aligned"], "cuda") == file
    assert first_use.alignment_of(known["aligned"], "npu-qnn") is None


def test_alignments_of_the_catalogue_are_those_of_its_drafters() -> None:
    shipped = [(entry, entry.alignment) for entry in entries().values() if entry.alignment is not None]
    for entry, aligned in shipped:
        assert entry.role == "drafter" and aligned.path.stat().st_size <= 7_000_000
        assert hashlib.sha256(aligned.path.read_bytes()).hexdigest() == aligned.sha256
        origin = read_alignment(aligned.path).origin
        assert origin.source_sha256 == entry.sha256 and origin.licence
    files = {path for path in catalog._FOLDER.iterdir() if path.suffix != ".toml"}
    assert files == {aligned.path for _, aligned in shipped}
