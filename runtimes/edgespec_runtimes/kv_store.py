"""Keys and values of texts that no session holds, in blocks of 32 tokens: what was read stays read.

A block lies in memory, on disk, or in both. Its name is a chain of digests: over what the bits depend on
besides tokens (:attr:`edgespec_runtimes.session.LoadedModel.prompt_key`), then over all tokens up to the
block's end. So texts share the blocks of what they begin with alike. In memory the last block of a text may
have fewer tokens.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, takewhile
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.kept import BLOCK
from edgespec_runtimes.block_files import BlockFiles
from edgespec_runtimes.kv_cache import shared_length
from edgespec_runtimes.session import LoadedModel, Session

_LEAST: Final = 4
"""Tokens that are worth a copy: it takes next to nothing, and reading them longer than a pass over one."""


class _Place(NamedTuple):
    """What tells a block from others: the model, the name of the block before it or the key, its tokens."""

    model: LoadedModel
    before: str
    tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of the block."""
        return hashlib.sha256(self.before.encode() + np.array(self.tokens, "<i8").tobytes()).hexdigest()


class KvStore:
    """Blocks of texts that sessions of one or more models have read.

    A session's cache holds one text. Before it reads another, what would be lost is put aside in memory, and
    what is known of the new text is put in its place: a copy of the same bits, so that answers do not change.
    Texts are written to ``files``, where there are any, when there is time for it. One thread at a time.

    Blocks in memory take ``nbytes`` now, and may take ``budget`` bytes; 0 keeps none. The least recently used
    go first, of a text the end before the beginning, without which it is lost.
    """

    def __init__(self, budget: int, files: BlockFiles | None = None) -> None:
        self._budget, self._files = budget, files
        self.nbytes = 0
        self._blocks = dict[_Place, bytes]()  # the least recently used first
        self._readers = list[Session]()  # of which what they hold is to be written
        self._unwritten = list[list[_Place]]()  # texts in memory that are to be written

    @property
    def problem(self) -> str | None:
        """What keeps texts from being written to disk; None if nothing."""
        return None if self._files is None else self._files.problem

    def fetch(
        self, session: Session, tokens: Sequence[int], beside: Sequence[Session] = (), *, on_disk: bool = True
    ) -> None:
        """Let ``session`` hold as much of ``tokens`` as is known of them, or as those ``beside`` it hold.

        With ``on_disk`` also of what other processes held, and what it will hold of this text is written.

        Raises:
            DeviceError: no memory; the session's cache is empty then.
        """
        files = self._files if on_disk and session.model.prompt_key else None
        text = [*_places(session.model, tokens)]
        known = self._known(text)  # although another text may need their room now
        if self._budget and session.length - session.shared_prefix(tokens) >= _LEAST:
            self._put_aside(session)
        if session in self._readers:
            self._readers.remove(session)
        for other in beside:
            _copy(session, other, tokens)
        self._take_up(session, text, known, files)
        if files is not None:
            session.rewind(session.shared_prefix(tokens))  # the rest may be of what is not to be written
            self._readers.append(session)

    def write_behind(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Write what is not on disk yet, the latest first; ``stop``, asked between blocks, ends it."""
        while self._readers:
            session = self._readers[-1]
            text = [*_places(session.model, session.stretch.tokens)]
            if not self._write(text, partial(_content, session), stop):
                return
            self._readers.pop()
        while self._unwritten:
            text = self._unwritten[-1]
            if not self._write(text, [*map(self._blocks.get, text)].__getitem__, stop):
                return
            self._unwritten.pop()

    def trim(self, used: Collection[Session]) -> int:
        """Drop all blocks in memory, those on the way to the disk when they are there; their bytes.

        What ``used`` sessions hold is written later, when they have read more.
        """
        later = [session for session in self._readers if session in used]
        self._readers = [session for session in self._readers if session not in used]
        self.write_behind()
        freed, self.nbytes = self.nbytes, 0
        self._blocks.clear()
        self._unwritten.clear()
        self._readers = later
        return freed

    def forget(self, session: Session, *, on_disk: bool = False) -> None:
        """Forget all texts in memory of the model that ``session`` is of; those on disk too if asked to."""
        model = session.model
        self._readers = [reader for reader in self._readers if reader.model is not model]
        self._unwritten = [text for text in self._unwritten if text[0].model is not model]
        for place in [place for place in self._blocks if place.model is model]:
            self._drop(place)
        if on_disk and self._files is not None:
            self._files.forget(model.prompt_key)

    def _known(self, text: Sequence[_Place]) -> dict[_Place, bytes]:
        """Blocks in memory of a text, which are used now, and others behind the same beginnings."""
        for place in reversed(text):
            if place in self._blocks:
                self._blocks[place] = self._blocks.pop(place)
        befores = {place[:2] for place in text}
        return {place: block for place, block in self._blocks.items() if place[:2] in befores}

    def _take_up(
        self,
        session: Session,
        text: Sequence[_Place],
        known: Mapping[_Place, bytes],
        files: BlockFiles | None,
    ) -> None:
        """Let ``session`` hold of ``text`` what is ``known`` or in ``files``, if that is worth it."""
        tokens = [*chain.from_iterable(place.tokens for place in text)]
        held, key = session.shared_prefix(tokens), session.model.prompt_key
        first = held // BLOCK

        def is_there(place: _Place) -> bool:
            return place in known or (files is not None and files.has(key, place.name))

        found = [*takewhile(is_there, text[first:])]
        for rest in text[first + len(found) :][:1]:  # of which another may have a part
            others = [place for place in known if place.before == rest.before]
            found += sorted(others, key=lambda place: shared_length(place.tokens, rest.tokens))[-1:]
        parts = [text[:first], found]
        length = shared_length([token for part in parts for place in part for token in place.tokens], tokens)
        length = session.model.places.floor(length)
        if length < held + _LEAST or session.rewind(first * BLOCK) != first * BLOCK:
            return
        session.reserve(length)
        like = session.view(0, 0)
        assert like is not None  # or no block would be known
        form = _form(like, BLOCK)
        for place in found:
            block: bytes | memoryview | None = known.get(place)
            if block is None and files is not None:
                block = files.read(key, place.name, form.itemsize)
            if block is None:
                return
            if len(block) != form.itemsize:
                form = _form(like, BLOCK * len(block) // form.itemsize)
            fields = np.frombuffer(block, form)[0]
            arrays = [fields[name] for name in form.names or ()]
            session.append(place.tokens[: length - session.length], arrays)

    def _put_aside(self, session: Session) -> None:
        """Keep what ``session`` holds, or its beginning as far as the budget has room for it."""
        kept = dict[_Place, bytes]()
        try:
            for at, place in enumerate(_places(session.model, session.stretch.tokens)):
                block = self._blocks.pop(place, None)
                if block is None:
                    block = _content(session, at) if len(place.tokens) >= _LEAST else None
                    if block is None or not self._make_room(len(block)):
                        break
                    self.nbytes += len(block)
                kept[place] = block
        finally:
            self._blocks.update(reversed(kept.items()))
        longer = {place.before: place.tokens for place in kept}
        for end in [place for place in self._blocks if len(place.tokens) < BLOCK and place not in kept]:
            other = longer.get(end.before, ()) if end.model is session.model else ()
            if len(end.tokens) - shared_length(end.tokens, other) < _LEAST:
                self._drop(end)
        whole = [place for place in kept if len(place.tokens) == BLOCK]
        if session in self._readers and whole:
            self._unwritten = [text for text in self._unwritten if text[-1] not in kept] + [whole]

    def _make_room(self, nbytes: int) -> bool:
        """Whether there is room for so many bytes, after dropping others."""
        while self._blocks and self.nbytes + nbytes > self._budget:
            self._drop(next(iter(self._blocks)))
        return self.nbytes + nbytes <= self._budget

    def _drop(self, place: _Place) -> None:
        self.nbytes -= len(self._blocks.pop(place))

    def _write(
        self, text: Sequence[_Place], block: Callable[[int], bytes | None], stop: Callable[[], bool]
    ) -> bool:
        """Whether the whole blocks of ``text`` are on disk, or cannot be; False if ``stop`` said so."""
        names = [place.name for place in text if len(place.tokens) == BLOCK]
        if not names or self._files is None:
            return True
        return self._files.write(text[0].model.prompt_key, names, block, stop)


def _places(model: LoadedModel, tokens: Sequence[int]) -> Iterator[_Place]:
    """Of all blocks of a text; the last may have fewer tokens."""
    before = model.prompt_key
    for start in range(0, len(tokens), BLOCK):
        place = _Place(model, before, tuple(tokens[start : start + BLOCK]))
        yield place
        before = place.name


def _copy(session: Session, other: Session, tokens: Sequence[int]) -> None:
    """Let ``session`` hold as much of ``tokens`` as ``other`` does, if that is worth it."""
    held, shared = session.shared_prefix(tokens), other.model.places.floor(other.shared_prefix(tokens))
    begin = held // BLOCK * BLOCK
    if shared < held + _LEAST or other.view(0, 0) is None or session.rewind(begin) != begin:
        return
    session.reserve(shared)  # before there is a view, which would keep the memory that others move out of
    view = other.view(begin, shared)
    assert view is not None
    session.append(tokens[begin:shared], view)


def _content(session: Session, at: int) -> bytes | None:
    """What a session holds of the block of that number of its text; None where the device keeps no rows."""
    view = session.view(at * BLOCK, min((at + 1) * BLOCK, session.length))
    return None if view is None else b"".join(array.tobytes() for array in view)


def _form(like: Sequence[npt.NDArray[Any]], tokens: int) -> np.dtype[Any]:
    """Of a block of so many tokens: arrays such as these, one behind the other."""
    return np.dtype([("", array.dtype, (1, array.shape[1], tokens, array.shape[3])) for array in like])
