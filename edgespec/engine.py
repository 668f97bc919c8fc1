"""The SDK: load a target and a drafter, generate, stream, chat."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Annotated, Self, Unpack

from edgespec.drafting.ahead import Ahead
from edgespec.drafting.choice import Choice
from edgespec.drafting.draft import Drafter, Extending
from edgespec.drafting.guard import Guard
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.side import DrafterSide
from edgespec.encoding import Messages, encode_chat, encode_text
from edgespec.generation import Job, TextStreamer
from edgespec.loading import NGRAM, Reference, open_model, recommended_drafter
from edgespec.pricing import Pricing
from edgespec.profile.corrections import DrafterKey
from edgespec.profile.drafter import BestOf
from edgespec.profile.manage import Profile
from edgespec.profile.store import Scope
from edgespec.profile.use import ProfileUse, RequestUse, open_use
from edgespec.request import Request, RequestOptions
from edgespec.results import Generation
from edgespec.sessions import Devices, open_pair
from edgespec_export.recipe import WEIGHTS
from edgespec_models.bundle import Bundle
from edgespec_models.errors import RequestError
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_models.schema import check_fields, checked, form, length, one_of, within
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.cpu import CpuOptions, Instructions, Threads
from edgespec_runtimes.discovery import AUTO
from edgespec_runtimes.placement import Placement, export_for, place, run_at_once

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
        namespace: keeps what a profile learns apart, by app, task or language.
        training_share: share of the time, 0 to 1, that training a drafter on what the target writes may take,
            between requests, in a thread of its own; 0 trains nothing. It needs a profile.
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
    profile: Reference | None = None,
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
        profile: a name or a file: what answers teach is kept there and drafted from, across requests and
            restarts (:class:`edgespec.profile.Profile`). With None nothing is written anywhere.
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
    if profile is not None and drafter is None:
        raise RequestError("plain decoding (drafter None) uses no profile; give drafter='ngram' or a model")
    if profile is not None:
        named = Profile(profile)
        named.check()  # before a model is pulled
        profile = named.path
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
    model = Model(
        target_bundle,
        drafter_bundle,
        options=options,
        drafts=drafter is not None,
        placements=(placement, drafter_placement),
    )
    if profile is not None:
        model.use_profile(profile)
    return model


class Model:
    """A loaded target, with its drafter. A context manager; one request at a time.

    A new request ends the one before, whose stream then stops. From several threads, begin one when the
    other has ended: a request while another thread reads a stream is a :class:`RequestError`.

    Attributes:
        target: the target's bundle.
        drafter: the drafter's bundle; None without a drafter model.
        cost_curve: the target's T(n), measured at this load or at an earlier one and checked at this.
        options: as given.
    """

    def __init__(
        self,
        target: Bundle,
        drafter: Bundle | None,
        *,
        options: LoadOptions,
        drafts: bool,
        placements: tuple[Placement, Placement | None] | None = None,
    ) -> None:
        if target.manifest.role == "drafter":
            raise RequestError(
                f"{target.path} was exported as a drafter, which may lack tokens; export the model with the "
                "role target"
            )
        self.target, self.drafter, self.options = target, drafter, options
        self._drafts = drafts
        if placements is None:
            placements = place(target), None if drafter is None else place(drafter)
        self._placed = placements
        devices = Devices(placements[0].device, None if placements[1] is None else placements[1].device)
        cpu = CpuOptions(
            threads=options.threads,
            spinning=options.spinning,
            huge_pages=options.huge_pages,
            instructions=options.instructions,
        )
        pair = open_pair(target, drafter, cpu, devices)
        self._session = pair.target.session
        self.cost_curve: CostCurve = pair.target.curve
        self._pricing = Pricing(self.cost_curve)
        self._profile: ProfileUse | None = None
        self._side: DrafterSide | None = None
        if drafter is not None and pair.drafter is not None:
            self._side = DrafterSide(
                target,
                drafter,
                pair.drafter,
                same_vocabulary=pair.same_vocabulary,
                pricing=self._pricing,
                ahead=self._ahead(pair.drafter.curve),
            )
        self._guard = Guard(self._pricing)
        self._profile_guard = Guard(self._pricing, "proposals from the profile brought tokens")
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
            if self._profile is not None:
                self._profile.close()
        finally:  # a second Ctrl-C, perhaps
            if self._side is not None:
                self._side.session.close()
            self._session.close()

    @checked
    def use_profile(self, path: Path) -> None:
        """Draft from the profile at ``path``, and learn into it, from the next request on.

        A file that cannot be used is reported in the log and in ``result.stats.profile_problem``.
        """
        self._end_request()
        if self._profile is not None:
            self._profile.close()
        scope = Scope(self.name, self.target.tokenizer.digest, self.options.namespace)
        self._profile = use = open_use(path, scope, self.target.tokenizer)
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
        return self._placed[0].opened(self._session)

    @property
    def drafter_placement(self) -> Placement | None:
        """The same of the drafter; None without a drafter model."""
        placed = self._placed[1]
        return placed if placed is None or self._side is None else placed.opened(self._side.session)

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
        request = Request.of(options)
        tokens = encode_text(self.target, prompt)
        return self._start(tokens, lambda bundle: encode_text(bundle, prompt), request)

    def stream_chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> TextStreamer:
        """Like :meth:`chat`, piece by piece: iterate over text, then read ``.result``."""
        if self.target.chat_template is None:
            raise RequestError(f"{self.name} has no chat template; use generate, or another model")
        request = Request.of(options)
        tokens = encode_chat(self.target, messages)
        return self._start(tokens, lambda bundle: encode_chat(bundle, messages), request)

    def _ahead(self, curve: CostCurve) -> Ahead | None:
        """Drafting ahead, where target and drafter compute side by side."""
        target, aside = self._placed
        return Ahead(self._pricing, curve) if aside and run_at_once(target, aside) else None

    def _end_request(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._side is not None:
            self._side.reset()

    def _start(
        self, tokens: list[int], drafter_prompt: Callable[[Bundle], list[int]], request: Request
    ) -> TextStreamer:
        """A new request, which ends the one before: both sessions hold one text."""
        if not tokens:
            raise RequestError("the prompt is empty; give at least one character")
        with self._starting:
            self._end_request()
            self._stream = TextStreamer(self._prepared(tokens, drafter_prompt, request))
        return self._stream

    def _prepared(
        self, tokens: list[int], drafter_prompt: Callable[[Bundle], list[int]], request: Request
    ) -> Job:
        self._session.reserve(len(tokens) + request.max_new_tokens)
        if not (request.speculate and self._drafts):
            return self._job(None, None, tokens, request)
        use = None if self._profile is None else self._profile.request(self._profile_guard)
        free = NgramDrafter() if use is None else BestOf(NgramDrafter(), use.drafter)
        drafter = self._drafter(free, tokens, drafter_prompt, request)
        return self._job(drafter, use, tokens, request)

    def _job(
        self, drafter: Drafter | None, learner: RequestUse | None, tokens: list[int], request: Request
    ) -> Job:
        off = "the drafter is None" if not self._drafts else None if request.speculate else "speculate=False"
        ahead = None if self._side is None else self._side.ahead
        return Job(
            session=self._session,
            tokenizer=self.target.tokenizer,
            drafter=drafter,
            tokens=tokens,
            request=request,
            eos=frozenset(self.target.manifest.special_tokens.eos) if request.stop_at_eos else frozenset(),
            max_draft=self.options.max_draft,
            pricing=self._pricing,
            guard=self._guard,
            off_reason=off,
            placement=self._placements,
            learner=learner,
            ahead=ahead,
            student=self._side,
        )

    def _drafter(
        self,
        free: Extending,
        tokens: list[int],
        drafter_prompt: Callable[[Bundle], list[int]],
        request: Request,
    ) -> Drafter:
        model, reading_s = None, 0.0
        if self._side is not None:
            model, reading_s = self._side.drafter(
                tokens, drafter_prompt, request, max_draft=self.options.max_draft
            )
        return Choice(free, model, pricing=self._pricing, guard=self._guard, reading_s=reading_s)
