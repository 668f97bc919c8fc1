"""Keys and values of 8 bits: rows, rollback and drafts over them, their bytes, and who cannot keep them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import edgespec
from edgespec.cli import app
from edgespec_export.export import export_model
from edgespec_models.bundles.bundle import GRAPH, Bundle
from edgespec_models.decoders.kept import bytes_per_token, in_bytes, keys_and_values
from edgespec_models.decoders.record import record
from edgespec_models.errors import BundleError, RequestError
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Session
from tests.kit.drafters import same_with_drafts
from tests.kit.gguf_cases import gguf_of
from tests.kit.native import tiny_native
from tests.kit.states import check_rows, rows_in_one_pass
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import LLAMA, QWEN, tiny_bundle

KV = edgespec.LoadOptions(threads=1, parallel=2, kv="8bit")


def _opened(path: Path) -> Session:
    bundle = Bundle(path)
    bundle.keep_bytes()
    return open_cpu(bundle)


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt_oss", "qwen35"])
def sessions(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Session]]:
    """Two sequences over bytes, and one in 16 bits: with windows, with sinks, beside states."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        path = tiny_native(folder / "bundle", LLAMA).path
    else:
        path = folder / "bundle"
        export_model(gguf_of(request.param, "Q8_0").write(folder / "m.gguf"), path)
    first = _opened(path)
    opened = [first, first.model.session(), open_cpu(Bundle(path))]
    yield opened
    for session in opened:
        session.close()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_have_the_bits_of_one_plain_run(sessions: list[Session], data: st.DataObject) -> None:
    reference = sessions[1]
    check_rows(
        data, reference.model, partial(rows_in_one_pass, reference), place_behind=reference.model.places.floor
    )


def test_logits_are_near_those_over_16_bits(sessions: list[Session]) -> None:
    text = np.random.default_rng(5).integers(0, 97, 90).tolist()
    near, exact = (rows_in_one_pass(session, text) for session in sessions[1:])
    error = np.abs(near - exact).max() / exact.std()
    assert 0 < error < 0.2


def test_texts_are_those_without_drafts(tmp_path: Path) -> None:
    target = tiny_native(tmp_path / "target", LLAMA).path
    other = byte_level_json(size=330)
    bridged = tiny_native(tmp_path / "bridged", LLAMA, role="drafter", tokenizer_json=other).path
    prompts = "one two three " * 3, "one two three " * 3 + "four", "x"
    counts = same_with_drafts(target, ("ngram", bridged), prompts, opened=KV, max_new_tokens=32)
    assert counts[1][0] > 10


def test_prompts_on_disk_are_kept_apart_from_those_in_16_bits(tmp_path: Path) -> None:
    target, prompt = tiny_native(tmp_path / "target", LLAMA).path, "one two three " * 12
    for kv, cached in (("16bit", False), ("8bit", False), ("8bit", True), ("16bit", True)):
        with edgespec.load(target, None, options=replace(KV, kv=kv)) as model:
            stats = model.generate(prompt, max_new_tokens=4).stats
        assert (stats.cached_tokens > 0) == cached


def test_they_take_little_more_than_half(tmp_path: Path) -> None:
    kept, taken = record(LLAMA).kept_in("float16"), 2 * 2 * (32 + 2 + 32 + 2)
    wide = [tensor.shape for tensor in in_bytes(keys_and_values(0, 2, 128, "float16"))]
    assert wide == [(2, 128 + 8), (2, 128 + 2)]
    assert bytes_per_token(in_bytes(kept)) == taken
    target = tiny_native(tmp_path / "target", LLAMA).path
    planned = [edgespec.plan(target, "ngram", kv=kv).models[0].cache for kv in ("16bit", "8bit")]
    assert [cache.types for cache in planned] == ["float16", "int8"]
    assert planned[1].bytes_per_token == taken
    shown = CliRunner().invoke(app, ["plan", str(target), "--drafter", "none", "--kv", "8bit"])
    assert shown.exit_code == 0 and "int8" in shown.output


def test_who_cannot_keep_bytes_says_so(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="kv is '4bit'; allowed: a text out of '16bit', '8bit'"):
        edgespec.LoadOptions(kv="4bit")
    narrow = replace(LLAMA, head_dim=24, rope=replace(LLAMA.rope, width=24, pairs=12))
    with pytest.raises(BundleError, match="rows of 24 numbers, which are kept in 16 bits alone"):
        edgespec.load(tiny_native(tmp_path / "narrow", narrow).path, None, options=KV)
    with pytest.raises(BundleError, match="does not run on edgespec's kernels"):
        edgespec.load(tiny_bundle(tmp_path / "portable").path, None, options=KV)


def test_a_large_bias_of_keys_drowns_no_channel(tmp_path: Path) -> None:
    """Attention learns of it from the graph."""
    path = tiny_native(tmp_path / "bundle", QWEN).path

    bias = np.zeros((4 + 2 * 2) * 32, np.float32)
    bias[[4 * 32 + 9, 5 * 32 + 20]] = 100  # of the first head's keys, and of the second's
    for tensor in onnx.load(path / GRAPH, load_external_data=False).graph.initializer:
        if tensor.name.endswith("qkv.bias"):
            place = {entry.key: entry.value for entry in tensor.external_data}
            with (path / place["location"]).open("r+b") as file:
                file.seek(int(place["offset"]))
                file.write(bias.tobytes())
    text = np.random.default_rng(5).integers(0, 97, 90).tolist()
    near, exact = (rows_in_one_pass(session, text) for session in (_opened(path), open_cpu(Bundle(path))))
    assert np.sqrt(np.square(near - exact).mean()) / exact.std() < 0.15
