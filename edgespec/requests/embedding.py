"""Vectors of texts, by models that were trained for it. Requests wait in the model's queue."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from edgespec.requests.request import Request, encode_text
from edgespec.requests.results import FinishReason, nothing
from edgespec.requests.ticket import Ticket
from edgespec_models.bundles.config import ModelConfig
from edgespec_models.errors import Cancelled, Closed, DoesNotFit, EdgespecError, RequestError, too_long
from edgespec_models.schema import checked, length
from edgespec_runtimes.session import LoadedModel, Rows, Session

if TYPE_CHECKING:
    from edgespec_models.bundles.bundle import Bundle

_F32 = npt.NDArray[np.float32]
_Text = str | Sequence[int]
Texts = str | Annotated[Sequence[_Text], length(1)]
"""One or several texts, each as a text or as its tokens."""
_QUERY: Final = "Instruct: {}\nQuery:{}"  # from the model card of Qwen3-Embedding
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


class EmbeddingTicket(Ticket):
    """A request for vectors of ``texts``, each at least one token.

    ``unread`` are the texts still without a vector.
    """

    def __init__(self, request: Request, texts: Sequence[list[int]], dimensions: int) -> None:
        super().__init__(request)
        self._vectors, self._counts = np.empty((len(texts), dimensions), np.float32), tuple(map(len, texts))
        self.unread, self.longest = deque(texts), max(self._counts)

    def put_vector(self, stream: _F32) -> None:
        """Take the last layer's output at the end of the first unread text, and multiply it by the last gain.

        In a vector of length 1 nothing else is left of the final normalization.
        """
        vector = stream[: self._vectors.shape[1]]
        norm = np.linalg.norm(vector)
        if not np.isfinite(norm):
            raise EdgespecError("the model computes numbers that are not finite; check the bundle")
        self._vectors[-len(self.unread)] = vector / max(norm, np.finfo(np.float32).tiny)
        self.unread.popleft()

    def embeddings(self, reason: FinishReason) -> Embeddings:
        """All vectors. Raises Closed if the model was closed before, and Cancelled if the time was up."""
        if reason == "closed":
            raise Closed("the model is closed; load it again")
        if reason != "stop":
            why = f"not finished within {self.request.timeout:g} s" if reason == "timeout" else "cancelled"
            raise Cancelled(f"{len(self.unread)} of {len(self._counts)} texts have no vector: {why}")
        return Embeddings(self._vectors, self._counts)


class Embedder:
    """Makes vectors with ``model``, whose predictions hold the last layer's output.

    ``readers`` are the sessions that read texts. They are made when they are needed.

    Raises:
        RequestError: the model was not trained for it, or does not run on edgespec's kernels.
    """

    def __init__(self, bundle: "Bundle", model: LoadedModel, readers: list[Session]) -> None:
        name, made = bundle.manifest.name, bundle.manifest.embedding
        if made is None:
            raise RequestError(
                f"{name} makes no vectors of texts; load a model for that, such "
                "as hf:Qwen/Qwen3-Embedding-0.6B, or export this one again if it was made for it"
            )
        if not bundle.embeds:
            raise RequestError(f"{name} returns no hidden states; export it for the CPU with weights exact")
        from edgespec_models.bundles.stored_weights import stored_vector  # answers do not need this

        self._bundle, self._model, self._readers, self._end = bundle, model, readers, made.end
        self._late = isinstance(bundle.config, ModelConfig) and bool(bundle.config.late_streams)
        self._gain = stored_vector(bundle, "final_norm.weight")

    @checked
    def ticket(
        self,
        texts: Texts,
        *,
        instruction: str | None = None,
        dimensions: int | None = None,
        timeout: float | None = None,
    ) -> EmbeddingTicket:
        """Make a request, from any thread. RequestError for an option out of range."""
        width = len(self._gain)
        if dimensions is not None and not 1 <= dimensions <= width:
            raise RequestError(f"dimensions is {dimensions}; allowed: 1 to the model's own, {width}")
        texts = [texts] if isinstance(texts, str) else texts
        ids = [self._tokens(at, text, instruction) for at, text in enumerate(texts)]
        return EmbeddingTicket(Request.single({"timeout": timeout}), ids, dimensions or width)

    def own(self, tickets: Sequence[Ticket]) -> list[EmbeddingTicket]:
        """The requests for vectors among ``tickets``."""
        return [ticket for ticket in tickets if isinstance(ticket, EmbeddingTicket)]

    def turn(self, tickets: Sequence[EmbeddingTicket], most: int) -> None:
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
                    ticket.put_vector(predicted.hidden[-1] * self._gain)
                    rows.session.rewind(0)
        except BaseException as error:  # noqa: BLE001 - raised where the vectors are waited for
            for ticket in running:
                ticket.finish(error)
            return
        for ticket in running:
            if not ticket.unread:
                ticket.end(nothing("stop"))

    def _pieces(
        self, running: Sequence[EmbeddingTicket], most: int
    ) -> Iterator[tuple[EmbeddingTicket, Rows]]:
        """The pieces of texts that a pass reads, and their readers. A partly read text keeps its reader."""
        free = list(self._readers)
        for ticket, text in ((owner, text) for owner in running for text in owner.unread):
            if not most or len(self._readers) - len(free) == _AT_ONCE:
                return
            if not free:
                free.append(self._model.session())
                self._readers.append(free[0])
            reader = max(free, key=lambda session: (session.shared_prefix(text), -session.length))
            free.remove(reader)
            reader.rewind(min(reader.shared_prefix(text), len(text) - 1))
            reader.reserve(len(text))
            piece = text[reader.length : reader.length + most]
            most -= len(piece)
            ends = reader.length + len(piece) == len(text)
            yield ticket, Rows(reader, piece, int(ends and self._late))  # for its state, not its logits

    def _tokens(self, at: int, text: _Text, instruction: str | None) -> list[int]:
        """The tokens that the model reads for a text."""
        if not text:
            raise RequestError(f"text {at} is empty; leave it out")
        if isinstance(text, str):
            tokens = encode_text(
                self._bundle, text if instruction is None else _QUERY.format(instruction, text)
            )
        else:
            tokens, size = list(text), self._model.vocab_size
            if instruction is not None or not 0 <= min(tokens) <= max(tokens) < size:
                raise RequestError(
                    f"text {at} is a list of tokens; allowed: ids from 0 to {size - 1}, no instruction"
                )
        if self._end is not None and tokens[-1:] != [self._end]:
            tokens.append(self._end)
        if len(tokens) > self._model.longest:
            raise DoesNotFit(
                f"{too_long(f'text {at}', len(tokens), self._model.longest)}, the model's context; cut it"
            )
        return tokens
