"""Opening bundles: what fits opens, what does not is named."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.cli.inspect import inspect
from edgespec_models import errors
from edgespec_models.bundles.bundle import (
    GRAPH,
    HEAD_TOKENS,
    MANIFEST,
    REPORT,
    TEMPLATE,
    TOKENIZER,
    Bundle,
    FileRecord,
    Manifest,
)
from edgespec_models.decoders.operations import Rope
from edgespec_models.decoders.transformer import FULL, SLIDING
from edgespec_models.errors import BundleError, RequestError, TokenizerError, UnsupportedModelError
from edgespec_runtimes.cpu import open_cpu
from tests.kit.native import Edit, edit_manifest
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import LLAMA, tiny_bundle


def npy(header: str) -> bytes:
    """A NumPy file with this header, which NumPy reads as Python."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_bundle(tmp_path / "m").path


def add(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    edit_manifest(folder, lambda m: m["files"].update({name: asdict(FileRecord.of(folder / name))}))


def test_a_manifest_survives_json(folder: Path) -> None:
    manifest = Bundle(folder, verify_digests=True).manifest
    value = json.loads(json.dumps(manifest.to_json()))
    assert Manifest.from_json(value, folder / MANIFEST) == manifest
    assert manifest.bytes_per_pass == manifest.parameters_per_pass == 3000


IMPOSSIBLE: tuple[tuple[str, Any, str], ...] = (
    ("rope", Rope(theta=1e4, width=24, pairs=12), "rotary_dim"),
    ("rope", Rope(theta=1e4, width=48, pairs=24), "rotary_dim"),
    *(("layer_types", (FULL,), "1 layer_types for 2 layers"), ("hidden_size", 0, "hidden_size")),
    ("layer_types", ("conv", FULL), "layer_types has 'conv'; allowed for llama: full_attention"),
    ("layer_types", (SLIDING, FULL), "need a sliding_window"),
    ("feature_layers", (1, 2), "llama is no head"),
    ("num_kv_heads", 3, "3 key-value heads"),
)


ROTATIONS: tuple[tuple[str, Any, str], ...] = (
    ("factors", (1.0,), "there are 1 rope_factors for 16 frequencies"),
    *(("factors", (0.0,) * 16, "factors"), ("magnitude", 0.0, "magnitude"), ("pairs", 17, "pairs")),
)


@pytest.mark.parametrize(("name", "value", "message"), ROTATIONS)
def test_impossible_rotations_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        replace(LLAMA.rope, **{name: value})


@pytest.mark.parametrize(("name", "value", "message"), IMPOSSIBLE)
def test_impossible_architecture_facts_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        replace(LLAMA, **{name: value})


def test_the_digest_follows_graph_and_weights_only(folder: Path) -> None:
    before = Bundle(folder).digest
    edit_manifest(folder, lambda m: m.update(name="other"))
    assert Bundle(folder).digest == before
    edit_manifest(folder, lambda m: m["files"][f"{GRAPH}.data"].update(sha256="0" * 64))
    assert Bundle(folder).digest != before


def test_template_and_report_are_optional_and_templates_told_what_ends_a_text(folder: Path) -> None:
    assert (Bundle(folder).chat_template, Bundle(folder).report()) == (None, {})
    add(folder, REPORT, '{"seconds": 2.0}')
    assert Bundle(folder).report() == {"seconds": 2.0}
    add(folder, TEMPLATE, "{{ messages[0].content }}{{ eos_token }}")
    for eos, shown in (([2], "hi<|im_end|>"), ([], "hi")):
        edit_manifest(folder, lambda m: m["special_tokens"].update(eos=eos))  # noqa: B023 - called at once
        template = Bundle(folder).chat_template
        assert template is not None and template.render([{"role": "user", "content": "hi"}]) == shown


def test_a_template_may_be_put_into_a_bundle_or_given_to_it(folder: Path) -> None:
    ask = [{"role": "user", "content": "hi"}]
    (folder / TEMPLATE).write_text("default", encoding="utf-8")
    (folder / "chat_template.tool_use.jinja").write_text("{{ tools }}", encoding="utf-8")
    bundle = Bundle(folder)
    template = bundle.chat_template
    assert template is not None and template.render(ask) == "default"
    assert template.render(ask, {"tools": "t"}) == "t"
    (folder / "own.txt").write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}{{ eos_token }}")
    bundle.use_template(folder / "own.txt")
    assert bundle.chat_template is not None and bundle.chat_template.render(ask) == "hi<|im_end|>"
    (folder / "own.txt").write_text("{% for %}", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"own.txt: The chat template is not valid"):
        bundle.use_template(folder / "own.txt")
    with pytest.raises(RequestError, match=r"no.txt.*Give a file"):
        bundle.use_template(folder / "no.txt")


