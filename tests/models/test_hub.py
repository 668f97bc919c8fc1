"""Models on the hub: which files are fetched, checked and taken up again, and what happens offline."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from edgespec.cli import app
from edgespec.loading.opening import open_model
from edgespec_export.export import export_model
from edgespec_models.bundles.bundle import Bundle, Embedding
from edgespec_models.downloads.catalog import hub_names
from edgespec_models.downloads.hub import HubReference, on_hub, pull_hub, pulled_hub
from edgespec_models.errors import DownloadError, ModelFileError, RequestError, UnsupportedModelError
from edgespec_models.progress import Progress
from tests.kit.downloads import REPOSITORY, Hub
from tests.kit.gguf import tiny_gguf
from tests.kit.hf import config_of, write_checkpoint
from tests.kit.tokenizers import byte_level_json

NAME = f"hf:{REPOSITORY}"
SAFETENSORS = HubReference(REPOSITORY)
GGUF = HubReference(REPOSITORY, filename="q/tiny.gguf")
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
UNWANTED = {"modeling.py": b"import os", "pytorch_model.bin": b"pickle", "README.md": b"# Tiny"}


pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def hub(tmp_path: Path, hub: Hub) -> Hub:
    """A hub with a sharded checkpoint, a GGUF file and things nobody should fetch."""
    folder = write_checkpoint(tmp_path / "source", config_of("llama"), dtype="BF16", shards=2)
    (folder / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    hub.files = {file.name: file.read_bytes() for file in folder.iterdir()} | UNWANTED
    hub.files["q/tiny.gguf"] = tiny_gguf("llama", "Q4_0").write(tmp_path / "tiny.gguf").read_bytes()
    hub.content = None
    return hub


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf:a/b", ("a/b",)),
        ("hf:a/b@refs/pr/3", ("a/b", "refs/pr/3")),
        ("hf:A-1/b.c/m.gguf", ("A-1/b.c", "main", "m.gguf")),
        ("hf:a/b/q4/m.gguf@v1.0", ("a/b", "v1.0", "q4/m.gguf")),
    ],
)
def test_references(text: str, parts: tuple[str, ...]) -> None:
    assert HubReference.parse(text) == HubReference.parse(str(HubReference(*parts))) == HubReference(*parts)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("hf:a/b/My%20Model%20(Q8_0).gguf", "hf:a/b/My Model (Q8_0).gguf@main"),
        ("hf.co/a/b:Q8_0", "hf:a/b:Q8_0@main"),
        ("https://huggingface.co/a/b", "hf:a/b@main"),
        ("https://huggingface.co/a/b/tree/v1", "hf:a/b@v1"),
        ("https://huggingface.co/a/b/blob/main/q/m.gguf", "hf:a/b/q/m.gguf@main"),
        ("https://hf.co/a/b/resolve/v1.0/m.gguf?download=true", "hf:a/b/m.gguf@v1.0"),
        ("hf:a/b/resolve/main/m.gguf", "hf:a/b/m.gguf@main"),
    ],
)
def test_addresses_are_references(text: str, plain: str) -> None:
    reference = on_hub(text)
    assert str(reference) == plain
    assert HubReference.parse(plain) == reference


def test_a_file_is_named_by_its_weight_format(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    data = hub.files.pop("q/tiny.gguf")
    names = ("tiny-Q4_0.gguf", "tiny-Q4_0_S.gguf", "mmproj-Q8_0.gguf", "UD/My tiny (a) UD-IQ4_NL.gguf")
    hub.files |= dict.fromkeys(names, data)
    for weights, name in (("Q4_0", names[0]), ("q4_0_s", names[1]), ("IQ4_NL", names[3])):
        reference = HubReference.parse(f"hf:{REPOSITORY}:{weights}")
        assert pulled_hub(reference) is None
        place = pull_hub(reference)
        assert place.name == Path(name).name and place.read_bytes() == data
        assert pulled_hub(reference) == place
    with pytest.raises(ModelFileError, match=r"has no GGUF file named by Q8_0.*It has GGUF files"):
        pull_hub(HubReference.parse(f"hf:{REPOSITORY}:Q8_0"))


@pytest.mark.parametrize(
    ("architecture", "files", "taken"),
    [
        ("gemma4", ("mmproj-F16.gguf", "mmproj-BF16.gguf", "mmproj-Q8_0.gguf"), ["mmproj-Q8_0.gguf"]),
        ("gemma4", ("mmproj-F16.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf"), ["mmproj-BF16.gguf"]),
        ("gemma4", ("q/mmproj-F16.gguf", "mmproj-F32.gguf"), ["mmproj-F32.gguf"]),  # beside the model
        ("gemma4", ("mmproj-Q8_0.gguf", "mmproj-tiny-a.gguf"), ["mmproj-tiny-a.gguf"]),
        ("gemma4", ("imatrix.gguf",), []),
        ("llama", ("mmproj-F16.gguf",), []),
        (None, ("mmproj-F16.gguf",), []),
    ],
)
def test_the_tower_comes_with_a_model_that_sees(
    hub: Hub, architecture: str | None, files: tuple[str, ...], taken: list[str]
) -> None:
    hub.files = {"tiny-Q4_0.gguf": hub.files["q/tiny.gguf"]} | dict.fromkeys(files, b"a tower")
    hub.architecture = architecture
    place = pull_hub(HubReference.parse(f"hf:{REPOSITORY}:Q4_0"))
    assert hub.fetched == ["tiny-Q4_0.gguf", *taken]
    assert sorted(path.name for path in place.parent.iterdir()) == sorted([place.name, *taken])
    assert pulled_hub(HubReference.parse(f"hf:{REPOSITORY}:Q4_0")) == place
    for name in taken:
        (place.parent / name).unlink()
        assert pulled_hub(HubReference.parse(f"hf:{REPOSITORY}:Q4_0")) is None


def test_a_commit_that_came_as_a_branch_needs_no_network(hub: Hub) -> None:
    for name in ("", "/q/tiny.gguf"):
        place = pull_hub(HubReference.parse(f"hf:{REPOSITORY}{name}"))
        assert pulled_hub(HubReference.parse(f"hf:{REPOSITORY}{name}@{hub.commit}")) == place
        assert pulled_hub(HubReference.parse(f"hf:{REPOSITORY}{name}@{'1b' * 20}")) is None
    assert pulled_hub(HubReference.parse(f"hf:{REPOSITORY}/q/other.gguf@{hub.commit}")) is None


@pytest.mark.parametrize("left", [("rfilename",), ("rfilename", "size")])
def test_a_listing_without_sizes_or_digests_is_named(hub: Hub, left: tuple[str, ...]) -> None:
    listing = json.loads(hub.listing())
    listing["siblings"] = [{key: entry[key] for key in left} for entry in listing["siblings"]]
    hub.listing = lambda: json.dumps(listing).encode()  # type: ignore[method-assign]
    with pytest.raises(DownloadError, match=r"states no sizes and digests.*HF_ENDPOINT.*hf download"):
        pull_hub(SAFETENSORS)


def test_names_of_the_catalogue_are_references() -> None:
    for name, model in hub_names().items():
        reference = on_hub(name)
        assert reference is not None
        assert str(reference) == f"{model.reference}@main"
    assert on_hub("hf:a/b") == HubReference("a/b")
    assert on_hub("smollm2-135m-instruct") is None  # of the index too, with a digest of its own


def test_a_name_is_pulled_like_its_reference(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(hub_names()["qwen3-0.6b"], reference=f"hf:{REPOSITORY}/q/tiny.gguf")
    monkeypatch.setitem(hub_names(), "tiny", model)
    assert open_model("tiny", "target").config.architecture == "llama"
    assert hub.fetched == ["q/tiny.gguf"]


OTHER_NAMES = (
    *("hf:", "hf:a", "hf:a/b/c", "hf:a/b/c.bin", "hf:../b", "hf:a/../m.gguf", "hf:a/b@", "hf:a/b@-x", "a/b"),
    *("hf:a/b/../c.gguf", "hf:/b", "hf:a/b@a..b", "hf:a--b/c", "hf:a/b?x=1", "hf:a/b#x", "hf:a\\b/c"),
)


@pytest.mark.parametrize("text", OTHER_NAMES)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="write hf:OWNER/REPO"):
        HubReference.parse(text)


@given(st.text(alphabet="ab./@:-_~%\\ ", max_size=20))
def test_no_reference_leads_out_of_its_folder(text: str) -> None:
    try:
        reference = HubReference.parse(f"hf:{text}")
    except RequestError:
        return
    root = reference.folder.parent.resolve()
    for place in (reference.record, reference.path("0a" * 20)):
        assert root in place.resolve().parents


def test_a_checkpoint_comes_whole_and_nothing_else(hub: Hub, home: Path) -> None:
    seen: list[Progress] = []
    hub.files |= {"chat_template.json": b"{}", "additional_chat_templates/tool_use.jinja": b"x"}
    place = pull_hub(SAFETENSORS, progress=seen.append)
    assert place == home.parent / "hub" / "models--someone--Tiny-1.5B" / "snapshots" / hub.commit
    wanted = hub.files.keys() - UNWANTED.keys() - {"q/tiny.gguf"}
    files = {file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file()}
    assert files == wanted
    assert all((place / name).read_bytes() == hub.files[name] for name in wanted)
    assert hub.fetched[-2:] == SHARDS
    total = sum(len(hub.files[name]) for name in SHARDS)
    assert (seen[-1].stage, seen[-1].done) == (f"Checking {REPOSITORY}", total)
    assert {report.total for report in seen} == {total}


def test_of_a_head_a_pickle_comes_where_there_is_nothing_else(hub: Hub) -> None:
    for name in ("model.safetensors.index.json", *SHARDS, "q/tiny.gguf"):
        del hub.files[name]
    with pytest.raises(ModelFileError, match="has neither"):
        pull_hub(SAFETENSORS)
    config = json.loads(hub.files["config.json"]) | {"draft_vocab_size": 32}
    hub.files["config.json"], hub.commit = json.dumps(config).encode(), "1b" * 20
    assert (pull_hub(SAFETENSORS) / "pytorch_model.bin").read_bytes() == b"pickle"


def test_what_is_here_needs_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pulled_hub(GGUF) is None
    file = pull_hub(GGUF)
    assert (file.read_bytes(), hub.fetched) == (hub.files["q/tiny.gguf"], ["q/tiny.gguf"])
    assert pulled_hub(SAFETENSORS) is None
    place = pull_hub(SAFETENSORS)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert (pulled_hub(GGUF), pulled_hub(SAFETENSORS)) == (file, place)
    assert pulled_hub(HubReference(REPOSITORY, "v2")) is None
    (place / SHARDS[0]).write_bytes(b"cut")
    assert pulled_hub(SAFETENSORS) is None


def test_a_new_commit_is_seen_by_a_pull_only(hub: Hub) -> None:
    old = pull_hub(SAFETENSORS)
    hub.commit = "1b" * 20
    hub.files["chat_template.jinja"] = b"{{ 'new' }}"
    assert pulled_hub(SAFETENSORS) == old
    new = pull_hub(SAFETENSORS)
    assert new != old
    assert (pulled_hub(SAFETENSORS), (new / "chat_template.jinja").read_bytes()) == (new, b"{{ 'new' }}")


def test_a_broken_connection_and_a_stopped_pull_are_taken_up_again(hub: Hub) -> None:
    hub.cuts = {SHARDS[0]: [1000], SHARDS[1]: [1000]}

    def stop(progress: Progress) -> None:
        if hub.fetched[-1] == SHARDS[1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_hub(SAFETENSORS, progress=stop)
    assert hub.fetched.count(SHARDS[0]) == 2
    assert pulled_hub(SAFETENSORS) is None
    hub.requests.clear()
    place = pull_hub(SAFETENSORS)
    assert hub.fetched == [SHARDS[1]]
    assert (place / SHARDS[0]).read_bytes() == hub.files[SHARDS[0]]


@pytest.mark.parametrize("name", [SHARDS[1], "config.json"])
def test_a_file_that_is_damaged_on_its_way_or_here_is_replaced(hub: Hub, name: str) -> None:
    hub.damaged = {name}
    with pytest.raises(DownloadError, match=rf"{name} .* arrived damaged"):
        pull_hub(SAFETENSORS)
    assert pulled_hub(SAFETENSORS) is None
    hub.damaged = set()
    file, sound = pull_hub(SAFETENSORS) / name, hub.files[name]
    assert file.read_bytes() == sound
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    pull_hub(SAFETENSORS)
    assert file.read_bytes() == sound


def test_without_a_network_one_error_says_what_to_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HF_ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
        with pytest.raises(DownloadError, match=f"{NAME}@v2 cannot be pulled") as caught:
            pull_hub(HubReference(REPOSITORY, "v2"))
        assert f"hf download {REPOSITORY} --revision v2 --local-dir DIR" in str(caught.value)
        assert ("HF_HUB_OFFLINE" in str(caught.value)) == (name == "HF_HUB_OFFLINE")
    assert hub.requests == []


def test_a_hub_that_has_no_such_revision_or_refuses(hub: Hub) -> None:
    with pytest.raises(DownloadError, match=r"has no someone/Tiny-1.5B \(revision v9\)"):
        pull_hub(HubReference(REPOSITORY, "v9"))
    hub.status = 401
    with pytest.raises(DownloadError, match="set HF_TOKEN"):
        pull_hub(SAFETENSORS)


ANSWERS = (b"<html>", b"[]", b'{"sha": "../x", "siblings": []}', b'{"sha": "' + b"a" * 40 + b'"}')


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_is_no_listing(hub: Hub, answer: bytes) -> None:
    hub.listing = lambda: answer  # type: ignore[method-assign]
    with pytest.raises(DownloadError, match="cannot be read"):
        pull_hub(SAFETENSORS)


def test_repositories_without_a_checkpoint_say_what_they_have(hub: Hub) -> None:
    for shard in [*SHARDS, "model.safetensors.index.json"]:
        del hub.files[shard]
    with pytest.raises(ModelFileError, match=r"neither model\.safetensors .* such as q/tiny\.gguf"):
        pull_hub(SAFETENSORS)
    del hub.files["config.json"], hub.files["q/tiny.gguf"]
    with pytest.raises(ModelFileError, match=r"has no config\.json.*Look for"):
        pull_hub(SAFETENSORS)
    with pytest.raises(ModelFileError, match=r"has no q/tiny\.gguf"):
        pull_hub(GGUF)


@pytest.mark.parametrize("name", ["../../evil.safetensors", "/etc/passwd", "absent.safetensors"])
@pytest.mark.parametrize("listed", [False, True])
def test_neither_index_nor_listing_places_files_elsewhere(
    hub: Hub, home: Path, name: str, listed: bool
) -> None:
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": name}}).encode()
    if listed and "absent" not in name:
        hub.files[name] = b""
    with pytest.raises(ModelFileError, match="has no"):
        pull_hub(SAFETENSORS)
    assert not list(home.parent.rglob("evil*"))


def test_a_full_disk_is_refused_before_the_weights(hub: Hub, free_disk: Callable[..., None]) -> None:
    free = max(len(hub.files[name]) for name in SHARDS) * 3 // 2
    free_disk(free)
    with pytest.raises(DownloadError, match=f"{free:,} bytes free, but {NAME}@main needs"):
        pull_hub(SAFETENSORS)
    assert not set(SHARDS) & set(hub.fetched)


def test_a_model_that_cannot_be_exported_is_refused_before_its_weights(hub: Hub) -> None:
    hub.files["config.json"] = json.dumps(config_of("llama") | {"model_type": "mamba"}).encode()
    with pytest.raises(UnsupportedModelError, match="mamba"):
        open_model(NAME, "target")
    assert not set(SHARDS) & set(hub.fetched)


def test_a_model_that_a_gpu_cannot_run_is_refused_before_its_weights(hub: Hub) -> None:
    hub.files["config.json"] = json.dumps(config_of("qwen35")).encode()
    with pytest.raises(UnsupportedModelError, match="lacks for ONNX Runtime's operators"):
        open_model(NAME, "target", device="cuda")
    assert not set(SHARDS) & set(hub.fetched)


def test_export_load_and_pull_by_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["export", NAME, "-o", str(out), "--weights", "exact"])
    assert result.exit_code == 0, result.output
    manifest = Bundle(out, verify_digests=True).manifest
    assert manifest.name == "Tiny-1.5B"
    assert re.fullmatch(rf"{NAME}@[0-9a-f]{{40}}", source := manifest.provenance["source"])
    assert HubReference.parse(source).repository == REPOSITORY
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert open_model(NAME, "target").manifest.name == "Tiny-1.5B"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    pulled = CliRunner().invoke(app, ["pull", f"{NAME}/q/tiny.gguf", "--json"])
    assert pulled.exit_code == 0, pulled.output
    (facts,) = json.loads(pulled.stdout)
    assert Path(facts["path"]).read_bytes() == hub.files["q/tiny.gguf"]
    manifest = open_model(f"{NAME}/q/tiny.gguf", "target").manifest
    assert manifest.name == "tiny" and manifest.provenance["source"].startswith(f"{NAME}/q/tiny.gguf@")


def test_what_says_how_texts_become_vectors_comes_too(hub: Hub, tmp_path: Path) -> None:
    hub.files["1_Pooling/config.json"] = b'{"pooling_mode_lasttoken": true}'
    hub.files["2_Dense/config.json"] = b"{}"
    place = pull_hub(SAFETENSORS)
    assert (place / "1_Pooling/config.json").is_file() and not (place / "2_Dense").exists()
    export_model(place, tmp_path / "out")
    assert Bundle(tmp_path / "out").manifest.embedding == Embedding()
