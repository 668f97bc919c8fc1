"""Online distillation: after each answer, the drafter's gains are moved towards what the target wrote.

The loss is ``-log q(token)`` of every committed token (OmniDraft, arXiv 2507.02659, its second term; Online
Speculative Decoding, arXiv 2310.07177). Committed tokens are the target's own choices or samples, so the mean
gradient is the gradient of ``KL(p || q)``, and the target's predictions need not be kept. The step is Adam's
(Kingma and Ba 2015), one for each text.
"""

import logging
from collections.abc import Callable
from typing import Final

import numpy as np

from edgespec.decoding.watch import Watch
from edgespec.learning.decoder import NumpyDecoder, Reading
from edgespec.learning.gains import ROWS, Example, Lesson, Table
from edgespec.learning.layer_math import F32

_RATE: Final = 3e-3
_MEAN, _SQUARE, _TINY = 0.9, 0.999, 1e-8
_LONGEST: Final = 1.0  # of a gradient
_WARM: Final = 10_000  # steps that a stored state counts as
_CHECK_EVERY: Final = 4  # texts
_STAKE: Final = 24.0  # guesses
_LOG = logging.getLogger("edgespec")


class Tuning:
    """The gains of one drafter for one target and user. One thread at a time.

    The first text and every fourth after it is also read with the last gains that had proved themselves. When
    the present ones were right less often, by 24 guesses that nothing made good, those are put back; if they
    fail too, the bundle's.

    A ``table`` is what is known; None, or one of another shape, is nothing.
    """

    def __init__(self, decoder: NumpyDecoder, table: Table | None = None) -> None:
        self._decoder, count = decoder, len(decoder.gains)
        known = table is not None and table.shape == (ROWS, count) and bool(np.isfinite(table).all())
        self._state: Table = (
            table.copy() if known and table is not None else np.zeros((ROWS, count), np.float32)
        )
        self._steps = _WARM if known else 0
        self._nothing: F32 = np.zeros(count, np.float32)
        self._good = self._nothing
        self._watch = Watch(_STAKE)
        self._before, self._tokens, self._anew = self._state.copy(), 0, False  # since the last lesson
        self.texts = 0
        """Texts learned from so far."""
        self.undone = 0
        """The number of times that gains were put back."""

    def lesson(self) -> Lesson | None:
        """The lesson since the last call; None if nothing was learned."""
        if not self._tokens and not self._anew:
            return None
        now = self._state.copy()
        lesson = Lesson(now if self._anew else now - self._before, self._anew, self._tokens)
        self._before, self._tokens, self._anew = now, 0, False
        return lesson

    @property
    def gains(self) -> dict[str, F32]:
        """The gains now, by their names in the graph. Copies."""
        return self._decoder.gains.named(self._with(self._state[0]))

    def learn(self, example: Example, breathe: Callable[[], None] = lambda: None) -> Reading:
        """Learn from a text; returns how it was read before that.

        ``breathe`` is called between layers; it may wait, or raise to give up, when nothing is learned.
        """
        reading, failed = self._read(example, self._state[0], breathe, differentiate=True), False
        if self.texts % _CHECK_EVERY == 0 and self._state[0].any():  # the first too, after a restart
            before = self._read(example, self._good, breathe, differentiate=False)
            failed = self._check(float(reading.right.sum()) - float(before.right.sum()))
        self.texts += 1
        self._tokens += len(reading.right)
        if failed:  # the gradient belongs to gains that are gone
            self._undo("was right less often than before")
        elif reading.gradient is None or not np.isfinite(reading.gradient).all():
            self._undo("computed numbers that are not finite")
        else:
            self._step(reading.gradient)
        return reading

    def _read(
        self, example: Example, change: F32, breathe: Callable[[], None], *, differentiate: bool
    ) -> Reading:
        return self._decoder.read(*example, self._with(change), differentiate=differentiate, breathe=breathe)

    def _with(self, change: F32) -> F32:
        changed: F32 = self._decoder.gains.stored + change
        return changed

    def _step(self, gradient: F32) -> None:
        gradient = gradient * np.float32(min(1.0, _LONGEST / max(float(np.linalg.norm(gradient)), _TINY)))
        change, mean, square = self._state
        self._steps += 1
        mean += (1.0 - _MEAN) * (gradient - mean)
        square += (1.0 - _SQUARE) * (np.square(gradient) - square)
        np.maximum(square, 0.0, out=square)  # sums of what several programs learned may be below
        usual = np.sqrt(square / (1.0 - _SQUARE**self._steps)) + _TINY
        change -= _RATE * mean / (1.0 - _MEAN**self._steps) / usual

    def _check(self, gain: float) -> bool:
        """Whether the present gains have failed."""
        finding = self._watch.observe(gain)
        if finding == "proved":
            self._good = self._state[0].copy()
        return finding == "failed"

    def _undo(self, why: str) -> None:
        self._anew |= not self._good.any()
        self._state[:] = 0.0
        self._state[0] = self._good
        self._good, self._steps = self._nothing, 0
        self.undone += 1
        _LOG.warning("the tuned drafter %s; its last good state is back", why)