@pytest.mark.parametrize("name", [GRAPH, f"{GRAPH}.data", TOKENIZER])
def test_a_changed_byte_is_found(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    Bundle(folder)  # sizes only
    with pytest.raises(BundleError, match=f"{name} has changed.*export the model again"):
        Bundle(folder, verify_digests=True)


def test_a_manifest_that_says_something_else_is_found(folder: Path) -> None:
    text = (folder / MANIFEST).read_text(encoding="utf-8")
    changed = text.replace('"context_length": 640', '"context_length": 641')
    assert changed != text
    (folder / MANIFEST).write_text(changed, encoding="utf-8")
    with pytest.raises(BundleError, match=r"edgespec\.json has changed"):
        Bundle(folder, verify_digests=True)
    (folder / MANIFEST).write_text(json.dumps(json.loads(text), indent=4), encoding="utf-8")
    Bundle(folder, verify_digests=True)  # another form says the same
    edit_manifest(folder, lambda m: m.pop("sha256"))
    with pytest.raises(BundleError, match=r"edgespec\.json has changed"):
        Bundle(folder, verify_digests=True)


@pytest.mark.parametrize("name", [GRAPH, f"{GRAPH}.data", TOKENIZER])
def test_a_missing_file_and_a_changed_size_are_named(folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.write(b"x")
    with pytest.raises(BundleError, match=f"{name} has .* bytes, not"):
        Bundle(folder)
    (folder / name).unlink()
    with pytest.raises(BundleError, match=f"lacks {name}"):
        Bundle(folder)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ""])
def test_files_outside_are_refused(folder: Path, name: str) -> None:
    (folder.parent / "x").write_bytes(b"")
    record = {"size_bytes": 0, "sha256": "0" * 64}
    edit_manifest(folder, lambda m: m["files"].update({name: record}))
    with pytest.raises(BundleError, match=r"edgespec\.json"):
        Bundle(folder)


DAMAGE: dict[str, Edit] = {
    "other version": lambda m: m.update(format_version=4),
    "no version": lambda m: m.pop("format_version"),
    "no config": lambda m: m.pop("config"),
    "unknown fact": lambda m: m["config"].update(colour=1),
    "no heads": lambda m: m["config"].update(num_heads=0),
    "a record without a digest": lambda m: m["files"].update({GRAPH: {"size_bytes": 1}}),
    "unknown role": lambda m: m.update(role="boss"),
    "unknown field": lambda m: m.update(extra=1),
    "special tokens missing": lambda m: m.pop("special_tokens"),
    "an end of text that is no id": lambda m: m["special_tokens"].update(eos=[""]),
    "an end of text that is no token": lambda m: m["special_tokens"].update(eos=[10**9]),
    "a suppressed token that is none": lambda m: m["special_tokens"].update(suppressed=[10**9]),
    "a bad word of what is no token": lambda m: m["special_tokens"].update(bad_words=[[0, 10**9]]),
    "a negative size": lambda m: m["parameters_by_class"].update(mlp=-1),
    "a size beyond all disks": lambda m: m["bytes_by_class"].update(mlp=10**400),
    "nothing kept": lambda m: m.update(kept=[]),
    "kept by nobody": lambda m: m["kept"][0].update(per="layer"),
    "no heads kept": lambda m: m["kept"][0].update(shape=[0, 8]),
    "no width kept": lambda m: m["kept"][0].update(shape=[8]),
    "an unknown type": lambda m: m["kept"][0].update(type="int3"),
    "a number that is no number": lambda m: m["config"].update(norm_epsilon=float("nan")),
    "static graphs for a GPU": lambda m: m.update(static={"device": "cuda"}),
    "no graph": lambda m: m["files"].pop(GRAPH),
    "no tokenizer": lambda m: m["files"].pop(TOKENIZER),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_wrong_manifest_is_one_clear_error(folder: Path, name: str) -> None:
    edit_manifest(folder, DAMAGE[name])
    with pytest.raises(BundleError, match=r"edgespec\.json.*export the model again") as caught:
        Bundle(folder)
    if "version" in name:
        assert f"again: edgespec export random -o {folder} --over" in str(caught.value)


OFTEN = {"model 1.gguf": "'model 1.gguf'", "hf:A/b@main": "hf:A/b@main", "$(b); c": "'$(b); c'"}


@pytest.mark.skipif(os.name == "nt", reason="other shells quote otherwise")
@pytest.mark.parametrize(("source", "word"), [*OFTEN.items(), *((n, "SOURCE") for n in ("-o", "", None, 3))])
def test_the_command_that_makes_a_bundle_again_can_be_pasted(
    tmp_path: Path, folder: Path, source: object, word: str
) -> None:
    edit_manifest(folder, lambda m: m.update(format_version=4, provenance={"source": source}))
    folder = folder.rename(tmp_path / "my model")
    with pytest.raises(BundleError) as caught:
        Bundle(folder)
    assert f"edgespec export {word} -o '{folder}' --overwrite" in str(caught.value)


def test_words_of_commands_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "sys", SimpleNamespace(platform="win32"))
    words = {r"C:\m.gguf": r"C:\m.gguf", r"a b\c": '"a b\\c"', '$(b)" & c %d%': '"?(b)? & c ?d?"'}
    assert {word: errors.shell_word(word) for word in words} == words


