"""Keys and values of texts that no session holds, in blocks of 32 tokens, so they need not be read again.

A block lies in memory, on disk, or in both. Its name is a chain of digests: over the model's key
(:attr:`edgespec_runtimes.session.LoadedModel.prompt_key`), then over all tokens up to the block's end. So
texts share the blocks of their common beginning. In memory the last block of a text may have fewer tokens.

Some models have states that are too large for every block. A *checkpoint* of a text has the states at a
place, with keys and values of the few tokens from the last whole block to there. It is a block without tokens
of its own in the chain, so each block has one at most. Such a text goes on only from a checkpoint.

The vectors of a picture are kept likewise: a block with the picture's name and without tokens.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from edgespec_models.decoders.kept import BLOCK, LOGGED
from edgespec_runtimes.block_files import BlockFiles
from edgespec_runtimes.kv_cache import Saved, shared_length
from edgespec_runtimes.predictions import Floats
from edgespec_runtimes.session import LoadedModel, Session

_LEAST: Final = 4
"""The least tokens worth a copy, which takes next to nothing; reading them takes longer."""

_APART: Final = 64
"""The least tokens between checkpoints: reading them takes much longer than a pass and the copy."""


class _BlockKey(NamedTuple):
    """The identity of a block: the model, the name of the block before it or the key, its tokens."""

    model: LoadedModel
    before: str
    tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the block; a checkpoint's has no tokens."""
        return hashlib.sha256(self.before.encode() + np.array(self.tokens, "<i8").tobytes()).hexdigest()


class _Sources:
    """The places of a text's blocks: memory, as ``known``, or ``files``."""

    def __init__(
        self, text: Sequence[_BlockKey], known: Mapping[_BlockKey, Saved], files: BlockFiles | None
    ) -> None:
        self._text, self.known, self.files = text, known, files
        self._whole = sum(len(place.tokens) == BLOCK for place in text)

    def end(self, first: int) -> int:
        """The number of blocks before the first block, from ``first`` on, that is not whole or not stored."""
        return first + len([*takewhile(self._has, range(first, self._whole))])

    def _has(self, at: int) -> bool:
        place, files = self._text[at], self.files
        return place in self.known or (files is not None and files.has(place.model.prompt_key, place.name))

    def length(self, at: int) -> int:
        """The tokens before a block, and the tokens of its part in memory."""
        return at * BLOCK + (self._in_memory(at)[0] if at < len(self._text) else 0)

    def part(self, at: int) -> tuple[Sequence[int], Saved] | None:
        """Tokens of a block, or of its beginning, with their kept rows; None if it is lost."""
        place, (count, known) = self._text[at], self._in_memory(at)
        saved = None if known is None else self.known[known]
        if self.files is not None and len(place.tokens) == BLOCK > count:
            of_file = self.files.read(place.model.prompt_key, place.name, place.model.block_bytes)
            count, saved = (count, saved) if of_file is None else (BLOCK, of_file)
        return None if saved is None or not count else (place.tokens[:count], saved)

    def checkpoint(self, at: int) -> _BlockKey:
        """The checkpoint behind this many blocks."""
        last = self._text[-1]
        return _BlockKey(last.model, self._text[at].before if at < len(self._text) else last.name, ())

    def _in_memory(self, at: int) -> tuple[int, _BlockKey | None]:
        """A block that begins like the text's block, and the number of shared tokens."""
        place = self._text[at]
        if place in self.known:
            return len(place.tokens), place
        others = [other for other in self.known if other.before == place.before and other.tokens]
        shared = [(shared_length(other.tokens, place.tokens), other) for other in others]
        return max(shared, key=lambda match: match[0], default=(0, None))


