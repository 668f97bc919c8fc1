"""A drafter's predictions behind each token of a text, each read once, and their price."""

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
_FEW = 8  # tokens; with more of them followers save little, and may need another graph


class RunningMean:
    """A mean that outliers hardly move, and that drifts back to a usual value while it is not used.

    The usual value weighs as much as ten observations.
    """

    def __init__(self, usual: float) -> None:
        self.value = self._usual = usual
        self._seen = 10

    def observe(self, value: float) -> None:
        """Add an observation."""
        self._seen += 1
        bounded = min(value, 2.0 * self.value)
        self.value += max(_SMOOTHING, 1.0 / self._seen) * (bounded - self.value)

    def fade(self) -> None:
        """Drift towards the usual value, because nothing was observed."""
        self.value += _FORGETTING * (self._usual - self.value)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The model's prediction behind ``token``: the most probable next token, and its probability."""

    token: int
    following: int
    probability: float


class Chain(ABC):
    """Reads a text, and each token that is drafted behind it, with a drafter's session.

    :meth:`read`, :meth:`step` and :meth:`take` return the rows that the model has to read next, for which the
    caller calls :meth:`take`, or None. Then :attr:`latest` is there. No other object uses the session during
    the request. ``curve`` has the times of its passes.
    """

    def __init__(self, session: Session, curve: CostCurve) -> None:
        self._session = session
        # The first pass of a round also reads the tokens committed since the last round.
        self._first, self._step = RunningMean(curve.seconds(2)), RunningMean(curve.seconds(1))

    @property
    @abstractmethod
    def latest(self) -> Prediction:
        """The prediction behind the text and all drafted tokens that were read."""

    def add_features(self, features: Floats, committed: int) -> None:
        """Note the ``committed`` new tokens, and the target's features before the last one, if any."""
        return

    @abstractmethod
    def room_for(self, text: Sequence[int], more: int) -> bool:
        """Whether the KV cache has room for ``text``, and ``more`` tokens behind it."""

    def seconds_of_text(self, text: Sequence[int]) -> float:
        """The expected seconds of the pass of :meth:`read`. Other requests may share the pass."""
        return self._first.value

    def seconds_of_step(self, token: int) -> float:
        """The expected seconds of the pass of :meth:`step`. Other requests may share the pass."""
        return self._step.value

    def idle(self) -> None:
        """Note a round in which nothing was read."""
        self._first.fade()
        self._step.fade()

    def catch_up(self, text: Sequence[int]) -> Rows | None:
        """Begin to read a piece of the text if :meth:`read` would need several; None if it would not."""
        return None

    @abstractmethod
    def read(self, text: Sequence[int], requests: int = 1) -> Rows | None:
        """Begin to read the committed text that is unread; at first that is the prompt.

        So many ``requests`` share the passes up to the next call.
        """

    @abstractmethod
    def step(self, token: int) -> Rows | None:
        """Begin to read a drafted token."""

    @abstractmethod
    def take(self, predictions: Predictions, passed: Passed) -> Rows | None:
        """Go on with the model's predictions for the rows. ``passed`` is the pass that read them."""

    def _prediction(self, token: int, predictions: Predictions, row: int = 0) -> Prediction:
        """The prediction of a row, which stands behind ``token``."""
        best, kept = predictions.best(row), self._session.model.head_tokens
        return Prediction(token, best if kept is None else int(kept[best]), predictions.probability(row))


