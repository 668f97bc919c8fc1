"""KV caches that are put aside while a session reads something else, within a budget of memory."""

from collections.abc import Sequence

from edgespec_runtimes.kv_buffers import KEY_TILE
from edgespec_runtimes.session import ModelSession, SavedCache, shared_length

__all__ = ["KvStore"]

_LEAST = 4
"""Tokens that are worth a copy: it takes next to nothing, and reading them longer than a pass over one."""


class KvStore:
    """KV caches of conversations that are not being read, of one or more sessions.

    A session's cache holds one text. Before it reads another, what would be lost is put aside, and what is
    known of the new text is put in its place: a copy of the same bits, so that answers do not change. The
    caches least recently used go first. One thread at a time.

    Args:
        budget: bytes that all of them may take together; 0 keeps none.

    Attributes:
        nbytes: what they take now.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.nbytes = 0
        self._kept: list[tuple[ModelSession, SavedCache]] = []  # the least recently used first

    def fetch(self, session: ModelSession, tokens: Sequence[int]) -> None:
        """Let ``session`` hold as much of ``tokens`` as it held of them at any time that is still known.

        Raises:
            DeviceError: no memory; the session's cache is empty then.
        """
        if not self._budget:
            return
        held = session.shared_prefix(tokens)
        found = self._longest(session, tokens, held + _LEAST)
        if found is not None:  # it makes room
            self._drop(session, found)
        if session.length - held >= _LEAST:
            self._put_aside(session)
        if found is None:
            return
        shared = shared_length(found.tokens, tokens)
        session.restore(found, shared)
        if len(found.tokens) - shared >= _LEAST:  # another text's too: that goes on without its end here
            self._keep(session, found)

    def forget(self, session: ModelSession) -> None:
        """Forget all caches of ``session``."""
        for saved in [saved for owner, saved in self._kept if owner is session]:
            self._drop(session, saved)

    def _longest(self, session: ModelSession, tokens: Sequence[int], least: int) -> SavedCache | None:
        """The cache that shares most with ``tokens``, at least so many; the latest of equals."""
        own = [saved for owner, saved in self._kept if owner is session]
        lengths = [shared_length(saved.tokens, tokens) for saved in own]
        best = max(lengths, default=0)
        return own[len(lengths) - 1 - lengths[::-1].index(best)] if best >= least else None

    def _put_aside(self, session: ModelSession) -> None:
        """Keep a copy of what ``session`` holds, or of as many tokens as the budget has room for."""
        per_token = -(-session.kv_bytes // max(1, session.capacity))
        length = min(session.length, self._budget // max(1, per_token) // KEY_TILE * KEY_TILE)
        if length < _LEAST:
            return
        self._make_room(length * per_token)
        saved = session.save(length)
        if saved is not None:
            for owner, other in list(self._kept):
                only_there = len(other.tokens) - shared_length(other.tokens, saved.tokens)
                if owner is session and only_there < _LEAST:
                    self._drop(session, other)
            self._keep(session, saved)

    def _keep(self, session: ModelSession, saved: SavedCache) -> None:
        self._make_room(saved.nbytes)
        if saved.nbytes <= self._budget:
            self._kept.append((session, saved))
            self.nbytes += saved.nbytes

    def _make_room(self, nbytes: int) -> None:
        while self._kept and self.nbytes + nbytes > self._budget:
            self._drop(*self._kept[0])

    def _drop(self, session: ModelSession, saved: SavedCache) -> None:
        self._kept.remove((session, saved))
        self.nbytes -= saved.nbytes
