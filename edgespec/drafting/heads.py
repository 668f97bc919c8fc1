"""A head as drafter: one layer that reads the target's states (EAGLE-3, Li et al. 2025, arXiv 2503.01840).

Row i of a head reads token i + 1 and the target's features of token i, and says what follows token i + 1.
Behind its own drafts it reads the state that it wrote itself. So what a round has committed is read again
once the target's features of it are there, and nothing that was drafted stays in the KV cache.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

from edgespec.decoding.draft import Clock, Passed, Work
from edgespec.drafting.bridge import IdentityBridge
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.policy import Part
from edgespec.drafting.reading import Chain, Said
from edgespec.drafting.side import DrafterSide
from edgespec_models.bundles.bundle import Bundle
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.predictions import Floats, joined
from edgespec_runtimes.session import Rows, Session

_MOST = 128  # tokens that are read at once: of a prompt, and where drafting has paused


class HeadReader(Chain):
    """Reads a text, whose prompt has ``length`` tokens, with a head's session.

    Where there is more to read than one pass takes, or no room for it, the head begins anew with the end of
    the text.
    """

    def __init__(
        self, session: Session, curve: CostCurve, length: int, *, clock: Clock = perf_counter
    ) -> None:
        super().__init__(session, curve, clock)
        self._length, self._most = length, min(_MOST, session.model.piece)
        self._features: Floats | None = None  # of the last tokens
        self._held = self._unread = 0  # committed tokens: in the cache, and behind these
        self._state: Floats | None = None  # behind the last token that was read

    def hear(self, features: Floats, committed: int) -> None:
        """Tell of so many new tokens, and of the target's features of what stands before the last of them."""
        self._length += committed
        if len(features) != committed:  # of the prompt, or of a text that the target had to read anew
            self._features, self._held, self._unread = None, 0, 0
        self._features = joined(self._features, features)
        self._unread += len(features)

    def room_for(self, text: Sequence[int], more: int) -> bool:
        """See :class:`Chain`."""
        more += len(text) - self._length  # forced tokens, which are read like drafts
        if self._unread > self._most or self._held + self._unread + more > self._session.capacity:
            kept = 0 if self._features is None else len(self._features)
            self._held, self._unread = 0, min(self._most, kept)
        return self._held + self._unread + more <= self._session.capacity

    def read(self, text: Sequence[int]) -> Work[Said]:
        """See :class:`Chain`. What a grammar forces behind the text is read like drafts."""
        assert self._features is not None  # the target has read the text
        count = self._unread
        tokens = text[self._length - count : self._length]
        said, passed = yield from self._ask(self._held, tokens, self._features[-count:])
        if self._held:
            self._first.observe(passed.share_s * passed.requests)
        self._held, self._unread = self._held + count, 0
        for token in text[self._length :]:
            said = yield from self.step(token)
        return said

    def step(self, token: int) -> Work[Said]:
        """See :class:`Chain`."""
        assert self._state is not None
        said, passed = yield from self._ask(self._session.length, [token], self._state)
        self._step.observe(passed.share_s * passed.requests)
        return said

    def _ask(self, held: int, tokens: Sequence[int], hidden: Floats) -> Work[tuple[Said, Passed]]:
        self._session.rewind(held)  # which has keys and values alone, and goes back anywhere
        predictions, passed = yield Rows(self._session, tokens, 1, hidden)
        self._state = predictions.hidden
        return self._said(tokens[-1], predictions), passed


class HeadSide(DrafterSide):
    """A head beside its target: it reads no prompt of its own, and begins every request anew."""

    def prompt(self, tokens: list[int], encode: Callable[[Bundle], list[int]]) -> list[int]:
        """Nothing."""
        return []

    def begin(
        self,
        tokens: Sequence[int],
        prompt: list[int],
        sessions: tuple[Session, Sequence[Session]],
        *,
        max_new_tokens: int,
        max_draft: int,
        **_: object,
    ) -> Part:
        """A request begins; see :meth:`DrafterSide.begin`."""
        session = sessions[0]
        session.reserve(min(_MOST + max_new_tokens + 4 * max_draft, session.model.longest))
        model = ModelDrafter(
            HeadReader(session, self.curve, len(tokens), clock=self.clock),
            IdentityBridge(self.bundle.config.vocab_size),
            pricing=self.pricing,
            calibration=self.calibration,
        )
        return self.part(model)
