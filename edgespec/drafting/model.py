"""A small model as drafter, of any vocabulary."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from edgespec.decoding.draft import Draft, Passed, Round
from edgespec.drafting.bridge import Bridge
from edgespec.drafting.pricing import Prices
from edgespec.drafting.rates import Rate
from edgespec.drafting.reading import Chain, Prediction
from edgespec.drafting.source import Source, Wanted
from edgespec_models.errors import TokenizerError
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows

SOURCE = "model"
_COUNT = 10
_BINS = [(is_open, at) for is_open in (False, True) for at in range(_COUNT)]
_PRIOR = 12.0
_MEMORY, _TYPICAL_MEMORY = 200.0, 50.0
_FADING = 0.003
TYPICAL = 0.6
_MOST_IN_CONTEXT = 192  # tokens


class Calibration:
    """How often proposals of a given confidence are accepted: decayed Beta counts by bin.

    A token that ends exactly where the drafted text ends is *open*: with the text that follows, the target
    might write another token there. Open tokens have bins of their own. The prior is that a drafter's
    probability is right; it weighs as much as ``_PRIOR`` observations.
    """

    def __init__(self) -> None:
        self._rates = {(is_open, at): Rate(_PRIOR * _middle(at), _PRIOR, _MEMORY) for is_open, at in _BINS}
        self._typical = Rate.usual(TYPICAL, _TYPICAL_MEMORY)

    @property
    def typical(self) -> float:
        """The expected acceptance of a token that is not drafted yet."""
        return self._typical.share()

    def probability(self, guess: "Guess") -> float:
        """The expected acceptance of a proposal."""
        return self._rate(guess).share()

    def consider(self, guess: "Guess") -> None:
        """Count a drafted token, whether it is proposed or not."""
        self._typical.add(self.probability(guess))

    def observe(self, guess: "Guess", accepted: bool) -> None:
        """Learn whether a proposal was accepted."""
        self._rate(guess).add(accepted)

    def judge(self, guesses: Sequence["Guess"], came: Sequence[int]) -> None:
        """Judge proposals by the committed tokens, up to the first wrong one; the rest was never judged."""
        for guess, token in zip(guesses, came, strict=False):
            self.observe(guess, guess.token == token)
            if guess.token != token:
                break

    def fade(self) -> None:
        """Let verdicts fade in a round without proposals, because nothing tests them any more."""
        for (_, at), rate in self._rates.items():
            rate.fade(_FADING, _middle(at), _PRIOR)
        self._typical.fade(_FADING, TYPICAL)

    def _rate(self, guess: "Guess") -> Rate:
        return self._rates[guess.open, min(int(guess.confidence * _COUNT), _COUNT - 1)]


def _middle(at: int) -> float:
    """The confidence in the middle of a bin."""
    return (at + 0.5) / _COUNT


@dataclass(frozen=True, slots=True)
class Guess:
    """A proposal of the model.

    Attributes:
        token: the id in the target's vocabulary.
        confidence: the product of the probabilities of its drafter tokens.
        open: whether it ends exactly where the drafted text ends.
    """

    token: int
    confidence: float
    open: bool


class ModelDrafter(Source):
    """Drafts greedily with a model, and stops when the next token no longer pays.

    It drafts its most likely token at any temperature. So proposals are a function of the text, and
    sample-and-match verification accepts each with the target's probability of it, as rejection sampling
    would.

    If the drafter ends the text (``ends``), it proposes ``target_end``, if there is one. Requests share
    ``calibration``. The drafter's tokens between the two places of ``left_out`` are not read.
    """

    def __init__(
        self,
        reader: Chain,
        bridge: Bridge,
        *,
        ends: Collection[int] = (),
        target_end: int | None = None,
        calibration: Calibration,
        left_out: tuple[int, int] = (0, 0),
        earliest: int = 0,
    ) -> None:
        self._reader, self._bridge, self.ends, self._target_end = reader, bridge, ends, target_end
        self.calibration, self._left_out, self.earliest = calibration, left_out, earliest
        self._prices: Prices  # of the round
        self._limit, self._reads = 0, False  # tokens of its draft; whether it reads a piece of the prompt
        self._drafted: list[Prediction] = []  # this round, in the drafter's tokens
        self._guesses: list[Guess] = []  # target tokens of these; the proposals, once the draft is complete

    def begin(self, tokens: Sequence[int], limit: int, prices: Prices) -> Wanted:
        self._prices, self._limit, self._drafted, self._guesses = prices, limit, [], []
        ids = self._aligned(tokens) if limit > 0 else []
        reader, requests = self._reader, prices.load.sequences
        # One piece a round, so that the answers of other requests go on.
        shares = bool(ids) and requests > 1 and reader.room_for(ids, 2 * limit)
        piece = reader.catch_up(ids) if shares else None
        self._reads = piece is not None
        if piece is not None:
            return piece
        if not ids or not self.pays(1.0, 1, reader.seconds_of_text(ids)):
            reader.idle()
            return self._priced([])
        if not reader.room_for(ids, 2 * limit):
            return self._priced([])
        return self._go_on(reader.read(ids, requests))

    def take(self, predictions: Predictions, passed: Passed) -> Wanted:
        rows = self._reader.take(predictions, passed)
        return None if self._reads else self._go_on(rows)

    def observe(self, round_: Round) -> None:
        """Compare the proposals with the committed tokens."""
        if round_.features is not None:
            self._reader.add_features(round_.features, len(round_.tokens))
        self.calibration.judge(self._guesses, round_.judged)
        self._guesses = []

    def pays(self, survival: float, rows: int, seconds: float) -> bool:
        """Whether one more token, or several, pay in a pass of ``rows``; see :meth:`Prices.pays`.

        The drafter's pass takes ``seconds``; all requests are expected to share it.
        """
        typical, seconds = self.calibration.typical, seconds / self._prices.load.sequences
        return self._prices.pays(survival * typical, rows, seconds, typical=typical, source=SOURCE)

    def _aligned(self, tokens: Sequence[int]) -> list[int]:
        """The drafter's tokens to read; none if one of the vocabularies cannot spell the text."""
        begin, end = self._left_out
        try:
            ids = self._bridge.to_drafter(tokens)
        except TokenizerError:  # or its encoder fails over it
            return []
        return ids[:begin] + ids[end:]

    def _go_on(self, rows: Rows | None) -> Rows | Draft:
        """Draft until the reader needs a pass, or the draft is complete."""
        while rows is None and self._grows():
            rows = self._reader.step(self._drafted[-1].following)
        return self._priced(self._guesses[: self._limit]) if rows is None else rows

    def _grows(self) -> bool:
        """Add the reader's latest token to the draft, and return whether one more is expected to pay."""
        prediction = self._reader.latest
        token = prediction.following
        if token in self.ends:
            if self._target_end is not None:
                self._guesses.append(Guess(self._target_end, prediction.probability, open=False))
            return False
        self._drafted.append(prediction)
        try:
            self._guesses = _guesses(self._bridge, self._drafted)
        except TokenizerError:
            self._guesses = []
            return False
        survival = prod(self.calibration.probability(guess) for guess in self._guesses)
        if self._guesses:
            self.calibration.consider(self._guesses[-1])
        if len(self._guesses) >= self._limit or len(self._drafted) >= 2 * self._limit:
            return False
        return self.pays(survival, 1 + len(self._guesses), self._reader.seconds_of_step(token))

    def _priced(self, guesses: Sequence[Guess]) -> Draft:
        """The guesses that are worth their rows, which are to be judged."""
        draft = draft_of(guesses, self._prices, self.calibration)
        self._guesses = list(guesses[: len(draft.tokens)])
        return draft


