"""The one decoding loop: propose, predict, verify, commit, observe; plain decoding has no drafts."""

from collections import abc
from dataclasses import dataclass, replace
from itertools import takewhile

from edgespec.answering.answer import Answer, TopLogprobs
from edgespec.answering.results import FinishReason, Record
from edgespec.decoding.draft import NO_DRAFT, Draft, Passed, PromptProgress, Round
from edgespec.decoding.sampling import log_probabilities, most_likely
from edgespec.drafting.policy import Policy
from edgespec.drafting.pricing import Prices
from edgespec.running.ticket import Ticket
from edgespec.running.verifier import Verifier
from edgespec_models.errors import Cancelled, EdgespecError, RequestError
from edgespec_runtimes.kv_store import KvStore
from edgespec_runtimes.predictions import Floats, Predictions, joined
from edgespec_runtimes.session import Rows, Session

_FEW = 32  # a pass over at most so many tokens of a prompt also verifies a draft
_SCORED = 32  # tokens of a prompt in a pass that scores them: rows of logits are long


@dataclass(slots=True, eq=False)
class Seat:
    """A request's sessions; ``drafter`` is None without a drafter, or if it reads one text at a time.

    ``caches`` keep texts that sessions drop.
    """

    target: Session
    drafter: Session | None
    caches: KvStore
    taken: bool = False

    def free(self) -> None:
        """Release the seat for another request."""
        self.taken = False


