"""Passages: the pieces in which answers are kept, each with its uses and the verdicts on its tokens.

The tokens themselves decide where answers are cut: a cut after a token depends on the four tokens up to it
and on the distance to the cut before. So two answers that share a stretch share the pieces within it,
wherever it stands (content-defined chunking: Muthitacharoen et al. 2001, LBFS). A passage that is written
again is counted and not stored again. Memory and file count alike. Time is counted in learned tokens, so an
unused history forgets nothing.
"""

import hashlib
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

LEAD: Final = 8
"""Tokens before a passage that are kept with it, as context of its first tokens."""
LONGEST: Final = 64
"""Tokens of the longest passage."""
HALF_LIFE: Final = 65_536
"""Learned tokens after which a use counts half."""
_SHORTEST: Final = 16
_WINDOW: Final = 4
_ONE_IN: Final = 32  # positions at which a passage may end
_MOST_JUDGED: Final = 32  # verdicts remembered for one token
_PATIENCE: Final = 4.0  # good verdicts with which a passage begins


@dataclass(frozen=True, slots=True)
class Passage:
    """A stretch of an answer, 1 to 64 tokens, with up to 8 tokens before it (``lead``).

    ``digest`` has 16 bytes that identify the passage.
    """

    lead: tuple[int, ...]
    body: tuple[int, ...]
    digest: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        data = pack_tokens(self.lead) + b"|" + pack_tokens(self.body)
        object.__setattr__(self, "digest", hashlib.blake2b(data, digest_size=16).digest())

    def __len__(self) -> int:
        """The tokens that it takes in memory and on disk."""
        return len(self.lead) + len(self.body)


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as it was answered: the prompt, as JSON in UTF-8 (a text, or a list of messages), and the
    bytes of the answer, which has ``ended`` where the model itself ended it.
    """

    prompt: bytes
    answer: bytes
    ended: bool

    @property
    def digest(self) -> bytes:
        """16 bytes that identify the turn."""
        return hashlib.blake2b(self.prompt + b"|" + self.answer, digest_size=16).digest()


class Cutter:
    """Cuts one answer while it is written. The rest at its end is a passage too, however short."""

    def __init__(self) -> None:
        self._lead: tuple[int, ...] = ()
        self._body: list[int] = []

    def push(self, tokens: Iterable[int]) -> list[Passage]:
        """Add ``tokens`` and return the complete passages."""
        done = []
        for token in tokens:
            self._body.append(token)
            if self._ends_here():
                done.append(self._take())
        return done

    def finish(self) -> list[Passage]:
        """Return the rest of the answer, one passage or none. The next token begins a new answer."""
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


def decayed(value: float, tokens: int) -> float:
    """``value``, decayed by so many learned tokens."""
    return value * math.exp2(-max(tokens, 0) / HALF_LIFE)


@dataclass(slots=True)
class Entry:
    """A passage with its history.

    Attributes:
        uses: how often it was written, and how much of it was accepted as a proposal, decayed until ``at``.
        at: the clock (learned tokens of the scope) at which ``uses`` was last updated.
        right: decayed verdicts that a token of the body was a right proposal, by token; ``wrong`` likewise.
    """

    passage: Passage
    uses: float = 0.0
    at: int = 0
    right: bytearray = field(default_factory=bytearray)
    wrong: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        if not self.right:
            self.right = bytearray(len(self.passage.body))
            self.wrong = bytearray(len(self.passage.body))

    def use(self, count: float, now: int) -> None:
        """Add ``count`` uses at the clock ``now``. A part of the passage is a part of a use."""
        self.uses = decayed(self.uses, now - self.at) + count
        self.at = max(self.at, now)

    def judge(self, offset: int, *, right: int, wrong: int) -> None:
        """Add verdicts on a token of the body. Old ones fade, so that a token may recover."""
        yes, no = self.right[offset] + right, self.wrong[offset] + wrong
        while yes + no > _MOST_JUDGED:
            yes, no = yes // 2, no // 2
        self.right[offset], self.wrong[offset] = yes, no

    def worth(self, now: int) -> float:
        """The usefulness, by which passages stay: decayed uses, reduced by how often proposals misled."""
        right, wrong = sum(self.right), sum(self.wrong)
        trust = (right + _PATIENCE) / (right + wrong + _PATIENCE)
        return decayed(self.uses, now - self.at) * trust


def total_tokens(entries: Iterable[Entry]) -> int:
    """The tokens that entries take."""
    return sum(len(entry.passage) for entry in entries)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The inverse of :func:`pack_tokens`."""
    return struct.unpack(f"<{len(data) // 4}I", data)
