"""Gemma 2 and 4 from file to text: what is left out, what is refused, rollback, and drafts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgespec
from edgespec import LoadOptions
from edgespec.answering.answer_reading import AnswerReader
from edgespec.answering.call_reading import CallReader
from edgespec.asking.tool_calls import Calls, format_of
from edgespec.decoding.grammar import Grammars
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_export.sources.gguf_checkpoint import GGUFCheckpoint
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.transformer import FULL, SLIDING
from edgespec_models.errors import ModelFileError, RequestError, UnsupportedModelError
from edgespec_models.families import read_config
from edgespec_models.families.gemma2 import Gemma2
from edgespec_models.files.facts import Facts
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.thoughts import Tags, ThoughtState, state_behind, tags_of
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Rows
from tests.kit.gguf import F32
from tests.kit.gguf_cases import gguf_of
from tests.kit.heads import Head
from tests.kit.hf import (
    VOCAB,
    config_of,
    weights,
    write_checkpoint,
    write_safetensors,
    write_with_tower,
)
from tests.kit.states import check_rows
from tests.kit.tokenizers import byte_level_json

CASES = ("gemma4", "gemma4_tied", "gemma4_moe")
MULTIPLIED = ("attention", "mlp", "lm_head")


@pytest.fixture(scope="module", params=[*CASES, "gemma2"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    export_model(gguf_of(request.param, "Q8_0").write(folder / "m.gguf"), folder / "bundle")
    return folder / "bundle"


# ---- Files -------------------------------------------------------------------------------------------------


def test_what_sees_and_hears_is_left_out_and_keys_that_nothing_reads(tmp_path: Path) -> None:
    text = config_of("gemma4")
    outer = {"model_type": "gemma4", "text_config": text, "vision_config": {}, "audio_config": None}
    unread = {
        f"model.language_model.layers.4.self_attn.{kind}.weight" for kind in ("k_proj", "v_proj", "k_norm")
    }
    unread |= {"model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight", "model.embed_audio.weight"}
    with (
        HFCheckpoint(write_checkpoint(tmp_path / "alone", text)) as expected,
        HFCheckpoint(write_with_tower(tmp_path / "whole", text, outer, unread)) as opened,
    ):
        assert opened.config == expected.config and opened.tensors.keys() == expected.tensors.keys()


def test_layers_are_as_transformers_writes_them_too() -> None:
    """With a section for each layer that sees all, in place of ``global_head_dim``."""
    for case in CASES:
        plain = config_of(case)
        own = {"head_dim": plain["global_head_dim"]}
        if "num_global_key_value_heads" in plain:
            own["num_key_value_heads"] = plain["num_global_key_value_heads"]
        written = {
            **plain,
            "per_layer_config": {str(n): own for n in range(2, plain["num_hidden_layers"], 3)},
        }
        del written["global_head_dim"]
        written.pop("num_global_key_value_heads", None)
        assert read_config(Facts(written, "c")) == read_config(Facts(plain, "c"))


def test_a_files_layers_are_those_of_a_directory(tmp_path: Path) -> None:
    for case in CASES:
        with (
            GGUFCheckpoint(gguf_of(case).write(tmp_path / "m.gguf")) as file,
            HFCheckpoint(write_checkpoint(tmp_path / case, config_of(case))) as directory,
        ):
            epsilon = directory.config.norm_epsilon
            assert file.config.norm_epsilon == pytest.approx(epsilon)
            assert replace(file.config, norm_epsilon=epsilon) == directory.config
            assert file.tensors.keys() == directory.tensors.keys()


def test_experts_are_the_same_in_every_form(tmp_path: Path) -> None:
    """Gates and what they multiply in one tensor or in two, and in a directory one tensor for each expert."""
    tensors, model = weights(config_of("gemma4_moe")), gguf_of("gemma4_moe")
    for layer in range(3):
        kind, both = model.tensors.pop(f"blk.{layer}.ffn_gate_up_exps.weight")
        for part, rows in zip(("gate", "up"), np.split(both, 2, axis=1), strict=True):
            model.tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = kind, np.ascontiguousarray(rows)
        prefix = f"model.layers.{layer}.experts"
        down, both = tensors.pop(f"{prefix}.down_proj"), tensors.pop(f"{prefix}.gate_up_proj")
        for part, matrices in (("gate", both[:, :32]), ("up", both[:, 32:]), ("down", down)):
            tensors |= {f"{prefix}.{n}.{part}_proj.weight": matrix for n, matrix in enumerate(matrices)}
    apart = write_checkpoint(tmp_path / "apart", config_of("gemma4_moe"))
    write_safetensors(apart / "model.safetensors", tensors)
    forms: list[Checkpoint] = [
        HFCheckpoint(write_checkpoint(tmp_path / "fused", config_of("gemma4_moe"))),
        HFCheckpoint(apart),
        GGUFCheckpoint(gguf_of("gemma4_moe").write(tmp_path / "fused.gguf")),
        GGUFCheckpoint(model.write(tmp_path / "apart.gguf")),
    ]
    values = [{name: form.values(name) for name in form.tensors} for form in forms]
    for other in values[1:]:
        assert other.keys() == values[0].keys()
        for name, wanted in values[0].items():
            np.testing.assert_array_equal(other[name], wanted, name)
    for form in forms:
        form.close()


def test_the_first_files_of_gemma_2_do_not_state_its_caps_and_window(tmp_path: Path) -> None:
    model = gguf_of("gemma2")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"):
        del model.metadata[f"gemma2.{key}"]
    with GGUFCheckpoint(model.write(tmp_path / "m.gguf")) as file:
        config = file.config
    assert isinstance(config, Gemma2)
    assert (config.attention_cap, config.logit_cap, config.sliding_window) == (50.0, 30.0, 4096)
    assert config.layer_types == (SLIDING, FULL) * 2
    largest = Facts({**config_of("gemma2"), "num_hidden_layers": 46, "query_pre_attn_scalar": 16}, "c")
    model.metadata["gemma2.block_count"] = 46  # of which 27B's products are scaled by another width
    with pytest.raises(ModelFileError, match=r"lacks a tensor for layers\.4"):
        GGUFCheckpoint(model.write(tmp_path / "27b.gguf"))
    assert read_config(largest).attention_scale == 0.25


def test_a_cap_of_gemma_2_that_is_null_is_none() -> None:
    facts = config_of("gemma2") | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    for left_out, caps in (set[str](), (None, None)), ({"attn_logit_softcapping"}, (50.0, None)):
        stated = {key: value for key, value in facts.items() if key not in left_out}
        config = read_config(Facts(stated, "config.json"))
        assert isinstance(config, Gemma2) and (config.attention_cap, config.logit_cap) == caps


def test_values_that_some_layers_lack_are_named(tmp_path: Path) -> None:
    model = gguf_of("gemma4_tied")
    model.tensors["blk.2.attn_v.weight"] = model.tensors["blk.2.attn_k.weight"]
    with pytest.raises(ModelFileError, match="has values in some layers and none in others"):
        export_model(model.write(tmp_path / "m.gguf"), tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "only layers that see the whole context may differ"),
        ({"per_layer_config": {"2": {"head_dim": 32}}}, "has 1 layers, and 2 layers see"),
        (
            {"per_layer_config": {"2": {"head_dim": 32}, "5": {"head_dim": 64}}},
            "'head_dim': 64.*those before it .*'head_dim': 32",
        ),
        ({"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input is 300"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"enable_moe_block": True, "num_experts": 8}, "lacks 'top_k_experts'"),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3}, "uses 3 experts; there are 2"),
        ({"enable_moe_block": True, "top_k_experts": 3}, "count is 0"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    ],
)
def test_directories_that_contradict_themselves(changed: dict[str, Any], words: str) -> None:
    with pytest.raises((ModelFileError, UnsupportedModelError), match=words):
        read_config(Facts({**config_of("gemma4"), **changed}, "c"))


def test_tables_are_no_part_of_a_pass(tmp_path: Path) -> None:
    """Of the inputs of layers a pass reads a row a token; the embedding is the LM head."""
    export_model(gguf_of("gemma4", "Q8_0").write(tmp_path / "m.gguf"), tmp_path / "out")
    manifest = Bundle(tmp_path / "out").manifest
    assert manifest.parameters_by_class["embedding"] == VOCAB * 64 + VOCAB * 6 * 32
    blocks = VOCAB * 6 * 32 // 32 * 34
    assert manifest.bytes_by_class["embedding"] == blocks
    assert manifest.bytes_per_pass == sum(manifest.bytes_by_class[kind] for kind in MULTIPLIED)
    kept = [(tensor.input, tensor.shape) for tensor in manifest.kept]
    shapes = [(2, 16), (2, 16), (2, 32)]
    assert kept == [
        (f"past_key_values.{n}.{which}", shapes[n]) for n in range(3) for which in ("key", "value")
    ]


# ---- Sequences ---------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_rows_have_the_bits_of_one_plain_run(bundle: Path, data: st.DataObject) -> None:
    """Drafts, of which some stay, of several sequences in common passes. Not all rows have logits."""
    reference = open_cpu(Bundle(bundle))

    def rows_of(text: list[int]) -> F32:
        reference.rewind(0)
        return reference.predict(text).logits.copy()

    check_rows(data, reference.model, rows_of, place_behind=lambda length: length)
    reference.close()


@pytest.mark.parametrize(("layers", "late"), [((1, 2), False), ((3, 6), True), ((6,), True)])
def test_layers_without_keys_compute_rows_with_logits_alone(
    tmp_path: Path, layers: tuple[int, ...], late: bool
) -> None:
    """So their streams have no others, which is what an assistant reads, and a vector is made of."""
    export_model(gguf_of("gemma4", "Q8_0").write(tmp_path / "m.gguf"), tmp_path / "out")
    session = open_cpu(Bundle(tmp_path / "out"), read_layers=layers)
    text = [*range(3, 43)]
    whole = session.predict(text)
    assert whole.hidden is not None and whole.hidden.shape == (40, 64 * len(layers))
    for wanted in (0, 1, 7):
        session.rewind(0)
        (found,) = session.model.predict_together([Rows(session, text, wanted)])
        np.testing.assert_array_equal(found.hidden, whole.hidden[40 - wanted if late else 0 :])
    session.close()


def test_a_head_cannot_read_layers_of_both_kinds(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "target", config_of("gemma4"))
    (source / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
    head = Head.random(eagle_aux_hidden_state_layer_ids=[1, 2, 3]).write(tmp_path / "head")
    export_model(source, tmp_path / "out")
    export_model(head, tmp_path / "drafter", options=ExportOptions(role="drafter", target=source))
    with pytest.raises(RequestError, match=r"reads layers 1, 2, 3 .* from layer 3 on"):
        edgespec.load(tmp_path / "out", tmp_path / "drafter")


# ---- Text --------------------------------------------------------------------------------------------------


def test_a_gemma_4_drafts_for_another_model(bundle: Path, tmp_path: Path) -> None:
    """With all tokens, and with some, beside those that its embedding offers."""
    source = gguf_of("gemma4", "Q8_0").write(tmp_path / "m.gguf")
    for trim in ("full", 280):
        options = ExportOptions(role="drafter", trim=trim)
        export_model(source, tmp_path / f"drafter-{trim}", options=options)
    answers = []
    for drafter in (None, tmp_path / "drafter-full", tmp_path / "drafter-280"):
        with edgespec.load(bundle, drafter, options=LoadOptions(threads=1)) as model:
            answers.append(model.generate("one two three", max_new_tokens=30, stop_at_eos=False))
    assert answers[0].text == answers[1].text == answers[2].text


# ---- Thoughts and calls ------------------------------------------------------------------------------------

MARKS = "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'
TEMPLATE = """{% for m in messages %}<|turn>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}{{ tools }}
{%- endfor %}<turn|>
{% endfor %}<|turn>model
{% if not enable_thinking | default(false) %}{{ '<|channel>thought\n<channel|>' }}{% endif %}"""


def vocabulary(*, are_controls: bool) -> Tokenizer:
    """As directories have the marks, or as GGUF files have those that readers need."""
    spec = json.loads(byte_level_json(specials=MARKS))
    for token in spec["added_tokens"]:
        if token["content"] in MARKS[2:]:
            token["special"] = are_controls
    return Tokenizer.from_json(json.dumps(spec))


@pytest.mark.parametrize("are_controls", [True, False])
def test_thoughts_and_calls_are_told_from_text(are_controls: bool) -> None:
    tokenizer, chat = vocabulary(are_controls=are_controls), ChatTemplate(TEMPLATE)
    tags = tags_of(chat, tokenizer)
    assert tags == Tags("<|channel>thought", "<channel|>", switch="enable_thinking")
    stages = []
    for thinks in (False, True):
        prompt = chat.encode([{"role": "user", "content": "Hi"}], tokenizer, {"enable_thinking": thinks})
        stages.append(state_behind(prompt, tags, tokenizer).stage)
    assert stages == ["text", "before"]
    answer = (
        '<|channel>thought\nOne, <b>.\n<channel|>I call.<|tool_call>call:do{a:<|"|>x, {<|"|>,b:1}<tool_call|>'
    )
    form = format_of(TEMPLATE)
    assert form is not None and form.name == "gemma4"
    for text, thoughts, called in (
        (answer, "One, <b>.", [("do", {"a": "x, {", "b": 1})]),
        ("I say.", "", []),
    ):
        tokens = tokenizer.encode(text, special=True)
        for size in (1, 3, len(tokens)):
            reader = AnswerReader(tokenizer, ThoughtState(tags), CallReader(form, {"do": {}}, [1]))
            records = [reader.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
            records.append(reader.push([], final=True))
            assert "".join(reader.thoughts) == thoughts
            assert "".join(record.content for record in records) == ("I call." if called else "I say.")
            assert [(call.name, call.arguments) for call in reader.called] == called


@pytest.mark.parametrize("are_controls", [True, False])
def test_a_forced_call_is_written_with_the_marks(are_controls: bool) -> None:
    tokenizer, form = vocabulary(are_controls=are_controls), format_of(TEMPLATE)
    assert form is not None
    properties = {"b": {"type": "integer", "maximum": 3}, "A": {"type": "string"}, "c": {"type": "array"}}
    schema = {"type": "object", "properties": properties, "required": ["A"]}
    tools = [{"type": "function", "function": {"name": "do", "parameters": schema}}]
    grammars = Grammars(tokenizer, tokenizer.encode("<turn|>", special=True))

    def follows(inner: str) -> bool:
        constraint, tokens = grammars.constraint(Calls(form, tools, tokenizer)), list[int]()
        constraint.begin([])
        for token in tokenizer.encode(f"<|tool_call>call:do{{{inner}}}<tool_call|>", special=True):
            if constraint.completes(tokens) or token not in constraint.allowed(tokens):
                return False
            tokens.append(token)
        return constraint.completes(tokens)

    right = ('A:<|"|>"x} <|"|>', 'A:<|"|><|"|>,b:3', 'A:<|"|>x<|"|>,b:-1,c:[1,{k:<|"|>v<|"|>},null]')
    wrong = ("", "A:x", 'A:"x"', 'A:<|"|>x<|"|>,b:4', 'b:1,A:<|"|>x<|"|>', 'A:<|"|>x<|"|>,c:{}')
    assert all(map(follows, right)) and not any(map(follows, wrong))