class Reader(Chain):
    """Reads committed and drafted tokens with a drafter model's session.

    A prediction is kept as long as the KV cache holds the token before it, so no token is read twice. This
    holds for drafted tokens that were not proposed, and for right ones of ``followers``, which a pass reads
    too. Use it in one thread at a time.

    ``followers`` know the first ``held`` tokens of the text already.
    """

    def __init__(self, session: Session, curve: CostCurve, followers: Followers, *, held: int = 0) -> None:
        super().__init__(session, curve)
        self._followers = followers
        self._asked: Rows | None = None  # of the next pass
        self._requests = 1
        self._unread: Sequence[int] = ()  # tokens of the text behind the next pass's tokens
        self._end = self._length = 0  # length of the text with drafted tokens: when all is read, and now
        self._seconds = 0.0  # time of the reading
        self._mean: RunningMean | None = None  # learns from that time
        self._predicted: dict[int, Prediction] = {}  # predictions by position
        self._found: list[Follower] = []  # the next pass reads them too
        self._right: dict[int, Follower] = {}  # right ones that no draft has needed yet, by position
        self._text: list[int] = []  # the text and the drafted tokens
        self._learned = held  # tokens of the text that followers know
        self._has_read = False  # the prompt

    @property
    def latest(self) -> Prediction:
        return self._predicted[self._length - 1]

    def room_for(self, text: Sequence[int], more: int) -> bool:
        return len(text) + more <= self._session.capacity

    def seconds_of_text(self, text: Sequence[int]) -> float:
        return 0.0 if self._knows(text) else super().seconds_of_text(text)

    def seconds_of_step(self, token: int) -> float:
        return 0.0 if self._knows_behind(token) else super().seconds_of_step(token)

    def catch_up(self, text: Sequence[int]) -> Rows | None:
        if len(text) - self._session.shared_prefix(text) <= _PIECE:
            return None
        held = self._roll_back(text)
        self._asked = Rows(self._session, text[held : held + _PIECE], 0)
        return self._asked

    def read(self, text: Sequence[int], requests: int = 1) -> Rows | None:
        self._requests = requests
        self._followers.learn(text, self._learned)
        self._learned, self._text = len(text), list(text)
        self._predicted = {at: known for at, known in self._predicted.items() if at >= len(text) - 1}
        if self._knows(text):
            self._move(len(text))
            return None
        self._end, self._seconds, self._mean = len(text), 0.0, self._first if self._has_read else None
        self._has_read = True
        self._unread = text[self._roll_back(text) :]
        return self._read_piece()

    def step(self, token: int) -> Rows | None:
        self._text.append(token)
        if self._knows_behind(token):
            self._move(self._length + 1)
            return None
        self._end, self._seconds, self._mean = self._length + 1, 0.0, self._step
        held = self._session.rewind(min(self._length, self._session.length))
        self._drop(held)
        self._unread = self._text[held:]
        return self._read_piece()

    def take(self, predictions: Predictions, passed: Passed) -> Rows | None:
        rows, self._asked = self._asked, None
        assert rows is not None
        self._seconds += passed.unshared_s
        if self._unread:
            return self._read_piece()
        if rows.wanted:
            if self._mean is not None:
                self._mean.observe(self._seconds)
            self._keep(rows.tokens, self._found, predictions)
            self._move(self._end)
        return None

    def _read_piece(self) -> Rows:
        count = self._session.model.piece
        piece, self._unread = self._unread[:count], self._unread[count:]
        return self._ask(piece, is_last=not self._unread)

    def _ask(self, tokens: Sequence[int], *, is_last: bool) -> Rows:
        """Ask for a pass over these tokens and, if they end the text, over what may follow."""
        found = list[Follower]()
        if is_last and len(tokens) <= _FEW:
            model, undone = self._session.model, self._session.model.places.undone
            room = min(model.piece, self._session.capacity - self._session.length) - len(tokens)
            room = room if undone is None else min(room, undone)
            found = self._followers.behind(self._text, len(tokens), room, self._requests)
        self._found = found
        rows = [*tokens, *(follower.token for follower in found)]
        self._asked = Rows(self._session, rows, is_last + len(found))
        return self._asked

    def _keep(self, rows: Sequence[int], found: Sequence[Follower], predictions: Predictions) -> None:
        """Keep the predictions behind the text and each right follower, and drop the others."""
        at, right = self._session.length - len(found) - 1, 0
        token = rows[len(rows) - len(found) - 1]
        while True:
            prediction = self._predicted[at + right] = self._prediction(token, predictions, right)
            if right == len(found) or found[right].token != prediction.following:
                break
            token = prediction.following
            self._right[at + 1 + right] = found[right]
            right += 1
        for follower in found[right:]:
            self._followers.fared(follower, spared=False)
        self._session.keep(len(rows) - len(found) + right)

    def _knows(self, text: Sequence[int]) -> bool:
        return len(text) - 1 in self._predicted and self._session.shared_prefix(text) == len(text)

    def _knows_behind(self, token: int) -> bool:
        prediction = self._predicted.get(self._length)
        return prediction is not None and prediction.token == token

    def _roll_back(self, text: Sequence[int]) -> int:
        """Roll the KV cache back to a beginning of ``text``, and return its length."""
        held = self._session.rewind(min(self._session.shared_prefix(text), len(text) - 1))
        self._drop(held)
        return held

    def _move(self, length: int) -> None:
        """Set the length of the text to ``length`` tokens."""
        self._length = length
        for at in [at for at in self._right if at < length]:
            self._followers.fared(self._right.pop(at), spared=True)

    def _drop(self, length: int) -> None:
        """Drop predictions from position ``length`` on: the KV cache is about to lose these tokens."""
        self._predicted = {at: known for at, known in self._predicted.items() if at < length}
        for at in [at for at in self._right if at >= length]:
            self._followers.fared(self._right.pop(at), spared=False)
