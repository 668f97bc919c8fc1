"""What a drafter says behind each token of a text, asked once, and what asking takes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from edgespec.decoding.draft import Clock, Passed, Work, alone
from edgespec.drafting.cascade import Follower, Followers
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.predictions import Floats, Predictions
from edgespec_runtimes.session import Rows, Session

_SMOOTHING = 0.1
_FORGETTING = 0.005
_PIECE = 64  # tokens
_FEW = 8  # tokens; beside more of them guesses save little, and may need another graph


class RunningMean:
    """A mean that outliers hardly move, and that drifts back to the usual value where it is not used.

    The usual value is ``worth`` so many observations: with few, the first that are made count for more.
    """

    def __init__(self, usual: float, worth: int = 10) -> None:
        self.value = self._usual = usual
        self._seen = worth

    def observe(self, value: float) -> None:
        """It was ``value`` once more."""
        self._seen += 1
        bounded = min(value, 2.0 * self.value)
        self.value += max(_SMOOTHING, 1.0 / self._seen) * (bounded - self.value)

    def fade(self) -> None:
        """It was not tried."""
        self.value += _FORGETTING * (self._usual - self.value)


@dataclass(frozen=True, slots=True)
class Said:
    """What the model says behind ``token``: which token most probably follows, and how probably."""

    token: int
    following: int
    probability: float


class Chain(ABC):
    """What a drafter says behind a text, and behind each token that it drafts there.

    Nobody else uses the session while the request lasts; its passes take what ``curve`` says.
    """

    def __init__(self, session: Session, curve: CostCurve, clock: Clock) -> None:
        self._session, self.clock = session, clock
        # The first pass of a round also reads what was committed since the last.
        self._first, self._step = RunningMean(curve.seconds(2)), RunningMean(curve.seconds(1))

    def hear(self, features: Floats, committed: int) -> None:
        """Tell of so many new tokens, and of the target's features before the last of them, if it has any."""
        return

    @abstractmethod
    def room_for(self, text: Sequence[int], more: int) -> bool:
        """Whether the KV cache has room for ``text``, and ``more`` tokens behind it."""

    def seconds_of_text(self, text: Sequence[int]) -> float:
        """What the pass of :meth:`read` is expected to take, of which others may pay a share."""
        return self._first.value

    def seconds_of_step(self, token: int) -> float:
        """What the pass of :meth:`step` is expected to take, of which others may pay a share."""
        return self._step.value

    def idle(self) -> None:
        """Tell of a round in which nothing was read."""
        self._first.fade()
        self._step.fade()

    def catch_up(self, text: Sequence[int]) -> Work[bool]:
        """Read a piece of the text if :meth:`read` would have to read several; whether that was so."""
        yield from ()
        return False

    @abstractmethod
    def read(self, text: Sequence[int]) -> Work[Said]:
        """Catch up with the committed text; the first time that is the prompt."""

    @abstractmethod
    def step(self, token: int) -> Work[Said]:
        """Read a drafted token."""

    def _said(self, token: int, predictions: Predictions, row: int = 0) -> Said:
        """What a row says behind ``token``."""
        best, kept = predictions.best(row), self._session.model.head_tokens
        return Said(token, best if kept is None else int(kept[best]), predictions.probability(row))


