"""The one decoding loop: propose, predict, verify, commit, observe; plain decoding has no drafts.

Verification looks at one row of logits after another and stops at the first rejection. No proposal is dropped
for its value, because that would change the distribution of the output.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from time import perf_counter

from edgespec.decoding.draft import NO_DRAFT, Clock, Draft, Passed, Source, Step
from edgespec.decoding.sampling import (
    Penalties,
    Row,
    RowStep,
    SamplingParams,
    Suppressed,
    changed_row,
    distribution,
    draw,
    log_probabilities,
    most_likely,
    uniform,
)
from edgespec_models.errors import EdgespecError, RequestError
from edgespec_runtimes.predictions import Floats, Predictions, joined
from edgespec_runtimes.session import Rows, Session

TopLogprobs = tuple[tuple[int, float], ...]
_FEW = 32  # a pass over at most so many tokens of a prompt also verifies a draft
_SCORED = 32  # tokens of a prompt in a pass that scores them: rows of logits are long


class Verifier:
    """Judges the drafts of one request by the target's predictions.

    Drafts are verified by sample-and-match: the token is chosen from the target's row, and the proposal is
    accepted while it equals that choice. So the output equals plain decoding, or plain sampling with the same
    seed, token for token.

    Without a seed in ``params`` a new one is drawn. ``masks``, such as a grammar, change the rows after the
    penalties and biases of ``params``; ``suppressed`` changes them last.
    """

    def __init__(
        self, params: SamplingParams, masks: Sequence[RowStep] = (), suppressed: Suppressed | None = None
    ) -> None:
        self._params, self._suppressed = params, suppressed
        self._steps = [Penalties(params), *masks] if params.changes_rows else list(masks)
        self._seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed % 2**64

    def __call__(self, predictions: Predictions, draft: Draft, tokens: Sequence[int]) -> tuple[int, int]:
        """Judge ``draft`` as a continuation of ``tokens``. Rows behind a rejection are not read.

        Args:
            predictions: the target's, with ``len(draft.tokens) + 1`` rows. Row i predicts the token after
                ``tokens`` and the first i proposals.
            draft: the proposals. An empty draft is plain decoding.
            tokens: all committed tokens, prompt included.

        Returns:
            The number of accepted proposals, and the token behind them.

        Raises:
            RequestError: the predictions have another shape, or the request allows no token.
            EdgespecError: a row of logits is not a distribution.
        """
        _check_shapes(predictions, draft)
        suppressed = self._suppressed
        steps = self._steps if suppressed is None else [*self._steps, suppressed]
        for step in steps:
            step.begin(tokens)
        position = len(tokens)

        def row(i: int) -> Row:
            return changed_row(predictions, draft.tokens[:i], steps)

        def best(i: int) -> int:
            # A device that found the most likely tokens itself need not copy the rows.
            token = None if self._steps else predictions.best(i)
            if token is None or (suppressed and token in suppressed.behind(draft.tokens[:i])):
                token = int(row(i).argmax())
            return token

        def sample(i: int) -> int:
            return draw(distribution(row(i), self._params), uniform(self._seed, position + i))

        return _match(draft, best if self._params.greedy else sample)

    def head(self, draft: Draft) -> Draft:
        """The beginning of a draft without tokens that are never written."""
        never = frozenset[int]() if self._suppressed is None else self._suppressed.always
        return draft.head(
            next((at for at, token in enumerate(draft.tokens) if token in never), len(draft.tokens))
        )


class Decoding:
    """One request in the loop, a round at a time: :meth:`propose`, a pass over :meth:`rows`, :meth:`take`.

    Between two rounds the target's cache holds every token but the last, or the part of the prompt that was
    read. The caller may stop there, and other requests may share the passes. The prompt is read in pieces;
    the pass over the last piece gives the first token, and verifies a draft if it reads few tokens.

    Args:
        session: the target's session. Tokens of the prompt in its cache are not read again.
        policy: the source of proposals, which observes every round.
        verify: decides which proposals are kept.
        tokens: the prompt, at least one token. The list grows.
        max_new_tokens: the most tokens that are committed.
        max_draft: the most tokens of a draft.
        stop: tokens that end the generation. They are committed.
        top_logprobs: the number of most likely tokens whose log probabilities are in the steps, besides the
            committed token's. None gives no log probabilities.
        prompt_logprobs: the same for the prompt. The cache must hold none of its tokens.
        checkpoints: lengths of the prompt behind which a pass ends.
        clock: times the rounds.

    Attributes:
        session: the target's session.
        tokens: the prompt and all committed tokens.
        draft: the proposal of this round. The caller may cut it before the pass.
        scores: for each token of the prompt that was read, if asked for: its log probability, and the most
            likely tokens there with theirs. The first token has none.
        ended: whether the request is complete.
    """

    def __init__(
        self,
        session: Session,
        policy: Source,
        verify: Verifier,
        tokens: list[int],
        *,
        max_new_tokens: int,
        max_draft: int,
        stop: Collection[int] = (),
        top_logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        checkpoints: Sequence[int] = (),
        clock: Clock = perf_counter,
    ) -> None:
        self.tokens, self.draft, self.ended = tokens, NO_DRAFT, max_new_tokens < 1
        self.session, self._policy, self._verify, self.clock = session, policy, verify, clock
        self._end, undone = len(tokens) + max_new_tokens, session.model.places.undone
        self._max_draft = max_draft if undone is None else min(max_draft, undone)
        self._stop, self._top_logprobs, self._drafter_s = stop, top_logprobs, 0.0
        self._prompt_logprobs, self._checkpoints = prompt_logprobs, checkpoints
        self.scores: list[tuple[float | None, TopLogprobs]] = [] if prompt_logprobs is None else [(None, ())]
        self._features: Floats | None = None  # features of the end of the prompt
        self._read = 0  # rows of this round's pass
        session.rewind(session.shared_prefix(tokens[:-1]))

    @property
    def unread(self) -> int:
        """The number of tokens that the target has to read before the prompt's last token."""
        return len(self.tokens) - 1 - self.session.length

    def propose(self) -> None:
        """Begin to draft, if this round may have a draft."""
        self.draft, self._drafter_s = NO_DRAFT, 0.0
        limit = min(self._max_draft, self._end - len(self.tokens) - 1)
        if limit > 0 and self.unread <= _FEW and not self._scores:
            began = self.clock()
            self._policy.begin_round(self.tokens, limit)
            self._spend(self.clock() - began)

    @property
    def drafter_rows(self) -> Rows | None:
        """The rows that a drafter has to read next for :attr:`draft`, or None if it is complete."""
        return self._policy.rows

    def take_drafter(self, predictions: Predictions, passed: Passed) -> None:
        """Go on drafting with the predictions for :attr:`drafter_rows`."""
        began = self.clock()
        self._policy.take(predictions, passed)
        self._spend(self.clock() - began + passed.share_s)

    def fail_drafter(self, error: Exception) -> None:
        """Go on without the pass over :attr:`drafter_rows`, which failed."""
        self._policy.fail(error)
        self._spend(0.0)

    def _spend(self, seconds: float) -> None:
        self._drafter_s += seconds
        if self.drafter_rows is None:
            draft = self._verify.head(self._policy.draft)
            # No token is committed behind the end.
            self.draft = draft.head(len(_until_stop(draft.tokens, self._stop)[0]))

    @property
    def _scores(self) -> bool:
        """Whether this round scores tokens of the prompt."""
        return self._prompt_logprobs is not None and self.unread > 0

    def rows(self, most: int) -> Rows:
        """The rows that the target reads in this round: at most ``most`` tokens of a prompt, or the draft."""
        scored = self._scores
        next_ = min(
            (place for place in self._checkpoints if place > self.session.length), default=len(self.tokens)
        )
        piece = self.tokens[self.session.length : next_][: min(most, _SCORED) if scored else most]
        begins = len(piece) > self.unread
        if self.unread:
            self.draft = self.draft.head(most - len(piece) if begins else 0)
        self._read = len(piece)
        if begins and not scored:
            self._read += len(self.draft.tokens)
            return Rows(self.session, [*piece, *self.draft.tokens], 1 + len(self.draft.tokens))
        return Rows(self.session, piece, len(piece) if scored else 0)

    def take(self, predictions: Predictions, passed: Passed) -> Step | None:
        """Commit tokens by the target's pass. None if it read a part of the prompt, or no token is wanted.

        The time of the pass over a prompt's end does not count as decoding.
        """
        features = self._features = joined(self._features, predictions.hidden)
        if self._prompt_logprobs is not None:
            predictions = self._scored(predictions, self._prompt_logprobs)
        if self.session.length < len(self.tokens) or self.ended:
            return None
        began, draft, self._features = self.clock(), self.draft, None
        try:
            accepted, token = self._verify(predictions, draft, self.tokens)
        except EdgespecError as error:
            if not isinstance(error, RequestError):  # a state that is no number is not kept
                self.session.rewind(0)
            raise
        new, self.ended = _until_stop((*draft.tokens[:accepted], token), self._stop)
        top = self._top_logprobs
        logprobs = ((), ()) if top is None else _log_probabilities(predictions, new, top)
        self.tokens += new
        self.session.keep(self._read - len(draft.tokens) + len(new) - 1)
        self.ended |= len(self.tokens) >= self._end
        seconds = self._drafter_s + passed.share_s + self.clock() - began
        times = self._drafter_s, passed.share_s, seconds
        step = Step(new, draft, min(accepted, len(new)), *times, *logprobs, passed)
        if features is not None:  # only the policy keeps features
            features = features[: len(features) - len(draft.tokens) + accepted]
        self._policy.observe(step if features is None else replace(step, features=features))
        return step

    def _scored(self, predictions: Predictions, top: int) -> Predictions:
        """Score the prompt's next tokens, and return the rows that did not score any."""
        length = self.session.length
        scored = self.tokens[length - predictions.shape[0] + 1 : length + 1]
        if not scored:
            return predictions
        first = length - len(scored) + 1  # scored again, if the cache was emptied for want of memory
        self.scores[first:] = zip(*_log_probabilities(predictions, scored, top), strict=True)
        return Predictions(predictions.logits[len(scored) :])

    def close(self) -> None:
        """End the request, for whatever reason, and close its source once."""
        self._policy.close()


