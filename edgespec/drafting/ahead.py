"""Drafting ahead: the drafter goes on while the target, on another device, verifies its draft.

The drafter assumes that its draft is accepted, and that the target adds the token that it guesses itself. If
both are right, the next draft is there when verification ends (PEARL, arXiv 2408.11850, post-verify). If not,
what it read is dropped, at the price of waiting for the running step. The guesses are the same, only sooner.
They cost no time any more, so drafts may be longer.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from threading import Event, Thread, current_thread
from time import perf_counter

from edgespec.decoding.draft import Clock, Draft, Passed, Remarks, Step
from edgespec.drafting.model import Guess, ModelDrafter
from edgespec.drafting.pricing import Prices
from edgespec.drafting.reading import Reader, RunningMean
from edgespec.drafting.source import Source, Wanted
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.predictions import Predictions

_LOG = logging.getLogger("edgespec")
_ALONE_EVERY = 16  # rounds


@dataclass(slots=True)
class _Run:
    """Reading ahead during one pass of the target."""

    until: float  # when the pass is expected to end
    stop: Event = field(default_factory=Event)  # of this run alone, so that no thread takes another's
    thread: Thread | None = None
    error: BaseException | None = None


class Ahead(Source):
    """A source that drafts with ``model`` and lets its ``reader`` read on while the target verifies.

    ``remarks`` receive how much was read ahead.
    """

    def __init__(self, model: ModelDrafter, reader: Reader, beside: "Beside", *, remarks: Remarks) -> None:
        self._model, self._reader, self._beside, self._remarks = model, reader, beside, remarks
        self.earliest = model.earliest
        self._prices: Prices  # of the round
        self._limit = 0

    def begin(self, tokens: Sequence[int], limit: int, prices: Prices) -> Wanted:
        self._beside.settle()
        self._limit, self._prices = limit, prices
        return self._go_on(self._model.begin(tokens, limit, prices))

    def take(self, predictions: Predictions, passed: Passed) -> Wanted:
        return self._go_on(self._model.take(predictions, passed))

    def observe(self, step: Step) -> None:
        self.slowdown = 1.0
        if self._reader.has_read:  # earlier passes may be of the prompt
            prices = self._prices.pricing.at(step.target_pass.load)
            self._beside.observe(step.target_s / prices.pass_seconds(1 + len(step.draft.tokens)))
        self._model.observe(step)

    def close(self) -> None:
        self._beside.stop()
        self._model.close()
        self._remarks.drafted_ahead = self._reader.drafted_ahead
        self._remarks.used_ahead = self._reader.used_ahead

    def _go_on(self, wanted: Wanted) -> Wanted:
        """Read on if the model's draft is complete."""
        if isinstance(wanted, Draft) and (count := len(wanted.tokens)):
            steps, pass_s = self._read_on(wanted, self._limit), self._prices.pass_seconds(1 + count)
            if self._beside.start(steps, pass_s=pass_s, wanted=count):
                self.slowdown = self._beside.slowdown
        return wanted

    def _read_on(self, draft: Draft, limit: int) -> Iterator[float]:
        """Read what the model would write behind its ``draft``, one token a step, as far as drafts may go.

        Before each step it yields the probability that the step's token is needed: all drafted tokens are
        accepted, and the target's own next token is the model's.
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
    """Decides whether to read on during a pass of the target, and does it in a thread of its own.

    Each model has one. The thread lives for one pass and ends by itself. Whoever else uses the drafter's
    session calls :meth:`settle` or :meth:`stop` first.

    A step begins if its expected gain exceeds its price. If a step ends after the target's pass, only its
    time during the pass is gained where the guess is right, and the rest is lost where it is wrong. The pass
    may take longer with the drafter beside it, because they share memory or power. How much longer is learned
    by leaving one pass in sixteen alone.
    """

    def __init__(
        self, curve: CostCurve, *, clock: Clock = perf_counter, thread: Callable[..., Thread] = Thread
    ) -> None:
        self._clock, self._thread = clock, thread
        self._step = RunningMean(curve.seconds(1))
        self._alone, self._slowdown = RunningMean(1.0, worth=1), RunningMean(1.0, worth=1)
        self._rounds = 0
        self._ran = False  # whether it ran during the pass that is observed next
        self._run: _Run | None = None

    @property
    def slowdown(self) -> float:
        """The factor, at least 1, by which the target's passes take longer while the drafter runs."""
        return max(1.0, self._slowdown.value)

    def start(self, steps: Iterator[float], *, pass_s: float, wanted: int) -> bool:
        """Go through ``steps`` during the target's pass, which is about to begin, if that pays.

        Args:
            steps: reads a token at each step, and yields before it the probability that it is needed.
            pass_s: the seconds of the target's pass alone.
            wanted: the steps that the next draft is expected to need.

        Returns:
            Whether it reads ahead.
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
        """Observe a pass of the target: its time over the time that it is expected to take alone."""
        if self._ran:
            self._slowdown.observe(ratio / self._alone.value)
        else:
            self._alone.observe(ratio)
        self._ran = False

    def settle(self) -> None:
        """Stop reading ahead and wait for the step that runs.

        Raises:
            BaseException: the error of the thread that read ahead.
        """
        run = self._wait()
        if run is not None and run.error is not None:
            raise run.error

    def stop(self) -> None:
        """Like :meth:`settle`, when no draft is wanted any more: errors go to the log."""
        run, self._ran = self._wait(), False
        if run is not None and run.error is not None:
            _LOG.warning("drafting ahead failed: %r", run.error)

    def _wait(self) -> _Run | None:
        run = self._run
        if run is None or run.thread is None:
            return None
        run.stop.set()
        if run.thread is current_thread():  # garbage collection there may end an abandoned request
            return None
        if run.thread.is_alive():  # an interrupt may have kept it from starting
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
