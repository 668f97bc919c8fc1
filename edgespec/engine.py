"""The SDK: load a target and a drafter, generate, stream, chat."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Self, Unpack

from edgespec.drafting.draft import Clock, Extending
from edgespec.drafting.guard import Guard
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.policy import Policy
from edgespec.encoding import Messages, encode_chat, encode_text
from edgespec.generation import PreparedRequest, TextStreamer
from edgespec.loading import NGRAM, Reference, open_model, recommended_drafter
from edgespec.pricing import Pricing
from edgespec.request import Request, RequestOptions
from edgespec.results import Generation, Remarks
from edgespec.sessions import Loaded, open_pair
from edgespec_models.bundle import WEIGHTS, Bundle
from edgespec_models.errors import RequestError
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_models.schema import check_fields, checked, form, length, one_of, within
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.cpu import CpuOptions, Instructions, Threads
from edgespec_runtimes.discovery import AUTO
from edgespec_runtimes.placement import Placement, export_for, place, run_at_once

if TYPE_CHECKING:  # a model without a drafter model or a history imports nothing of them
    from edgespec.drafting.ahead import Beside
    from edgespec.drafting.side import DrafterSide, Part
    from edgespec.history.use import HistoryUse

__all__ = ["LoadOptions", "Model", "TextStreamer", "load"]

DeviceName = Annotated[str, length(1, 200)]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How models are loaded.

    Attributes:
        threads: threads of a pass, at most twice the logical cores; 0 takes the physical cores.
        spinning: idle threads wait busily within a pass (see :class:`edgespec_runtimes.cpu.CpuOptions`).
        max_draft: the longest draft; what is worth drafting is decided round by round.
        weights: policy of exports made at first use, ``exact`` or ``portable``
            (:class:`edgespec_export.export.ExportOptions`); None is the default.
        namespace: keeps what a history learns apart, by app, task or language.
        training_share: share of the time, 0 to 1, that training a drafter on what the target writes may take,
            between requests, in a thread of its own; 0 trains nothing. It needs a history.
        huge_pages: weights are copied into huge pages at load (Linux): passes are a tenth faster. Without,
            models open at once, and processes share their weights.
        instructions: what edgespec's kernels use, of :data:`edgespec_runtimes.kernels.INSTRUCTIONS`; empty
            takes the best that the processor has. All give the same bits.
    """

    threads: Threads = 0
    spinning: bool = True
    max_draft: Annotated[int, within(1, 64)] = 8
    weights: Annotated[str, one_of(WEIGHTS)] | None = None
    namespace: Annotated[str, form(r"[^\ud800-\udfff]{0,200}", "of at most 200 characters")] = ""
    training_share: Annotated[float, within(0, 1)] = 0.0
    huge_pages: bool = True
    instructions: Instructions = ""

    def __post_init__(self) -> None:
        check_fields(self)


@checked
def load(
    target: Reference,
    drafter: Reference | None = "auto",
    *,
    options: LoadOptions | None = None,
    history: Reference | None = None,
    progress: ProgressCallback = ignore_progress,
    device: DeviceName = AUTO,
    drafter_device: DeviceName = AUTO,
) -> "Model":
    """Load a target and its drafter.

    Args:
        target: a bundle's directory, one that onnxruntime-genai's builder, mobius or Optimum wrote (run as it
            is), a GGUF file, a Hugging Face directory (``config.json`` and safetensors), a catalogue name, or
            ``hf:OWNER/REPO`` on the hub. Names are pulled, checkpoints exported, at first use.
        drafter: the same; ``"auto"`` takes the catalogue's recommendation, ``"ngram"`` drafts from the text
            alone, None is plain decoding.
        options: threads and limits.
        history: a name or a file: what answers teach is kept there and drafted from, across requests and
            restarts (:class:`edgespec.history.History`). With None nothing is written anywhere.
        progress: told of downloads and exports.
        device: where the target runs: a name that :func:`edgespec.devices` lists, or ``npu``; what cannot be
            had, or does not fit the bundle, is an error. ``"auto"`` takes the device the bundle was made for,
            or the CPU, and says why (:attr:`Model.placement`).
        drafter_device: the same for the drafter.

    Returns:
        A :class:`Model`, to be used as a context manager or closed.

    Raises:
        EdgespecError: what kept a model from being found, made or loaded.
    """
    options = options or LoadOptions()
    if history is not None and drafter is None:
        raise RequestError("plain decoding (drafter None) uses no history; give drafter='ngram' or a model")
    if history is not None:
        from edgespec.history.manage import History

        named = History(history)
        named.check()  # before a model is pulled
        history = named.path
    made_for = export_for(device), export_for(drafter_device)
    target_bundle = open_model(
        target, "target", weights=options.weights, device=made_for[0], progress=progress
    )
    placement = place(target_bundle, device)
    if drafter == "auto":
        drafter = recommended_drafter(target_bundle)
    drafter_bundle, drafter_placement = None, None
    if drafter is not None and drafter != NGRAM:
        drafter_bundle = open_model(
            drafter, "drafter", weights=options.weights, device=made_for[1], progress=progress
        )
        drafter_placement = place(drafter_bundle, drafter_device)
    cpu = CpuOptions(
        threads=options.threads,
        spinning=options.spinning,
        huge_pages=options.huge_pages,
        instructions=options.instructions,
    )
    loaded = open_pair(target_bundle, drafter_bundle, cpu, (placement, drafter_placement))
    model = Model(
        loaded, options=options, drafts=drafter is not None, clock=perf_counter, beside=_beside(loaded)
    )
    if history is not None:
        model.use_history(history)
    return model


