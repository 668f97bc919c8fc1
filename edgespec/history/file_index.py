"""The user's files in one mapped file: their text, and its words sorted by how the text goes on from there.

A suffix array of words (Manber and Myers 1990; as a source of drafts: He et al. 2023, REST; Liu et al. 2024,
infini-gram). All places where a context of 8 to 64 bytes stands that begins with a word are found by binary
search, and of the file only the pages are read that are looked at. It holds bytes and no tokens: files are
sorted once, whatever targets draft from them, and no model has to be there for it.

The file: a header with the places of its parts; a line of JSON, what was asked for; the text of all files, a
zero behind each; the sorted words; where each pair of first bytes begins among them; the files, as JSON.
"""

import json
import mmap
import os
import re
import stat
import struct
import traceback
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec_models.errors import StorageError
from edgespec_models.files.replacing import move
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.schema import read

__all__ = ["AddedFile", "Asked", "DamagedIndexError", "FileIndex", "Followed", "asked_of", "write_index"]

_MOST: Final = 256_000_000
"""Bytes of all texts."""
_LARGEST: Final = 4_000_000  # bytes of a file
_LOOKED_AT: Final = 8192  # bytes at a file's beginning that tell whether it is binary
_LONGEST: Final = 64
"""Bytes of the longest context, by which places are told apart."""
_SHORTEST: Final = 8
_MAGIC: Final = b"edgespec files 2"
_HEADER: Final = struct.Struct("<16sI4x5Q")
_BLOCK: Final = 1 << 18  # words that are sorted at once
_CHUNK: Final = 1 << 24  # bytes that are searched for words at once
_MOST_READ: Final = 16  # places that vote; of more, an even selection
_VOTES: Final = (1, 2, 4, 8, 16, 32)  # bytes
_WORD: Final = re.compile(rb"(?<![0-9A-Za-z_\x80-\xff])[0-9A-Za-z_\x80-\xdf]|[\xe0-\xff]")
"""Where a word begins; in scripts of three bytes a character, which have no spaces, every character does."""
_IN_WORD: Final = np.array([_WORD.match(bytes([byte])) is not None for byte in range(256)])

_Bytes = npt.NDArray[np.uint8]
_Places = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Asked:
    """What an index was asked for.

    Attributes:
        namespace: whose proposals the files are for.
        named: absolute paths of files and folders that were added and, False, of those within them that were
            removed.
    """

    namespace: str
    named: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class AddedFile:
    """A file that was added to a history, or was found there and left out.

    Attributes:
        path: where it is.
        namespace: whose proposals it is for.
        size_bytes: its size when it was looked at.
        changed_on: when it was last changed then, seconds since 1970.
        skipped: why it is not drafted from; None where it is.
    """

    path: str
    namespace: str
    size_bytes: int = 0
    changed_on: float = 0.0
    skipped: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


class Followed(NamedTuple):
    """What stands behind a context.

    Attributes:
        length: bytes of the context.
        text: the bytes behind one of the places where it stands, to that file's end at most.
        texts: the same of all places, or of sixteen of them.
    """

    length: int
    text: bytes
    texts: Sequence[bytes]


class DamagedIndexError(StorageError):
    """An index is not as it was written."""


