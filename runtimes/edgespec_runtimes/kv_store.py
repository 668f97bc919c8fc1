"""Keys and values of texts that no session holds, in blocks of 32 tokens: what was read stays read.

A block lies in memory, on disk, or in both. Its name is a chain of digests: over what the bits depend on
besides tokens (:attr:`edgespec_runtimes.session.LoadedModel.prompt_key`), then over all tokens up to the
block's end. So texts share the blocks of what they begin with alike. In memory the last block of a text may
have fewer tokens.

Some models have states that are too large for every block. Of their texts a *checkpoint* has the states at
one place, with keys and values of the few tokens from the last whole block to there: a block without tokens
of its own in the chain, so that there is one behind each block at most. A text goes on from a checkpoint or
not at all.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, takewhile
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec_models.bundles.kept import BLOCK, LOGGED
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
        """Of the block; a checkpoint's is over no tokens."""
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
            self.checkpoint(session)
            self._put_aside(session)
        if session in self._readers:
            self._readers.remove(session)
        for other in beside:
            _copy(session, other, tokens)
        self._take_up(session, text, known, files)
        if files is not None:
            session.rewind(session.shared_prefix(tokens))  # the rest may be of what is not to be written
            self._readers.append(session)

    def checkpoint(self, session: Session) -> None:
        """Keep the states that ``session`` has now, where they do not go with blocks of tokens."""
        if session.model.places.every or not session.stretch.behind:
            return
        place, like = _checkpoint_place(session), session.view(0, 0)
        assert like is not None  # of models with states
        if place in self._blocks:
            rest = session.stretch.tokens[session.stretch.behind // BLOCK * BLOCK :]
            before = _Checkpoint.read(self._blocks[place], session, like)
            if before is not None and shared_length(before.tokens, rest) >= before.behind:
                return  # most texts that share this one's end go on from there, too
            self._drop(place)
        with suppress(MemoryError):
            content = _checkpoint(session)
            if self._make_room(len(content)):
                self._blocks[place] = content
                self.nbytes += len(content)

    def write_behind(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Write what is not on disk yet, the latest first; ``stop``, asked between blocks, ends it."""
        while self._readers:
            session = self._readers[-1]
            if not self._write([*_places(session.model, session.stretch.tokens)], session, stop):
                return
            self._readers.pop()
        while self._unwritten:
            if not self._write(self._unwritten[-1], None, stop):
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
            for used in (place._replace(tokens=()), place):
                if used in self._blocks:
                    self._blocks[used] = self._blocks.pop(used)
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
        if not session.model.places.every:
            self._resume(session, text, known, files)
            return
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

    def _resume(
        self,
        session: Session,
        text: Sequence[_Place],
        known: Mapping[_Place, bytes],
        files: BlockFiles | None,
    ) -> None:
        """The same from a checkpoint: the last that leads on and whose blocks are all there."""
        tokens = [*chain.from_iterable(place.tokens for place in text)]
        shared, key = session.shared_prefix(tokens), session.model.prompt_key
        held = session.model.places.nearest(shared, session.stretch.behind)
        session.reserve(min(len(tokens), session.model.longest))
        like = session.view(0, 0)
        assert like is not None  # of models with states
        block_form, form = _form(like, BLOCK), _checkpoint_form(session, like)

        def content(place: _Place, size: int) -> bytes | memoryview | None:
            block = known.get(place)
            return files.read(key, place.name, size) if block is None and files is not None else block

        for at, place in reversed([*enumerate(text)]):
            if (at + 1) * BLOCK + LOGGED < held + _LEAST:
                return
            states = content(place._replace(tokens=()), form.itemsize)
            checkpoint = None if states is None else _Checkpoint.read(states, session, like)
            if checkpoint is None:
                continue
            length = shared_length(checkpoint.tokens, tokens[at * BLOCK :])
            if length < checkpoint.behind or at * BLOCK + length < held + _LEAST:
                continue
            first = min(shared // BLOCK, at)  # whose keys and values lie in the session
            parts = list[tuple[Sequence[int], Sequence[npt.NDArray[Any]]]]()
            for before in text[first:at]:
                if (block := content(before, block_form.itemsize)) is not None:
                    parts.append((before.tokens, [*np.frombuffer(block, block_form)[0]]))
            if len(parts) < at - first:
                continue
            parts.append((checkpoint.tokens[:length], checkpoint.arrays))
            session.resume(first * BLOCK, parts, checkpoint.state, at * BLOCK + checkpoint.behind)
            return

    def _put_aside(self, session: Session) -> None:
        """Keep what ``session`` holds, or its beginning as far as the budget has room for it."""
        kept = dict[_Place, bytes]()
        try:
            for at, place in enumerate(_places(session.model, session.stretch.tokens)):
                block = self._blocks.pop(place, None)
                if block is None:
                    least = _LEAST if session.model.places.every else BLOCK
                    block = _content(session, at) if len(place.tokens) >= least else None
                    if block is None or not self._make_room(len(block)):
                        break
                    self.nbytes += len(block)
                kept[place] = block
        finally:
            self._blocks.update(reversed(kept.items()))
        longer = {place.before: place.tokens for place in kept}
        for end in [place for place in self._blocks if 0 < len(place.tokens) < BLOCK and place not in kept]:
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

    def _write(self, text: Sequence[_Place], session: Session | None, stop: Callable[[], bool]) -> bool:
        """Whether the whole blocks of ``text`` and its checkpoints are on disk, or cannot be.

        Blocks are those that ``session`` holds, else those in memory. False if ``stop`` said so.
        """
        contents = list[tuple[str, Callable[[], bytes | None]]]()
        for at, place in enumerate(text):
            if len(place.tokens) < BLOCK:
                break
            held = partial(self._blocks.get, place) if session is None else partial(_content, session, at)
            contents.append((place.name, held))
            checkpoint = _Place(place.model, place.name, ())
            if checkpoint in self._blocks:
                contents.append((checkpoint.name, partial(self._blocks.get, checkpoint)))
        if not contents or self._files is None:
            return True
        names = [name for name, _ in contents]
        return self._files.write(text[0].model.prompt_key, names, lambda at: contents[at][1](), stop)


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


_ROWS: Final = BLOCK + LOGGED
"""Tokens of a checkpoint at most: states lie behind one of a block, and the log has the rows since."""


class _Checkpoint(NamedTuple):
    """Tokens behind a block, with keys and values, and states that lie behind ``behind`` of these."""

    behind: int
    tokens: list[int]
    arrays: list[npt.NDArray[Any]]
    state: list[npt.NDArray[Any]]

    @classmethod
    def read(
        cls, content: bytes | memoryview, session: Session, like: Sequence[npt.NDArray[Any]]
    ) -> "_Checkpoint | None":
        """What :func:`_checkpoint` wrote; None where it is of no use."""
        facts, rows, state = np.frombuffer(content, _checkpoint_form(session, like))[0]
        behind, count, *tokens = facts.tolist()
        if not 0 <= behind <= count <= min(behind + LOGGED, _ROWS):
            return None
        return cls(behind, tokens[:count], [*rows], [*state])


def _checkpoint_form(session: Session, like: Sequence[npt.NDArray[Any]]) -> np.dtype[Any]:
    """Of a checkpoint: where states lie and how many tokens follow, these, keys and values, states."""
    rows = _form(like, _ROWS)
    states = [("", array.dtype, array.shape) for array in session.state()]
    return np.dtype([("facts", "<i8", (2 + _ROWS,)), ("rows", rows), ("states", states)])


def _checkpoint_place(session: Session) -> _Place:
    """Behind the last whole block of what the states of ``session`` lie behind."""
    tokens = session.stretch.tokens[: session.stretch.behind // BLOCK * BLOCK]
    before = [session.model.prompt_key, *(place.name for place in _places(session.model, tokens))]
    return _Place(session.model, before[-1], ())


def _checkpoint(session: Session) -> bytes:
    """The states of ``session``, of a size that depends on the model alone."""
    stretch = session.stretch
    begin = stretch.behind // BLOCK * BLOCK
    view, tokens = session.view(begin, session.length), stretch.tokens[begin:]
    assert view is not None  # of models with states
    content = np.zeros(1, _checkpoint_form(session, view))
    content["facts"][0, : 2 + len(tokens)] = stretch.behind - begin, len(tokens), *tokens
    for name, array in zip(content["rows"].dtype.names or (), view, strict=True):
        content["rows"][name][0][:, :, : array.shape[2]] = array
    for name, array in zip(content["states"].dtype.names or (), session.state(), strict=True):
        content["states"][name][0] = array
    return content.tobytes()
