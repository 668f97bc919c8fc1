"""The GGUF reader against the ``gguf`` package, which wrote the files."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from edgespec_export.sources.gguf import GGUFFile
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_models.errors import ModelFileError
from tests.gguf_for_tests import ARCHITECTURES, FORMATS, HEAD_DIM, HIDDEN, WINDOW, tiny_gguf


@pytest.mark.parametrize("kind", FORMATS)
def test_reads_what_the_gguf_package_reads(tmp_path: Path, kind: str) -> None:
    path = tiny_gguf("llama", kind).write(tmp_path / "m.gguf")
    theirs = GGUFReader(path)
    with GGUFFile(path) as ours:
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            mine = ours.tensors[tensor.name]
            assert mine.type.name == tensor.tensor_type.name
            assert list(mine.shape) == [int(dim) for dim in tensor.shape][::-1]
            assert mine.offset == tensor.data_offset
            assert mine.n_bytes == tensor.n_bytes
            assert mine.read().tobytes() == tensor.data.tobytes()
        for key, field in theirs.fields.items():
            if not key.startswith("GGUF."):
                np.testing.assert_array_equal(np.asarray(ours.metadata[key]), np.asarray(field.contents()))


def test_every_kind_of_metadata(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_int64("i", -(2**40))
    writer.add_float64("f", 0.1)
    writer.add_bool("b", True)
    writer.add_string("s", "日本語")
    writer.add_array("texts", ["a", "", "ö"])
    writer.add_array("floats", [0.5, 2.0])
    writer.add_array("nested", [[1, 2], [3, 4]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GGUFFile(tmp_path / "m.gguf") as file:
        found = file.metadata
    assert (found["i"], found["f"], found["b"], found["s"]) == (-(2**40), 0.1, True, "日本語")
    assert found["texts"] == ["a", "", "ö"]
    np.testing.assert_array_equal(np.asarray(found["floats"]), [0.5, 2.0])
    nested = found["nested"]
    assert isinstance(nested, list)
    assert [np.asarray(inner).tolist() for inner in nested] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("alignment", [1, 32, 64, 4096])
def test_rows_are_read_wherever_they_lie(tmp_path: Path, alignment: int) -> None:
    data = np.arange(40, dtype=np.float32).reshape(10, 4)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(alignment)
    writer.add_tensor("a", data[0].copy())
    writer.add_tensor("b", data, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "m.gguf") as file:
        for start, stop in ((0, None), (3, 7), (9, None)):
            got = file.tensors["b"].read(start, stop).view(np.float32)[..., 0]
            np.testing.assert_array_equal(got, data[start:stop])


def test_an_array_that_runs_over_the_end_is_named(tmp_path: Path) -> None:
    three_integers = struct.pack("<QcIIQ", 1, b"k", 9, 4, 3)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + three_integers + bytes(8))
    with pytest.raises(ModelFileError, match="k needs 12 bytes, the file ends before that"):
        GGUFFile(tmp_path / "m.gguf")


def test_a_file_that_shrinks_while_read_is_noticed(tmp_path: Path) -> None:
    path = tiny_gguf("llama").write(tmp_path / "m.gguf")
    with GGUFFile(path) as file:
        last = max(file.tensors.values(), key=lambda tensor: tensor.offset)
        with path.open("r+b") as other:
            other.truncate(last.offset + 4)
        with pytest.raises(ModelFileError, match="changed"):
            last.read()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture_facts(tmp_path: Path, architecture: str) -> None:
    model = tiny_gguf(architecture)
    with GGUFCheckpoint(model.write(tmp_path / "m.gguf")) as checkpoint:
        config = checkpoint.config
        assert checkpoint.tied_head == (architecture != "llama")
        head = "token_embd.weight" if checkpoint.tied_head else "output.weight"
        np.testing.assert_array_equal(checkpoint.values("lm_head"), model.values(head))
    assert config.architecture == architecture
    assert (config.hidden_size, config.head_dim) == (HIDDEN, HEAD_DIM)
    assert config.rope_interleaved == (architecture == "llama")
    assert config.attention_scale == pytest.approx(HEAD_DIM**-0.5)
    gemma = architecture == "gemma3"
    assert config.sliding_window == (WINDOW if gemma else None)
    assert config.embedding_scale == pytest.approx(HIDDEN**0.5 if gemma else 1.0)
    assert [config.is_global(i) for i in range(6)] == ([False] * 5 + [True] if gemma else [True] * 6)


def test_facts_and_tensors_of_single_architectures(tmp_path: Path) -> None:
    llama, qwen, gemma = (tiny_gguf(name) for name in ("llama", "qwen2", "gemma3"))
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    llama.tensors["rope_freqs.weight"] = ("F32", factors)
    for model in (llama, gemma):  # whose defaults differ
        del model.metadata[f"{model.architecture}.rope.freq_base"]
    with GGUFCheckpoint(llama.write(tmp_path / "l.gguf")) as checkpoint:
        assert checkpoint.config.rope_factors == tuple(factors.tolist())
        assert "rope_factors" not in checkpoint.tensors and checkpoint.config.rope_theta == 1e4
    with GGUFCheckpoint(qwen.write(tmp_path / "q.gguf")) as checkpoint:
        np.testing.assert_array_equal(checkpoint.values("layers.1.k_bias"), qwen.values("blk.1.attn_k.bias"))
    with GGUFCheckpoint(gemma.write(tmp_path / "g.gguf")) as checkpoint:
        assert checkpoint.config.rope_theta == 1e6
        wanted = gemma.values("blk.5.post_ffw_norm.weight")
        np.testing.assert_array_equal(checkpoint.values("layers.5.post_mlp_norm"), wanted)
