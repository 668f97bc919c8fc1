"""Vectors of texts, and scores of texts for a query, by models that were trained for it.

Requests wait in the model's queue.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, NamedTuple, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from edgespec.answering.results import FinishReason, nothing
from edgespec.asking.request import Request, encode_text
from edgespec.running.ticket import Ticket
from edgespec_models.decoders.kept import BLOCK
from edgespec_models.decoders.record import record
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import Cancelled, Closed, DoesNotFit, EdgespecError, RequestError, too_long
from edgespec_models.schema import checked, length
from edgespec_models.text.marked_text import mark, unmark
from edgespec_runtimes.kv_cache import shared_length
from edgespec_runtimes.kv_store import KvStore
from edgespec_runtimes.session import LoadedModel, Rows, Session

if TYPE_CHECKING:
    from edgespec_models.bundles.bundle import Bundle

T = TypeVar("T")
_F32 = npt.NDArray[np.float32]
_Text = str | Sequence[int]
Texts = str | Annotated[Sequence[_Text], length(1)]
"""One or several texts, each as a text or as its tokens."""
_QUERY: Final = "Instruct: {}\nQuery:{}"  # from the model card of Qwen3-Embedding
_PART: Final = re.compile(r"\{(instruction|query|document)\}")
_AT_ONCE: Final = 4  # texts of a pass; each takes a KV cache, and four mostly fill the pass


class EmbeddingOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`edgespec.Model.embed`.

    Attributes:
        instruction: the purpose of a query, in a sentence. Documents have none.
        dimensions: the length of vectors, which are cut (Kusupati et al. 2022, "Matryoshka Representation
            Learning").
        timeout: the seconds that the request may take, waiting included.
    """

    instruction: str | None
    dimensions: int | None
    timeout: float | None


class Embeddings(NamedTuple):
    """The result of :meth:`edgespec.Model.embed`.

    Attributes:
        vectors: float32 ``(texts, dimensions)``; each row has the length 1.
        tokens: the number of tokens that the model read of each text.
    """

    vectors: _F32
    tokens: tuple[int, ...]


class RerankOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`edgespec.Model.rerank`.

    Attributes:
        instruction: what makes a text relevant, in a sentence. Without it the model's own counts.
        timeout: the seconds that the request may take, waiting included.
    """

    instruction: str | None
    timeout: float | None


class Scores(NamedTuple):
    """The result of :meth:`edgespec.Model.rerank`.

    Attributes:
        scores: float32 ``(texts,)``; how likely each text is relevant, from 0 to 1.
        tokens: the number of tokens that the model read for each text, with the query.
    """

    scores: _F32
    tokens: tuple[int, ...]

    @property
    def order(self) -> list[int]:
        """The places of the texts, the most relevant first."""
        return [int(at) for at in np.argsort(-self.scores, kind="stable")]


class TextsTicket(Ticket, Generic[T]):
    """A request for a row of ``width`` numbers of each of ``texts``, which have at least one token each.

    ``of_state`` computes a row from the last layer's output at the end of a text, and ``of_rows`` the result
    from all rows and the numbers of tokens. ``unread`` are the texts still without a row.
    """

    def __init__(
        self,
        request: Request,
        texts: Sequence[list[int]],
        width: int,
        of_state: Callable[[_F32], _F32],
        of_rows: Callable[[_F32, tuple[int, ...]], T],
    ) -> None:
        super().__init__(request)
        self._rows, self._of_state = np.empty((len(texts), width), np.float32), of_state
        self._of_rows = of_rows
        self._counts = tuple(map(len, texts))
        self.unread, self.longest = deque(texts), max(self._counts)

    def put_state(self, state: _F32) -> None:
        """Take the last layer's output at the end of the first unread text."""
        if not np.isfinite(np.linalg.norm(state)):
            raise EdgespecError("the model computes numbers that are not finite; check the bundle")
        self._rows[-len(self.unread)] = self._of_state(state)
        self.unread.popleft()

    def outcome(self, reason: FinishReason) -> T:
        """The result. Raises Closed if the model was closed before, and Cancelled if the time was up."""
        if reason == "closed":
            raise Closed("the model is closed; load it again")
        if reason != "stop":
            why = f"not finished within {self.request.timeout:g} s" if reason == "timeout" else "cancelled"
            raise Cancelled(f"{len(self.unread)} of {len(self._counts)} texts are unread: {why}")
        return self._of_rows(self._rows, self._counts)