class Sequence:
    """A running request, a round at a time: :meth:`propose`, a pass over :meth:`rows`, :meth:`advance`.

    Between two rounds the target's cache holds every token but the last, or the part of the prompt that was
    read. The caller may stop there, and other requests may share the passes. The prompt is read in pieces;
    the pass over the last piece gives the first token, and verifies a draft if it reads few tokens. The
    model's thread alone uses it.

    Args:
        ticket: gets the records and the result.
        seat: the sessions. Tokens of the prompt in the target's cache are not read again; there must be none
            for ``prompt_logprobs``.
        answer: has the tokens, at first of the prompt, at least one.
        stop: tokens that end the generation. They are committed.
        checkpoints: lengths of the prompt behind which a pass ends, and the target's states are kept.

    Attributes:
        session: the target's session.
        draft: the proposal of this round, of which the pass over :meth:`rows` verifies the beginning.
        reason: why no further token is wanted: a token of ``stop``, or the length; None if one is.
    """

    def __init__(
        self,
        ticket: Ticket,
        seat: Seat,
        policy: Policy,
        verify: Verifier,
        answer: Answer,
        *,
        max_draft: int,
        stop: abc.Collection[int] = (),
        checkpoints: abc.Sequence[int] = (),
    ) -> None:
        request, tokens = ticket.request, answer.tokens
        self.ticket, self.answer, self.tokens, self.draft = ticket, answer, tokens, NO_DRAFT
        self.reason: FinishReason | None = "length" if request.max_new_tokens < 1 else None
        self._seat, self._policy, self._verify = seat, policy, verify
        self.session = session = seat.target
        self._end, undone = len(tokens) + request.max_new_tokens, session.model.places.undone
        self._max_draft = max_draft if undone is None else min(max_draft, undone)
        self._stop, self._checkpoints, self._drafter_s = stop, checkpoints, 0.0
        self._features: Floats | None = None  # features of the end of the prompt
        self._read = 0  # rows of this round's pass
        self._pictures = ticket.prompt.pictures
        known = session.shared_prefix(self._named(0, len(tokens) - 1))
        held = answer.cached_tokens = session.rewind(known)
        self._progress: PromptProgress | None = None  # of a prompt that takes several passes
        if self.unread >= session.model.piece:
            self._progress = PromptProgress(len(tokens), held, held, 0.0)

    def begin(self) -> None:
        """Tell the readers that the request runs."""
        self.ticket.answer, self.ticket.close = self.answer, self.close
        if self._progress is not None:
            self.ticket.put(Record("", (), progress=self._progress))

    @property
    def unread(self) -> int:
        """The number of tokens that the target has to read before the prompt's last token."""
        return len(self.tokens) - 1 - self.session.length

    def prepare(self) -> None:
        """Have memory for the rows of the next round, so that a lack of it is this request's alone.

        Raises:
            DeviceError: there is none. The caches of all sessions may be empty then, and are read again.
        """
        start, most = self.session.length, max(1 + self._max_draft, self.session.model.piece)
        end = start + min(self.unread + 1 + self._max_draft, most)
        if self._pictures is not None:
            end = max(end, self._pictures.end(start, end))
        self.session.prepare(min(end, self._end))
        if self._pictures is not None:
            try:
                self._pictures.vectors(start, end, lambda: not self.is_live or self.ticket.has_to_end())
            except Cancelled:
                if self.is_live:
                    self.stop(self.ticket.interruption or "cancelled")

    def propose(self, prices: Prices) -> Rows | None:
        """Begin to draft; the rows that a drafter has to read next, or None if :attr:`draft` is complete."""
        self.draft, self._drafter_s = NO_DRAFT, 0.0
        limit = min(self._max_draft, self._end - len(self.tokens) - 1)
        if limit < 1 or self.unread > _FEW or self._scores:
            return None
        began = self.answer.clock()
        wanted = self._policy.begin(self.tokens, limit, prices)
        return self._spend(wanted, self.answer.clock() - began)

    def take(self, predictions: Predictions, passed: Passed) -> Rows | None:
        """Go on drafting with the predictions for the drafter's rows; returns the next ones, or None."""
        began = self.answer.clock()
        wanted = self._policy.take(predictions, passed)
        return self._spend(wanted, self.answer.clock() - began + passed.share_s)

    def fail_drafter(self, error: Exception) -> Rows | None:
        """Go on without the pass over the drafter's rows, which failed."""
        return self._spend(self._policy.fail(error), 0.0)

    def _spend(self, wanted: Rows | Draft, seconds: float) -> Rows | None:
        self._drafter_s += seconds
        if isinstance(wanted, Rows):
            return wanted
        draft = self._verify.head(wanted)
        # No token is committed behind the end.
        self.draft = draft.head(len(_until_stop(draft.tokens, self._stop)[0]))
        return None

    @property
    def _scores(self) -> bool:
        """Whether this round scores tokens of the prompt."""
        return self.ticket.request.prompt_logprobs and self.unread > 0

    def rows(self, most: int, drafted: int) -> Rows:
        """The rows that the target reads in this round: at most ``most`` tokens of a prompt, or the draft.

        At most the first ``drafted`` proposals are verified.
        """
        scored = self._scores
        next_ = min(
            (place for place in self._checkpoints if place > self.session.length), default=len(self.tokens)
        )
        start, vectors = self.session.length, None
        end = min(next_, start + (min(most, _SCORED) if scored else most))
        if self._pictures is not None:
            end = self._pictures.end(start, end)
        piece = self._named(start, end)
        is_seen = piece[0] < 0
        if scored:  # nobody wants logits of pictures' rows
            piece = [*takewhile(lambda token: (token < 0) == is_seen, piece)]
        if self._pictures is not None:
            vectors = self._pictures.vectors(start, start + len(piece))
        begins, at = len(piece) > self.unread, None
        if self.unread:
            drafted = max(0, min(drafted, most - len(piece))) if begins else 0  # a picture may exceed `most`
        self.draft = self.draft.head(drafted)
        self._read = len(piece)
        if begins and not scored:
            self._read += len(self.draft.tokens)
            tokens, wanted = [*piece, *self.draft.tokens], 1 + len(self.draft.tokens)
        else:
            tokens, wanted = piece, 0 if not scored else 1 if is_seen else len(piece)
        if self._pictures is not None:
            at = self._pictures.positions(start, start + len(tokens))
        return Rows(self.session, tokens, wanted, vectors=vectors, positions=at)

    def _named(self, start: int, end: int) -> list[int]:
        """Tokens as the target keeps them, with names of pictures' rows."""
        if self._pictures is None:
            return self.tokens[start:end]
        return self._pictures.tokens[start:end] + self.tokens[max(start, len(self._pictures.tokens)) : end]

    def commit(self, predictions: Predictions, passed: Passed) -> Round | None:
        """Commit tokens by the target's pass. None if it read a part of the prompt, or no token is wanted."""
        features = self._features = joined(self._features, predictions.hidden)
        if self.ticket.request.prompt_logprobs:
            predictions = self._scored(predictions)
        if self.session.length < len(self.tokens) or self.reason is not None:
            return None
        began, draft, self._features = self.answer.clock(), self.draft, None
        try:
            accepted, token = self._verify(predictions, draft, self.tokens)
        except EdgespecError as error:
            if not isinstance(error, RequestError):  # a state that is no number is not kept
                self.session.rewind(0)
            raise
        new, is_stopped = _until_stop((*draft.tokens[:accepted], token), self._stop)
        count = self.answer.read(new)  # a draft may go on behind what ends the text
        new, is_stopped = new[:count], is_stopped and count == len(new)
        scores = ((), ()) if not self.ticket.request.logprobs else self._log_probabilities(predictions, new)
        self.tokens += new
        self.session.keep(self._read - len(draft.tokens) + len(new) - 1)
        if is_stopped or len(self.tokens) >= self._end:
            self.reason = "stop" if is_stopped else "length"
        seconds = self._drafter_s + passed.share_s + self.answer.clock() - began
        times = self._drafter_s, passed.share_s, seconds
        round_ = Round(new, draft, min(accepted, len(new)), *times, *scores, passed)
        if features is not None:  # only the policy keeps features
            features = features[: len(features) - len(draft.tokens) + accepted]
        self._policy.observe(round_ if features is None else replace(round_, features=features))
        return round_

    def _scored(self, predictions: Predictions) -> Predictions:
        """Score the prompt's next tokens, and return the rows that did not score any."""
        end, scores = self.session.length + 1, self.answer.scores
        first = end - predictions.shape[0]
        scored = self.tokens[first:end]
        if not scored:
            return predictions
        del scores[first:]  # they are scored again, if the cache was emptied for want of memory
        scores += [(None, ())] * (first - len(scores))  # of a picture
        scores += zip(*self._log_probabilities(predictions, scored), strict=True)
        if self._named(len(scores) - 1, len(scores))[0] < 0:
            scores[-1] = None, ()
        return Predictions(predictions.logits[len(scored) :])

    def _log_probabilities(
        self, predictions: Predictions, tokens: abc.Sequence[int]
    ) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...]]:
        """Log probabilities of every token that follows, and the most likely ones at its place."""
        rows = [log_probabilities(row) for row in predictions.logits[: len(tokens)]]
        own = tuple(float(row[token]) for row, token in zip(rows, tokens, strict=True))
        return own, tuple(most_likely(row, self.ticket.request.top_logprobs) for row in rows)

    @property
    def is_live(self) -> bool:
        """Whether the request goes on."""
        return self.ticket.result is None

    def advance(self, predictions: Predictions, passed: Passed) -> None:
        """Put the records of a pass onto the ticket, and end the request if it is complete."""
        round_, session = self.commit(predictions, passed), self.session
        if self._progress is not None:
            seconds = self.answer.clock() - self.answer.started
            read = min(session.length, self._progress.total)  # not the tokens that a draft added
            self._progress = replace(self._progress, read=read, seconds=seconds)
            self.ticket.put(Record("", (), progress=self._progress))
        is_over = self.reason is not None and self.unread <= 0
        if not self.answer.rounds and (round_ or is_over or session.length in self._checkpoints):
            self._seat.caches.checkpoint(session)
        if round_ is not None:
            self._progress = None
            self.ticket.put(self.answer.push(round_, self.reason))
            if self.answer.reason is not None:
                self.ticket.finish()
        elif is_over:
            self.stop("length")

    def stop(self, reason: FinishReason) -> None:
        """End the request early."""
        self.ticket.put(self.answer.stop(reason))
        self.ticket.finish()

    def close(self) -> None:
        """Close the sources and free the seat, once, however the request ended."""
        try:
            self._policy.close()
        finally:
            self._seat.free()


def _until_stop(tokens: tuple[int, ...], stop: abc.Collection[int]) -> tuple[tuple[int, ...], bool]:
    """The tokens up to the first that ends the generation, included, and whether there is one."""
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1], True
    return tokens, False
