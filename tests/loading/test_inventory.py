"""What a model takes on the disk, and its removal: by name or file; shared files, other versions' bundles."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgespec.cli import app
from edgespec.loading.first_use import folder_of, mark_of, name_of
from edgespec.loading.inventory import bundle_of, holdings, outdated, removable, remove
from edgespec_export.options import ExportOptions
from edgespec_export.recipe import RECIPES
from edgespec_models.downloads.catalog import find
from edgespec_models.downloads.download import model_path
from edgespec_models.errors import RequestError
from edgespec_models.storage import prompts_name

NAME, SHARING = "smollm2-135m-instruct", "smollm2-135m-qwen2.5-coder"
Make = Callable[..., Path]


@pytest.fixture
def make(own_home: Path) -> Make:
    """Writes a file below the home, of so many bytes."""

    def write(*parts: str, size: int = 10) -> Path:
        path = own_home.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
        return path

    return write


def bundle(make: Make, name: str, mark: str, recipe: int | None = None, size: int = 100) -> Path:
    folder = f"{name}-{mark}-target-exact-r{RECIPES[None] if recipe is None else recipe}"
    return make("bundles", folder, "edgespec.json", size=size).parent


def test_a_name_has_its_file_bundles_and_prompts(make: Make) -> None:
    file = make("models", model_path(find(NAME)).name, size=1000)
    made = bundle(make, NAME, find(NAME).mark)
    kept = make("prompt-cache", f"{NAME}-0123456789abcdef", "00", size=7).parent
    bundle(make, f"{NAME}-2", "0" * 8)  # of a model whose name begins alike
    parts = holdings(NAME)
    sizes = {part.kind: part.size_bytes for part in parts}
    assert sizes == {"file": 1000, "bundle": 100, "prompts": 7}
    assert [part.paths[0] for part in parts] == [file, made, kept]
    assert parts[0].shared_with == (SHARING,)
    with pytest.raises(RequestError, match="nothing on this machine belongs to 'mistral'"):
        holdings("mistral")


def test_a_shared_file_stays_while_another_name_has_bundles(make: Make) -> None:
    file = make("models", model_path(find(NAME)).name)
    made, other = bundle(make, NAME, find(NAME).mark), bundle(make, SHARING, find(SHARING).mark)
    remove(removable(NAME))
    assert file.exists() and other.exists() and not made.exists()
    remove(removable(SHARING))
    assert not file.exists() and not other.exists()


def test_a_file_goes_with_all_the_names_that_share_it_and_counts_once(make: Make) -> None:
    file = make("models", model_path(find(NAME)).name, size=1000)
    for name in (NAME, SHARING):
        bundle(make, name, find(name).mark)
    old = bundle(make, NAME, "0" * 8, recipe=1)
    result = CliRunner().invoke(app, ["rm", NAME, SHARING, "--outdated", "--json"])
    removed = json.loads(result.stdout)
    assert removed["bytes"] == 1300 and len(removed["removed"]) == len({*removed["removed"]})
    assert not file.exists() and not old.exists()


def test_a_name_with_that_of_a_device_is_no_bundle_for_it(make: Make) -> None:
    bundle(make, "model-cuda", "0" * 8)
    assert outdated() == []


def test_files_of_the_user_stay_and_what_was_made_of_them_goes(make: Make, tmp_path: Path) -> None:
    source, twin = tmp_path / "a" / "model.gguf", tmp_path / "b" / "model.gguf"
    for path in (source, twin):
        path.parent.mkdir()
        path.write_bytes(b"GGUF")
    made, others = bundle(make, "model", mark_of(source)), bundle(make, "model", mark_of(twin))
    assert bundle_of(str(source)) == made
    remove(removable(str(source)))
    assert source.exists() and others.exists() and not made.exists()


@pytest.mark.parametrize("stem", ["m" * 200, "\u6a21" * 60], ids=["letters", "bytes"])
def test_a_name_that_folders_shorten_has_its_bundle_and_prompts(
    make: Make, tmp_path: Path, stem: str
) -> None:
    source = tmp_path / f"{stem}.gguf"
    source.write_bytes(b"GGUF")
    made = folder_of(ExportOptions(), name_of(source), mark_of(source))
    make("bundles", made.name, "edgespec.json")
    make("prompt-cache", f"{prompts_name(name_of(source))}-0123456789abcdef", "00")
    assert [part.kind for part in holdings(str(source))] == ["bundle", "prompts"]


def test_the_mtp_layer_of_a_file_goes_with_it(make: Make, tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF")
    target = folder_of(ExportOptions(), name_of(source), mark_of(source))
    layer = folder_of(ExportOptions("drafter", target=source), name_of(source, source), mark_of(source))
    other = bundle(make, "m-mtp", "0" * 8)
    for folder in (target, layer):
        make("bundles", folder.name, "edgespec.json")
    remove(removable(str(source)))
    assert other.exists() and not target.exists() and not layer.exists()


def test_bundles_of_other_versions_are_found_whatever_they_were_made_for(make: Make) -> None:
    made, old = bundle(make, "m", "0" * 8), bundle(make, "m", "0" * 8, recipe=1)
    cuda = make("bundles", f"m-{'0' * 8}-target-cuda-r{RECIPES['cuda']}", "edgespec.json").parent
    older_cuda = make("bundles", f"m-{'0' * 8}-target-cuda-r{RECIPES[None] + 1}", "edgespec.json").parent
    assert {part.paths[0] for part in outdated()} == {old, older_cuda}
    result = CliRunner().invoke(app, ["rm", "--outdated", "--json"])
    assert set(json.loads(result.stdout)["removed"]) == {str(old), str(older_cuda)}
    assert made.exists() and cuda.exists()
    assert bundle_of("m") in (made, cuda)


@pytest.mark.usefixtures("consoles")
def test_the_commands_show_and_remove(make: Make) -> None:
    bundle(make, NAME, find(NAME).mark)
    shown = CliRunner().invoke(app, ["models", NAME]).stdout
    assert "100 bytes" in shown and f"{NAME}-{find(NAME).mark}" in shown
    assert CliRunner().invoke(app, ["rm"]).exit_code == 2
    assert CliRunner().invoke(app, ["rm", NAME]).exit_code == 0
    failed = CliRunner().invoke(app, ["rm", NAME])
    assert failed.exit_code == 1 and "nothing on this machine" in failed.stderr
    missing = CliRunner().invoke(app, ["inspect", NAME])
    assert missing.exit_code == 1 and f"edgespec export {NAME} -o DIR" in missing.stderr
