"""Texts as vectors, by models that were trained for it: in the model's queue, in passes of their own."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from edgespec.requests.request import Request, encode_text
from edgespec.requests.results import FinishReason, nothing
from edgespec.requests.worker import Answer
from edgespec_models.bundles.layers import graph_name
from edgespec_models.errors import Cancelled, Closed, DoesNotFit, EdgespecError, RequestError, too_long
from edgespec_models.schema import checked, length
from edgespec_runtimes.session import LoadedModel, Rows, Session

if TYPE_CHECKING:
    from edgespec_models.bundles.bundle import Bundle

_F32 = npt.NDArray[np.float32]
_Text = str | Sequence[int]
Texts = str | Annotated[Sequence[_Text], length(1)]
"""One or several, each as a text or as its tokens."""
_QUERY: Final = "Instruct: {}\nQuery:{}"  # as the model card of Qwen3-Embedding has it
_AT_ONCE: Final = 4  # texts of a pass, each of which takes a KV cache; most fill it by then


class EmbeddingOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`edgespec.Model.embed`.

    Attributes:
        instruction: of queries: what they are to find, in a sentence; documents have none.
        dimensions: cuts vectors (Kusupati et al. 2022, "Matryoshka Representation Learning").
        timeout: seconds, waiting included.
    """

    instruction: str | None
    dimensions: int | None
    timeout: float | None


class Embeddings(NamedTuple):
    """What :meth:`edgespec.Model.embed` returns.

    Attributes:
        vectors: of length 1, float32 ``(texts, dimensions)``.
        tokens: how many the model read of each text.
    """

    vectors: _F32
    tokens: tuple[int, ...]


class EmbeddingRequest(Answer):
    """A request for the vectors of ``texts``, each at least one token; ``unread`` are those without one."""

    def __init__(self, request: Request, texts: Sequence[list[int]], dimensions: int) -> None:
        super().__init__(request, lambda: None)
        self._vectors, self._counts = np.empty((len(texts), dimensions), np.float32), tuple(map(len, texts))
        self.unread, self.longest = deque(texts), max(self._counts)

    def put_vector(self, stream: _F32) -> None:
        """Take what leaves the last layer at the end of the first unread text, times the last gain.

        Of the final normalization nothing else is left in a vector of length 1.
        """
        vector = stream[: self._vectors.shape[1]]
        norm = np.linalg.norm(vector)
        if not np.isfinite(norm):
            raise EdgespecError("the model computes numbers that are not finite; check the bundle")
        self._vectors[-len(self.unread)] = vector / max(norm, np.finfo(np.float32).tiny)
        self.unread.popleft()

    def found(self, reason: FinishReason) -> Embeddings:
        """All vectors; raises Closed where the model was closed before, Cancelled where time was up."""
        if reason == "closed":
            raise Closed("the model is closed; load it again")
        if reason != "stop":
            why = f"not done within {self.request.timeout:g} s" if reason == "timeout" else "cancelled"
            raise Cancelled(f"{len(self.unread)} of {len(self._counts)} texts have no vector: {why}")
        return Embeddings(self._vectors, self._counts)


