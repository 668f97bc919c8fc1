"""Drafting ahead: the drafter goes on while the target, on another device, verifies what it drafted.

It takes its own draft for accepted and its next guess for the token that the target adds. If both come true
the next draft is there when verification ends (PEARL, arXiv 2408.11850, post-verify); if not, what was read
is dropped, at the price of waiting for a drafter step that runs. Guesses are the same, only sooner; as they
cost nothing any more, drafts may be longer.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from threading import Event, Thread, current_thread
from time import perf_counter

from edgespec.decoding.draft import Clock, Draft, Passed, Remarks, Source, Step
from edgespec.drafting.model import Guess, ModelDrafter
from edgespec.drafting.pricing import Pricing
from edgespec.drafting.reading import Reader, RunningMean
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.predictions import Predictions

_LOG = logging.getLogger("edgespec")
_ALONE_EVERY = 16  # rounds


@dataclass(slots=True)
class _Run:
    """Reading ahead beside one pass of the target."""

    until: float  # when the pass is expected to end
    stop: Event = field(default_factory=Event)  # one for each run: a thread never takes another's for its own
    thread: Thread | None = None
    error: BaseException | None = None


class Ahead(Source):
    """Drafts of a ``model`` with ``reader``, which reads on while the target verifies them.

    How much that was is written to ``remarks``.
    """

    def __init__(
        self, model: ModelDrafter, reader: Reader, beside: "Beside", *, pricing: Pricing, remarks: Remarks
    ) -> None:
        self._model, self._reader, self._beside = model, reader, beside
        self._pricing, self._remarks = pricing, remarks
        self.earliest = model.earliest
        self._limit = 0

    def begin_round(self, tokens: Sequence[int], limit: int) -> None:
        self._beside.settle()
        self._limit = limit
        self._model.begin_round(tokens, limit)
        self._go_on()

    def take(self, predictions: Predictions, passed: Passed) -> None:
        self._model.take(predictions, passed)
        self._go_on()

    def observe(self, step: Step) -> None:
        self.slowdown = 1.0
        if self._reader.has_read:  # before, passes may be of the prompt
            self._beside.observe(step.target_s / self._pricing.pass_seconds(1 + len(step.draft.tokens)))
        self._model.observe(step)

    def close(self) -> None:
        self._beside.stop()
        self._model.close()
        self._remarks.drafted_ahead = self._reader.drafted_ahead
        self._remarks.used_ahead = self._reader.used_ahead

    def _go_on(self) -> None:
        """Read on, where the model's draft is complete."""
        self.rows, self.draft, count = self._model.rows, self._model.draft, len(self._model.draft.tokens)
        if self.rows is None and count:
            steps, pass_s = self._read_on(self.draft, self._limit), self._pricing.pass_seconds(1 + count)
            if self._beside.start(steps, pass_s=pass_s, wanted=count):
                self.slowdown = self._beside.slowdown

    def _read_on(self, draft: Draft, limit: int) -> Iterator[float]:
        """Read what the model would write behind its ``draft``, a token at a step, as far as may be drafted.

        Yields, before each step, the probability that the token is needed: that the whole draft is accepted
        and the token behind it, which the target adds, is the one that the model would write.
        """
        calibration = self._model.calibration
        accepted, added, survival = prod(draft.confidence), calibration.typical, 1.0
        prediction = self._reader.latest
        for count in range(limit + 1):  # the last of the draft, what the target adds, the next draft
            token = prediction.following
            probability = calibration.probability(Guess(token, prediction.probability, open=False))
            if count == 1:
                added = probability
            elif count:
                survival *= probability
            if token in self._model.ends or not self._model.pays(survival, max(1, count), 0.0):
                return
            known = self._reader.ahead(count)
            if known is None:
                if not self._reader.room_ahead:
                    return
                yield accepted * added
                known = self._reader.read_on(token)
            prediction = known


class Beside:
    """Decides whether to read on beside a pass of the target, and does it in a thread of its own.

    One for each model. The thread lives for one pass and ends by itself; who else uses the drafter's session
    calls :meth:`settle` or :meth:`stop` before.

    Another step is begun where its expected gain exceeds its price. Of a step that ends after the target's
    pass only the time beside the pass is gained, if the text goes on as guessed; if it does not, the rest is
    waited for in vain. A pass may take longer with the drafter beside it, where both share memory or power;
    by how much is learned from passes of both kinds, one in sixteen being left alone to compare with.
    """

    def __init__(
        self, curve: CostCurve, *, clock: Clock = perf_counter, thread: Callable[..., Thread] = Thread
    ) -> None:
        self._clock, self._thread = clock, thread
        self._step = RunningMean(curve.seconds(1))
        self._alone, self._slowdown = RunningMean(1.0, worth=1), RunningMean(1.0, worth=1)
        self._rounds = 0
        self._ran = False  # beside the pass that is observed next
        self._run: _Run | None = None

    @property
    def slowdown(self) -> float:
        """Factor by which the target's passes take longer while the drafter runs; at least 1."""
        return max(1.0, self._slowdown.value)

    def start(self, steps: Iterator[float], *, pass_s: float, wanted: int) -> bool:
        """Go through ``steps`` beside the target's pass, which is about to begin, if that pays.

        Args:
            steps: reads a token at each step; yields, before each, the probability that it is needed.
            pass_s: what the target's pass takes alone.
            wanted: steps that the next draft is expected to need.

        Returns:
            Whether it does.
        """
        self._rounds += 1
        chance = next(steps, 0.0)
        gain_s, extra_s = chance * min(wanted * self._step.value, pass_s), (self.slowdown - 1.0) * pass_s
        if gain_s <= extra_s:
            self._slowdown.fade()
            return False
        self._ran = self._rounds % _ALONE_EVERY > 0
        if self._ran:
            run = self._run = _Run(self._clock() + pass_s + extra_s)
            run.thread = self._thread(
                target=self._go_through, args=(run, steps, chance), name="edgespec-ahead"
            )
            run.thread.start()
        return self._ran

    def observe(self, ratio: float) -> None:
        """Tell of a pass of the target: what it took over what it would be expected to take alone."""
        if self._ran:
            self._slowdown.observe(ratio / self._alone.value)
        else:
            self._alone.observe(ratio)
        self._ran = False

    def settle(self) -> None:
        """Stop reading ahead and wait for the step that runs.

        Raises:
            BaseException: what reading ahead raised.
        """
        run = self._wait()
        if run is not None and run.error is not None:
            raise run.error

    def stop(self) -> None:
        """Like :meth:`settle`, where no draft is wanted any more: errors go to the log."""
        run, self._ran = self._wait(), False
        if run is not None and run.error is not None:
            _LOG.warning("drafting ahead failed: %r", run.error)

    def _wait(self) -> _Run | None:
        run = self._run
        if run is None or run.thread is None:
            return None
        run.stop.set()
        if run.thread is current_thread():  # collecting garbage there may end a request that was left early
            return None
        if run.thread.is_alive():  # not if an interrupt kept it from starting; then it finds itself stopped
            run.thread.join()
        self._run = None
        return run

    def _go_through(self, run: _Run, steps: Iterator[float], chance: float) -> None:
        try:
            while chance and not run.stop.is_set() and self._pays(chance, run.until):
                started = self._clock()
                chance = next(steps, 0.0)
                self._step.observe(self._clock() - started)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            run.error = error

    def _pays(self, chance: float, until: float) -> bool:
        beyond_s = max(0.0, self._clock() + self._step.value - until)
        return chance * self._step.value > beyond_s
