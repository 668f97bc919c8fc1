"""The pieces that answers are kept in: cut where the tokens themselves say so.

A cut after a token depends on the four tokens up to it and on the distance to the cut before, so two
answers that share a stretch share the pieces within it, wherever it stands in them (content-defined
chunking: Muthitacharoen et al. 2001, LBFS). What is written again is counted, not stored again.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["LEAD", "LONGEST", "Cutter", "Passage", "cut", "pack_tokens", "unpack_tokens"]

LEAD: Final = 8
"""Tokens before a passage that are kept with it, as the context of its first ones."""
LONGEST: Final = 64
"""Tokens of the longest passage."""
_SHORTEST: Final = 16
_WINDOW: Final = 4
_ONE_IN: Final = 32  # positions at which a passage may end


@dataclass(frozen=True, slots=True)
class Passage:
    """A stretch of an answer.

    Attributes:
        lead: up to 8 tokens of the same answer before it; empty where the answer begins.
        body: its tokens, 1 to 64.
        digest: 16 bytes that tell passages apart.
    """

    lead: tuple[int, ...]
    body: tuple[int, ...]
    digest: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        data = pack_tokens(self.lead) + b"|" + pack_tokens(self.body)
        object.__setattr__(self, "digest", hashlib.blake2b(data, digest_size=16).digest())

    def __len__(self) -> int:
        """Tokens it takes in memory and on disk."""
        return len(self.lead) + len(self.body)


class Cutter:
    """Cuts one answer, as it is written. What remains at its end is a passage too, however short."""

    def __init__(self) -> None:
        self._lead: tuple[int, ...] = ()
        self._body: list[int] = []

    def push(self, tokens: Iterable[int]) -> list[Passage]:
        """Go on by ``tokens``; returns the passages that are complete."""
        done = []
        for token in tokens:
            self._body.append(token)
            if self._ends_here():
                done.append(self._take())
        return done

    def finish(self) -> list[Passage]:
        """What is left at the end of the answer: one passage or none. The next token begins a new answer."""
        left = [self._take()] if self._body else []
        self._lead = ()
        return left

    def _ends_here(self) -> bool:
        if len(self._body) < _SHORTEST:
            return False
        return len(self._body) == LONGEST or zlib.crc32(pack_tokens(self._body[-_WINDOW:])) % _ONE_IN == 0

    def _take(self) -> Passage:
        passage = Passage(self._lead, tuple(self._body))
        self._lead = (*self._lead, *self._body)[-LEAD:]
        self._body = []
        return passage


def cut(tokens: Iterable[int]) -> list[Passage]:
    """The passages of a whole answer."""
    cutter = Cutter()
    return [*cutter.push(tokens), *cutter.finish()]


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The reverse of :func:`pack_tokens`."""
    return struct.unpack(f"<{len(data) // 4}I", data)
