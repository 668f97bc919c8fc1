"""The index of the user's files: what it finds is what stands there; what it may be made of."""

import os
import random
import re
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.history import file_index
from edgespec.history.file_index import AddedFile, Asked, DamagedIndexError, FileIndex, write_index
from edgespec_models.errors import StorageError
from edgespec_models.progress import Progress, ignore_progress

WORDS = st.sampled_from(["ab", "abc", "b", "ba_1", "été", "日本", " ", "  ", "\n", ".", "(", "\r\n"])
TEXTS = st.lists(WORDS, max_size=60).map("".join)


def index_of(folder: Path, texts: Sequence[bytes]) -> Path:
    """The path of an index of these texts, later ones in files that were changed later."""
    files: list[AddedFile] = []
    for number, text in enumerate(texts):
        file = folder / f"{number}.txt"
        file.write_bytes(text)
        files.insert(0, AddedFile(str(file), "", len(text), float(number)))
    path = folder / "my-files"
    write_index(path, Asked("", {str(folder): True}), files, ignore_progress)
    return path


def _begins(text: bytes) -> list[int]:
    """Where words begin, said once more."""
    inner = [byte == 95 or byte > 127 or (byte < 128 and chr(byte).isalnum()) for byte in text]
    before = [False, *inner]
    return [at for at in range(len(text)) if (inner[at] and not before[at]) or text[at] >= 0xE0]


