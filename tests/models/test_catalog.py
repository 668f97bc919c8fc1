"""The catalogue: what is installed is sound, and what is malformed is refused by file and key."""

from pathlib import Path

import pytest

from edgespec_models.downloads.catalog import HubFile, IndexParts, entries, find
from edgespec_models.downloads.hub import HubReference
from edgespec_models.errors import CatalogueError

GOOD = """
title = "A model"
architecture = "llama"
role = "target"
parameters = 7
licence = "MIT"
filename = "a.gguf"
size_bytes = 5
sha256 = "0000000000000000000000000000000000000000000000000000000000000000"

[[sources]]
kind = "hub"
repository = "someone/a"
filename = "sub/a.gguf"

[[sources]]
kind = "index"
parts = [
    { package = "a-part1", version = "1.0", member = "a/1.bin", size_bytes = 2 },
    { package = "a-part2", version = "1.0", member = "a/2.bin", size_bytes = 3 },
]
"""


SOURCES = GOOD[GOOD.index("[[sources]]") :]


def write(folder: Path, text: str, name: str = "a") -> Path:
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return folder


def test_what_the_installed_catalogue_has() -> None:
    known = entries()
    assert {"gemma-3-270m", "qwen2.5-coder-1.5b-instruct", "smollm2-135m-qwen2.5-coder"} <= known.keys()
    for name, entry in known.items():
        assert entry.name == name
        assert entry.drafter is None or known[entry.drafter].role == "drafter"
        assert {type(source) for source in entry.sources} == {HubFile, IndexParts}
    files = {(entry.filename, entry.sha256, entry.size_bytes, entry.sources) for entry in known.values()}
    assert len(files) == len({entry.filename for entry in known.values()})
    assert len({entry.mark for entry in known.values()}) == len(known)


def test_every_key_is_read(tmp_path: Path) -> None:
    entry = entries(write(tmp_path, GOOD))["a"]
    assert (entry.name, entry.role, entry.size_bytes, entry.licence_url) == ("a", "target", 5, None)
    hub, index = entry.sources
    assert hub == HubFile("someone/a", "sub/a.gguf", "main")
    assert isinstance(index, IndexParts)
    assert [(part.package, part.size_bytes) for part in index.parts] == [("a-part1", 2), ("a-part2", 3)]


def test_a_name_that_none_may_have(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="Not A Name"):
        entries(write(tmp_path, GOOD, "Not A Name"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('licence = "MIT"\n', "", "a.toml: licence is missing"),
        ('licence = "MIT"', 'license = "MIT"\nlicence = "MIT"', "a.toml: 'license' is not known"),
        ("parameters = 7", 'parameters = "7"', "a.toml: parameters is '7'"),
        ("parameters = 7", "parameters = true", "a.toml: parameters is True"),
        ("size_bytes = 5", "size_bytes = 0", "size_bytes is 0"),
        ('"target"', '"oracle"', "role is 'oracle'"),
        ('filename = "a.gguf"', 'filename = "../a.gguf"', "filename is '../a.gguf'"),
        ('filename = "sub/a.gguf"', 'filename = "/etc/passwd"', r"a.toml: sources\[0\]: filename"),
        ("someone/a", "someone", "repository"),
        ('"hub"', '"ftp"', "kind is 'ftp'"),
        ('"a-part2"', '"--index-url"', r"sources\[1\]: parts\[1\].package is '--index-url'"),
        ('"a-part1", version', '"a-part1", colour = 1, version', "colour' is not known"),
        ("size_bytes = 3", "size_bytes = 4", "the parts add up to 6 bytes, but size_bytes is 5"),
        ('role = "target"', 'role = "target"\ndrafter = "b"', "drafter = 'b' is not in the catalogue"),
        ("000000", "zz0000", "sha256"),
        ("title =", "title", "cannot be read as TOML"),
        (SOURCES, "", "sources is missing"),
        (SOURCES, "sources = []", "of length 1 or more"),
    ],
)
def test_a_malformed_file_is_refused_by_name_and_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GOOD
    with pytest.raises(CatalogueError, match=message):
        entries(write(tmp_path, GOOD.replace(old, new, 1)))


def test_find_suggests_what_is_near_and_lists_all() -> None:
    assert find("gemma-3-270m").architecture == "gemma3"
    with pytest.raises(CatalogueError, match=r"Did you mean 'smollm2-135m-instruct'\?.*gemma-3-270m"):
        find("SmolLM2-135M")
    for name in ("zzz", "z" * 400, "z\0"):
        with pytest.raises(CatalogueError, match=r"^no model 'z.*, and no such file or folder"):
            find(name)


def test_a_name_of_the_hub_is_suggested_before_names_of_the_catalogue() -> None:
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-4B-GGUF:Q8_0", "a/b@main"):
        with pytest.raises(CatalogueError, match=f"Did you mean 'hf:{name}'"):
            find(name)
        assert HubReference.parse(f"hf:{name}")
    for path in ("./model", "../model", "models/", "a/b/c"):
        with pytest.raises(CatalogueError, match=r"^no model"):
            find(path)
