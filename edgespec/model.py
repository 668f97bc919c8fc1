"""A loaded model, as apps use it: from any thread, or from tasks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Self, Unpack

from edgespec.conversation import Conversation
from edgespec.decoding.draft import Clock, Drafter
from edgespec.loading.names import NGRAM
from edgespec.loading.sessions import Loaded, LoadOptions
from edgespec.requests.answer import Answer
from edgespec.requests.choices import answers, answers_async
from edgespec.requests.encoding import Asked, Messages, count_tokens, detokenize, tokenize
from edgespec.requests.generation import respond
from edgespec.requests.request import Request, RequestOptions, with_options
from edgespec.requests.results import Generation
from edgespec.requests.runner import PromptTokens, Runner
from edgespec.requests.stream import Stream
from edgespec.requests.worker import Worker
from edgespec_models.errors import RequestError
from edgespec_models.schema import checked, length
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.devices.placement import Placement

if TYPE_CHECKING:
    from edgespec.drafting.ahead import Beside

__all__ = ["Model"]


class Model:
    """A loaded target, with its drafter. A context manager.

    Requests may come from any thread and any task; a thread of the model's own answers them in turn, first
    come, first served. At most ``options.max_waiting`` wait: one more is refused (:class:`edgespec.Busy`).

    Args:
        loaded: the models, which it closes.
        options: how they were loaded, and limits.
        drafts: whether requests draft.
        clock: times everything.
        beside: lets the drafter go on while the target verifies; None where both run on one device.
        own: an app's own drafter.

    Attributes:
        target: the target's bundle.
        drafter: the drafter's bundle; None without a drafter model.
        cost_curve: the target's T(n), measured at this load or at an earlier one and checked at this.
        options: as given.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        options: LoadOptions,
        drafts: bool = True,
        clock: Clock = perf_counter,
        beside: "Beside | None" = None,
        own: Drafter | None = None,
    ) -> None:
        self.target, self.options = loaded.target.bundle, options
        self.drafter = None if loaded.drafter is None else loaded.drafter.bundle
        self.cost_curve: CostCurve = loaded.target.curve
        self._drafts = drafts
        self._runner = Runner(loaded, options=options, drafts=drafts, clock=clock, beside=beside, own=own)
        self._session, self._side = self._runner.session, self._runner.side
        self._worker = Worker(respond, options.max_waiting)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs and what waits, store what was learned, free both models, for good; from any thread.

        Requests that it ends have results as far as they came, with the reason ``closed``.
        """
        self._worker.close(self._runner.close)

    @checked
    def use_history(self, path: Path) -> None:
        """Draft from the history at ``path``, and learn into it, from the next request on.

        A file that cannot be used is reported in the log and in ``result.stats.history_problem``. A request
        that runs is waited for.
        """
        with self._worker.paused():
            self._runner.use_history(path)

    def forget(self) -> None:
        """Leave nothing of earlier requests in the KV caches; a request that runs is waited for.

        What a history has learned stays.
        """
        with self._worker.paused():
            self._runner.forget()

    @property
    def name(self) -> str:
        """The target's name."""
        return self.target.manifest.name

    @property
    def drafter_name(self) -> str | None:
        """The drafter's name; ``ngram`` for n-grams alone, None for plain decoding."""
        if self._runner.own is not None:
            return self._runner.own.name
        if self.drafter is not None:
            return self.drafter.manifest.name
        return NGRAM if self._drafts else None

    @property
    def placement(self) -> Placement:
        """Where the target runs, and why; opening a longer bucket may change the reason."""
        return self._runner.placement

    @property
    def drafter_placement(self) -> Placement | None:
        """The same of the drafter; None without a drafter model."""
        return self._runner.drafter_placement

    @property
    def drafter_step_s(self) -> float | None:
        """Seconds of a drafter step, as measured at load."""
        return None if self._side is None else self._side.curve.seconds(1)

    @property
    def row_exact(self) -> bool:
        """Whether the target's passes give the same bits for any number of rows (then greedy is exact)."""
        return self._session.row_exact

    @with_options
    def generate(self, prompt: str, **options: Unpack[RequestOptions]) -> Generation:
        """Continue ``prompt`` and return the whole result; see :class:`edgespec.RequestOptions`.

        An answer that would not fit the context behind the prompt ends where the context does.

        Raises:
            RequestError: an option out of range; a prompt that does not fit (:class:`edgespec.DoesNotFit`);
                too many requests wait (:class:`edgespec.Busy`); the model is closed
                (:class:`edgespec.Closed`).
        """
        return answers(options, lambda each: self.stream(prompt, **each).run())

    @with_options
    def chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> Generation:
        """Answer a conversation in the model's own chat template; like :meth:`generate` otherwise.

        Args:
            messages: mappings with ``role`` (system, developer, user, assistant, tool) and ``content``.
            options: see :class:`edgespec.RequestOptions`.
        """
        return answers(options, lambda each: self.stream_chat(messages, **each).run())

    @with_options
    async def generate_async(self, prompt: str, **options: Unpack[RequestOptions]) -> Generation:
        """Like :meth:`generate`, in an event loop; cancelling the task ends the answer within a pass."""
        return await answers_async(options, lambda each: self.stream(prompt, **each).run_async())

    @with_options
    async def chat_async(self, messages: Messages, **options: Unpack[RequestOptions]) -> Generation:
        """Like :meth:`chat`, in an event loop; cancelling the task ends the answer within a pass."""
        return await answers_async(options, lambda each: self.stream_chat(messages, **each).run_async())

    @with_options
    @checked
    def stream(self, prompt: Annotated[str, length(1)], **options: Unpack[RequestOptions]) -> Stream:
        """Like :meth:`generate`, piece by piece: iterate over text, then read ``.result``."""
        return self._stream(prompt, options)

    @with_options
    def stream_chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> Stream:
        """Like :meth:`chat`, piece by piece: iterate over text, then read ``.result``."""
        return self._stream(messages, options)

    @with_options
    @checked
    def conversation(self, system: str | None = None, **defaults: Unpack[RequestOptions]) -> Conversation:
        """Begin a conversation, perhaps with a system message; ``defaults`` are options of every answer.

        Raises:
            RequestError: an option out of range, or the model has no chat template.
        """
        self._check_chats()
        Request.one(defaults)
        messages = [] if system is None else [{"role": "system", "content": system}]
        return Conversation(self._start, messages, defaults)

    @with_options
    def count_tokens(self, said: str | Messages, **options: Unpack[RequestOptions]) -> int:
        """See :func:`edgespec.requests.encoding.count_tokens`."""
        return count_tokens(self.target, said, Request.of(options))

    def tokenize(self, text: str) -> list[int]:
        """See :func:`edgespec.requests.encoding.tokenize`."""
        return tokenize(self.target, text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """See :func:`edgespec.requests.encoding.detokenize`."""
        return detokenize(self.target, tokens)

    def _check_chats(self) -> None:
        if self.target.chat_template is None:
            raise RequestError(f"{self.name} has no chat template; use generate, or another model")

    def _stream(self, said: str | Messages, options: RequestOptions) -> Stream:
        """A request whose prompt is read now, so that what is wrong with it shows at once."""
        request = Request.one(options)
        prompt = self._runner.prompt(Asked.of(said, request), request)
        return self._queued(request, lambda: prompt)

    def _start(
        self, messages: Callable[[], Messages], options: RequestOptions, ended: Callable[[Generation], None]
    ) -> Stream:
        """A request whose messages are those there are when its turn comes."""
        request = Request.one(options)
        return self._queued(
            request, lambda: self._runner.prompt(Asked.of(messages(), request), request), ended
        )

    def _queued(
        self,
        request: Request,
        prompt: Callable[[], PromptTokens],
        ended: Callable[[Generation], None] = lambda result: None,
    ) -> Stream:
        runner, constraint = self._runner, self._runner.constraint(request)
        answer = Answer(request, lambda: runner.prepared(prompt(), request, constraint), ended)
        return Stream(answer, self._worker)
