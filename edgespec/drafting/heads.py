"""A head as drafter: a few layers that read the target's states.

Others have trained it (EAGLE-3, Li et al. 2025, arXiv 2503.01840), or it came with the model: its MTP layer
(DeepSeek-AI 2024, arXiv 2412.19437), or one of Gemma 4's assistants.

Row i of a head reads token i + 1 and the target's features of token i, and predicts the token after i + 1.
Behind its own drafts it reads the state that it wrote itself. So a round's committed tokens are read again
when the target's features of them are known, and no drafts stay in the KV cache.

An assistant attends to the target's KV cache, and has none to read tokens into: it reads the last committed
token, and then its drafts, all at that token's position.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

from edgespec.decoding.draft import Passed
from edgespec.drafting.reading import Chain, Prediction
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.predictions import Floats, Predictions, joined
from edgespec_runtimes.session import Rows, Session

MOST_READ = 128
"""The most tokens that are read at once, of a prompt or after a pause of drafting."""


class _StateReader(Chain):
    """The common part of readers with a head's session: a drafted token is read beside the last state.

    Tokens that a grammar forces behind the committed ones are read like drafts.
    """

    def __init__(self, session: Session, curve: CostCurve) -> None:
        super().__init__(session, curve)
        self._asked: Rows | None = None
        self._forced: list[int] = []
        self._state: Floats | None = None  # behind the last token that was read
        self._latest: Prediction | None = None

    @property
    def latest(self) -> Prediction:
        assert self._latest is not None
        return self._latest

    def take(self, predictions: Predictions, passed: Passed) -> Rows | None:
        assert self._asked is not None
        token = self._asked.tokens[-1]
        self._state, self._latest = predictions.hidden, self._prediction(token, predictions)
        self._took(passed.unshared_s)
        return self.step(self._forced.pop(0)) if self._forced else None

    @abstractmethod
    def _took(self, seconds: float) -> None:
        """Learn how long the pass took, as if all requests had it alone."""


class AssistantReader(_StateReader):
    """Reads with an assistant's session; ``target`` is the session that reads the text.

    The prompt has ``length`` tokens.
    """

    def __init__(self, session: Session, curve: CostCurve, length: int, target: Session) -> None:
        super().__init__(session, curve)
        self._length, self._target = length, target
        self._features: Floats | None = None  # of the last token

    def add_features(self, features: Floats, committed: int) -> None:
        self._length += committed
        self._features = features[-1:]

    def room_for(self, text: Sequence[int], more: int) -> bool:
        return self._features is not None and self._target.length == self._length - 1

    def read(self, text: Sequence[int], requests: int = 1) -> Rows:
        self._forced = list(text[self._length :])
        return self._ask(text[self._length - 1], self._features, None)

    def step(self, token: int) -> Rows:
        return self._ask(token, None, self._state)

    def seconds_of_text(self, text: Sequence[int]) -> float:
        return self._step.value  # it reads one token at a time

    def _took(self, seconds: float) -> None:
        self._step.observe(seconds)

    def _ask(self, token: int, features: Floats | None, states: Floats | None) -> Rows:
        self._session.rewind(0)
        self._asked = Rows(self._session, [token], 1, features, states, self._target)
        return self._asked


class Unread:
    """Committed tokens whose features a head has not read yet, behind a prompt of ``length`` tokens.

    If a pass cannot read all of them, or the context has no room, the head begins anew with the end of the
    text.

    Attributes:
        length: of the committed text, in tokens.
        held: how many of them the head's cache holds.
        count: how many of them are unread. The last token does not count, because it has no features yet.
    """

    def __init__(self, session: Session, length: int) -> None:
        self._session, self.length, self._most = session, length, min(MOST_READ, session.model.piece)
        self._features: Floats | None = None  # of the last tokens
        self.held = self.count = 0

    @property
    def features(self) -> Floats:
        """The target's features of the unread tokens, ``(count, width)``."""
        assert self._features is not None  # the target has read the text
        return self._features[len(self._features) - self.count :]

    def add(self, features: Floats, committed: int) -> None:
        """Add this many new tokens, and the target's features of the tokens before the last of them."""
        self.length += committed
        if len(features) != committed:  # of the prompt, or of a text that the target had to read anew
            self._features, self.held, self.count = None, 0, 0
        self._features = joined(self._features, features)
        self.count += len(features)

    def room_for(self, more: int) -> bool:
        """Whether the cache has room for the unread tokens, perhaps the last of them, and ``more``."""
        no_room = self.held + self.count + more > self._session.capacity
        if not self.count or self.count > self._most or no_room:
            kept = 0 if self._features is None else len(self._features)
            self.held, self.count = 0, min(self._most, kept)
        return self.held + self.count + more <= self._session.capacity

    def read(self) -> None:
        """Note that the cache holds all tokens."""
        self.held, self.count = self.held + self.count, 0


AddPictures = Callable[[Rows, int], Rows]
"""From rows of a head, and the place of the first in the text, to the rows with pictures among them."""


class HeadReader(_StateReader):
    """Reads a text with a head's session; the prompt has ``length`` tokens, to which pictures are added."""

    def __init__(
        self, session: Session, curve: CostCurve, length: int, add_pictures: AddPictures | None = None
    ) -> None:
        super().__init__(session, curve)
        self._unread, self._begin = Unread(session, length), 0  # the text's token that the cache begins with
        self._add_pictures = add_pictures if session.model.reads_vectors else None

    def add_features(self, features: Floats, committed: int) -> None:
        self._unread.add(features, committed)

    def room_for(self, text: Sequence[int], more: int) -> bool:
        return self._unread.room_for(more + len(text) - self._unread.length)  # forced tokens

    def read(self, text: Sequence[int], requests: int = 1) -> Rows:
        length, features = self._unread.length, self._unread.features
        self._forced = list(text[length:])
        tokens = text[length - len(features) : length]
        self._begin = length - len(features) - self._unread.held
        return self._ask(self._unread.held, Rows(self._session, tokens, 1, features=features))

    def step(self, token: int) -> Rows:
        assert self._state is not None
        return self._ask(self._session.length, Rows(self._session, [token], 1, states=self._state))

    def _took(self, seconds: float) -> None:
        if not self._unread.count:
            self._step.observe(seconds)
        elif self._unread.held:  # the first time, it reads the prompt
            self._first.observe(seconds)
        self._unread.read()

    def _ask(self, held: int, rows: Rows) -> Rows:
        self._session.rewind(held)  # which has keys and values alone, and goes back anywhere
        self._asked = rows if self._add_pictures is None else self._add_pictures(rows, self._begin + held)
        return self._asked