class Embedder:
    """Makes vectors with ``model``, whose predictions have what leaves the last layer.

    Texts are read by ``readers``, sessions of it, made when they are needed.

    Raises:
        RequestError: the model was not made for it, or does not run on edgespec's kernels.
    """

    def __init__(self, bundle: "Bundle", model: LoadedModel, readers: list[Session]) -> None:
        name, made = bundle.manifest.name, bundle.manifest.embedding
        if made is None:
            raise RequestError(
                f"{name} does not say how a text becomes a vector, as models made for it do: by its last "
                "token; load one of those, such as hf:Qwen/Qwen3-Embedding-0.6B, or export it again if it is "
                "one"
            )
        if not bundle.embeds:
            raise RequestError(f"{name} gives out no hidden states; export it for the CPU, weights exact")
        from edgespec_models.bundles.stored_weights import StoredWeights  # answers do not need it

        self._bundle, self._model, self._readers, self._end = bundle, model, readers, made.end
        self._gain = StoredWeights(bundle).vector(f"{graph_name('final_norm')}.weight")

    @checked
    def request(
        self,
        texts: Texts,
        *,
        instruction: str | None = None,
        dimensions: int | None = None,
        timeout: float | None = None,
    ) -> EmbeddingRequest:
        """See :class:`EmbeddingOptions`; from any thread. RequestError for what is out of range."""
        width = len(self._gain)
        if dimensions is not None and not 1 <= dimensions <= width:
            raise RequestError(f"dimensions is {dimensions}; allowed: 1 to the model's own, {width}")
        given = [texts] if isinstance(texts, str) else texts
        ids = [self._tokens(at, text, instruction) for at, text in enumerate(given)]
        return EmbeddingRequest(Request.one({"timeout": timeout}), ids, dimensions or width)

    def own(self, answers: Sequence[Answer]) -> list[EmbeddingRequest]:
        """Those of the requests that are for vectors."""
        return [each for each in answers if isinstance(each, EmbeddingRequest)]

    def turn(self, requests: Sequence[EmbeddingRequest], rows: int) -> None:
        """One pass over at most so many rows, of several texts if they fit; short requests go first."""
        for one in requests:
            if (reason := one.why_end()) is not None:
                one.end(nothing(reason))
        running = [one for one in requests if one.result is None]
        running.sort(key=lambda one: sum(map(len, one.unread)))
        try:
            asked = list(self._pieces(running, rows))
            said = self._model.predict_together([each for _, each in asked]) if asked else ()
            for (one, each), predictions in zip(asked, said, strict=True):
                assert predictions.hidden is not None
                if each.session.length == len(one.unread[0]):
                    one.put_vector(predictions.hidden[-1] * self._gain)
                    each.session.rewind(0)
        except BaseException as error:  # noqa: BLE001 - raised where the vectors are waited for
            for one in running:
                one.finish(error)
            return
        for one in running:
            if not one.unread:
                one.end(nothing("stop"))

    def _pieces(
        self, running: Sequence[EmbeddingRequest], rows: int
    ) -> Iterator[tuple[EmbeddingRequest, Rows]]:
        """What a pass reads; of the last text perhaps a part; its reader is found again by what it holds."""
        free = list(self._readers)
        for one, text in ((each, text) for each in running for text in each.unread):
            if not rows or len(self._readers) - len(free) == _AT_ONCE:
                return
            if not free:
                free.append(self._model.session())
                self._readers.append(free[0])
            reader = max(free, key=lambda each: (each.shared_prefix(text), -each.length))
            free.remove(reader)
            reader.rewind(min(reader.shared_prefix(text), len(text) - 1))
            reader.reserve(len(text))
            piece = text[reader.length : reader.length + rows]
            rows -= len(piece)
            yield one, Rows(reader, piece, 0)

    def _tokens(self, at: int, text: _Text, instruction: str | None) -> list[int]:
        """What the model reads of a text."""
        if not text:
            raise RequestError(f"text {at} is empty; leave it out")
        if isinstance(text, str):
            said = text if instruction is None else _QUERY.format(instruction, text)
            tokens = encode_text(self._bundle, said)
        else:
            tokens, size = list(text), self._model.vocab_size
            if instruction is not None or not 0 <= min(tokens) <= max(tokens) < size:
                raise RequestError(f"text {at} is tokens; allowed: 0 to {size - 1}, and no instruction")
        if self._end is not None and tokens[-1:] != [self._end]:
            tokens.append(self._end)
        if len(tokens) > self._model.longest:
            raise DoesNotFit(
                f"{too_long(f'text {at}', len(tokens), self._model.longest)}, the model's context; cut it"
            )
        return tokens