class FileIndex:
    """Files, mapped. One thread at a time.

    Args:
        path: what :func:`write_index` wrote.

    Raises:
        OSError: it cannot be read.
        DamagedIndexError: it is not whole.
        StorageError: something else made it.

    Attributes:
        files: the files, in the order in which they were given.
    """

    def __init__(self, path: Path) -> None:
        asked_of(path)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        magic, checksum, *places = _HEADER.unpack_from(self._map)
        text, order, table, files, end = places
        whole = magic == _MAGIC and _HEADER.size <= text <= order <= table <= files <= end == len(self._map)
        if not whole or checksum != _checksum(places, self._map[_HEADER.size : text] + self._map[table:]):
            self._map.close()
            made = "is damaged" if magic == _MAGIC else "was made by another version of edgespec"
            raise DamagedIndexError(f"{path} {made}; 'edgespec history add' makes it again")
        with memoryview(self._map) as view:
            self._order, self._table = view[order:table].cast("I"), view[table:files].cast("I")
        listed = json.loads(self._map[files:])
        self.files = [AddedFile(*values) for _, *values in listed]
        self._starts = [start for start, *_ in listed]

    def close(self) -> None:
        """Let go of the file."""
        self._order.release()
        self._table.release()
        self._map.close()

    def holding(self, text: str) -> Iterator[AddedFile]:
        """The files in which ``text`` occurs, in upper or lower case."""
        wanted = text.casefold()
        for file, start in zip(self.files, self._starts, strict=True):
            content = self._map[start : self._map.find(b"\0", start)]
            if file.skipped is None and wanted in content.decode("utf-8", "replace").casefold():
                yield file

    def find(self, context: bytes, most: int) -> Followed | None:
        """What stands behind the longest end of ``context`` that is found, of 8 to 64 bytes; None if none is.

        Of several places the most frequent continuation is taken, of equally frequent ones that in the file
        that was changed last.

        Args:
            context: committed text.
            most: bytes of what follows.
        """
        tail = context[-_LONGEST:]
        begins = [match.start() for match in _WORD.finditer(tail, 0, max(0, len(tail) - _SHORTEST + 1))]
        # Wherever a context stands, its end does.
        which = bisect_left(begins, True, key=lambda begin: self._stands(tail[begin:]))
        if which == len(begins):
            return None
        wanted = tail[begins[which] :]
        low = self._place(bisect_left, wanted)
        high = max(low + 1, self._place(bisect_right, wanted))  # also where the file is damaged
        some = self._order[low : high : (high - low - 1) // _MOST_READ + 1]
        behind = [place + len(wanted) for place in some]  # in files that were changed earlier, the greater
        texts = [self._map[place : place + most].partition(b"\0")[0] for place in behind]
        votes = Counter((size, text[:size]) for text in texts for size in _VOTES)
        ranks = [[votes[size, text[:size]] for size in _VOTES] for text in texts]
        _, _, text = max((rank, -place, text) for rank, place, text in zip(ranks, behind, texts, strict=True))
        return Followed(len(wanted), text, texts) if text else None

    def _stands(self, wanted: bytes) -> bool:
        at = self._place(bisect_left, wanted)
        place = self._order[at] if at < len(self._order) else 0
        return self._map[place : place + len(wanted)] == wanted

    def _place(self, bisect: Callable[..., int], wanted: bytes) -> int:
        """How many words come before ``wanted``, or besides begin with it, as ``bisect`` counts."""
        text, count, pair = self._map, len(wanted), wanted[0] << 8 | wanted[1]
        low, high = self._table[pair], self._table[pair + 1]
        return bisect(self._order, wanted, low, high, key=lambda place: text[place : place + count])


def asked_of(path: Path) -> Asked:
    """What an index was asked for, also of a damaged one if that can still be read.

    Raises:
        OSError: it cannot be read.
        DamagedIndexError: nothing of it can be.
        StorageError: something else made it.
    """
    line = None
    if stat.S_ISREG(path.lstat().st_mode):  # to open a pipe would wait
        with path.open("rb") as file:
            if file.read(_HEADER.size).startswith(_MAGIC[:-1]):  # of any edgespec
                line = file.readline()
    if line is None:
        raise StorageError(f"{path} is in the way of edgespec, which did not make it: move it")
    try:
        return read(Asked, json.loads(line), str(path), DamagedIndexError, "It is damaged")
    except (ValueError, RecursionError) as error:
        raise DamagedIndexError(f"{path} is damaged: {error}") from error


def write_index(path: Path, asked: Asked, found: Sequence[AddedFile], progress: ProgressCallback) -> None:
    """Read files and put their index at ``path``, which is replaced when all is done; mode 0600.

    It takes memory for some ten bytes a word, besides what the system keeps of files where there is room.

    Args:
        path: where to.
        asked: what was asked for.
        found: the files, those changed last first. Those that say why they are skipped are not read.
        progress: is told how far it is.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)  # of a program that was killed
    try:
        with os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b") as file:
            _write(file, asked, found, progress)
            file.flush()
            os.fsync(file.fileno())
        move(temporary, path)
    except BaseException as error:  # Ctrl-C
        traceback.clear_frames(error.__traceback__)  # they have it mapped, and Windows deletes no mapped file
        temporary.unlink(missing_ok=True)
        raise


def _write(file: BinaryIO, asked: Asked, found: Sequence[AddedFile], progress: ProgressCallback) -> None:
    head = json.dumps(asdict(asked)).encode() + b"\n"
    file.write(bytes(_HEADER.size) + head)
    text = file.tell()
    listed = list(_write_texts(file, found, progress))
    file.write(bytes(_LONGEST))
    order = file.tell()
    pairs = _write_order(file, text, progress)
    table = file.tell()
    begins = np.cumsum([0, *pairs], dtype="<u4").tobytes()
    tail = begins + json.dumps(listed).encode()
    file.write(tail)
    places = text, order, table, table + len(begins), file.tell()
    file.seek(0)
    file.write(_HEADER.pack(_MAGIC, _checksum(places, head + tail), *places))


def _checksum(places: Sequence[int], parts: bytes) -> int:
    """Of all that is read when an index is opened: the header, what was asked for, the table, the files."""
    return zlib.crc32(parts, zlib.crc32(_HEADER.pack(_MAGIC, 0, *places)))


def _write_texts(
    file: BinaryIO, found: Sequence[AddedFile], progress: ProgressCallback
) -> Iterator[tuple[Any, ...]]:
    """Where the text of each file begins, and the file."""
    total, done, room = sum(each.size_bytes for each in found), 0, _MOST
    for each in found:
        start, data, skipped = file.tell(), b"", each.skipped
        if skipped is None:
            data, skipped = _text_of(each, room)
            room -= len(data)
            file.write(data)
        done += each.size_bytes
        progress(Progress("Reading files", done, total))
        yield start, *astuple(replace(each, skipped=skipped))


def _text_of(added: AddedFile, room: int) -> tuple[bytes, str | None]:
    """A file's text, its lines ended as models end them, and a zero; or nothing, and why."""
    if added.size_bytes > _LARGEST:
        return b"", f"larger than {_LARGEST // 10**6} MB"
    if added.size_bytes > room:
        return b"", f"no room beside {_MOST // 10**6} MB of later files"
    try:
        with Path(added.path).open("rb") as file:
            data = file.read(min(_LOOKED_AT, added.size_bytes))
            if b"\0" not in data:
                data = (data + file.read(added.size_bytes - len(data))).replace(b"\r\n", b"\n")
        data.decode()
    except OSError as error:
        return b"", error.strerror or "cannot be read"
    except UnicodeDecodeError:
        return b"", "no UTF-8 text"
    return (b"", "binary") if b"\0" in data else (data + b"\0", None)


def _write_order(file: BinaryIO, begin: int, progress: ProgressCallback) -> npt.NDArray[np.int64]:
    """Sort the words from ``begin`` on; returns how many begin with each pair of bytes."""
    file.flush()
    end = file.tell()
    text = np.frombuffer(mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ), np.uint8)
    words = np.concatenate([_words(text, at, min(at + _CHUNK, end)) for at in range(begin, end, _CHUNK)])
    pairs, done = np.zeros(1 << 16, np.int64), 0
    for block in _sorted(text, words):
        file.write(block.astype("<u4").tobytes())
        pairs += np.bincount(
            text[block].astype(np.int64) << 8 | text[block + np.uint32(1)], minlength=1 << 16
        )
        done += len(block)
        progress(Progress("Sorting words", done, len(words), "words"))
    return pairs


def _words(text: _Bytes, begin: int, end: int) -> _Places:
    """Where words begin; what stands before ``begin`` counts."""
    within = _IN_WORD[text[begin - 1 : end]]
    found = (within[1:] & ~within[:-1]) | (text[begin:end] >= 0xE0)
    return (np.flatnonzero(found) + begin).astype(np.uint32)


def _sorted(text: _Bytes, words: _Places) -> Iterator[_Places]:
    """Words as their texts sort, block by block; equal ones as they stand."""
    waiting = [(words, 0)]  # each word in one of them, or repetitive texts would take memory for every depth
    while waiting:
        words, depth = waiting.pop()
        if depth == _LONGEST:
            yield from (words[at : at + _BLOCK] for at in range(0, len(words), _BLOCK))
        elif len(words) > _BLOCK:
            following = text[words + np.uint32(depth)]
            last_first = np.unique(following)[::-1]
            waiting += [(words[following == byte], depth + 1) for byte in last_first]
        else:
            keys = np.lib.stride_tricks.sliding_window_view(text, _LONGEST)[words].view(f"S{_LONGEST}")
            yield words[np.argsort(keys.reshape(-1), kind="stable")]
