"""Whatever strangers wrote, reading it ends well: damaged input that hypothesis chooses, and past finds.

The rule is the same everywhere. Nothing but a documented error may come out. It names the file, is short, and
holds nothing that would command a terminal; no file that is read may change. ``python tools/run.py fuzz``
tries many times as many inputs.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec_models.errors import EdgespecError, ModelFileError
from tests.kit.readers import READERS, allowed, table

KEPT = sorted((Path(__file__).parent / "fuzz").glob("*/*"))
NUMBERS: list[Any] = [None, True, 0, -1, 7, 2**31, 10**400, 1.5, 1e308]
WRONG = st.sampled_from([*NUMBERS, "", "x", "\x1b[2J\ud800", "[/red]", [], [0], {}, {"a": 1}])


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a tree: what holds it, and under which key."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree))[:200]:
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


@st.composite
def damaged(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A sound input with some values of its JSON, or some bytes, replaced."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 3))):
        tree = table(data)
        found = list(places(tree))
        if bool(found) and draw(st.booleans()):
            holder, key = found[draw(st.integers(0, len(found) - 1))]
            holder[key] = draw(WRONG)
            data = json.dumps(tree).encode()
        else:
            at = draw(st.integers(0, min(len(data), 1 << 14)))
            data = data[:at] + draw(st.binary(max_size=8)) + data[at + draw(st.integers(0, 8)) :]
    return data


@pytest.mark.parametrize("file", KEPT, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_what_was_found_once_is_refused_as_it_should_be(tmp_path: Path, file: Path) -> None:
    reader = READERS[file.parent.name](tmp_path)
    with allowed(*reader.errors, name=reader.name):
        reader.read(file.read_bytes())


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of a find, which must be seen
@pytest.mark.parametrize("name", READERS)
def test_damaged_input_meets_the_documented_error(tmp_path: Path, name: str) -> None:
    reader = READERS[name](tmp_path)
    reader.read(reader.seeds[0])

    @settings(suppress_health_check=list(HealthCheck))
    @given(damaged(reader.seeds))
    def try_one(data: bytes) -> None:
        with allowed(*reader.errors, name=reader.name):
            reader.read(data)

    try_one()


def test_messages_are_never_long_and_command_no_terminal() -> None:
    error = ModelFileError(f"m.gguf: \x1b[2J\udc80 {'x' * 10_000_000} é日\n. Download it again")
    with allowed(ModelFileError, name="m.gguf"):
        raise error
    assert str(error).startswith(r"m.gguf: \x1b[2J\udc80 xxx")
    assert str(error).endswith("xxx é日\n. Download it again")
    assert str(EdgespecError()) == ""
    assert len(str(EdgespecError("\0" * 5000))) < 5000