class KvStore:
    """Blocks of texts that sessions of models have read.

    A session's cache holds one text. Before it reads another, the rest of the old text is copied to memory,
    and the known beginning of the new text is copied into the session: the same bits, so answers do not
    change. Texts are written to ``files``, if there are any, when there is time. One thread at a time uses a
    store.

    Blocks in memory take ``nbytes`` now, and may take ``budget`` bytes; 0 keeps none. The least recently used
    are dropped first, the end of a text before its beginning, without which it is useless.
    """

    def __init__(self, budget: int, files: BlockFiles | None = None) -> None:
        self._budget, self._files = budget, files
        self.nbytes = 0
        self._blocks = dict[_BlockKey, Saved]()  # the least recently used first
        self._readers = list[Session]()  # sessions whose texts are to be written
        self._unwritten = list[list[_BlockKey]]()  # texts in memory that are to be written
        self._pictures = list[_BlockKey]()  # whose vectors are to be written, or count as used
        self._private = set[_BlockKey]()  # checkpoints in memory of texts that are not to be written

    @property
    def problem(self) -> str | None:
        """The reason why texts cannot be written to disk; None if they can."""
        return None if self._files is None else self._files.problem

    def fetch(
        self,
        session: Session,
        tokens: Sequence[int],
        beside: Sequence[Session] = (),
        starts: Sequence[int] = (),
        *,
        on_disk: bool = True,
    ) -> list[int]:
        """Copy the known beginning of ``tokens``, from memory or from sessions ``beside``, into ``session``.

        With ``on_disk`` also blocks of other processes count, and the session's text is written later.

        Returns:
            Lengths of ``tokens`` at which a :meth:`checkpoint` is worth its memory: the ``starts`` of parts
            from which other texts may differ, and the end of another text's common beginning. An empty list
            if states go with blocks.

        Raises:
            DeviceError: no memory; the session's cache is empty then.
        """
        files = self._files if on_disk and session.model.prompt_key else None
        text = [*_places(session.model, tokens)]
        known = self._known(text, beside)  # although another text may need their room now
        if self._budget and session.length - session.shared_prefix(tokens) >= _LEAST:
            self.checkpoint(session)
            self._put_aside(session)
        if session in self._readers:
            self._readers.remove(session)
        same = self._take_up(session, tokens, _Sources(text, known, files))
        if files is not None:
            session.rewind(session.shared_prefix(tokens))  # the rest may be of what is not to be written
            self._readers.append(session)
        held = session.model.places.nearest(session.shared_prefix(tokens), session.stretch.behind)
        return [] if session.model.places.every else _worth([*starts, same], held, len(tokens))

    def checkpoint(self, session: Session) -> None:
        """Keep the present states of ``session``, if they do not go with blocks of tokens."""
        if session.model.places.every or not session.stretch.behind:
            return
        if not all(np.isfinite(np.vdot(array, array)) for array in session.state()):
            return  # no text could go on from it
        place = _checkpoint_place(session)
        if place in self._blocks:
            rest = session.stretch.tokens[session.stretch.behind // BLOCK * BLOCK :]
            before = _Checkpoint.read(self._blocks[place], session)
            if before is not None and shared_length(before.tokens, rest) >= before.behind:
                return  # most texts that share this one's end go on from there, too
            self._drop(place)
        with suppress(MemoryError):
            content = _checkpoint(session)
            if self._make_room(content.nbytes):
                self._blocks[place] = content
                self.nbytes += content.nbytes
                if session not in self._readers:
                    self._private.add(place)

    def vectors(
        self,
        model: LoadedModel,
        picture: str,
        shape: tuple[int, int],
        make: Callable[[], Floats],
        *,
        on_disk: bool = True,
    ) -> Floats:
        """The vectors of a picture, float32 of this shape; ``make`` is called if they are not kept.

        ``picture`` names the pixels, the tower, and what else decides the vectors. With ``on_disk`` also
        those of other processes count, and they are written later.
        """
        place, size = _BlockKey(model, f"picture {picture}", ()), 4 * shape[0] * shape[1]
        files = self._files if on_disk and model.prompt_key else None
        saved = self._blocks.pop(place, None)
        self.nbytes -= 0 if saved is None else size
        if saved is None and files is not None and files.has(model.prompt_key, place.name):
            saved = files.read(model.prompt_key, place.name, size)
        vectors = make() if saved is None else np.frombuffer(cast(memoryview, saved), np.float32)
        vectors = vectors.reshape(shape)
        if size <= self._budget and self._make_room(size):
            self._blocks[place] = vectors.data.cast("B")
            self.nbytes += size
            if files is not None:
                self._pictures = [*(other for other in self._pictures if other != place), place]
        return vectors

    def write_behind(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Write missing blocks to disk, the latest first, until ``stop``, called between blocks, is True."""
        while self._readers:
            session = self._readers[-1]
            if not self._write([*_places(session.model, session.stretch.tokens)], session, stop):
                return
            self._readers.pop()
        while self._unwritten:
            if not self._write(self._unwritten[-1], None, stop):
                return
            self._unwritten.pop()
        while self._pictures and self._files is not None:
            place = self._pictures[-1]
            if not self._write_contents(place.model, [(place.name, partial(self._blocks.get, place))], stop):
                return
            self._pictures.pop()

    def trim(self, used: Collection[Session]) -> int:
        """Drop all blocks in memory, blocks for the disk after they are written; return their bytes.

        The texts of ``used`` sessions are written later, when they have read more.
        """
        later = [session for session in self._readers if session in used]
        self._readers = [session for session in self._readers if session not in used]
        self.write_behind()
        freed, self.nbytes = self.nbytes, 0
        for kept in (self._blocks, self._unwritten, self._pictures, self._private):
            kept.clear()
        self._readers = later
        return freed

    def forget(self, session: Session, *, on_disk: bool = False) -> None:
        """Forget all texts of the model of ``session`` in memory, and perhaps on disk."""
        model = session.model
        self._readers = [reader for reader in self._readers if reader.model is not model]
        self._unwritten = [text for text in self._unwritten if text[0].model is not model]
        self._pictures = [place for place in self._pictures if place.model is not model]
        for place in [place for place in self._blocks if place.model is model]:
            self._drop(place)
        if on_disk and self._files is not None:
            self._files.forget(model.prompt_key)

    def _known(self, text: Sequence[_BlockKey], beside: Sequence[Session]) -> dict[_BlockKey, Saved]:
        """Blocks of a text in memory, which count as used now, and others behind the same beginnings.

        Blocks of sessions ``beside`` are among them.
        """
        for place in reversed(text):
            for used in (place._replace(tokens=()), place):
                if used in self._blocks:
                    self._blocks[used] = self._blocks.pop(used)
        befores = {place[:2] for place in text}
        known = {place: saved for place, saved in self._blocks.items() if place[:2] in befores}
        for other in beside:
            for at, place in enumerate(_places(other.model, other.stretch.tokens)):
                if place[:2] not in befores or (saved := other.save(at)) is None:
                    break
                known.setdefault(place, saved)
        return known

    def _take_up(self, session: Session, tokens: Sequence[int], sources: "_Sources") -> int:
        """Copy the known beginning of ``tokens`` into ``session``, if worth it; return the known length."""
        places, shared = session.model.places, session.shared_prefix(tokens)
        first, held = shared // BLOCK, places.nearest(shared, session.stretch.behind)
        there = sources.end(first)
        if places.every:
            length = places.floor(max(there * BLOCK, sources.length(there)))
            if length >= held + _LEAST and session.rewind(first * BLOCK) == first * BLOCK:
                session.reserve(length)
                for at in range(first, -(-length // BLOCK)):
                    if (part := sources.part(at)) is None:
                        break
                    session.append(part[0][: length - session.length], part[1])
                    if session.length < (at + 1) * BLOCK:  # a damaged file, whose beginning is in memory
                        break
            return there * BLOCK
        session.reserve(min(len(tokens), session.model.longest))
        for at in reversed(range(there + 1)):
            if at * BLOCK + _ROWS < held + _LEAST:
                break
            checkpoint = self._checkpoint_behind(session, at, sources)
            if checkpoint is None:
                continue
            length = shared_length(checkpoint.tokens, tokens[at * BLOCK :])
            if length < checkpoint.behind or at * BLOCK + length < held + _LEAST:
                continue
            lacking = range(min(first, at), at)  # keys and values that the session lacks
            parts = [part for number in lacking if (part := sources.part(number)) is not None]
            if sum(len(part[0]) for part in parts) == BLOCK * len(lacking):
                for start, saved in zip(range(0, length, BLOCK), checkpoint.blocks, strict=False):
                    parts.append((checkpoint.tokens[start : min(start + BLOCK, length)], saved))
                behind = at * BLOCK + checkpoint.behind
                session.resume(lacking.start * BLOCK, parts, checkpoint.state, behind)
                break
        return there * BLOCK

    def _checkpoint_behind(self, session: Session, at: int, sources: "_Sources") -> "_Checkpoint | None":
        """The checkpoint behind ``at`` blocks, kept in memory unless the session has just left another."""
        place, files, key = sources.checkpoint(at), sources.files, session.model.prompt_key
        content = sources.known.get(place)
        if content is None and files is not None and files.has(key, place.name):
            size = _checkpoint_form(session).itemsize
            content = files.read(key, place.name, size)
            if content is not None and place not in self._blocks and self._make_room(size):
                self._blocks[place] = content
                self.nbytes += size
        return None if content is None else _Checkpoint.read(content, session)

    def _put_aside(self, session: Session) -> None:
        """Keep the text of ``session``, or its beginning as far as the budget has room."""
        kept = dict[_BlockKey, Saved]()
        try:
            for at, place in enumerate(_places(session.model, session.stretch.tokens)):
                block = self._blocks.pop(place, None)
                if block is None:
                    least = _LEAST if session.model.places.every else BLOCK
                    block = session.save(at) if len(place.tokens) >= least else None
                    if block is None or not self._make_room(block.nbytes):
                        break
                    self.nbytes += block.nbytes
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
        """Make room for this many bytes by dropping others; return whether there is room."""
        while self._blocks and self.nbytes + nbytes > self._budget:
            self._drop(next(iter(self._blocks)))
        return self.nbytes + nbytes <= self._budget

    def _drop(self, place: _BlockKey) -> None:
        self.nbytes -= self._blocks.pop(place).nbytes
        self._private.discard(place)

    def _write(self, text: Sequence[_BlockKey], session: Session | None, stop: Callable[[], bool]) -> bool:
        """Write the whole blocks of ``text`` and its checkpoints; return whether that is done or impossible.

        Blocks come from ``session``, else from memory. False if ``stop`` returned True.
        """
        if self._files is None:
            return True
        contents = list[tuple[str, Callable[[], Saved | None]]]()
        for at, place in enumerate(text):
            if len(place.tokens) < BLOCK:
                break
            held = partial(self._blocks.get, place) if session is None else partial(session.save, at)
            contents.append((place.name, held))
            checkpoint = _BlockKey(place.model, place.name, ())
            is_there = self._files.has(place.model.prompt_key, checkpoint.name)
            if is_there or (checkpoint in self._blocks and checkpoint not in self._private):
                contents.append((checkpoint.name, partial(self._blocks.get, checkpoint)))
        return not contents or self._write_contents(text[0].model, contents, stop)

    def _write_contents(
        self,
        model: LoadedModel,
        contents: Sequence[tuple[str, Callable[[], Saved | None]]],
        stop: Callable[[], bool],
    ) -> bool:
        """Write blocks by their names; False if ``stop`` returned True."""
        assert self._files is not None  # or nothing is to be written

        def content(at: int) -> bytes | None:
            saved = contents[at][1]()
            return None if saved is None else bytes(saved)

        return self._files.write(model.prompt_key, [name for name, _ in contents], content, stop)


def _places(model: LoadedModel, tokens: Sequence[int]) -> Iterator[_BlockKey]:
    """The identities of all blocks of a text; the last may have fewer tokens."""
    before = model.prompt_key
    for start in range(0, len(tokens), BLOCK):
        place = _BlockKey(model, before, tuple(tokens[start : start + BLOCK]))
        yield place
        before = place.name


def _worth(places: Collection[int], held: int, end: int) -> list[int]:
    """The ``places`` that are far enough from each other, from ``held`` and from the ``end``."""
    worth = [held]
    for place in sorted(places):
        if worth[-1] + _APART <= place <= end - LOGGED:  # the log of the end's states leads back
            worth.append(place)
    return worth[1:]


_ROWS: Final = BLOCK + LOGGED
"""The most tokens of a checkpoint: states lie behind a token of a block, and the log has the rows since."""


class _Checkpoint(NamedTuple):
    """Tokens behind a block, with their kept rows, and states that lie behind ``behind`` of these."""

    behind: int
    tokens: list[int]
    blocks: list[memoryview]
    state: list[npt.NDArray[Any]]

    @classmethod
    def read(cls, content: Saved, session: Session) -> "_Checkpoint | None":
        """Read the bytes of :func:`_checkpoint`; None if they are unusable."""
        facts, blocks, state = np.frombuffer(bytes(content), _checkpoint_form(session))[0]
        behind, count, *tokens = facts.tolist()
        if not 0 <= behind <= count <= min(behind + LOGGED, _ROWS):
            return None
        return cls(behind, tokens[:count], [memoryview(block) for block in blocks], [*state])


def _checkpoint_form(session: Session) -> np.dtype[Any]:
    """The form of a checkpoint: place of states, number of tokens, these, two blocks, states."""
    states = [("", array.dtype, array.shape) for array in session.state()]
    shape = 2, session.model.block_bytes
    return np.dtype([("facts", "<i8", (2 + _ROWS,)), ("blocks", "u1", shape), ("states", states)])


def _checkpoint_place(session: Session) -> _BlockKey:
    """The place behind the last whole block before the states of ``session``."""
    tokens = session.stretch.tokens[: session.stretch.behind // BLOCK * BLOCK]
    before = [session.model.prompt_key, *(place.name for place in _places(session.model, tokens))]
    return _BlockKey(session.model, before[-1], ())


def _checkpoint(session: Session) -> memoryview:
    """The states of ``session``, of a size that depends on the model alone."""
    stretch = session.stretch
    first = stretch.behind // BLOCK
    tokens = stretch.tokens[first * BLOCK :]
    content = np.zeros(1, _checkpoint_form(session))
    content["facts"][0, : 2 + len(tokens)] = stretch.behind - first * BLOCK, len(tokens), *tokens
    for at in range(-(-len(tokens) // BLOCK)):
        saved = session.save(first + at)
        assert saved is not None  # of models with states
        content["blocks"][0, at] = np.frombuffer(bytes(saved), np.uint8)
    for name, array in zip(content["states"].dtype.names or (), session.state(), strict=True):
        content["states"][name][0] = array
    return memoryview(content.tobytes())