def draft_of(guesses: Sequence[Guess], prices: Prices, calibration: Calibration) -> Draft:
    """The first guesses, as many as are worth their rows. If none is, ``calibration`` fades."""
    confidence = tuple(calibration.probability(guess) for guess in guesses)
    count, _ = prices.keep(confidence, SOURCE)
    if not count:
        calibration.fade()
    tokens = tuple(guess.token for guess in guesses[:count])
    return Draft(tokens, (SOURCE,) * count, confidence[:count])


def _guesses(bridge: Bridge, drafted: Sequence[Prediction]) -> list[Guess]:
    """Target tokens, each with the probabilities of the drafter tokens that it adds to those before it."""
    guesses, used = list[Guess](), 0
    translated = bridge.to_target([prediction.following for prediction in drafted])
    for index, (token, needed) in enumerate(translated):
        confidence = prod(prediction.probability for prediction in drafted[used:needed])
        guesses.append(Guess(token, confidence, index == len(translated) - 1))
        used = max(used, needed)
    return guesses


def context_tokens(prompt: Sequence[int], tokenizer: Tokenizer, kept: npt.NDArray[np.int32]) -> list[int]:
    """Tokens of a prompt that a trimmed drafter should be able to write in this request.

    Answers repeat words of their prompts, and a list made for all prompts lacks these words (an in-context
    vocabulary as in NanoSpec, arXiv 2605.26444, here beside the trimmed rows).

    Returns:
        Tokens of ``prompt``, and other spellings of them, that are not ``kept``: the latest, at most 192.
    """
    known = set(kept.tolist())
    words: dict[int, None] = {}
    for token in dict.fromkeys(reversed(prompt)):
        if not tokenizer.is_special(token):
            words |= dict.fromkeys(other for other in _spellings(token, tokenizer) if other not in known)
        if len(words) >= _MOST_IN_CONTEXT:
            break
    return list(words)[:_MOST_IN_CONTEXT]


def _spellings(token: int, tokenizer: Tokenizer) -> Iterator[int]:
    """The token, and its forms with and without a space before it, its first letter small or large."""
    yield token
    word = tokenizer.token_bytes(token).lstrip(b" ")
    for first in dict.fromkeys((word[:1].lower(), word[:1].upper())):
        for spelling in (first + word[1:], b" " + first + word[1:]):
            other = tokenizer.id_of_bytes(spelling)
            if other is not None:
                yield other
