"""A head as drafter: one layer that reads the target's states (EAGLE-3, Li et al. 2025, arXiv 2503.01840).

Row i of a head reads token i + 1 and the target's features of token i, and says what follows token i + 1.
Behind its own drafts it reads the state that it wrote itself. So what a round has committed is read again
once the target's features of it are there, and nothing that was drafted stays in the KV cache.
"""

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from edgespec.decoding.draft import Clock, Draft, Passed, Remarks, Step, Work
from edgespec.drafting.bridge import IdentityBridge
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.policy import Part
from edgespec.drafting.reading import RunningMean, Said
from edgespec.drafting.side import DrafterSide
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.hidden import Floats
from edgespec_runtimes.session import Predictions, Rows, Session

_MOST = 128  # tokens that are read at once: of a prompt, and where drafting has paused


class HeadReader:
    """Reads a text with a head's session; :class:`~edgespec.drafting.reading.Chain` says what its methods do.

    Nobody else uses the session while the request lasts, whose prompt has ``length`` tokens. Where there is
    more to read than one pass takes, or no room for it, the head begins anew with the end of the text.
    """

    def __init__(
        self, session: Session, curve: CostCurve, length: int, *, clock: Clock = perf_counter
    ) -> None:
        self._session, self._length, self.clock = session, length, clock
        self._most = min(_MOST, session.piece)
        self._first, self._step = RunningMean(curve.seconds(2)), RunningMean(curve.seconds(1))
        self._features: list[Floats] = []  # of the last tokens
        self._held = self._unread = 0  # committed tokens: in the cache, and behind these
        self._state: Floats | None = None  # behind the last token that was read

    def hear(self, features: Floats, committed: int) -> None:
        """Tell of so many new tokens, and of the target's features of what stands before the last of them."""
        self._length += committed
        self._features.append(features)
        self._unread += len(features)
        while sum(map(len, self._features[1:])) >= self._most:
            del self._features[0]

    def room_for(self, text: Sequence[int], more: int) -> bool:
        """See :class:`Chain`."""
        if self._unread > self._most or self._held + self._unread + more > self._session.capacity:
            self._held, self._unread = 0, min(self._most, sum(map(len, self._features)))
        return self._held + self._unread + more <= self._session.capacity

    def seconds_of_text(self, text: Sequence[int]) -> float:
        """See :class:`Chain`."""
        return self._first.value

    def seconds_of_step(self, token: int) -> float:
        """See :class:`Chain`."""
        return self._step.value

    def idle(self) -> None:
        """See :class:`Chain`."""
        self._first.fade()
        self._step.fade()

    def catch_up(self, text: Sequence[int]) -> Work[bool]:
        """See :class:`Chain`: one pass is enough."""
        yield from ()
        return False

    def read(self, text: Sequence[int]) -> Work[Said]:
        """See :class:`Chain`. What a grammar forces behind the text is read like drafts."""
        count = self._unread
        features = np.concatenate(self._features)[-count:]
        tokens = text[self._length - count : self._length]
        said, passed = yield from self._ask(self._held, tokens, features)
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
        self._session.truncate(held)
        predictions, passed = yield Rows(self._session, tokens, 1, hidden)
        self._state = predictions.hidden
        return self._said(tokens[-1], predictions), passed

    def _said(self, token: int, predictions: Predictions) -> Said:
        best, head = predictions.best(0), self._session.head_tokens
        return Said(token, best if head is None else int(head[best]), predictions.probability(0))


class HeadDrafter:
    """Drafts with a head, whose reader is told of the target's features."""

    def __init__(self, model: ModelDrafter[HeadReader]) -> None:
        self._model = model

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """See :class:`~edgespec.decoding.draft.Source`."""
        return self._model.propose(tokens, limit)

    def proposing(self, tokens: Sequence[int], limit: int) -> Work[Draft]:
        """See :class:`~edgespec.decoding.draft.Asking`."""
        return self._model.proposing(tokens, limit)

    def observe(self, step: Step) -> None:
        """See :class:`~edgespec.decoding.draft.Source`."""
        if step.features is not None:
            self._model.reader.hear(step.features, len(step.tokens))
        self._model.observe(step)

    def close(self) -> None:
        """See :class:`~edgespec.decoding.draft.Source`."""
        self._model.close()


class HeadSide(DrafterSide):
    """A head beside its target: it reads no prompt of its own, and begins every request anew."""

    def begin(
        self,
        tokens: Sequence[int],
        prompt: list[int],
        sessions: tuple[Session, Sequence[Session]],
        *,
        max_new_tokens: int,
        max_draft: int,
        target_end: int | None,
        remarks: Remarks,
    ) -> Part:
        """A request begins; see :meth:`DrafterSide.begin`."""
        session, _ = sessions
        session.truncate(0)
        session.reserve(min(_MOST + max_new_tokens + 4 * max_draft, session.longest))
        model = ModelDrafter(
            HeadReader(session, self.curve, len(tokens), clock=self.clock),
            IdentityBridge(self.bundle.config.vocab_size),
            ends=self.bundle.manifest.special_tokens.eos,
            target_end=target_end,
            pricing=self.pricing,
            calibration=self.calibration,
        )
        return self.part(HeadDrafter(model))