def _beside(loaded: Loaded) -> "Beside | None":
    """Drafting ahead, where target and drafter compute side by side."""
    target, aside = loaded.target, loaded.drafter
    if aside is None or not run_at_once(target.placed, aside.placed):
        return None
    from edgespec.drafting.ahead import Beside

    return Beside(aside.curve)


class Model:
    """A loaded target, with its drafter. A context manager; one request at a time.

    A new request ends the one before, whose stream then stops. From several threads, begin one when the
    other has ended: a request while another thread reads a stream is a :class:`RequestError`.

    Args:
        loaded: the models, which it closes.
        options: how they were loaded, and limits.
        drafts: whether requests draft.
        clock: times everything.
        beside: lets the drafter go on while the target verifies; None where both run on one device.

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
    ) -> None:
        self.target, self.options = loaded.target.bundle, options
        self.drafter = None if loaded.drafter is None else loaded.drafter.bundle
        self.cost_curve: CostCurve = loaded.target.curve
        self._loaded, self._session = loaded, loaded.target.session
        self._drafts, self._clock = drafts, clock
        self._pricing = Pricing(self.cost_curve)
        self._history: HistoryUse | None = None
        self._side: DrafterSide | None = None
        if loaded.drafter is not None:
            from edgespec.drafting import side

            self._side = side.DrafterSide(
                self.target,
                loaded.drafter,
                same_vocabulary=loaded.same_vocabulary,
                pricing=self._pricing,
                beside=beside,
                clock=clock,
            )
        self._guard = Guard(self._pricing)
        self._history_guard = Guard(self._pricing, "proposals from the history brought tokens")
        self._stream: TextStreamer | None = None  # the last request's
        self._starting = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End a request that is not over, store what was learned, free both models, for good.

        Raises:
            RequestError: another thread reads an answer just now; nothing is closed then.
        """
        self._end_request()
        try:
            if self._history is not None:
                self._history.close()
        finally:  # a second Ctrl-C, perhaps
            if self._side is not None:
                self._side.session.close()
            self._session.close()

    @checked
    def use_history(self, path: Path) -> None:
        """Draft from the history at ``path``, and learn into it, from the next request on.

        A file that cannot be used is reported in the log and in ``result.stats.history_problem``.
        """
        from edgespec.history.corrections import DrafterKey
        from edgespec.history.store import Scope
        from edgespec.history.use import open_use

        self._end_request()
        if self._history is not None:
            self._history.close()
        scope = Scope(self.name, self.target.tokenizer.digest, self.options.namespace)
        self._history = use = open_use(path, scope, self.target.tokenizer)
        if self._side is not None and self.drafter is not None:
            side, share = self._side, self.options.training_share
            key = DrafterKey(self.drafter.digest, self.drafter.manifest.name)
            side.experience = use.experience(key.digest)
            trains = share > 0.0 and side.trainable
            side.teach(use.trainer(key, side.tuning, share=share) if trains else None)
            if share > 0.0 and not trains:
                use.warn(
                    "the drafter is not trained: that takes a bundle for the CPU with inputs for its gains; "
                    "export it again with this version of edgespec"
                )

    @property
    def name(self) -> str:
        """The target's name."""
        return self.target.manifest.name

    @property
    def drafter_name(self) -> str | None:
        """The drafter's name; ``ngram`` for n-grams alone, None for plain decoding."""
        if self.drafter is not None:
            return self.drafter.manifest.name
        return NGRAM if self._drafts else None

    @property
    def placement(self) -> Placement:
        """Where the target runs, and why; opening a longer bucket may change the reason."""
        return self._loaded.target.placed.opened(self._session)

    @property
    def drafter_placement(self) -> Placement | None:
        """The same of the drafter; None without a drafter model."""
        running = self._loaded.drafter
        return None if running is None else running.placed.opened(running.session)

    @property
    def _placements(self) -> str:
        """Where the models run and why, in a line."""
        aside = self.drafter_placement
        line = f"target on {self.placement}"
        return line if aside is None else f"{line}; drafter on {aside}"

    @property
    def drafter_step_s(self) -> float | None:
        """Seconds of a drafter step, as measured at load."""
        return None if self._side is None else self._side.curve.seconds(1)

    @property
    def row_exact(self) -> bool:
        """Whether the target's passes give the same bits for any number of rows (then greedy is exact)."""
        return self._session.row_exact

    def generate(self, prompt: str, **options: Unpack[RequestOptions]) -> Generation:
        """Continue ``prompt`` and return the whole result; see :class:`edgespec.RequestOptions`.

        Raises:
            RequestError: an option out of range, or a prompt that does not fit the context.
        """
        return self.stream(prompt, **options).run()

    def chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> Generation:
        """Answer a conversation in the model's own chat template; like :meth:`generate` otherwise.

        Args:
            messages: mappings with ``role`` (system, user, assistant) and ``content``.
            options: see :class:`edgespec.RequestOptions`.
        """
        return self.stream_chat(messages, **options).run()

    @checked
    def stream(self, prompt: Annotated[str, length(1)], **options: Unpack[RequestOptions]) -> TextStreamer:
        """Like :meth:`generate`, piece by piece: iterate over text, then read ``.result``."""
        return self._start(lambda bundle: encode_text(bundle, prompt), Request.of(options))

    def stream_chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> TextStreamer:
        """Like :meth:`chat`, piece by piece: iterate over text, then read ``.result``."""
        if self.target.chat_template is None:
            raise RequestError(f"{self.name} has no chat template; use generate, or another model")
        return self._start(lambda bundle: encode_chat(bundle, messages), Request.of(options))

    def _end_request(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._side is not None:
            self._side.stop()

    def _start(self, encode: Callable[[Bundle], list[int]], request: Request) -> TextStreamer:
        """A new request, which ends the one before: both sessions hold one text.

        ``encode`` gives the prompt in a bundle's own tokens and chat template.
        """
        tokens = encode(self.target)
        if not tokens:
            raise RequestError("the prompt is empty; give at least one character")
        with self._starting:
            self._end_request()
            self._stream = TextStreamer(self._prepared(tokens, encode, request))
        return self._stream

    def _prepared(
        self, tokens: list[int], encode: Callable[[Bundle], list[int]], request: Request
    ) -> PreparedRequest:
        self._session.reserve(len(tokens) + request.max_new_tokens)
        side = self._side if request.speculate else None
        of_drafter = [] if side is None else side.prompt(tokens, encode)
        return PreparedRequest(
            session=self._session,
            tokenizer=self.target.tokenizer,
            tokens=tokens,
            request=request,
            eos=frozenset(self.target.manifest.special_tokens.eos) if request.stop_at_eos else frozenset(),
            max_draft=self.options.max_draft,
            begin=partial(self._begin, tokens.copy(), of_drafter, request),
            clock=self._clock,
        )

    def _begin(self, prompt: list[int], of_drafter: list[int], request: Request) -> Policy:
        """The policy of a request; ``of_drafter`` is its prompt as the drafter reads it."""
        side, remarks = self._side, Remarks()
        if not self._drafts or not request.speculate:
            remarks.speculation_off_reason = "speculate=False" if self._drafts else "the drafter is None"
            return self._policy(None, None if side is None else side.idle(), remarks)
        free: Extending = NgramDrafter()
        if self._history is not None:
            from edgespec.history.drafter import BestOf

            free = BestOf(free, self._history.begin(self._history_guard, remarks))
        part = None
        if side is not None:
            longest = self.options.max_draft
            part = side.begin(prompt, of_drafter, request, max_draft=longest, remarks=remarks)
        return self._policy(free, part, remarks)

    def _policy(self, free: Extending | None, part: "Part | None", remarks: Remarks) -> Policy:
        remarks.placement = self._placements
        policy = partial(Policy, free, pricing=self._pricing, guard=self._guard, remarks=remarks)
        if part is None:
            return policy()
        return policy(model=part.source, reading_s=part.reading_s, observers=(part,))
