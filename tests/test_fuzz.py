"""What fuzzers found once is tried again, and their rules can fail; all that without atheris."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from edgespec_export.sources.gguf import GGUFFile
from edgespec_models.errors import BundleError, EdgespecError, ModelFileError
from tools.fuzz.forms import GGUF, JSON, PROTOBUF, Form
from tools.fuzz.rules import only, untouched, write_files
from tools.fuzz.targets import TARGETS, target_of
from tools.fuzz.trees import Changer

KEPT = sorted((Path(__file__).parent / "fuzz").glob("*/*"))
CHANGED = 25  # inputs of each target


def shuffled(data: bytes, random: Random) -> bytes:
    """Stands in for libFuzzer's own changes."""
    at = random.randrange(len(data) + 1)
    return data[:at] + random.randbytes(random.randrange(4)) + data[at + random.randrange(3) :]


@pytest.mark.parametrize("file", KEPT, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_what_was_found_once_is_refused_as_it_should_be(tmp_path: Path, file: Path) -> None:
    target_of(file.parent.name).rule(tmp_path)(file.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_becomes_of_them_keep_the_rule(tmp_path: Path, name: str) -> None:
    target, random = target_of(name), Random(name)
    rule, seeds = target.rule(tmp_path), target.seeds()
    for seed in seeds:
        assert target.form.write(target.form.read(seed)) == seed
    rule(seeds[0])
    rule(b"")
    rule(b"\xff{")
    changer = Changer([target.form.read(seed) for seed in seeds], target.words)
    for _ in range(CHANGED):
        tree = target.form.read(random.choice(seeds))
        rule(target.form.write(changer.changed(tree, random, lambda data: shuffled(data, random))))


@pytest.mark.parametrize("form", [JSON, GGUF, PROTOBUF])
def test_any_tree_can_be_written(form: Form) -> None:
    changer, random = Changer([{"facts": [["a", 8, "b"], ["c", 9, [4, [1, 2]]]], "tensors": []}]), Random(0)
    tree: object = (
        [[1, 2, [[1, 0, 5]]]] if form is PROTOBUF else {"facts": [["k", 9, [8, ["x"]]]], "more": [0, 0]}
    )
    for _ in range(300):
        tree = changer.changed(tree, random, lambda data: shuffled(data, random))
        assert isinstance(form.write(tree), bytes)
        if len(json.dumps(tree)) > 10_000:
            tree = {"tensors": [["t", [1], 0, 0]]}


def raising(error: BaseException) -> Callable[..., None]:
    def function(*_: object, **__: object) -> None:
        raise error

    return function


@pytest.mark.parametrize(
    "error", [KeyError("k"), BundleError("m.gguf"), ModelFileError("some file"), MemoryError()]
)
def test_what_is_not_documented_breaks_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    target = target_of("gguf")
    monkeypatch.setattr(GGUFFile, "_parse", raising(error))
    monkeypatch.setattr("tools.fuzz.checkpoints.naming", lambda path: untouched(tmp_path))
    with pytest.raises((AssertionError, type(error))):
        target.rule(tmp_path)(target.seeds()[0])


def test_a_file_that_is_changed_or_left_behind_breaks_the_rule(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": "x", "b": {}}, ("a", "b", "c"))
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b"}
    for change in ((tmp_path / "a").write_text, (tmp_path / "d").write_text):
        with pytest.raises(AssertionError, match="changed"), untouched(tmp_path):
            change("yz")


def test_messages_are_never_long_and_command_no_terminal() -> None:
    error = ModelFileError(f"m.gguf: \x1b[2J\udc80 {'x' * 10_000_000} é日\n. Download it again")
    with only(ModelFileError, names="m.gguf"):
        raise error
    assert str(error).startswith(r"m.gguf: \x1b[2J\udc80 xxx")
    assert str(error).endswith("xxx é日\n. Download it again")
    assert len(str(error)) < 5000
    assert str(EdgespecError()) == ""
    assert len(str(EdgespecError("\0" * 5000))) < 5000
