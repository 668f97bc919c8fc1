"""The GGUF reader against the ``gguf`` package, which wrote the files."""

import struct
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from edgespec_export.sources.gguf import GGUFFile
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_models.decoders.transformer import FULL, SLIDING
from edgespec_models.errors import ModelFileError
from edgespec_models.families.ministral3 import Ministral3
from tests.kit.gguf import FORMATS, tiny_gguf
from tests.kit.gguf_cases import GGUF_CASES, gguf_of
from tests.kit.hf import config_of, write_checkpoint


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
        metadata = file.metadata
    assert (metadata["i"], metadata["f"], metadata["b"], metadata["s"]) == (-(2**40), 0.1, True, "日本語")
    assert metadata["texts"] == ["a", "", "ö"]
    np.testing.assert_array_equal(np.asarray(metadata["floats"]), [0.5, 2.0])
    nested = metadata["nested"]
    assert isinstance(nested, list)
    assert [np.asarray(inner).tolist() for inner in nested] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_list_of_equal_numbers_is_that_number(tmp_path: Path, case: str) -> None:
    """As llama.cpp's converter writes heads of a Granite 4 that has attention alone."""
    model = gguf_of(case)
    with GGUFCheckpoint(model.write(tmp_path / "m.gguf")) as expected:
        kind, config = model.architecture, expected.config
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        key = f"{kind}.{name}"
        if type(number := model.metadata.get(key)) is int:
            model.metadata[key] = [number] * config.num_layers
    with GGUFCheckpoint(model.write(tmp_path / "m.gguf")) as opened:
        assert opened.config == config


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


@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_file_states_what_a_directory_states(tmp_path: Path, case: str) -> None:
    directory = HFCheckpoint(write_checkpoint(tmp_path / "m", config_of(case)))
    with directory, GGUFCheckpoint(gguf_of(case).write(tmp_path / "m.gguf")) as file:
        assert file.tied_head == directory.tied_head and file.logits_factor == directory.logits_factor
        assert file.tensors.keys() == directory.tensors.keys()
        stated = asdict(file.config)
        expected = asdict(directory.config)
        if expected.get("delta"):
            assert stated["delta"].pop("tiled") is True and expected["delta"].pop("tiled") is False
        for facts, others in ((stated, expected), (stated["rope"], expected["rope"])):
            for key, value in others.items():
                if key not in ("architecture", "interleaved", "rope"):
                    numbers = isinstance(value, float) or (isinstance(value, tuple) and key != "layer_types")
                    assert facts[key] == (pytest.approx(value, rel=1e-6) if numbers else value), key


def test_the_base_of_rotations_that_no_key_states(tmp_path: Path) -> None:
    for name, theta in (("llama", 1e4), ("gemma3", 1e6)):
        model = tiny_gguf(name)
        del model.metadata[f"{name}.rope.freq_base"]
        with GGUFCheckpoint(model.write(tmp_path / "m.gguf")) as checkpoint:
            assert checkpoint.config.rope.theta == theta


def test_graphs_that_know_no_positions_end_where_queries_grow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with GGUFCheckpoint(gguf_of("ministral3").write(tmp_path / "m.gguf")) as checkpoint:
        config = checkpoint.config
        assert isinstance(config, Ministral3)
        assert (config.context_length, config.query_step) == (96, 48)
        assert config.query_growth == pytest.approx(0.1)
        checkpoint.shorten_context()
        assert checkpoint.config == replace(config, context_length=48, query_step=0, query_growth=0.0)
    assert "m.gguf: exported for 48 tokens" in caplog.text and "up to 96" in caplog.text


def test_a_granite_may_rotate_nothing(tmp_path: Path) -> None:
    model = gguf_of("granite")
    model.metadata["granite.rope.scaling.finetuned"] = False
    with GGUFCheckpoint(model.write(tmp_path / "m.gguf")) as checkpoint:
        assert checkpoint.config.unrotated_layers == (0, 1)


@pytest.mark.parametrize(
    ("pattern", "types", "window"),
    [(0, (SLIDING,) * 6, 6), (1, (), None), (3, (SLIDING, SLIDING, FULL) * 2, 6)],
)
def test_which_layers_have_windows(
    tmp_path: Path, pattern: int, types: tuple[str, ...], window: int | None
) -> None:
    model = tiny_gguf("gemma3")
    model.metadata["gemma3.attention.sliding_window_pattern"] = pattern
    with GGUFCheckpoint(model.write(tmp_path / "m.gguf")) as checkpoint:
        config = checkpoint.config
    assert (config.layer_types, config.sliding_window) == (types, window)
