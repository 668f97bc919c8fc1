"""KV caches that are put aside, in memory and on disk."""

from collections.abc import Callable, Collection, Sequence

from edgespec_runtimes.kv_cache import KEY_TILE, SavedCache, shared_length
from edgespec_runtimes.prompt_cache import PromptCache
from edgespec_runtimes.session import Session

_LEAST = 4
"""Tokens that are worth a copy: it takes next to nothing, and reading them longer than a pass over one."""


class KvStore:
    """KV caches of conversations that are not being read, of one or more sessions.

    A session's cache holds one text. Before it reads another, what would be lost is put aside, and what is
    known of the new text is put in its place: a copy of the same bits, so that answers do not change. The
    caches least recently used go first. What memory does not have, the disk may: ``prompts``, where texts
    are written when there is time for it. One thread at a time.

    All of them together take ``nbytes`` now, and may take ``budget`` bytes; 0 keeps none.
    """

    def __init__(self, budget: int, prompts: PromptCache | None = None) -> None:
        self._budget, self._prompts = budget, prompts
        self.nbytes = 0
        self._kept: list[tuple[Session, SavedCache]] = []  # the least recently used first
        self._due: list[tuple[Session, SavedCache | None]] = []  # to be written: None is what it holds

    def fetch(
        self, session: Session, tokens: Sequence[int], beside: Sequence[Session] = (), *, on_disk: bool = True
    ) -> None:
        """Let ``session`` hold as much of ``tokens`` as is known of them, or as those ``beside`` it hold.

        With ``on_disk`` also of what other processes held, and what it will hold of this text is written.

        Raises:
            DeviceError: no memory; the session's cache is empty then.
        """
        if self._budget:
            self._fetch_from_memory(session, tokens)
        if (session, None) in self._due:
            self._due.remove((session, None))
        for other in beside:
            shared = other.shared_prefix(tokens)
            view = other.view(0, shared) if shared >= session.shared_prefix(tokens) + _LEAST else None
            if view is not None:
                session.rewind(0)
                session.append(view, shared)
        if self._prompts is not None and on_disk and session.model.prompt_key:
            session.rewind(session.shared_prefix(tokens))  # the rest may be of what is not to be written
            self._prompts.read(session, tokens)
            self._due.append((session, None))

    def write_behind(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Write what is not on disk yet, the latest first; ``stop``, asked between blocks, ends it."""
        while self._prompts is not None and self._due and not stop():
            session, saved = self._due[-1]
            text = session.view(0, session.length) if saved is None else saved
            if text is not None and not self._prompts.write(session.model.prompt_key, text, stop):
                return
            self._due.pop()

    def trim(self, used: Collection[Session]) -> int:
        """Drop all caches, those on the way to the disk when they are there; their bytes.

        What ``used`` sessions hold is written later, when they have read more.
        """
        later = [each for each in self._due if each[1] is None and each[0] in used]
        self._due = [each for each in self._due if each not in later]
        self.write_behind()
        freed, self.nbytes = self.nbytes, 0
        self._kept, self._due = [], later
        return freed

    def _fetch_from_memory(self, session: Session, tokens: Sequence[int]) -> None:
        held = session.shared_prefix(tokens)
        found = self._longest(session, tokens, held + _LEAST)
        is_due = found in self._due
        if found is not None:  # it makes room
            self._drop(*found)
        if session.length - held >= _LEAST:
            self._put_aside(session)
        if found is None:
            return
        saved = found[1]
        shared = shared_length(saved.tokens, tokens)
        session.rewind(0)
        session.append(saved, shared)
        if len(saved.tokens) - shared >= _LEAST:  # another text's too: that goes on without its end here
            self._keep(session, saved)
            if is_due and (session, saved) in self._kept:
                self._due.append((session, saved))

    def forget(self, session: Session, *, on_disk: bool = False) -> None:
        """Forget all caches of the model that ``session`` is of, in memory; those on disk too if asked to."""
        self._due = [(owner, saved) for owner, saved in self._due if owner.model is not session.model]
        for owner, saved in self._of_model(session):
            self._drop(owner, saved)
        if on_disk and self._prompts is not None:
            self._prompts.forget(session.model.prompt_key)

    def _of_model(self, session: Session) -> list[tuple[Session, SavedCache]]:
        return [each for each in self._kept if each[0].model is session.model]

    def _longest(
        self, session: Session, tokens: Sequence[int], least: int
    ) -> tuple[Session, SavedCache] | None:
        """The cache that shares most with ``tokens``, at least so many; the latest of equals."""
        own = self._of_model(session)
        lengths = [shared_length(saved.tokens, tokens) for _, saved in own]
        best = max(lengths, default=0)
        return own[len(lengths) - 1 - lengths[::-1].index(best)] if best >= least else None

    def _put_aside(self, session: Session) -> None:
        """Keep a copy of what ``session`` holds, or of as many tokens as the budget has room for."""
        per_token = -(-session.kv_bytes // max(1, session.capacity))
        length = min(session.length, self._budget // max(1, per_token) // KEY_TILE * KEY_TILE)
        if length < _LEAST:
            return
        self._make_room(length * per_token)
        view = session.view(0, length)
        if view is not None:
            saved = view.copy()
            for owner, other in list(self._kept):
                only_there = len(other.tokens) - shared_length(other.tokens, saved.tokens)
                if owner.model is session.model and only_there < _LEAST:
                    self._drop(owner, other)
            self._keep(session, saved)
            if (session, None) in self._due and (session, saved) in self._kept:
                self._due.append((session, saved))

    def _keep(self, session: Session, saved: SavedCache) -> None:
        self._make_room(saved.nbytes)
        if saved.nbytes <= self._budget:
            self._kept.append((session, saved))
            self.nbytes += saved.nbytes

    def _make_room(self, nbytes: int) -> None:
        while self._kept and self.nbytes + nbytes > self._budget:
            self._drop(*self._kept[0])

    def _drop(self, session: Session, saved: SavedCache) -> None:
        self._kept.remove((session, saved))
        if (session, saved) in self._due:
            self._due.remove((session, saved))
        self.nbytes -= saved.nbytes