class Reader(Chain):
    """Reads a text with the drafter's session: what is committed, and what is drafted behind it.

    What was said behind the end of the text is kept as long as the KV cache holds the token, so nothing is
    read twice: neither tokens that were drafted and not proposed, nor those read ahead (:meth:`read_on`), nor
    those that ``followers`` guessed rightly, which a pass reads besides. One thread at a time.

    The first ``held`` tokens of the text are known to ``followers`` already.

    Attributes:
        has_read: whether the prompt was read.
        drafted_ahead: tokens read ahead so far.
        used_ahead: of these, how many later drafts needed.
    """

    def __init__(
        self,
        session: Session,
        curve: CostCurve,
        followers: Followers,
        *,
        held: int = 0,
        clock: Clock = perf_counter,
    ) -> None:
        super().__init__(session, curve, clock)
        self._followers, self.drafted_ahead, self.used_ahead = followers, 0, 0
        self._heard: dict[int, Said] = {}  # by position
        self._length = 0  # of the text; the cache may hold tokens read ahead of it
        self._ahead: set[int] = set()  # positions read ahead that no draft has needed yet
        self._guessed: dict[int, Follower] = {}  # by position, those that were right and not needed yet
        self._text: list[int] = []  # with what is drafted behind it
        self._learned = held  # of the text
        self.has_read = False

    @property
    def latest(self) -> Said:
        """What was said behind the text."""
        return self._heard[self._length - 1]

    @property
    def room_ahead(self) -> bool:
        """Whether the KV cache has room for one more token."""
        return self._session.length < self._session.capacity

    def room_for(self, text: Sequence[int], more: int) -> bool:
        """See :class:`Chain`."""
        return len(text) + more <= self._session.capacity

    def seconds_of_text(self, text: Sequence[int]) -> float:
        """See :class:`Chain`."""
        return 0.0 if self._knows(text) else super().seconds_of_text(text)

    def seconds_of_step(self, token: int) -> float:
        """See :class:`Chain`."""
        return super().seconds_of_step(token) if self._known(token) is None else 0.0

    def catch_up(self, text: Sequence[int]) -> Work[bool]:
        """See :class:`Chain`."""
        if len(text) - self._session.shared_prefix(text) <= _PIECE:
            return False
        held = self._roll_back(text)
        yield Rows(self._session, text[held : held + _PIECE], 0)
        return True

    def read(self, text: Sequence[int]) -> Work[Said]:
        """See :class:`Chain`."""
        last, seconds = len(text) - 1, 0.0
        self._followers.learn(text, self._learned)
        self._learned, self._text = len(text), list(text)
        if not self._knows(text):
            held = self._roll_back(text)
            for start in range(held, len(text), self._session.model.piece):
                piece = list(text[start : start + self._session.model.piece])
                ends = start + len(piece) > last
                guesses = self._guesses(len(piece)) if ends and len(piece) <= _FEW else []
                rows = Rows(self._session, [*piece, *_tokens(guesses)], ends + len(guesses))
                predictions, passed = yield rows
                seconds += passed.share_s * passed.requests
            if self.has_read:
                self._first.observe(seconds)
            self.has_read = True
            self._hear(piece, guesses, predictions)
        self._move(len(text))
        self._heard = {at: said for at, said in self._heard.items() if at >= last}
        return self._heard[last]

    def step(self, token: int) -> Work[Said]:
        """See :class:`Chain`."""
        said = self._known(token)
        self._text.append(token)
        if said is None:
            held = self._session.rewind(min(self._length, self._session.length))
            self._forget(held)
            tokens = self._text[held:]
            said, passed = yield from self._ask(tokens, self._guesses(len(tokens)))
            self._step.observe(passed.share_s * passed.requests)
        self._move(self._length + 1)
        return said

    def ahead(self, count: int) -> Said | None:
        """What was said behind the token ``count`` places behind the text, if that was read already."""
        return self._heard.get(self._length + count)

    def read_on(self, token: int) -> Said:
        """Read a token ahead of the text, behind those read ahead already."""
        said, _ = alone(self._ask([token], []), self.clock)
        self._ahead.add(self._session.length - 1)
        self.drafted_ahead += 1
        return said

    def _ask(self, tokens: Sequence[int], guesses: Sequence[Follower]) -> Work[tuple[Said, Passed]]:
        rows = Rows(self._session, [*tokens, *_tokens(guesses)], 1 + len(guesses))
        predictions, passed = yield rows
        return self._hear(tokens, guesses, predictions), passed

    def _guesses(self, rows: int) -> list[Follower]:
        """What to read besides, in a pass over so many rows."""
        session = self._session
        room = min(session.model.piece, session.capacity - session.length) - rows
        return self._followers.guesses(self._text, rows, room)

    def _hear(self, tokens: Sequence[int], guesses: Sequence[Follower], predictions: Predictions) -> Said:
        """Keep what a pass says behind ``tokens`` and each guess that is right; the others do not stay."""
        at, right, token = self._session.length - len(guesses) - 1, 0, tokens[-1]
        while True:
            said = self._heard[at + right] = self._said(token, predictions, right)
            if right == len(guesses) or guesses[right].token != said.following:
                break
            token = said.following
            self._guessed[at + 1 + right] = guesses[right]
            right += 1
        for guess in guesses[right:]:
            self._followers.fared(guess, spared=False)
        self._session.keep(len(tokens) + right)
        return self._heard[at]

    def _knows(self, text: Sequence[int]) -> bool:
        return len(text) - 1 in self._heard and self._session.shared_prefix(text) == len(text)

    def _known(self, token: int) -> Said | None:
        said = self._heard.get(self._length)
        return said if said is not None and said.token == token else None

    def _roll_back(self, text: Sequence[int]) -> int:
        """Let the KV cache hold nothing else than the beginning of ``text``, and how much that is."""
        held = self._session.rewind(min(self._session.shared_prefix(text), len(text) - 1))
        self._forget(held)
        return held

    def _move(self, length: int) -> None:
        """The text has ``length`` tokens now."""
        self._length = length
        needed = {at for at in self._ahead if at < length}
        self.used_ahead += len(needed)
        self._ahead -= needed
        for at in [at for at in self._guessed if at < length]:
            self._followers.fared(self._guessed.pop(at), spared=True)

    def _forget(self, length: int) -> None:
        """The KV cache is about to lose every token from position ``length`` on."""
        self._heard = {at: said for at, said in self._heard.items() if at < length}
        self._ahead = {at for at in self._ahead if at < length}
        for at in [at for at in self._guessed if at >= length]:
            self._followers.fared(self._guessed.pop(at), spared=False)


def _tokens(guesses: Sequence[Follower]) -> list[int]:
    return [guess.token for guess in guesses]
