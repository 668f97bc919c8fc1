"""A small model as drafter, of any vocabulary."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from edgespec.decoding.draft import Draft, Source, Step, Work, alone
from edgespec.drafting.bridge import Bridge
from edgespec.drafting.pricing import Pricing
from edgespec.drafting.reading import Chain, Reader
from edgespec_models.errors import TokenizerError
from edgespec_models.text.tokenizer import Tokenizer

R = TypeVar("R", bound=Chain)
_SOURCE = "model"
_BINS = 10
_PRIOR = 12.0
_DECAY = 0.995
_FADING = 0.003
_TYPICAL_SMOOTHING = 0.02
_TYPICAL = 0.6
_MOST_IN_CONTEXT = 192  # tokens


class Calibration:
    """How often proposals of a given confidence are accepted: decayed Beta counts by bin.

    A token that ends exactly where the drafted text ends is *open*: had the drafter gone on, the target
    might write it with the text that follows as another token. Open tokens have bins of their own.
    The prior says that a drafter's probability means what it says; ``_PRIOR`` observations weigh as much.

    ``typical`` is the expected acceptance of a token that is not drafted yet.
    """

    def __init__(self) -> None:
        self._prior = np.tile(_PRIOR * (np.arange(_BINS) + 0.5) / _BINS, (2, 1))
        self._accepted = self._prior.copy()
        self._seen = np.full((2, _BINS), _PRIOR)
        self.typical = _TYPICAL

    def probability(self, guess: "Guess") -> float:
        """Expected acceptance of a proposal."""
        at = self._bin(guess)
        return float(self._accepted[at] / self._seen[at])

    def consider(self, guess: "Guess") -> None:
        """Tell of a drafted token, proposed or not."""
        self.typical += _TYPICAL_SMOOTHING * (self.probability(guess) - self.typical)

    def observe(self, guess: "Guess", accepted: bool) -> None:
        """Tell how a proposal fared."""
        at = self._bin(guess)
        self._accepted[at] = self._accepted[at] * _DECAY + accepted
        self._seen[at] = self._seen[at] * _DECAY + 1

    def judge(self, guesses: Sequence["Guess"], came: Sequence[int]) -> None:
        """Tell what came in the place of proposals; what follows a wrong one was never judged."""
        for guess, token in zip(guesses, came, strict=False):
            self.observe(guess, guess.token == token)
            if guess.token != token:
                break

    def forget(self) -> None:
        """Tell that nothing was proposed: a verdict that nothing tests any more fades."""
        self._accepted += _FADING * (self._prior - self._accepted)
        self._seen += _FADING * (_PRIOR - self._seen)
        self.typical += _FADING * (_TYPICAL - self.typical)

    @staticmethod
    def _bin(guess: "Guess") -> tuple[int, int]:
        return int(guess.open), min(int(guess.confidence * _BINS), _BINS - 1)


@dataclass(frozen=True, slots=True)
class Guess:
    """A proposal of the model.

    Attributes:
        token: in the target's vocabulary.
        confidence: the product of the drafter's probabilities of the drafter tokens behind it.
        open: whether it ends exactly where the drafted text ends.
    """

    token: int
    confidence: float
    open: bool


class ModelDrafter(Source, Generic[R]):
    """Drafts greedily with a model, stopping when the next token no longer pays.

    It drafts its own argmax whatever the request's temperature: the proposals are then a function of
    the text, and sample-and-match verification accepts each with the target's probability of it, as
    rejection sampling of a deterministic proposal would.

    Where the drafter ends the text (``ends``), ``target_end`` is proposed, if there is one. ``calibration``
    is shared between requests. Of the text in the drafter's tokens, those from the first place of
    ``left_out`` on and before the second are not read.
    """

    def __init__(
        self,
        reader: R,
        bridge: Bridge,
        *,
        ends: Collection[int] = (),
        target_end: int | None = None,
        pricing: Pricing,
        calibration: Calibration,
        left_out: tuple[int, int] = (0, 0),
    ) -> None:
        self.reader, self._bridge, self._ends, self._target_end = reader, bridge, ends, target_end
        self._pricing, self._calibration, self._left_out = pricing, calibration, left_out
        self._proposed: list[Guess] = []  # this round

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """See :class:`~edgespec.decoding.draft.Source`."""
        return alone(self.proposing(tokens, limit), self.reader.clock)

    def proposing(self, tokens: Sequence[int], limit: int) -> Work[Draft]:
        """See :class:`~edgespec.decoding.draft.Asking`."""
        ids = self._aligned(tokens) if limit > 0 else []
        shares = bool(ids) and self._pricing.sequences > 1 and self.reader.room_for(ids, 2 * limit)
        if shares and (yield from self.reader.catch_up(ids)):  # a piece a round: other answers flow on
            return Draft(reading=True)
        guesses = yield from self._draft(ids, limit)
        confidence = tuple(self._calibration.probability(guess) for guess in guesses)
        count, _ = self._pricing.keep(confidence)
        if not count:
            self._calibration.forget()
        self._proposed = guesses[:count]
        drafted = tuple(guess.token for guess in self._proposed)
        return Draft(drafted, (_SOURCE,) * count, confidence[:count])

    def observe(self, step: Step) -> None:
        """See :class:`~edgespec.decoding.draft.Source`: compare the proposals with what was committed."""
        if step.features is not None:
            self.reader.hear(step.features, len(step.tokens))
        self._calibration.judge(self._proposed, step.judged)
        self._proposed = []

    def read_on(self: "ModelDrafter[Reader]", draft: Draft, limit: int) -> Iterator[float]:
        """Read what the model would write behind its ``draft``, a token at a step, as far as may be drafted.

        Yields, before each step, the probability that the token is needed: that the whole draft is accepted
        and the token behind it, which the target adds, is the one that the model would write.
        """
        accepted, added, survival = prod(draft.confidence), self._calibration.typical, 1.0
        said = self.reader.latest
        for count in range(limit + 1):  # the last of the draft, what the target adds, the next draft
            token = said.following
            guessed = self._calibration.probability(Guess(token, said.probability, open=False))
            if count == 1:
                added = guessed
            elif count:
                survival *= guessed
            if token in self._ends or not self._pays(survival, max(1, count), 0.0):
                return
            known = self.reader.ahead(count)
            if known is None:
                if not self.reader.room_ahead:
                    return
                yield accepted * added
                known = self.reader.read_on(token)
            said = known

    def _aligned(self, tokens: Sequence[int]) -> list[int]:
        """What to read of the text; nothing where one of the vocabularies cannot spell it."""
        begin, end = self._left_out
        try:
            ids = self._bridge.align(tokens)
        except TokenizerError:  # or its encoder fails over it
            return []
        return ids[:begin] + ids[end:]

    def _draft(self, ids: list[int], limit: int) -> Work[list[Guess]]:
        if ids and self._pays(1.0, 1, self.reader.seconds_of_text(ids)):
            try:
                fits = self.reader.room_for(ids, 2 * limit)
                return (yield from self._guess(ids, limit)) if fits else []
            except TokenizerError:
                return []
        self.reader.idle()
        return []

    def _guess(self, ids: list[int], limit: int) -> Work[list[Guess]]:
        drafted: list[int] = []
        probabilities: list[float] = []
        guesses: list[Guess] = []
        said = yield from self.reader.read(ids)
        while True:
            token = said.following
            if token in self._ends:
                end = [] if self._target_end is None else [Guess(self._target_end, said.probability, False)]
                return [*guesses, *end][:limit]
            drafted.append(token)
            probabilities.append(said.probability)
            guesses = _guesses(self._bridge.translate(drafted), probabilities)
            survival = prod(self._calibration.probability(guess) for guess in guesses)
            if guesses:
                self._calibration.consider(guesses[-1])
            if len(guesses) >= limit or len(drafted) >= 2 * limit:
                return guesses[:limit]
            if not self._pays(survival, 1 + len(guesses), self.reader.seconds_of_step(token)):
                return guesses
            said = yield from self.reader.step(token)

    def _pays(self, survival: float, rows: int, seconds: float) -> bool:
        """Whether one more token, or several, pay in a pass of ``rows``; see :meth:`Pricing.pays`.

        All requests are expected to share the drafter's pass of so many ``seconds``.
        """
        typical, seconds = self._calibration.typical, seconds / self._pricing.sequences
        return self._pricing.pays(survival * typical, rows, seconds, typical=typical)


def _guesses(translated: Sequence[tuple[int, int]], probabilities: Sequence[float]) -> list[Guess]:
    """Target tokens with the probabilities of the drafter tokens each needs beyond those before it."""
    guesses, used = [], 0
    for index, (token, needed) in enumerate(translated):
        confidence = prod(probabilities[used:needed])
        guesses.append(Guess(token, confidence, index == len(translated) - 1))
        used = max(used, needed)
    return guesses


def context_tokens(prompt: Sequence[int], tokenizer: Tokenizer, kept: npt.NDArray[np.int32]) -> list[int]:
    """What a trimmed drafter should be able to write in this request too: the words of its prompt.

    Answers repeat words of their prompts, and those are the words that a list made for all prompts lacks (an
    in-context vocabulary as in NanoSpec, arXiv 2605.26444, here besides the trimmed rows).

    Returns:
        Tokens of ``prompt``, and other spellings of them, that are not ``kept``; the latest, at most 192.
    """
    known = set(kept.tolist())
    found: dict[int, None] = {}
    for token in dict.fromkeys(reversed(prompt)):
        if not tokenizer.is_special(token):
            found |= dict.fromkeys(other for other in _spellings(token, tokenizer) if other not in known)
        if len(found) >= _MOST_IN_CONTEXT:
            break
    return list(found)[:_MOST_IN_CONTEXT]


def _spellings(token: int, tokenizer: Tokenizer) -> Iterator[int]:
    """The token itself; with and without a space before it, its first letter small or large."""
    yield token
    word = tokenizer.token_bytes(token).lstrip(b" ")
    for first in dict.fromkeys((word[:1].lower(), word[:1].upper())):
        for spelling in (first + word[1:], b" " + first + word[1:]):
            other = tokenizer.id_of_bytes(spelling)
            if other is not None:
                yield other
