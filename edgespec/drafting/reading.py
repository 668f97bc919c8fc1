"""What a drafter says behind each token of a text, asked once, and what asking takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from edgespec.decoding.draft import Clock, Passed, Work, alone
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.session import Predictions, Rows, Session

_SMOOTHING = 0.1
_FORGETTING = 0.005
_PIECE = 64  # tokens


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


class Reader:
    """Reads a text with the drafter's session: what is committed, and what is drafted behind it.

    What was said behind the end of the text is kept as long as the KV cache holds the token, so nothing is
    read twice: neither tokens that were drafted and not proposed, nor those read ahead (:meth:`read_on`).
    One thread at a time.

    Nobody else uses ``session`` while the request lasts.

    Attributes:
        spent_s: seconds of passes so far, reading the prompt and ahead not counted; None if nothing was read.
        drafted_ahead: tokens read ahead so far.
        used_ahead: of these, how many later drafts needed.
    """

    def __init__(self, session: Session, curve: CostCurve, *, clock: Clock = perf_counter) -> None:
        self._session, self.clock = session, clock
        self.drafted_ahead = self.used_ahead = 0
        # The first pass of a round also reads what was committed since the last.
        self._first, self._step = RunningMean(curve.seconds(2)), RunningMean(curve.seconds(1))
        self._said: dict[int, Said] = {}  # by position
        self._length = 0  # of the text; the cache may hold tokens read ahead of it
        self._ahead: set[int] = set()  # positions read ahead that no draft has needed yet
        self.spent_s: float | None = None

    @property
    def latest(self) -> Said:
        """What was said behind the text."""
        return self._said[self._length - 1]

    @property
    def room_ahead(self) -> bool:
        """Whether the KV cache has room for one more token."""
        return self._session.length < self._session.capacity

    def room_for(self, count: int) -> bool:
        """Whether the KV cache has room for ``count`` tokens."""
        return count <= self._session.capacity

    def seconds_of_text(self, text: Sequence[int]) -> float:
        """What the pass of :meth:`read` is expected to take, of which others may pay a share."""
        return 0.0 if self._knows(text) else self._first.value

    def seconds_of_step(self, token: int) -> float:
        """What the pass of :meth:`step` is expected to take, of which others may pay a share."""
        return self._step.value if self._known(token) is None else 0.0

    def idle(self) -> None:
        """Tell of a round in which nothing was read."""
        self._first.fade()
        self._step.fade()

    def near(self, text: Sequence[int]) -> bool:
        """Whether :meth:`read` would take one pass of few tokens."""
        return len(text) - self._session.shared_prefix(text) <= _PIECE

    def catch_up(self, text: Sequence[int]) -> Work[None]:
        """Read a piece of the text that :meth:`read` would have to read."""
        held = self._roll_back(text)
        yield Rows(self._session, text[held : held + _PIECE], 0)

    def read(self, text: Sequence[int]) -> Work[Said]:
        """Catch up with the committed text; the first time that is the whole prompt."""
        last, spent_s, share_s = len(text) - 1, 0.0, 0.0
        if not self._knows(text):
            held = self._roll_back(text)
            for start in range(held, len(text), self._session.piece):
                piece = text[start : start + self._session.piece]
                predictions, passed = yield Rows(self._session, piece, int(start + len(piece) > last))
                spent_s, share_s = spent_s + passed.share_s * passed.requests, share_s + passed.share_s
            if self.spent_s is None:
                self.spent_s = 0.0
            else:
                self._spent(self._first, spent_s, share_s)
            self._said[last] = self._heard(text[last], predictions)
        self._move(len(text))
        self._said = {at: said for at, said in self._said.items() if at >= last}
        return self._said[last]

    def step(self, token: int) -> Work[Said]:
        """Read a drafted token."""
        said = self._known(token)
        if said is None:
            self._forget(self._length)
            if self._session.length > self._length:
                self._session.truncate(self._length)
            said, passed = yield from self._ask(token)
            self._spent(self._step, passed.share_s * passed.requests, passed.share_s)
        self._move(self._length + 1)
        return said

    def ahead(self, count: int) -> Said | None:
        """What was said behind the token ``count`` places behind the text, if that was read already."""
        return self._said.get(self._length + count)

    def read_on(self, token: int) -> Said:
        """Read a token ahead of the text, behind those read ahead already."""
        said, _ = alone(self._ask(token), self.clock)
        self._ahead.add(self._session.length - 1)
        self.drafted_ahead += 1
        return said

    def _ask(self, token: int) -> Work[tuple[Said, Passed]]:
        predictions, passed = yield Rows(self._session, [token], 1)
        said = self._heard(token, predictions)
        self._said[self._session.length - 1] = said
        return said, passed

    def _heard(self, token: int, predictions: Predictions) -> Said:
        row, head = predictions.best(0), self._session.head_tokens
        following = row if head is None else int(head[row])
        return Said(token, following, predictions.probability(0))

    def _knows(self, text: Sequence[int]) -> bool:
        return len(text) - 1 in self._said and self._session.shared_prefix(text) == len(text)

    def _known(self, token: int) -> Said | None:
        said = self._said.get(self._length)
        return said if said is not None and said.token == token else None

    def _roll_back(self, text: Sequence[int]) -> int:
        """Let the KV cache hold nothing else than the beginning of ``text``, and how much that is."""
        held = min(self._session.shared_prefix(text), len(text) - 1)
        self._forget(held)
        self._session.truncate(held)
        return held

    def _spent(self, usual: RunningMean, seconds: float, share_s: float) -> None:
        usual.observe(seconds)
        self.spent_s = (self.spent_s or 0.0) + share_s

    def _move(self, length: int) -> None:
        """The text has ``length`` tokens now."""
        self._length = length
        needed = {at for at in self._ahead if at < length}
        self.used_ahead += len(needed)
        self._ahead -= needed

    def _forget(self, length: int) -> None:
        """The KV cache is about to lose every token from position ``length`` on."""
        self._said = {at: said for at, said in self._said.items() if at < length}
        self._ahead = {at for at in self._ahead if at < length}