def direction(gain: _F32, dimensions: int, state: _F32) -> _F32:
    """A vector of length 1, in which nothing but the gain is left of the final normalization."""
    vector = (state * gain)[:dimensions]
    return np.asarray(vector / max(np.linalg.norm(vector), np.finfo(np.float32).tiny), np.float32)


def probability(row: _F32, epsilon: float, state: _F32) -> _F32:
    """The probability whose logit is the product of ``row`` and the normalized state."""
    logit = row @ state / np.sqrt(np.mean(np.square(state)) + epsilon)
    return np.array([0.5 + 0.5 * np.tanh(logit / 2)], np.float32)


class TextReader:
    """Makes vectors or scores of texts with ``model``, whose predictions hold the last layer's output.

    ``sessions`` read the texts. They are made when they are needed.
    """

    def __init__(self, bundle: "Bundle", model: LoadedModel, sessions: list[Session]) -> None:
        self._bundle, self._model, self._sessions = bundle, model, sessions
        config = bundle.config
        self._late = isinstance(config, Transformer) and record(config).late is not None
        self._beginnings = KvStore(0)  # keeps none itself: the sessions share what they hold

    @cached_property
    def _gain(self) -> _F32:
        from edgespec_models.bundles.stored_weights import stored_vector  # answers do not need this

        return stored_vector(self._bundle, "final_norm.weight")

    @cached_property
    def _row(self) -> _F32:
        return self._bundle.rank_head() * self._gain

    @checked
    def rerank_ticket(
        self,
        query: Annotated[str, length(1)],
        texts: Annotated[Sequence[str], length(1)],
        *,
        instruction: str | None = None,
        timeout: float | None = None,
    ) -> TextsTicket[Scores]:
        """Make a request for scores, from any thread. RequestError for another model or a wrong option."""
        made, config = self._bundle.manifest.ranking, self._bundle.config
        if made is None or not isinstance(config, Transformer):
            raise RequestError(
                f"{self._bundle.manifest.name} scores no texts for a query; load a model for that, such as "
                "hf:Qwen/Qwen3-Reranker-0.6B, or export this one again, for the CPU with weights exact"
            )
        if instruction is not None and "{instruction}" not in made.template:
            raise RequestError("is not read by this model; leave it out", "instruction")
        tokenizer = self._bundle.tokenizer
        marks = tokenizer.marks_in(made.template)

        def spelled(text: str) -> str:
            return mark(text, tokenizer.special_spans(text, marks))

        fixed = {"query": spelled(query), "instruction": spelled(instruction or made.instruction)}

        def tokens(at: int, text: str) -> list[int]:
            parts = fixed | {"document": spelled(text)}
            whole, places = unmark(_PART.sub(lambda part: parts[part[1]], made.template))
            return self._fitting(f"texts[{at}]", tokenizer.encode_marked(whole, places, marks))

        ids = [tokens(at, text) for at, text in enumerate(texts)]
        score = partial(probability, self._row, config.norm_epsilon)
        request = Request.single({"timeout": timeout})
        return TextsTicket(request, ids, 1, score, lambda rows, counts: Scores(rows[:, 0], counts))

    @checked
    def ticket(
        self,
        texts: Texts,
        *,
        instruction: str | None = None,
        dimensions: int | None = None,
        timeout: float | None = None,
    ) -> TextsTicket[Embeddings]:
        """Make a request for vectors, from any thread. RequestError for another model or a wrong option."""
        name, made = self._bundle.manifest.name, self._bundle.manifest.embedding
        if made is None:
            raise RequestError(
                f"{name} makes no vectors of texts; load a model for that, such "
                "as hf:Qwen/Qwen3-Embedding-0.6B, or export this one again if it was made for it"
            )
        if not self._bundle.embeds:
            raise RequestError(f"{name} returns no hidden states; export it for the CPU with weights exact")
        width = len(self._gain)
        if dimensions is not None and not 1 <= dimensions <= width:
            raise RequestError(f"is {dimensions}; allowed: 1 to the model's own, {width}", "dimensions")
        texts = [texts] if isinstance(texts, str) else texts
        ids = [self._tokens(f"texts[{at}]", text, instruction, made.end) for at, text in enumerate(texts)]
        dimensions = dimensions or width
        of_state = partial(direction, self._gain, dimensions)
        return TextsTicket(Request.single({"timeout": timeout}), ids, dimensions, of_state, Embeddings)

    def turn(self, tickets: Sequence[TextsTicket[Any]], most: int) -> None:
        """Run one pass over at most ``most`` rows, of several texts if they fit. Short requests go first."""
        for ticket in tickets:
            if (reason := ticket.reason_to_end()) is not None:
                ticket.end(nothing(reason))
        running = [ticket for ticket in tickets if ticket.result is None]
        running.sort(key=lambda ticket: sum(map(len, ticket.unread)))
        try:
            pieces = list(self._pieces(running, most))
            predictions = self._model.predict_together([rows for _, rows in pieces]) if pieces else ()
            for (ticket, rows), predicted in zip(pieces, predictions, strict=True):
                assert predicted.hidden is not None
                if rows.session.length == len(ticket.unread[0]):
                    ticket.put_state(predicted.hidden[-1])
        except BaseException as error:  # noqa: BLE001 - raised where the vectors are waited for
            for ticket in running:
                ticket.finish(error)
            return
        if pieces and not any(ticket.unread for ticket in running):
            for session in self._sessions:
                session.rewind(0)
        for ticket in running:
            if not ticket.unread:
                ticket.end(nothing("stop"))

    def _pieces(
        self, running: Sequence[TextsTicket[Any]], most: int
    ) -> Iterator[tuple[TextsTicket[Any], Rows]]:
        """The pieces of texts that a pass reads, with their sessions. A partly read text keeps its own.

        A text, and all behind it, wait while another reads their common beginning, which is then shared.
        """
        free, begun = list(self._sessions), list[list[int]]()
        for ticket, text in ((owner, text) for owner in running for text in owner.unread):
            if not most or len(self._sessions) - len(free) == _AT_ONCE:
                return
            held = max((session.shared_prefix(text) for session in self._sessions), default=0)
            if any(shared_length(other, text) >= held + BLOCK for other in begun):
                return
            begun.append(text)
            if not free:
                free.append(self._model.session())
                self._sessions.append(free[0])
            session = max(free, key=lambda one: (one.shared_prefix(text), -one.length))
            free.remove(session)
            others = [other for other in self._sessions if other is not session]
            self._beginnings.fetch(session, text, others, on_disk=False)
            session.rewind(min(session.shared_prefix(text), len(text) - 1))
            session.reserve(len(text))
            piece = text[session.length : session.length + most]
            most -= len(piece)
            ends = session.length + len(piece) == len(text)
            yield ticket, Rows(session, piece, int(ends and self._late))  # for its state, not its logits

    def _tokens(self, field: str, text: _Text, instruction: str | None, end: int | None) -> list[int]:
        """The tokens that the model reads for a text, which errors name ``field``."""
        if not text:
            raise RequestError("is empty; leave it out", field)
        if isinstance(text, str):
            tokens = encode_text(
                self._bundle, text if instruction is None else _QUERY.format(instruction, text)
            )
        else:
            tokens, size = list(text), self._model.vocab_size
            if instruction is not None or not 0 <= min(tokens) <= max(tokens) < size:
                raise RequestError(
                    f"is a list of tokens; allowed: ids from 0 to {size - 1}, no instruction", field
                )
        if end is not None and tokens[-1:] != [end]:
            tokens.append(end)
        return self._fitting(field, tokens)

    def _fitting(self, field: str, tokens: list[int]) -> list[int]:
        if len(tokens) > self._model.longest:
            problem = too_long(len(tokens), self._model.longest)
            raise DoesNotFit(f"{problem}, the model's context; cut it", field)
        return tokens
