"""What a drafter predicts behind each token of a text, asked once, and what asking takes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.decoding.draft import Passed
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
class Prediction:
    """What the model predicts behind ``token``: which token most probably follows, and how probably."""

    token: int
    following: int
    probability: float


class Chain(ABC):
    """Reads a text with a drafter's session, and each token that is drafted behind it.

    :meth:`read` and :meth:`step` begin to read. While ``rows`` are wanted, the caller has them read and calls
    :meth:`take`; then :attr:`latest` is there. Nobody else uses the session while the request lasts; its
    passes take what ``curve`` says.

    Attributes:
        rows: what the model has to read next; None where nothing is left to read.
    """

    rows: Rows | None = None

    def __init__(self, session: Session, curve: CostCurve) -> None:
        self._session = session
        # The first pass of a round also reads what was committed since the last.
        self._first, self._step = RunningMean(curve.seconds(2)), RunningMean(curve.seconds(1))

    @property
    @abstractmethod
    def latest(self) -> Prediction:
        """What is predicted behind the text and all drafted tokens that were read."""

    def add_features(self, features: Floats, committed: int) -> None:
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

    def catch_up(self, text: Sequence[int]) -> bool:
        """Begin to read a piece of the text if :meth:`read` would need several; whether that is so."""
        return False

    @abstractmethod
    def read(self, text: Sequence[int]) -> None:
        """Catch up with the committed text; the first time that is the prompt."""

    @abstractmethod
    def step(self, token: int) -> None:
        """Read a drafted token."""

    @abstractmethod
    def take(self, predictions: Predictions, passed: Passed) -> None:
        """Go on with what the model says about ``rows``; ``passed`` is the pass that read them."""

    def _prediction(self, token: int, predictions: Predictions, row: int = 0) -> Prediction:
        """What a row says behind ``token``."""
        best, kept = predictions.best(row), self._session.model.head_tokens
        return Prediction(token, best if kept is None else int(kept[best]), predictions.probability(row))


class Reader(Chain):
    """Reads a text with the drafter's session: what is committed, and what is drafted behind it.

    A prediction is kept as long as the KV cache holds the token before it, so nothing is read twice: neither
    tokens that were drafted and not proposed, nor those read ahead (:meth:`read_on`), nor those that
    ``followers`` guessed rightly, which a pass reads besides. One thread at a time.

    The first ``held`` tokens of the text are known to ``followers`` already.

    Attributes:
        has_read: whether the prompt was read.
        drafted_ahead: tokens read ahead so far.
        used_ahead: of these, how many later drafts needed.
    """

    def __init__(self, session: Session, curve: CostCurve, followers: Followers, *, held: int = 0) -> None:
        super().__init__(session, curve)
        self._followers, self.drafted_ahead, self.used_ahead = followers, 0, 0
        self._unread: Sequence[int] = ()  # of the text, behind what is read next
        self._end = self._length = 0  # of the text with drafted tokens: when all is read, and now
        self._seconds = 0.0  # that reading has taken
        self._mean: RunningMean | None = None  # which learns from that
        self._predicted: dict[int, Prediction] = {}  # by position
        self._ahead: set[int] = set()  # positions read ahead that no draft has needed yet
        self._guesses: list[Follower] = []  # that the next pass reads besides
        self._guessed: dict[int, Follower] = {}  # by position, those that were right and not needed yet
        self._text: list[int] = []  # with what is drafted behind it
        self._learned = held  # of the text
        self.has_read = False

    @property
    def latest(self) -> Prediction:
        return self._predicted[self._length - 1]

    @property
    def room_ahead(self) -> bool:
        """Whether the KV cache has room for one more token."""
        return self._session.length < self._session.capacity

    def room_for(self, text: Sequence[int], more: int) -> bool:
        return len(text) + more <= self._session.capacity

    def seconds_of_text(self, text: Sequence[int]) -> float:
        return 0.0 if self._knows(text) else super().seconds_of_text(text)

    def seconds_of_step(self, token: int) -> float:
        return 0.0 if self._knows_behind(token) else super().seconds_of_step(token)

    def catch_up(self, text: Sequence[int]) -> bool:
        if len(text) - self._session.shared_prefix(text) <= _PIECE:
            return False
        held = self._roll_back(text)
        self.rows = Rows(self._session, text[held : held + _PIECE], 0)
        return True

    def read(self, text: Sequence[int]) -> None:
        self._followers.learn(text, self._learned)
        self._learned, self._text = len(text), list(text)
        self._predicted = {at: known for at, known in self._predicted.items() if at >= len(text) - 1}
        if self._knows(text):
            self._move(len(text))
            return
        self._end, self._seconds, self._mean = len(text), 0.0, self._first if self.has_read else None
        self.has_read = True
        self._unread = text[self._roll_back(text) :]
        self._read_piece()

    def step(self, token: int) -> None:
        self._text.append(token)
        if self._knows_behind(token):
            self._move(self._length + 1)
            return
        self._end, self._seconds, self._mean = self._length + 1, 0.0, self._step
        held = self._session.rewind(min(self._length, self._session.length))
        self._drop(held)
        self._unread = self._text[held:]
        self._read_piece()

    def take(self, predictions: Predictions, passed: Passed) -> None:
        rows, self.rows = self.rows, None
        assert rows is not None
        self._seconds += passed.share_s * passed.requests
        if self._unread:
            self._read_piece()
        elif rows.wanted:
            if self._mean is not None:
                self._mean.observe(self._seconds)
            self._keep(rows.tokens, self._guesses, predictions)
            self._move(self._end)

    def ahead(self, count: int) -> Prediction | None:
        """What is predicted behind the token ``count`` places behind the text, if that was read already."""
        return self._predicted.get(self._length + count)

    def read_on(self, token: int) -> Prediction:
        """Read a token ahead of the text, behind those read ahead already, in a pass of its own."""
        (predictions,) = self._session.model.predict_together([Rows(self._session, [token], 1)])
        prediction = self._keep([token], [], predictions)
        self._ahead.add(self._session.length - 1)
        self.drafted_ahead += 1
        return prediction

    def _read_piece(self) -> None:
        count = self._session.model.piece
        piece, self._unread = self._unread[:count], self._unread[count:]
        self._ask(piece, is_last=not self._unread)

    def _ask(self, tokens: Sequence[int], *, is_last: bool) -> None:
        """Want these read, and behind the last of a text what is guessed to follow."""
        guesses = list[Follower]()
        if is_last and len(tokens) <= _FEW:
            model, undone = self._session.model, self._session.model.places.undone
            room = min(model.piece, self._session.capacity - self._session.length) - len(tokens)
            room = room if undone is None else min(room, undone)
            guesses = self._followers.guesses(self._text, len(tokens), room)
        self._guesses = guesses
        rows = [*tokens, *(guess.token for guess in guesses)]
        self.rows = Rows(self._session, rows, is_last + len(guesses))

    def _keep(self, rows: Sequence[int], guesses: Sequence[Follower], predictions: Predictions) -> Prediction:
        """Keep what a pass says behind the text and each right guess; the others do not stay."""
        at, right = self._session.length - len(guesses) - 1, 0
        token = rows[len(rows) - len(guesses) - 1]
        while True:
            prediction = self._predicted[at + right] = self._prediction(token, predictions, right)
            if right == len(guesses) or guesses[right].token != prediction.following:
                break
            token = prediction.following
            self._guessed[at + 1 + right] = guesses[right]
            right += 1
        for guess in guesses[right:]:
            self._followers.fared(guess, spared=False)
        self._session.keep(len(rows) - len(guesses) + right)
        return self._predicted[at]

    def _knows(self, text: Sequence[int]) -> bool:
        return len(text) - 1 in self._predicted and self._session.shared_prefix(text) == len(text)

    def _knows_behind(self, token: int) -> bool:
        prediction = self._predicted.get(self._length)
        return prediction is not None and prediction.token == token

    def _roll_back(self, text: Sequence[int]) -> int:
        """Let the KV cache hold nothing else than the beginning of ``text``, and how much that is."""
        held = self._session.rewind(min(self._session.shared_prefix(text), len(text) - 1))
        self._drop(held)
        return held

    def _move(self, length: int) -> None:
        """The text has ``length`` tokens now."""
        self._length = length
        needed = {at for at in self._ahead if at < length}
        self.used_ahead += len(needed)
        self._ahead -= needed
        for at in [at for at in self._guessed if at < length]:
            self._followers.fared(self._guessed.pop(at), spared=True)

    def _drop(self, length: int) -> None:
        """The KV cache is about to lose every token from position ``length`` on."""
        self._predicted = {at: known for at, known in self._predicted.items() if at < length}
        self._ahead = {at for at in self._ahead if at < length}
        for at in [at for at in self._guessed if at >= length]:
            self._followers.fared(self._guessed.pop(at), spared=False)