def test_a_bundle_of_a_newer_version_is_said_to_be_one(folder: Path) -> None:
    """And no command is given that would overwrite it."""
    edit_manifest(folder, lambda m: m.update(format_version=99))
    with pytest.raises(BundleError, match=r"was made by a newer edgespec: .* update edgespec") as caught:
        Bundle(folder)
    assert "--overwrite" not in str(caught.value)


WHERE = Path("somewhere", MANIFEST)
WRONG = st.sampled_from(
    [None, 0, -1, 7, 10**400, 1.5, float("nan"), "", "x", [], [0], [""], {}, {"a": 1}, {"a": "b"}, True]
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tiny_bundle(tmp_path_factory.mktemp("sound") / "m").path
    return (folder / MANIFEST).read_text(encoding="utf-8")


@given(data=st.data())
def test_any_field_of_a_manifest_may_be_wrong(data: st.DataObject, sound: str) -> None:
    value = json.loads(sound)
    tables = [value, value["config"], value["special_tokens"], value["files"][GRAPH], value["kept"][0]]
    table = data.draw(st.sampled_from(tables))
    table[data.draw(st.sampled_from(sorted(table)))] = data.draw(WRONG)
    try:
        manifest = Manifest.from_json(value, WHERE)
    except BundleError as error:
        assert str(WHERE) in str(error)
    else:
        assert Manifest.from_json(json.loads(json.dumps(manifest.to_json())), WHERE) == manifest


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '{"format_version": 1}', "[" * 100_000, "\ud800"], ids=range(8)
)
def test_damaged_json(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(BundleError, match=r"edgespec\.json"):
        Bundle(folder)


REPORTS = ("", "{", "[" * 99_999, "[]", "3", '{"a": 1}', '{"parity": {}}', '{"parity": null, "weights": []}')


@pytest.mark.parametrize("text", REPORTS, ids=range(8))
def test_a_damaged_report_is_one_clear_error(folder: Path, text: str) -> None:
    add(folder, REPORT, text)
    with pytest.raises(BundleError, match=r"report\.json is (damaged|not JSON|no JSON object)"):
        inspect(str(folder))


def test_what_looks_like_markup_is_shown_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_manifest(folder, lambda m: m.update(name="[/red]", weights="[bold]", provenance={"source": "[/]"}))
    inspect(str(folder))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[/red]", "[bold]", "[/]"))


def test_a_file_of_an_impossible_name_is_missing(folder: Path) -> None:
    edit_manifest(folder, lambda m: m["files"].update({"x" * 5000: m["files"][TOKENIZER]}))
    with pytest.raises(BundleError, match=r"lacks xxx"):
        Bundle(folder)


HEADERS = (b"", b"PK\x05\x06" + bytes(18), npy("{'descr': '<i4',"), npy("{[]: 1}"), npy("9"))


@pytest.mark.parametrize("data", HEADERS, ids=range(5))
def test_damaged_head_tokens_are_no_crash(folder: Path, data: bytes) -> None:
    edit_manifest(folder, lambda m: m.update(head_rows=3))
    (folder / HEAD_TOKENS).write_bytes(data)
    with pytest.raises(BundleError, match=r"head_tokens\.npy"):
        _ = Bundle(folder).head_tokens


def test_not_a_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(BundleError, match="is not a bundle"):
            Bundle(path)


def test_a_tokenizer_that_is_damaged_or_has_more_ids_than_rows(folder: Path) -> None:
    small = LLAMA.vocab_size // 2
    edit_manifest(folder, lambda m: m["config"].update(vocab_size=small))
    with pytest.raises(TokenizerError, match=str(small)):
        _ = Bundle(folder).tokenizer
    add(folder, TOKENIZER, byte_level_json()[:-50])
    with pytest.raises(TokenizerError, match="Not a readable"):
        _ = Bundle(folder).tokenizer


def test_a_damaged_graph(folder: Path) -> None:
    (folder / GRAPH).write_bytes(bytes((folder / GRAPH).stat().st_size))
    with pytest.raises(BundleError, match="cannot load"):
        open_cpu(Bundle(folder))