@pytest.fixture(params=[3, 1 << 18])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words sorted in many small parts, and searched for in many, or in one."""
    monkeypatch.setattr(file_index, "_BLOCK", request.param)
    monkeypatch.setattr(file_index, "_CHUNK", max(5, request.param))


@pytest.mark.usefixtures("block")
@settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXTS, max_size=4), context=TEXTS, most=st.integers(1, 40), data=st.data())
def test_what_is_found_stands_behind_the_longest_end_of_the_context(
    tmp_path: Path, texts: list[str], context: str, most: int, data: st.DataObject
) -> None:
    if data.draw(st.booleans()) and texts:
        whole = data.draw(st.sampled_from(texts))
        context += whole[: data.draw(st.integers(0, len(whole)))]
    wanted = context.encode().replace(b"\r\n", b"\n")[-64:]
    stored = [text.encode().replace(b"\r\n", b"\n") for text in texts]
    index = FileIndex(index_of(tmp_path, [text.encode() for text in texts]))
    found = index.find(wanted, most)
    index.close()
    ends = [wanted[begin:] for begin in _begins(wanted) if len(wanted) - begin >= 8]
    for end in ends:
        behind = [
            text[begin + len(end) :][:most]
            for text in stored
            for begin in _begins(text)
            if text.startswith(end, begin)
        ]
        if behind:
            break
    else:
        assert found is None
        return
    if found is None:  # where the files end
        assert b"" in behind
        return
    assert (found.length, len(found.texts)) == (len(end), -(-len(behind) // ((len(behind) - 1) // 16 + 1)))
    assert found.text in found.texts and set(found.texts) <= set(behind)
    firsts = [text[:1] for text in found.texts]
    assert firsts.count(found.text[:1]) == max(map(firsts.count, firsts))


@settings(deadline=None)
@given(TEXTS)
def test_words_begin_in_files_where_they_begin_in_contexts(text: str) -> None:
    data = b"\n" + text.encode()
    found = file_index._words(np.frombuffer(data, np.uint8), 1, len(data)).tolist()
    assert found == _begins(data) == [match.start() for match in file_index._WORD.finditer(data)]


@pytest.mark.usefixtures("block")
def test_words_are_sorted_by_what_follows_to_64_bytes(tmp_path: Path) -> None:
    same = b"x" + b" y" * 40
    index = FileIndex(
        index_of(tmp_path, [same, "é zz ÿ\u4e00".encode(), same, b"", b"a", b"longer_than_a_chunk"])
    )
    keys = [index._map[place : place + 64] for place in index._order]
    assert len(keys) == 2 * 41 + 6
    assert all(a <= b for a, b in pairwise(keys))
    equal = [(a, b) for (a, x), (b, y) in pairwise(zip(index._order, keys, strict=True)) if x == y]
    assert equal and all(a < b for a, b in equal)
    index.close()


@pytest.mark.parametrize("text", [b"0 " * 100_000, (b"0 " * 999 + b"1 ") * 100])
def test_repetitive_text_takes_no_more_memory_than_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(file_index, "_BLOCK", 1000)
    index_of(tmp_path, [b"0 1"])  # what is imported and kept by the first call
    tracemalloc.start()
    try:
        path = index_of(tmp_path, [text])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * len(text)
    index = FileIndex(path)
    assert len(index._order) == len(text) // 2
    found = index.find(text[:100], 20)
    assert found is not None and (found.length, found.text) == (64, text[:20])
    index.close()


def test_the_most_frequent_continuation_wins_then_the_latest_change(tmp_path: Path) -> None:
    index = FileIndex(
        index_of(tmp_path, [b"the word is one", b"the word is two", b"the word is two", b"the word is new"])
    )
    two = index.find(b"so the word is ", 20)
    assert two is not None and (two.length, two.text, len(two.texts)) == (12, b"two", 4)
    index.close()
    for latest in (1, -1):
        texts = [b"the word is one", b"the word is two"][::latest]
        index = FileIndex(index_of(tmp_path, texts))
        assert index.find(b"the word is ", 20) == (12, texts[-1][12:], [b"one", b"two"])
        assert index.find(b"word is", 20) is None  # seven bytes say too little
        index.close()


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"a\0b", "binary"), (b"\xff\xfe", "no UTF-8 text"), (None, "No such file or directory")],
)
def test_what_is_no_text_is_skipped_and_says_why(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    path = tmp_path / "my-files"
    write_index(path, Asked("", {}), [AddedFile(str(file), "", 3)], ignore_progress)
    index = FileIndex(path)
    assert [each.skipped for each in index.files] == [why]
    assert len(index._order) == 0 and index.find(b"any context", 8) is None
    index.close()


def test_an_interrupt_leaves_what_was_there(tmp_path: Path) -> None:
    path = index_of(tmp_path, [b"some words of mine"])
    before = path.read_bytes()

    def interrupt(report: Progress) -> None:
        if report.stage == "Sorting words":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_index(path, Asked("", {}), FileIndex(path).files, interrupt)
    assert path.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0.txt", "my-files"]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "empty but for the header": lambda data: data[:100],
    "another head": lambda data: data.replace(b"true", b"null", 1),
    "another table": lambda data: data[: data.rindex(b"[[") - 3] + b"\xff" + data[data.rindex(b"[[") - 2 :],
    "another list": lambda data: re.sub(rb"0\.txt", b"1.txt", data),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    path = index_of(tmp_path, [b"some words of mine"])
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(DamagedIndexError, match="damaged"):
        FileIndex(path)


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("change", [-1, 1, -4, 8, 1 << 40])
def test_a_changed_header_is_damage(tmp_path: Path, place: int, change: int) -> None:
    path = index_of(tmp_path, [b"some words of mine"])
    data = bytearray(path.read_bytes())
    magic, checksum, *places = file_index._HEADER.unpack_from(data)
    places[place] += change
    file_index._HEADER.pack_into(data, 0, magic, checksum, *places)
    path.write_bytes(data)
    with pytest.raises(DamagedIndexError, match="damaged"):
        FileIndex(path)


def test_every_changed_byte_is_refused_with_one_kind_of_error(tmp_path: Path) -> None:
    """Of the header, what was asked for and the files; four bytes of the header say nothing."""
    path = index_of(tmp_path, [b"some words of mine"])
    sound = path.read_bytes()
    _, _, text, *_ = file_index._HEADER.unpack_from(sound)
    for at in (*range(20), *range(24, text), *range(len(sound) - 200, len(sound))):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
        with pytest.raises(StorageError, match=r"damaged|did not make|another version"):
            FileIndex(path)


def test_an_index_of_another_version_is_one_to_make_again(tmp_path: Path) -> None:
    path = index_of(tmp_path, [b"some words of mine"])
    path.write_bytes(path.read_bytes().replace(b"edgespec files 2", b"edgespec files 1"))
    with pytest.raises(
        DamagedIndexError, match="another version of edgespec; 'edgespec history add' makes it"
    ):
        FileIndex(path)
    assert file_index.asked_of(path).named == {str(tmp_path): True}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=50), TEXTS, st.integers(0, 99)
)
def test_damage_that_is_not_noticed_breaks_nothing(
    tmp_path: Path, changes: list[tuple[int, int]], context: str, seed: int
) -> None:
    """Text and order are not read when an index is opened: proposals may be wrong, which costs time."""
    path = index_of(tmp_path, [b"ab abc ba_1. ab abc (b)" * 8, context.encode()])
    data = bytearray(path.read_bytes())
    _, _, text, order, table, *_ = file_index._HEADER.unpack_from(data)
    words = [data[at : at + 4] for at in range(order, table, 4)]
    random.Random(seed).shuffle(words)
    data[order:table] = b"".join(words)
    for at, byte in changes:
        data[text + at % (table - text)] = byte
    path.write_bytes(data)
    index = FileIndex(path)
    for end in range(100):
        index.find((b"ab abc ba_1. ab abc (b)" * 5)[:end], 20)
        index.find(context[:end].encode(), 20)
    list(index.holding("abc"))
    index.close()


@pytest.mark.parametrize("content", [b"my notes", b""])
def test_what_something_else_made_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "my-files"
    file.write_bytes(content)
    with pytest.raises(StorageError, match="did not make"):
        FileIndex(file)


@pytest.mark.skipif(os.name != "posix", reason="modes and pipes are a matter of POSIX")
def test_it_is_the_users_alone_and_no_pipe_is_opened(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = index_of(tmp_path, [b"text"])
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="did not make"):
        FileIndex(tmp_path / "pipe")
