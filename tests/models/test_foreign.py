"""Directories that other exporters wrote: what is read from them, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.external_data_helper import set_external_data
from typer.testing import CliRunner

from edgespec.cli import app
from edgespec.loading.drafters import choose
from edgespec.loading.opening import open_model
from edgespec_export.export import export_model
from edgespec_models.bundles.foreign import is_model, open_bundle
from edgespec_models.bundles.foreign_bundle import ForeignBundle
from edgespec_models.decoders.kept import types_of
from edgespec_models.errors import BundleError, EdgespecError, ModelFileError, UnsupportedModelError
from edgespec_models.files.onnx_header import Node, Tensor, read_header
from tests.kit.foreign import (
    CONTEXT,
    EOS,
    GRAPH,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    ForeignSpec,
    edit_graph,
    graph,
    write_genai,
    write_optimum,
)
from tests.kit.toy import tiny_bundle

Json = dict[str, Any]
GENAI = "genai_config.json"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
EXTERNAL = ForeignSpec(external=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_genai_directory_is_seen_as_a_bundle(tmp_path: Path) -> None:
    folder = write_genai(tmp_path / "Tiny-1", EXTERNAL)
    before = contents(folder)
    bundle = open_bundle(folder)
    manifest, config = bundle.manifest, bundle.config
    assert (manifest.name, manifest.role, types_of(manifest.kept)) == ("Tiny-1", "target", "float32")
    assert (config.vocab_size, config.num_layers, config.context_length) == (VOCAB, LAYERS, CONTEXT)
    assert {(tensor.per, tensor.shape) for tensor in manifest.kept} == {("token", (KV_HEADS, WIDTH))}
    assert manifest.kv_bytes_per_token == LAYERS * 2 * KV_HEADS * WIDTH * 4
    assert manifest.special_tokens.eos == (EOS, 0)
    assert not manifest.special_tokens.add_bos
    assert bundle.tokenizer.vocab_size == VOCAB
    assert bundle.head_tokens is None
    assert bundle.report() == {}
    layer = HIDDEN * (HEADS + 2 * KV_HEADS) * WIDTH + HEADS * WIDTH * HIDDEN + 4 * HIDDEN * HIDDEN
    assert manifest.parameters_per_pass == LAYERS * layer + HIDDEN * VOCAB
    assert manifest.bytes_per_pass == 4 * manifest.parameters_per_pass
    assert manifest.parameters_by_class["embedding"] == VOCAB * HIDDEN
    assert manifest.formats == {"float32": manifest.parameters_per_pass + VOCAB * HIDDEN}
    json.dumps(manifest.to_json())
    assert contents(folder) == before


def test_an_optimum_directory_is_seen_as_a_bundle(tmp_path: Path) -> None:
    bundle = open_bundle(write_optimum(tmp_path / "m"))
    assert bundle.graph == tmp_path / "m" / "onnx" / GRAPH
    assert (bundle.config.num_layers, bundle.config.context_length) == (LAYERS, CONTEXT)
    assert bundle.config.architecture == "gpt2"
    assert bundle.manifest.special_tokens.eos[0] == EOS
    manifest = open_bundle(write_genai(tmp_path / "half", ForeignSpec(kv="float16"))).manifest
    assert (types_of(manifest.kept), manifest.kv_bytes_per_token) == (
        "float16",
        LAYERS * 2 * KV_HEADS * WIDTH * 2,
    )


@pytest.mark.parametrize("where", ["chat_template.jinja", "one", "several"])
def test_the_chat_template_is_found(tmp_path: Path, where: str) -> None:
    folder = write_genai(tmp_path / "m")
    assert open_bundle(folder).chat_template is None
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    if where == "chat_template.jinja":
        (folder / where).write_text(TEMPLATE, encoding="utf-8")
    else:
        config = {"chat_template": TEMPLATE if where == "one" else several}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template = open_bundle(folder).chat_template
    assert template is not None and template.render([{"role": "user", "content": "hi"}]) == "hi"


def test_names_are_the_configurations(tmp_path: Path) -> None:
    names = {"input_ids": "ids", "attention_mask": "mask"}
    names |= {"past_key_names": "k.%d", "past_value_names": "v.%d"}
    folder = write_genai(tmp_path / "m", inputs=names)
    renamed = {"input_ids": "ids", "attention_mask": "mask"}
    for layer in range(LAYERS):
        for kind in ("key", "value"):
            renamed[f"past_key_values.{layer}.{kind}"] = f"{kind[0]}.{layer}"

    def rename(graph: onnx.GraphProto) -> None:
        for value in graph.input:
            value.name = renamed[value.name]
        for node in graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = renamed.get(name, name)

    edit_graph(folder / GRAPH, rename)
    bundle = open_bundle(folder)
    assert bundle.tensors.inputs == {"input_ids": "ids", "attention_mask": "mask"}
    assert bundle.manifest.kept[1].input == "v.0"


def test_the_digest_names_graph_and_weights(tmp_path: Path) -> None:
    folder = write_genai(tmp_path / "m", EXTERNAL)
    before = open_bundle(folder).digest
    assert open_bundle(folder).digest == before
    data = folder / f"{GRAPH}.data"
    data.write_bytes(data.read_bytes() + b"\0")
    assert open_bundle(folder).digest != before


def test_what_is_opened_and_what_is_exported(tmp_path: Path) -> None:
    genai, optimum = write_genai(tmp_path / "genai"), write_optimum(tmp_path / "optimum")
    own = tiny_bundle(tmp_path / "own").path
    assert all(is_model(folder) for folder in (genai, optimum, own))
    assert not is_model(tmp_path)
    for folder in (genai, optimum):
        opened = open_model(folder, "drafter")
        assert isinstance(opened, ForeignBundle)
        assert choose(opened, folder) == "ngram"
        with pytest.raises(ModelFileError, match="runs without an export"):
            export_model(folder, tmp_path / "out")
    assert not isinstance(open_bundle(own), ForeignBundle)
    (optimum / "model.safetensors").write_bytes(b"")
    assert not is_model(optimum)  # the checkpoint exports to something better
    with pytest.raises(BundleError, match="not a bundle"):
        open_bundle(tmp_path)


def test_inspect_shows_it(tmp_path: Path) -> None:
    folder = write_genai(tmp_path / "m")
    shown = CliRunner().invoke(app, ["inspect", str(folder)])
    assert shown.exit_code == 0
    assert "of another exporter" in shown.stdout
    value = json.loads(CliRunner().invoke(app, ["inspect", str(folder), "--json"]).stdout)
    assert value["manifest"]["config"]["num_layers"] == LAYERS
    with pytest.raises(BundleError, match="no digests"):
        open_bundle(folder, verify_digests=True)


def set_in(*path: str, **values: Any) -> Callable[[Json], None]:
    def edit(config: Json) -> None:
        for key in path:
            config = config.setdefault(key, {})
        config.update(values)

    return edit


DECODER = ("model", "decoder")
INPUTS = (*DECODER, "inputs")
REFUSED_CONFIGS: tuple[tuple[Callable[[Json], None], type[EdgespecError], str], ...] = (
    (set_in("model", encoder={"filename": "e.onnx"}), UnsupportedModelError, "has encoder"),
    (set_in("model", vision={"filename": "v.onnx"}), UnsupportedModelError, "has vision"),
    (set_in(*DECODER, pipeline=[{"a": {}}]), UnsupportedModelError, "pipeline"),
    (set_in(*DECODER, "sliding_window", window_size=16), UnsupportedModelError, "slides"),
    (set_in(*INPUTS, past_key_names="p_%d", past_value_names="p_%d"), UnsupportedModelError, "input p_0"),
    (set_in(*DECODER, num_hidden_layers=3), UnsupportedModelError, r"past_key_values\.2\.key"),
    (set_in(*DECODER, num_hidden_layers=0), UnsupportedModelError, "the inputs past_key"),
    (set_in(*INPUTS, past_key_names="past_key_values.0.key"), UnsupportedModelError, r"inputs .*\.1\.key"),
    (set_in(*INPUTS, past_key_names="100%"), UnsupportedModelError, "input 100%"),
    (set_in(*DECODER, filename="../model.onnx"), BundleError, "outside"),
    (set_in(*DECODER, filename="other.onnx"), BundleError, r"other\.onnx"),
    (set_in("model", context_length=0), UnsupportedModelError, "context"),
    (set_in("model", context_length="long"), ModelFileError, "whole number"),
    (set_in("model", eos_token_id="2"), ModelFileError, "eos_token_id"),
)


@pytest.mark.parametrize(("edit", "kind", "message"), REFUSED_CONFIGS)
def test_configurations_that_cannot_run_are_one_clear_error(
    tmp_path: Path, edit: Callable[[Json], None], kind: type[EdgespecError], message: str
) -> None:
    folder = write_genai(tmp_path / "m")
    config = json.loads((folder / GENAI).read_text(encoding="utf-8"))
    edit(config)
    (folder / GENAI).write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(kind, match=message):
        open_bundle(folder)


def test_a_window_whose_cache_stays_is_taken_and_an_encoder_refused(tmp_path: Path) -> None:
    window = {"window_size": 8, "slide_key_value_cache": False}
    open_bundle(write_genai(tmp_path / "m", sliding_window=window))
    with pytest.raises(UnsupportedModelError, match="encoder"):
        open_bundle(write_optimum(tmp_path / "n", is_encoder_decoder=True))


def add_input(name: str) -> Callable[[onnx.GraphProto], None]:
    value = helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 1])
    return lambda graph: graph.input.append(value)


def set_type(name: str, kind: int) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output):
            if value.name.startswith(name):
                value.type.tensor_type.elem_type = kind

    return edit


def set_dim(name: str, dim: int, value: int | str) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        for tensor in (*graph.input, *graph.output):
            if tensor.name.startswith(name):
                where = tensor.type.tensor_type.shape.dim[dim]
                where.Clear()
                if isinstance(value, int):
                    where.dim_value = value
                else:
                    where.dim_param = value

    return edit


def branch(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("If", ["attention_mask"], ["either"]))


def forget_cache(graph: onnx.GraphProto) -> None:
    kept = [value for value in graph.input if not value.name.startswith("past")]
    del graph.input[:]
    graph.input.extend(kept)


REFUSED_GRAPHS = {
    r"the inputs past_conv\.0": add_input("past_conv.0"),
    "the inputs encoder_hidden_states": add_input("encoder_hidden_states"),
    "must be float32 or float16 or int8": set_type("past", TensorProto.BFLOAT16),
    "several types": set_type("past_key_values.1", TensorProto.FLOAT16),
    "logits is bfloat16": set_type("logits", TensorProto.BFLOAT16),
    "input_ids is float32": set_type("input_ids", TensorProto.FLOAT),
    "any number of tokens": set_dim("input_ids", 1, 64),
    "exactly 128": set_dim("past", 2, 128),
    "heads and head size fixed": set_dim("past", 1, "heads"),
    "prune_lm_head": set_dim("logits", 1, 1),
    "the graph branches": branch,
    "no KV cache": forget_cache,
}


@pytest.mark.parametrize("message", REFUSED_GRAPHS)
def test_graphs_that_cannot_run_are_one_clear_error(tmp_path: Path, message: str) -> None:
    folder = write_optimum(tmp_path / "m") if "no" in message[:2] else write_genai(tmp_path / "m")
    edit_graph(open_bundle(folder).graph, REFUSED_GRAPHS[message])
    with pytest.raises(UnsupportedModelError, match=message):
        open_bundle(folder)


@pytest.mark.parametrize("missing", [f"{GRAPH}.data", GRAPH, "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = write_genai(tmp_path / "m", EXTERNAL)
    (folder / missing).unlink()
    with pytest.raises(EdgespecError, match=missing):
        open_bundle(folder)


def test_the_header_is_what_onnx_reads(tmp_path: Path) -> None:
    model = graph(ForeignSpec(positions=True))
    onnx.save(model, str(tmp_path / GRAPH))
    header = read_header(tmp_path / GRAPH)
    assert list(header.inputs) == [value.name for value in model.graph.input]
    assert list(header.outputs) == [value.name for value in model.graph.output]
    assert [node.op_type for node in header.nodes] == [node.op_type for node in model.graph.node]
    sizes = {tensor.name: (tuple(tensor.dims), len(tensor.raw_data)) for tensor in model.graph.initializer}
    assert {name: (weight.dims, weight.size_bytes) for name, weight in header.weights.items()} == sizes


@pytest.mark.parametrize("kind", ["Cast", "GatherBlockQuantized"])
def test_operators_that_make_no_sense_count_as_others(tmp_path: Path, kind: str) -> None:
    facts: dict[str, Any] = {} if kind == "Cast" else {"bits": 0, "block_size": 32}

    def add_node(graph: onnx.GraphProto) -> None:
        graph.initializer.append(helper.make_tensor("w", TensorProto.UINT8, [2, 2], bytes(4), raw=True))
        graph.node.append(helper.make_node(kind, ["w"], ["new"] if facts else [], **facts))

    folder = write_genai(tmp_path / "m")
    before = open_bundle(folder).manifest.bytes_by_class
    edit_graph(folder / GRAPH, add_node)
    after = open_bundle(folder).manifest.bytes_by_class
    assert sum(after.values()) == sum(before.values()) + 4


def test_weights_in_a_file_of_an_impossible_name(tmp_path: Path) -> None:
    folder = write_genai(tmp_path / "m", EXTERNAL)
    data = (folder / GRAPH).read_bytes()
    model = onnx.load_from_string(data)
    next(e for e in model.graph.initializer[0].external_data if e.key == "location").value = "x" * 5000
    (folder / GRAPH).write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match="xxx, which is missing"):
        open_bundle(folder)


def _weight(name: str, kind: int) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=kind, dims=[2, 6], raw_data=b"0" * 96)
    set_external_data(tensor, location="weights.data", offset=64, length=96)
    tensor.ClearField("raw_data")
    return tensor


def test_the_header_names_types_files_and_texts(tmp_path: Path) -> None:
    bits = {"INT4": 4, "UINT4": 4, "INT8": 8, "UINT8": 8, "BOOL": 8, "INT16": 16, "UINT16": 16}
    bits |= {"FLOAT16": 16, "BFLOAT16": 16, "INT32": 32, "UINT32": 32, "FLOAT": 32}
    bits |= {"INT64": 64, "UINT64": 64, "DOUBLE": 64}
    kinds = {name: TensorProto.DataType.Value(name) for name in bits}
    held = helper.make_tensor("held", TensorProto.COMPLEX64, [8], [1.0] * 8)
    taken = helper.make_tensor_value_info("taken", TensorProto.FLOAT16, ["n", None, 5])
    listed = helper.make_tensor_value_info("INT4", TensorProto.INT4, [2, 6])
    node = helper.make_node("Op", ["taken", ""], ["given"], mode="one", count=3, ratio=0.5, axes=[1, 2])
    weights = [held, *(_weight(*each) for each in kinds.items())]
    made = helper.make_graph([node], "g", [taken, listed], [], weights)
    (tmp_path / GRAPH).write_bytes(helper.make_model(made).SerializeToString())
    header = read_header(tmp_path / GRAPH)
    assert header.inputs == {"taken": Tensor("taken", "float16", ("n", "", 5))}
    assert header.nodes == [Node("Op", ("taken", ""), ("given",), {"count": 3})]
    held_there = header.weights.pop("held")
    assert held_there == Tensor("held", str(TensorProto.COMPLEX64), (8,))
    assert held_there.size_bytes == 8  # a byte each, since the type is not known here
    for name, weight in header.weights.items():
        numpy_name = helper.tensor_dtype_to_np_dtype(kinds[name]).name
        assert weight == Tensor(name, numpy_name, (2, 6), "weights.data", 64)
        assert weight.size_bytes == 12 * bits[name] // 8


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_graph_is_an_error_of_the_bundle(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    whole, at = graph(ForeignSpec()).SerializeToString(), data.draw(st.integers(0, 3000))
    changed = whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]
    damaged = data.draw(st.sampled_from([changed, whole[:at]]))
    where = tmp_path_factory.mktemp("m") / GRAPH
    where.write_bytes(damaged)
    try:
        read_header(where)
    except BundleError as error:
        assert str(where) in str(error)
