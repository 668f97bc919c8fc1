"""The SDK: :func:`load` returns a :class:`Model`, which answers requests and conversations."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import partial, wraps
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar, Unpack

from edgespec.answering.results import Generation
from edgespec.asking.request import (
    Hole,
    Messages,
    PromptInput,
    PromptTokens,
    Request,
    RequestOptions,
    chat_prompt,
    ids_of,
    no_template,
    prompt_tokens,
    seen,
    text_prompt,
    thoughts_tags,
    with_options,
)
from edgespec.decoding.draft import Drafter
from edgespec.loading.footprint import room_for
from edgespec.loading.opening import NGRAM, Reference, open_model, open_pair, placed
from edgespec.loading.options import LoadOptions
from edgespec.running.runner import Runner
from edgespec.running.scheduler import Scheduler
from edgespec.running.stream import Answers, Stream
from edgespec.running.ticket import InProcess, Ticket
from edgespec_models.bundles.bundle import MANIFEST, Bundle
from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.progress import ProgressCallback, ignore_progress, show_progress
from edgespec_models.schema import checked, length, one_of, shown
from edgespec_models.storage import is_file
from edgespec_runtimes.devices import AUTO, Placement

if TYPE_CHECKING:  # models without a drafter model or a history import none of these
    from edgespec.history.adapting import Adapting
    from edgespec.history.changes import Adaptation, Learner
    from edgespec.running.conversation import Conversation
    from edgespec.running.embedding import (
        EmbeddingOptions,
        Embeddings,
        RerankOptions,
        Scores,
        Texts,
        TextsTicket,
    )
    from edgespec_models.bundles.static_graphs import ExportDevice

__all__ = ["LoadOptions"]

_CANNOT_LEARN = (
    "nothing here can be trained; load a history and a drafter by its name or checkpoint, such as "
    "smollm2-135m-instruct. Heads and bundles cannot learn"
)
Ready = Callable[[Bundle, Bundle | None], None]
Files = Sequence[tuple[str, str]]
DeviceName = Annotated[str, length(1, 200)]
P = ParamSpec("P")
T = TypeVar("T")


def _naming_options(function: Callable[P, T]) -> Callable[P, T]:
    """Have an error say where an option belongs that is given as an argument of ``function``."""
    names = [field.name for field in fields(LoadOptions)]

    @wraps(function)
    def loading(*args: P.args, **kwargs: P.kwargs) -> T:
        misplaced = [f"{name}={shown(kwargs[name])}" for name in names if name in kwargs]
        if misplaced:
            words = ", ".join(misplaced)
            raise RequestError(
                f"load() takes {words} as an option; write options=edgespec.LoadOptions({words})"
            )
        return function(*args, **kwargs)

    return loading


@_naming_options
@checked
def load(
    target: Reference,
    drafter: Reference | Drafter | None = "auto",
    *,
    options: LoadOptions | None = None,
    history: Reference | None = None,
    progress: ProgressCallback | None = show_progress,
    device: DeviceName = AUTO,
    drafter_device: DeviceName = AUTO,
    ready: Ready = lambda target, drafter: None,
    priority: Annotated[str, one_of(("normal", "low"))] = "normal",
) -> "Model":
    """Load a target and its drafter.

    Args:
        target: a bundle's directory, one that onnxruntime-genai's builder, mobius or Optimum wrote (run as it
            is), a GGUF file, a Hugging Face directory (``config.json`` and safetensors), a catalogue name, or
            ``hf:OWNER/REPO`` on the hub. Names are pulled, checkpoints exported, at first use.
        drafter: the same. ``"auto"`` takes the drafter that promises the highest speed (for a target of your
            own files only if it was pulled). ``"ngram"`` drafts from the text alone, and a :class:`Drafter`
            of your own drafts beside that. None is plain decoding.
        options: threads and limits.
        history: the name or file of a history, in which answers are learned and from which they are drafted
            (:class:`edgespec.history.History`). With None nothing is learned.
        progress: a function that is called during downloads, exports and measurements. The default shows a
            line on standard error if that is a terminal; None shows nothing.
        device: where the target runs: a name that :func:`edgespec.devices` lists, or ``npu``. A device that
            is missing, or does not fit the bundle, is an error. ``"auto"`` takes the device that the bundle
            was made for, or the CPU (:attr:`Model.placement` says why).
        drafter_device: where the drafter runs: the same names.
        ready: a function that gets both bundles before they take memory; the drafter's may be None. It may
            wait for room.
        priority: with ``"low"`` threads on the CPU give way to other programs.

    Returns:
        A :class:`Model`. Use it as a context manager, or close it.

    Raises:
        EdgespecError: a model cannot be found, made or loaded.
    """
    options, progress = options or LoadOptions(), progress or ignore_progress
    if history is None and (options.keep_prompts or options.adapt):
        raise RequestError("keep_prompts and adapt need a history; give load(..., history=NAME)")
    if history is not None:
        if drafter is None:
            raise RequestError(
                "plain decoding (drafter None) uses no history; give drafter='ngram' or a model"
            )
        from edgespec.history.manage import History

        named = History(history)
        named.check()  # before a model is pulled
        history = named.path
    opening = partial(open_model, weights=options.weights, progress=progress)
    made_for, why = [_made_for(device), _made_for(drafter_device)], ""  # before a model is pulled
    if device == AUTO and not _are_made(target):
        from edgespec.loading.gpu import choose_gpu

        takes, why = choose_gpu(target, drafter, options)
        made_for[0] = "cuda" if takes else None
    if isinstance(drafter, str | Path) and not (drafter in ("auto", NGRAM) or _are_made(target, drafter)):
        from edgespec.loading.first_use import check_drafter

        native = options.weights != "portable" and not any(made_for)
        check_drafter(drafter, target, progress, native=native)
    target_bundle = opening(
        target, "target", device=made_for[0], adapters=options.adapters, mmproj=options.mmproj
    )
    if options.chat_template is not None:
        target_bundle.use_template(options.chat_template)
    placement = placed(target_bundle, device)
    if why:
        placement = replace(placement, reason=f"{placement.reason}; {why}")
    if drafter == "auto":
        from edgespec.loading.drafters import choose

        makes_no_text = target_bundle.embeds or target_bundle.ranks
        drafter = None if makes_no_text else choose(target_bundle, target, in_bytes=options.kv == "8bit")
    drafter_bundle, drafter_placement, learner = None, None, None
    if isinstance(drafter, str | Path) and drafter != NGRAM:
        drafter_bundle = opening(drafter, "drafter", device=made_for[1], target=target)
        if history is not None:
            from edgespec.history.changes import learner_of
            from edgespec.history.store import Scope

            scope = Scope.of(target_bundle, options.namespace)
            learner = learner_of(Path(history), scope, drafter_bundle, drafter)
            if learner is not None:
                drafter_bundle = learner.changed(options.weights, made_for[1], progress) or drafter_bundle
        drafter_placement = placed(drafter_bundle, drafter_device)
    for bundle in filter(None, (target_bundle, drafter_bundle) if options.kv == "8bit" else ()):
        bundle.keep_bytes()
    if options.adapt:
        from edgespec.history.adapting import check_can_train

        check_can_train()
        if learner is None:
            raise RequestError(_CANNOT_LEARN)
    ready(target_bundle, drafter_bundle)
    cpu = room_for(target_bundle, drafter_bundle, options.cpu(low_priority=priority == "low"))
    loaded = open_pair(target_bundle, drafter_bundle, cpu, (placement, drafter_placement), progress=progress)
    own = drafter if isinstance(drafter, Drafter) else None
    model = Model(
        Runner(
            loaded,
            options,
            drafts=drafter is not None,
            own=own,
            clock=perf_counter,  # looked up in this module, where tests replace it
        ),
        learner,
    )
    if history is not None:
        model.use_history(history)
    return model


class Model(InProcess, AbstractContextManager["Model"]):
    """A loaded target with its drafter. It is a context manager.

    Requests may come from any thread and any task. A thread of the model's own answers them in order,
    ``options.parallel`` at once. At most ``options.max_waiting`` wait; one more raises
    :class:`edgespec.Busy`.

    Attributes:
        target: the target's bundle.
        drafter: the drafter's bundle, or None without a drafter model.
        cost_curve: the target's T(n), measured at this load, or earlier and checked at this load.
        options: the options of the load.
    """

    def __init__(self, runner: Runner, learner: "Learner | None" = None) -> None:
        self.target, self.options, self.cost_curve = runner.target, runner.options, runner.cost_curve
        self._advice = self.target.manifest.sampling
        self.drafter = None if runner.side is None else runner.side.bundle
        self._runner = runner
        self._queue = Scheduler(self.options.max_waiting, runner, runner.at_once)
        self._learner, self._idle = learner, None
        if learner is not None and self.options.adapt == "idle":
            from edgespec.history.adapting import WhenIdle

            self._idle = WhenIdle(self._adapt_if_due, lambda: self._queue.has_requests)

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests, store what was learned, and free both models. Any thread may call it.

        Requests that it ends have results as far as they came, with the reason ``closed``.
        """
        if self._idle is not None:
            self._idle.close()
        self._queue.close(self._runner.close)

    @checked
    def use_history(self, path: Path) -> None:
        """Draft from the history at ``path``, and learn into it, from the next request on.

        A file that cannot be used is reported in the log and in ``result.stats.history_problem``. This waits
        for running requests.
        """
        with self._queue.paused():
            self._runner.use_history(path)

    def adapt(
        self,
        *,
        progress: ProgressCallback = ignore_progress,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> "Adaptation":
        """Train the drafter on what the load's history has kept since it was last trained.

        It runs in a process of its own with the lowest priority, on one core, for minutes; answers go on. A
        change that is better on the latest tenth of the texts is merged at the next load of the history.
        Needs PyTorch (extra ``align``).

        Args:
            progress: called in a thread of its own.
            cancelled: ends the training when it returns True; the next one goes on from where it was.

        Raises:
            Cancelled: ``cancelled`` said so.
            EdgespecError: there is no history, or too little in it; or the training failed.
        """
        return self._adapting(progress).run(cancelled)

    def _adapting(self, progress: ProgressCallback = ignore_progress) -> "Adapting":
        from edgespec.history.adapting import Adapting, PassTimes, check_can_train

        check_can_train()
        if self._learner is None or self.drafter_step_s is None:
            raise RequestError(_CANNOT_LEARN)
        if self._runner.history is not None:
            self._runner.history.flush()
        rows = {n: self.cost_curve.seconds(n) for n in range(1, 10)}
        return Adapting(self._learner, PassTimes(rows, self.drafter_step_s), progress)

    def _adapt_if_due(self) -> "Adapting | None":
        return self._adapting() if self._learner is not None and self._learner.is_due() else None

    def forget(self, *, on_disk: bool = True) -> None:
        """Empty the KV caches and the table of the drafter's next tokens. This waits for running requests.

        With ``on_disk`` all blocks of this target and this drafter in the prompt cache are deleted too, even
        if other programs wrote them. A history keeps what it has learned.
        """
        with self._queue.paused():
            self._runner.forget(on_disk=on_disk)

    def pause(self) -> None:
        """Pause all requests until :meth:`resume`. Returns when no pass runs. Timeouts count on."""
        self._queue.hold()

    def resume(self) -> None:
        """Let answers go on after :meth:`pause`. Their text does not change."""
        self._queue.resume()

    def trim(self) -> int:
        """Free the KV caches that no running request uses, and return their bytes."""
        with self._queue.paused(between_passes=True):
            return self._runner.trim()

    @property
    def name(self) -> str:
        """The target's name."""
        return self.target.manifest.name

    @property
    def drafter_name(self) -> str | None:
        """The drafter's name: ``ngram`` for n-grams alone, None for plain decoding."""
        if self._runner.own is not None:
            return self._runner.own.name
        if self.drafter is not None:
            return self.drafter.manifest.name
        return NGRAM if self._runner.drafts else None

    @property
    def placement(self) -> Placement:
        """Where the target runs, and why. Opening a longer bucket may change the reason."""
        return self._runner.loaded.target.placement

    @property
    def drafter_placement(self) -> Placement | None:
        """Where the drafter runs, and why; None without a drafter model."""
        drafter = self._runner.loaded.drafter
        return None if drafter is None else drafter.placement

    @property
    def drafter_step_s(self) -> float | None:
        """Seconds of a step of the drafter, measured at load."""
        side = self._runner.side
        return None if side is None else side.curve.seconds(1)

    @property
    def thinks(self) -> bool:
        """Whether the model may think before it answers (the option ``thinking``)."""
        return thoughts_tags(self.target) is not None

    @property
    def reads_images(self) -> bool:
        """Whether messages may have pictures."""
        return self.target.reads_images

    @property
    def row_exact(self) -> bool:
        """Whether the target's rows have the same bits in any pass, so that greedy output is exact."""
        return self._runner.session.model.row_exact

    @with_options
    def generate(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Generation:
        """Continue ``prompt`` and return the whole result; see :class:`edgespec.RequestOptions`.

        Token ids are read as they are, without a BOS token before them. An answer that does not fit the
        context behind the prompt is shortened.

        Raises:
            RequestError: an option is out of range, the prompt does not fit (:class:`edgespec.DoesNotFit`),
                too many requests wait (:class:`edgespec.Busy`), or the model is closed
                (:class:`edgespec.Closed`).
        """
        return self.answers([text_prompt(prompt)], options).run()[0]

    @with_options
    def chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> Generation:
        """Answer a conversation in the model's chat template. Otherwise like :meth:`generate`.

        Args:
            messages: mappings with ``role`` (system, developer, user, assistant, tool) and ``content``.
            options: see :class:`edgespec.RequestOptions`.
        """
        return self.answers([chat_prompt(messages)], options).run()[0]

    @with_options
    async def generate_async(
        self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]
    ) -> Generation:
        """Like :meth:`generate`, in an event loop. Cancelling the task ends the answer within a pass."""
        return (await self.answers([text_prompt(prompt)], options).run_async())[0]

    @with_options
    async def chat_async(self, messages: Messages, **options: Unpack[RequestOptions]) -> Generation:
        """Like :meth:`chat`, in an event loop. Cancelling the task ends the answer within a pass."""
        return (await self.answers([chat_prompt(messages)], options).run_async())[0]

    @with_options
    def stream(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Stream:
        """Like :meth:`generate`, piece by piece: iterate over text, then read ``.result``."""
        return self._stream(text_prompt(prompt), options)

    @with_options
    def stream_chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> Stream:
        """Like :meth:`chat`, piece by piece: iterate over text, then read ``.result``."""
        return self._stream(chat_prompt(messages), options)

    @with_options
    def fill(
        self, prefix: str, suffix: str, *, extra: Files = (), **options: Unpack[RequestOptions]
    ) -> Generation:
        """Write the text between ``prefix`` and ``suffix``. Otherwise like :meth:`generate`.

        ``extra`` are names and texts of other files, the nearest last. Text that does not fit is cut at its
        far end. Models without tokens for fills raise RequestError.
        """
        return self.answers([Hole(prefix, suffix, extra)], options).run()[0]

    @with_options
    async def fill_async(
        self, prefix: str, suffix: str, *, extra: Files = (), **options: Unpack[RequestOptions]
    ) -> Generation:
        """Like :meth:`fill`, in an event loop. Cancelling the task ends the answer within a pass."""
        return (await self.answers([Hole(prefix, suffix, extra)], options).run_async())[0]

    @with_options
    def stream_fill(
        self, prefix: str, suffix: str, *, extra: Files = (), **options: Unpack[RequestOptions]
    ) -> Stream:
        """Like :meth:`fill`, piece by piece: iterate over text, then read ``.result``."""
        return self._stream(Hole(prefix, suffix, extra), options)

    @with_options
    def conversation(self, system: str | None = None, **defaults: Unpack[RequestOptions]) -> "Conversation":
        """Begin a conversation, with a system message or without. ``defaults`` are options of every answer.

        Raises:
            RequestError: an option is out of range, or the model has no chat template.
        """
        if self.target.chat_template is None:
            raise RequestError(no_template(self.name))
        Request.single(defaults, self._advice)
        from edgespec.running.conversation import Conversation

        return Conversation(self._start, system, **defaults)

    def embed(self, texts: "Texts", **options: "Unpack[EmbeddingOptions]") -> "Embeddings":
        """Make vectors of texts, with a model made for it, such as Qwen3-Embedding (Zhang et al. 2025).

        Vectors are float32 ``(texts, dimensions)`` and have the length 1. Texts share passes.

        Raises:
            RequestError: the model was not made for it, an option is out of range, or a reason of
                :meth:`generate`.
            Cancelled: the time was up.
        """
        ticket = self._runner.text_reader.ticket(texts, **options)
        return ticket.outcome(Stream(ticket, self._queue).run().finish_reason)

    async def embed_async(self, texts: "Texts", **options: "Unpack[EmbeddingOptions]") -> "Embeddings":
        """Like :meth:`embed`, in an event loop. Cancelling the task ends it within a pass."""
        return await self._read_texts(lambda: self._runner.text_reader.ticket(texts, **options))

    def rerank(self, query: str, texts: Sequence[str], **options: "Unpack[RerankOptions]") -> "Scores":
        """Score texts for a query, with a model made for it, such as Qwen3-Reranker (Zhang et al. 2025).

        Texts share passes, and the tokens that they begin with, such as the query's, are read once.

        Raises:
            RequestError: the model was not made for it, an option is out of range, or a reason of
                :meth:`generate`.
            Cancelled: the time was up.
        """
        ticket = self._runner.text_reader.rerank_ticket(query, texts, **options)
        return ticket.outcome(Stream(ticket, self._queue).run().finish_reason)

    async def rerank_async(
        self, query: str, texts: Sequence[str], **options: "Unpack[RerankOptions]"
    ) -> "Scores":
        """Like :meth:`rerank`, in an event loop. Cancelling the task ends it within a pass."""
        return await self._read_texts(lambda: self._runner.text_reader.rerank_ticket(query, texts, **options))

    @with_options
    def count_tokens(self, prompt: PromptInput, **options: Unpack[RequestOptions]) -> int:
        """The number of tokens that the model reads for a prompt or a conversation."""
        request = Request.of(options, self._advice)
        prompt = seen(self.target, prompt, request, self.options.image_tokens)
        return len(prompt_tokens(self.target, prompt, request))

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """The token ids of ``text``, without a BOS token. Only with ``special`` are control tokens read.

        Raises:
            RequestError: ``text`` is no text, or has lone surrogates.
        """
        if not isinstance(text, str):
            raise RequestError(f"text is {shown(text)}; allowed: a text")
        return self.target.tokenizer.encode(text, special=special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``. Control tokens are spelled out, and invalid UTF-8 becomes U+FFFD.

        Raises:
            RequestError: the model lacks an id.
        """
        tokenizer = self.target.tokenizer
        try:
            return tokenizer.decode(tokens, skip_special=False)
        except (TokenizerError, TypeError) as error:
            most = tokenizer.vocab_size - 1
            raise RequestError(f"tokens is {shown(tokens)}; allowed: token ids from 0 to {most}") from error

    async def _read_texts(self, make: Callable[[], "TextsTicket[T]"]) -> T:
        from asyncio import to_thread

        ticket = await to_thread(make)
        return ticket.outcome((await Stream(ticket, self._queue).run_async()).finish_reason)

    def answers(self, prompts: Sequence[PromptInput | Hole], options: RequestOptions) -> Answers:
        """Answers to several prompts, which are read now, so that their errors are raised at once."""
        request = Request.of(options, self._advice)
        return Answers([self._streams(prompt, request) for prompt in prompts], request.n)

    def _streams(self, prompt: PromptInput | Hole, request: Request) -> list[Stream]:
        """A stream for each answer to decode."""
        ready = self._runner.prompt(prompt, request)
        is_chat = not isinstance(prompt, Hole | str) and ids_of(prompt) is None
        return [self._queued(choice, lambda: ready, is_chat=is_chat) for choice in request.choices]

    def _stream(self, prompt: PromptInput | Hole, options: RequestOptions) -> Stream:
        return self._streams(prompt, Request.single(options, self._advice))[0]

    def _start(
        self,
        messages: Callable[[], Messages],
        options: RequestOptions,
        ended: Callable[[Generation], None],
        conversation: "Conversation",
    ) -> Stream:
        """Start a request with the messages that are there at its turn. ``ended`` gets its result."""
        request = Request.single(options, self._advice)
        return self._queued(request, lambda: self._runner.prompt(messages(), request), ended, conversation)

    def _queued(
        self,
        request: Request,
        prompt: Callable[[], PromptTokens],
        ended: Callable[[Generation], None] = lambda result: None,
        conversation: object | None = None,
        *,
        is_chat: bool = True,
    ) -> Stream:
        constraint = self._runner.constraint(request, is_chat=is_chat)
        ticket = Ticket(request, prompt, constraint, ended=ended, conversation=conversation)
        return Stream(ticket, self._queue)


def _are_made(*references: Reference) -> bool:
    """Whether all are bundles of edgespec."""
    return all(is_file(Path(reference) / MANIFEST) for reference in references)


def _made_for(device: str) -> "ExportDevice | None":
    """The export device of a checkpoint that is to run on ``device``."""
    if device == AUTO:
        return None
    from edgespec_runtimes.discovery import export_for

    return export_for(device)
