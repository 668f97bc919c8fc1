"""Model files as people have them: tokens without rows, other names, several parts, and what is no model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import LoadOptions
from edgespec.loading.opening import open_model
from edgespec.loading.planning import plan
from edgespec_export.export import ExportOptions, export_model
from edgespec_export.sources.hf_checkpoint import HFCheckpoint
from edgespec_export.sources.open import open_checkpoint
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.foreign import open_bundle
from edgespec_models.downloads.hub import HubReference, pull_hub, pulled_hub
from edgespec_models.errors import EdgespecError, ModelFileError, TokenizerError
from edgespec_models.families.qwen35 import Qwen35
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.downloads import REPOSITORY, Hub
from tests.kit.foreign import write_genai, write_optimum
from tests.kit.gguf import TinyGGUF, tiny_gguf
from tests.kit.gguf_cases import gguf_of
from tests.kit.hf import VOCAB, config_of, weights, write_checkpoint, write_safetensors
from tests.kit.sentencepiece import trained
from tests.kit.tokenizers import byte_level_json, sentencepiece_json

Json = dict[str, Any]
TURNS = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)

pytestmark = pytest.mark.usefixtures("home")


def added(id_: int, content: str, *, special: bool = True) -> Json:
    return {"id": id_, "content": content, **FLAGS, "special": special}


def changed(text: str, change: Callable[[Json], object]) -> str:
    spec = json.loads(text)
    change(spec)
    return json.dumps(spec)


def with_row_behind(text: str, content: str = "<image>", *, in_vocabulary: bool = False) -> str:
    def change(spec: Json) -> None:
        spec["added_tokens"].append(added(VOCAB, content))
        if in_vocabulary:
            spec["model"]["vocab"][content] = VOCAB

    return changed(text, change)


def directory(folder: Path, tokenizer: str, config: Json | None = None, **beside: object) -> Path:
    """A tiny llama, EOS 0, with files beside it: ``tokenizer_config={...}``."""
    facts = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": -1}
    write_checkpoint(folder, config_of("llama") | facts | (config or {}))
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    for name, value in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def read(folder: Path) -> tuple[Tokenizer, tuple[int, ...]]:
    """The tokenizer of a directory, and what ends generation."""
    with HFCheckpoint(folder) as opened:
        return Tokenizer.from_json(opened.tokenizer_json(), vocab_size=VOCAB), opened.special_tokens().eos


@pytest.mark.parametrize("in_vocabulary", [False, True])
@pytest.mark.parametrize("text", [byte_level_json(size=VOCAB - 1), sentencepiece_json(size=VOCAB - 1)])
def test_an_added_token_without_a_row_is_left_out(
    tmp_path: Path, text: str, in_vocabulary: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = directory(tmp_path / "m", with_row_behind(text, in_vocabulary=in_vocabulary))
    export_model(folder, tmp_path / "out")
    tok = Bundle(tmp_path / "out").tokenizer
    assert tok.matches(Tokenizer.from_json(text))
    assert "tokens without a row in the LM head are left out: ['<image>']" in caplog.text


def test_a_directory_that_runs_as_it_is_leaves_them_out_too(tmp_path: Path) -> None:
    folder = write_genai(tmp_path / "m")
    rows = open_bundle(folder).tokenizer.vocab_size
    more = [added(at, f"<unused{at}>") for at in range(390, rows + 2)]
    where = folder / "tokenizer.json"
    where.write_text(changed(byte_level_json(), lambda spec: spec["added_tokens"].extend(more)), "utf-8")
    tok = open_bundle(folder).tokenizer
    assert tok.vocab_size == rows
    assert tok.special_id(f"<unused{rows - 1}>") is not None and tok.special_id(f"<unused{rows}>") is None


def test_a_sentencepiece_model_leaves_them_out_too(tmp_path: Path) -> None:
    folder = directory(tmp_path / "m", "", added_tokens={f"<x{at}>": at for at in range(318, VOCAB + 1)})
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(trained("unigram"))
    tok, _ = read(folder)
    ids = [tok.encode(f"<x{at}>", special=True) for at in (318, VOCAB)]
    assert len(ids[0]) < len(ids[1])


@pytest.mark.parametrize(
    "facts",
    [
        {"eos_token": "<image>"},
        {"bos_token": {"content": "<image>"}},
        {"chat_template": "{% for m in messages %}<image>{{ m.content }}{% endfor %}"},
    ],
)
def test_a_needed_token_without_a_row_is_an_error(tmp_path: Path, facts: Json) -> None:
    text = with_row_behind(byte_level_json(size=VOCAB - 1))
    folder = directory(tmp_path / "m", text, tokenizer_config=facts)
    with pytest.raises(TokenizerError, match=r"320 rows, none for '<image>'.*Use the tokenizer"):
        read(folder)


def test_an_ordinary_token_without_a_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json.*320 rows"):
        read(directory(tmp_path / "m", byte_level_json(size=VOCAB + 1)))


def test_gaps_that_are_numbered_anew_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = changed(byte_level_json(size=300), lambda spec: spec["added_tokens"].append(added(310, "<far>")))
    tok, _ = read(directory(tmp_path / "m", text))
    assert tok.special_id("<far>") == 301
    assert "numbered anew: '<far>' is 301, not 310" in caplog.text


def absent(spec: Json) -> None:
    spec["added_tokens"] = [token for token in spec["added_tokens"] if "im_" not in token["content"]]
    spec["model"]["vocab"] = {text: id_ for text, id_ in spec["model"]["vocab"].items() if "im_" not in text}


def ordinary(spec: Json) -> None:
    spec["added_tokens"] = [token for token in spec["added_tokens"] if "im_" not in token["content"]]


def not_special(spec: Json) -> None:
    spec["added_tokens"] = [token | {"special": False} for token in spec["added_tokens"]]


DECODER = {str(at): {"content": f"<|im_{what}|>", "special": True} for at, what in ((1, "start"), (2, "end"))}
NAMED = {"eos_token": "<|im_end|>", "chat_template": TURNS}
EXPECTED: dict[str, Any] = {  # what transformers 5.24 reads: EOS, and <|im_start|>a<|im_end|> in a chat
    "not special": (not_special, {"tokenizer_config": NAMED}, 2, [1, 67, 2]),
    "said beside": (
        not_special,
        {"tokenizer_config": NAMED | {"added_tokens_decoder": DECODER}},
        2,
        [1, 67, 2],
    ),
    "ordinary": (
        ordinary,
        {"tokenizer_config": NAMED},
        2,
        [30, 94, 75, 79, 65, 85, 272, 84, 86, 94, 32, 67, 2],
    ),
    "only beside": (
        absent,
        {"tokenizer_config": NAMED | {"added_tokens_decoder": DECODER}},
        300,
        [299, 67, 300],
    ),
    "in an older file": (
        absent,
        {"tokenizer_config": NAMED, "added_tokens": {"<|im_start|>": 1, "<|im_end|>": 2}},
        300,
        [299, 67, 300],
    ),
    "in the map": (
        not_special,
        {
            "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}},
            "tokenizer_config": {"chat_template": TURNS},
        },
        2,
        [1, 67, 2],
    ),
    "the map is older": (
        not_special,
        {
            "special_tokens_map": {"eos_token": "<tool>"},
            "tokenizer_config": NAMED | {"added_tokens_decoder": DECODER},
        },
        2,
        [1, 67, 2],
    ),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_eos_and_added_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    change, beside, eos, ids = EXPECTED[case]
    folder = directory(tmp_path / "m", changed(byte_level_json(size=300), change), **beside)
    tok, ends = read(folder)
    assert ends[0] == eos == tok.special_id("<|im_end|>")
    assert tok.encode("<|im_start|>a<|im_end|>", special=True) == ids
    assert not {1, 2, 299, 300}.intersection(tok.encode("<|im_start|>a<|im_end|>"))  # users forge nothing


def test_an_end_of_one_character_stays_text(tmp_path: Path) -> None:
    folder = directory(tmp_path / "m", byte_level_json(size=300), tokenizer_config={"eos_token": "!"})
    tok, ends = read(folder)
    assert ends[0] == tok.id_of_bytes(b"!") and tok.decode(tok.encode("a!")) == "a!"


@pytest.mark.parametrize("expression", [r"\p{N}{1,3}", r"\p{N}"])
def test_mistral_s_wrong_expression_is_warned_of(
    tmp_path: Path, expression: str, caplog: pytest.LogCaptureFixture
) -> None:
    def change(spec: Json) -> None:
        cut = {"type": "Split", "pattern": {"Regex": rf"\p{{L}}+|{expression}"}, "behavior": "Isolated"}
        steps = [cut | {"invert": False}, spec["pre_tokenizer"]]
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        spec["added_tokens"].append(added(301, "[INST]"))

    read(directory(tmp_path / "m", changed(byte_level_json(size=300), change)))
    assert ("known wrong regular expression of Mistral" in caplog.text) is ("{1,3}" in expression)


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    folder = directory(tmp_path / "m", byte_level_json(size=300))
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}', encoding="utf-8-sig")
    assert read(folder)[1][0] == 9


def split(folder: Path, architecture: str = "llama") -> list[Path]:
    """A tiny model in three parts, and whole."""
    model = tiny_gguf(architecture, "Q8_0", layers=2)
    model.write(folder / "whole.gguf")
    model.write(folder / "tiny.gguf", most_tensors=9)
    return sorted(folder.glob("tiny-*.gguf"))


def test_a_split_model_is_read_from_any_part(tmp_path: Path) -> None:
    parts = split(tmp_path)
    assert len(parts) == 3
    with open_checkpoint(tmp_path / "whole.gguf") as whole:
        for part in parts:
            with open_checkpoint(part) as opened:
                assert (opened.model_name, opened.files) == ("tiny", tuple(parts))
                assert opened.config == whole.config and opened.tensors.keys() == whole.tensors.keys()
                for name in opened.tensors:
                    assert np.array_equal(opened.values(name), whole.values(name))
    first, last = open_model(parts[0], "target"), open_model(parts[2], "target")
    assert first.path == last.path and first.manifest.name == "tiny"
    assert plan(parts[1], None).target.name == "tiny"


def test_parts_that_are_missing_or_misnamed_are_named(tmp_path: Path) -> None:
    parts = split(tmp_path)
    parts[1].rename(tmp_path / "aside")
    for ask in (lambda: open_checkpoint(parts[2]), lambda: open_model(parts[0], "target")):
        with pytest.raises(ModelFileError, match=r"one of 3 parts.*tiny-00002-of-00003\.gguf is missing"):
            ask()
    shutil.copy(parts[2], parts[1])
    with pytest.raises(ModelFileError, match=r"tiny-00002.* one of 3 parts of a model, number 2 from 0"):
        open_checkpoint(parts[0])
    with pytest.raises(ModelFileError, match=r"model\.gguf says that it is one of 3 parts.*NAME-00001"):
        open_checkpoint(parts[0].rename(tmp_path / "model.gguf"))


def test_all_parts_are_pulled_and_the_first_is_recommended(hub: Hub, tmp_path: Path) -> None:
    parts = split(tmp_path)
    hub.content = None
    hub.files = {f"q/{part.name}": part.read_bytes() for part in parts} | {"mmproj-F16.gguf": b"x"}
    with pytest.raises(ModelFileError, match=r"such as q/tiny-00001-of-00003\.gguf,"):
        pull_hub(HubReference(REPOSITORY))
    for part in (parts[2], parts[0]):
        reference = HubReference.parse(f"hf:{REPOSITORY}/q/{part.name}")
        with open_checkpoint(pull_hub(reference)) as opened:
            assert len(opened.files) == 3
        assert pulled_hub(reference) is not None
    assert sorted(hub.fetched) == sorted(f"q/{part.name}" for part in parts)
    del hub.files[f"q/{parts[1].name}"]
    hub.commit = "1b" * 20
    with pytest.raises(ModelFileError, match="has no q/tiny-00002"):
        pull_hub(HubReference.parse(f"hf:{REPOSITORY}/q/{parts[0].name}"))


@pytest.mark.parametrize("name", ["sha256-6f3b0c1d", "model.GGUF", "model.bin", "model.gguf.part"])
def test_a_file_is_a_model_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = tiny_gguf("llama", "Q8_0", layers=1).write(tmp_path / name)
    with edgespec.load(path, None) as model:
        assert model.generate("the", max_new_tokens=2).stats.new_tokens == 2
    assert plan(path, None).target.name == Path(name).stem


OLLAMA = {  # llama.cpp's keys of a case, and ollama's
    "ministral3": {
        "attention.temperature_scale": "rope.scaling_beta",
        "rope.scaling.yarn_beta_fast": "rope.scaling.beta_fast",
        "rope.scaling.yarn_beta_slow": "rope.scaling.beta_slow",
        "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale_all_dim",
    },
    "gemma3": {
        "rope.freq_base": "rope.global.freq_base",
        "rope.freq_base_swa": "rope.local.freq_base",
    },
    "gemma4_moe": {},
    "qwen35": {},
}
TENSORS = {"ssm_dt.bias": "ssm_dt", "ffn_down_exps.scale": "ffn_gate_inp.per_expert_scale"}


@pytest.mark.parametrize("case", OLLAMA)
def test_files_of_ollama_are_read_as_llama_cpp_s(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = gguf_of(case, "Q8_0")
    arch = model.architecture
    unusual = {"attention.temperature_scale": 0.25, "rope.scaling.yarn_beta_fast": 20.0}
    model.metadata |= {f"{arch}.{key}": unusual[key] for key in OLLAMA[case] if key in unusual}
    with open_checkpoint(model.write(tmp_path / "plain.gguf")) as opened:
        plain = opened.config, {name: opened.values(name) for name in opened.tensors}
    for key, other in OLLAMA[case].items():
        value = model.metadata.pop(f"{arch}.{key}", None)
        model.metadata |= {} if value is None else {f"{arch}.{other}": value}
    for end, other in TENSORS.items():
        names = {name: name.removesuffix(end) + other for name in model.tensors if name.endswith(end)}
        model.tensors |= {names[name]: model.tensors.pop(name) for name in names}
    for name in ("v.blk.0.attn_q.weight", "a.conv1d.0.weight", "mm.input_projection.weight", "mtp.fc.weight"):
        model.tensors[name] = "F32", np.ones((8, 64), np.float32)
    with open_checkpoint(model.write(tmp_path / "ollama")) as opened:
        assert opened.config == plain[0]
        assert opened.tensors.keys() == plain[1].keys()
        assert all(np.array_equal(opened.values(name), values) for name, values in plain[1].items())
    assert "only the text model is exported, without ['v.blk.0.attn_q.weight'" in caplog.text


def test_what_ollama_states_in_other_ways_is_not_lost(tmp_path: Path) -> None:
    heads = gguf_of("qwen35", "Q8_0", **{"ssm.v_head_reordered": False})
    with open_checkpoint(heads.write(tmp_path / "heads")) as opened:
        assert isinstance(opened.config, Qwen35)
        assert opened.config.delta is not None and not opened.config.delta.tiled
    for eyes, expected in ((False, ()), (True, 8.0)):
        unstated = {"attention.layer_norm_rms_epsilon": None}
        model = gguf_of("gemma3", "Q8_0", context_length=131_072, **unstated)
        if eyes:
            model.tensors["v.patch_embd.weight"] = "F32", np.ones((8, 64), np.float32)
        with open_checkpoint(model.write(tmp_path / f"eyes-{eyes}")) as opened:
            assert {*opened.config.rope.factors} == ({expected} if eyes else set())
            assert opened.config.norm_epsilon == 1e-6
    with pytest.raises(EdgespecError, match=r"'gptoss': it needs experts in ollama's own form"):
        open_checkpoint(TinyGGUF("gptoss", {}).write(tmp_path / "gptoss"))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
PAGES = (b"<!DOCTYPE html><html></html>", b"\n<html>", b'<?xml version="1.0"?><Error/>')


@pytest.mark.parametrize("data", [POINTER, *PAGES])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer.model"])
def test_pointers_and_pages_in_a_directory_are_named(tmp_path: Path, name: str, data: bytes) -> None:
    folder = directory(tmp_path / "m", byte_level_json(size=300))
    if name == "tokenizer.model":
        (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(data)
    kind = "pointer of git-lfs.*git lfs pull" if data is POINTER else "a web page.*Download it again"
    with pytest.raises(ModelFileError, match=rf"{name} is {'a ' if data is POINTER else ''}{kind}"):
        export_model(folder, tmp_path / "out")


@pytest.mark.parametrize("data", [POINTER, *PAGES])
def test_pointers_and_pages_as_files_are_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="pointer of git-lfs" if data is POINTER else "a web page"):
        open_model(path, "target")
    folder = write_optimum(tmp_path / "optimum")
    (folder / "tokenizer.json").write_bytes(data)
    with pytest.raises(ModelFileError, match="pointer of git-lfs" if data is POINTER else "a web page"):
        open_model(folder, "target")


@pytest.mark.parametrize(
    ("architecture", "tensor", "kind", "says"),
    [
        (
            "llama",
            "blk.0.attn_q.weight.lora_a",
            "adapter",
            "an adapter.*give its base model",
        ),
        ("clip", "v.patch_embd.weight", "mmproj", "a projector.*the model's own file"),
        ("clip", "v.patch_embd.weight", "", "a projector"),  # of before there were types
        ("", "blk.0.attn_q.weight.in_sum2", "imatrix", "an importance matrix"),
        ("qwen3", "cls.output.weight", "", "classifies texts.*use a model that writes"),
    ],
)
def test_gguf_files_that_are_no_models_say_what_they_are(
    tmp_path: Path, architecture: str, tensor: str, kind: str, says: str
) -> None:
    model = TinyGGUF(architecture, {"general.type": kind} if kind else {})
    model.tensors[tensor] = "F32", np.zeros((8, 64), np.float32)
    path = model.write(tmp_path / "x.gguf")
    for ask in (lambda: open_model(path, "target"), lambda: export_model(path, tmp_path / "out")):
        with pytest.raises(EdgespecError, match=says):
            ask()


def adapter(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    write_safetensors(folder / "adapter_model.safetensors", {"lora_A": np.zeros((8, 64), np.float32)})


def adapter_alone(folder: Path) -> None:
    adapter(folder)
    (folder / "config.json").unlink()


def graphs(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model_q4.onnx").write_bytes(b"x")


def gguf_files(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "b.gguf").write_bytes(b"GGUF")


def without_tokenizer(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        for name in names:
            (folder / name).write_text("{}", encoding="utf-8")

    return change


def classifier(folder: Path) -> None:
    facts = config_of("llama") | {"architectures": ["LlamaForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")


def packed(folder: Path) -> None:
    (folder / "quantize_config.json").write_text('{"bits": 4}', encoding="utf-8")
    tensors = weights(config_of("llama"))
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.qweight"] = tensors.pop(f"{name}.weight")
    write_safetensors(folder / "model.safetensors", tensors)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (adapter, "an adapter.*give its base model"),
        (adapter_alone, "an adapter.*give its base model"),
        (graphs, r"has onnx/model_q4\.onnx, not model\.onnx or onnx/model\.onnx; rename the graph"),
        (gguf_files, r"GGUF files.*give one of them, such as .*b\.gguf"),
        (without_tokenizer("tekken.json"), r"only tekken\.json.*tokenizer\.json, or a GGUF file"),
        (without_tokenizer("vocab.json", "merges.txt"), r"only vocab\.json and merges\.txt.*save_pretrained"),
        (classifier, "classifies texts"),
        (packed, r"up_proj\.qweight.*quantized already .GPTQ or AWQ.*unquantized"),
    ],
)
def test_directories_that_are_no_models_say_what_they_are(
    tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    folder = directory(tmp_path / "m", byte_level_json(size=300))
    change(folder)
    for ask in (lambda: open_model(folder, "target"), lambda: export_model(folder, tmp_path / "out")):
        with pytest.raises(EdgespecError, match=says):
            ask()


def test_a_merged_model_with_traces_of_its_adapter_is_a_model(tmp_path: Path) -> None:
    folder = directory(tmp_path / "m", byte_level_json(size=300))
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    with open_checkpoint(folder) as opened:
        assert opened.config.num_layers == 2


def with_ordinary(path: Path, *marks: str, **facts: str) -> Path:
    """A tiny GGUF file in which ``marks`` are ordinary tokens, in the place of the last words."""
    model = tiny_gguf("llama", "Q8_0", layers=1)
    tokens, merges = model.metadata["tokenizer.ggml.tokens"], model.metadata["tokenizer.ggml.merges"]
    types = model.metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(merges, list)
    free = [id_ for id_, kind in enumerate(np.asarray(types)) if kind == 1][-len(marks) :]
    gone = {tokens[id_] for id_ in free}
    kept = [merge for merge in merges if gone.isdisjoint((*merge.split(" "), merge.replace(" ", "")))]
    texts = dict(zip(free, marks, strict=True))
    model.metadata["tokenizer.ggml.tokens"] = [texts.get(id_, text) for id_, text in enumerate(tokens)]
    model.metadata["tokenizer.ggml.merges"] = kept
    model.metadata |= {f"tokenizer.{key}": value for key, value in facts.items()}
    return model.write(path)


def test_marks_of_a_template_that_is_given_are_control_tokens_too(tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_text("{% for m in messages %}<|user|>{{ m.content }}<|stop|>{% endfor %}", encoding="utf-8")
    path = with_ordinary(tmp_path / "m.gguf", "<|user|>", "<|stop|>")
    ask: list[Json] = [{"role": "user", "content": "a<|stop|>"}]

    def check(model: edgespec.Model) -> None:
        tok = model.target.tokenizer
        begin, stop = tok.special_id("<|user|>"), tok.special_id("<|stop|>")
        assert begin is not None and stop is not None
        assert model.target.chat_template is not None
        ids = model.target.chat_template.encode(ask, tok)
        assert (ids[0], ids[-1], ids.count(stop)) == (begin, stop, 1)
        assert tok.bytes_of(ids) == b"<|user|>a<|stop|><|stop|>"

    with edgespec.load(path, None, options=LoadOptions(chat_template=given)) as model:
        check(model)
    export_model(path, tmp_path / "made", options=ExportOptions(chat_template=given))
    export_model(path, tmp_path / "put")
    shutil.copy(given, tmp_path / "put" / "chat_template.jinja")
    for bundle in ("made", "put"):
        with edgespec.load(tmp_path / bundle, None) as model:
            check(model)


def test_brackets_in_a_default_prompt_are_text(tmp_path: Path) -> None:
    template = "<|system|>You write list[i] and <br>, or [i] alone.{% for m in messages %}"
    template += "<|user|>{{ m.content }}{% endfor %}"
    marks = ("[i]", "<br>", "<|system|>", "<|user|>")
    with open_checkpoint(with_ordinary(tmp_path / "m.gguf", *marks, chat_template=template)) as opened:
        tok = Tokenizer.from_json(opened.tokenizer_json())
    assert [tok.special_id(mark) is not None for mark in marks] == [False, False, True, True]