def _until_stop(tokens: tuple[int, ...], stop: Collection[int]) -> tuple[tuple[int, ...], bool]:
    """The tokens up to the first that ends the generation, included, and whether there is one."""
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1], True
    return tokens, False


def _log_probabilities(
    predictions: Predictions, tokens: Sequence[int], top: int
) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...]]:
    """Log probabilities of every token that follows, and the ``top`` most likely ones at its place."""
    rows = [log_probabilities(row) for row in predictions.logits[: len(tokens)]]
    own = tuple(float(row[token]) for row, token in zip(rows, tokens, strict=True))
    return own, tuple(most_likely(row, top) for row in rows)


def _match(draft: Draft, choose: Callable[[int], int]) -> tuple[int, int]:
    """Accept proposals while ``choose(i)``, the target's choice for row i, is the same token."""
    for i, proposal in enumerate(draft.tokens):
        token = choose(i)
        if token != proposal:
            return i, token
    return len(draft.tokens), choose(len(draft.tokens))


def _check_shapes(predictions: Predictions, draft: Draft) -> None:
    rows, shape = len(draft.tokens) + 1, predictions.shape
    if len(shape) != 2 or shape[0] != rows:
        raise RequestError(f"logits of shape {shape} for {rows - 1} proposals; needed: ({rows}, vocab)")
