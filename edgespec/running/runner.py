"""The loaded models of requests: their prompts, passes, and the data kept between requests."""

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from edgespec.answering.answer import Answer
from edgespec.asking.images import Image
from edgespec.asking.pictures import Pictures, images_of
from edgespec.asking.request import (
    Hole,
    PromptInput,
    PromptTokens,
    Request,
    answer_format,
    begun_form,
    drafter_tokens,
    ids_of,
    message_starts,
    prompt_tokens,
    seen,
    thoughts_behind,
)
from edgespec.decoding.draft import NO_DRAFT, Clock, Draft, Drafter, Load, Remarks
from edgespec.decoding.grammar import Constraint, GrammarConstraint, Grammars
from edgespec.decoding.sampling import RowStep, Spelled, Suppressed
from edgespec.drafting.copies import CopyDrafter, Finder
from edgespec.drafting.ngram import ContextTree
from edgespec.drafting.policy import Policy
from edgespec.drafting.pricing import USUAL_TOKENS, Guard, Prices, Pricing
from edgespec.drafting.source import Source
from edgespec.loading.opening import Loaded
from edgespec.loading.options import LoadOptions
from edgespec.running.sequence import Seat, Sequence
from edgespec.running.ticket import Ticket
from edgespec.running.verifier import Verifier
from edgespec_models.errors import DoesNotFit, RequestError, too_long
from edgespec_models.storage import prompts_dir
from edgespec_runtimes.block_files import BlockFiles
from edgespec_runtimes.kv_store import KvStore
from edgespec_runtimes.memory import give_back, machine_memory
from edgespec_runtimes.predictions import Floats
from edgespec_runtimes.session import Session

if TYPE_CHECKING:  # requests import nothing of drafter models or histories that they do not have
    from edgespec.drafting.custom import Custom
    from edgespec.drafting.side import DrafterSide
    from edgespec.history.use import HistoryUse
    from edgespec.running.embedding import TextReader, TextsTicket
    from edgespec_runtimes.vision import VisionSession


_AGAIN = 0.7  # the chance that a token that was taken back is written again
_SHARE = 2  # of the available memory, what one more KV cache may take beside others, which may move for it


class Runner:
    """Runs requests on a target and its drafter, and keeps what they learn.

    :meth:`prompt` and :meth:`constraint` may be called from any thread, the rest from one at a time.

    ``write_behind`` writes prompts to disk while no request runs; see :class:`KvStore`.

    It closes ``loaded``. ``side``, ``own`` and ``history`` are None without a drafter model, without an app's
    own drafter, and without a history.
    """

    def __init__(
        self,
        loaded: Loaded,
        options: LoadOptions,
        *,
        drafts: bool = True,
        clock: Clock = perf_counter,
        own: Drafter | None = None,
    ) -> None:
        self.target, self.session = loaded.target.bundle, loaded.target.session
        self.options, self.drafts, self.cost_curve = options, drafts, loaded.target.curve
        self.loaded, self._clock = loaded, clock
        self.own = None if own is None else self._custom(own)
        self._grammars = Grammars(self.target.tokenizer, self.target.manifest.special_tokens.eos)
        self.pricing = Pricing(loaded.target.curve)
        limit = options.prompt_cache_bytes
        self.caches = KvStore(options.cache_bytes, None if limit == 0 else BlockFiles(prompts_dir(), limit))
        self.write_behind = self.caches.write_behind
        self.history: HistoryUse | None = None
        self.side: DrafterSide | None = None
        if loaded.drafter is not None:
            from edgespec.drafting import side

            self.side = side.DrafterSide(
                self.target, loaded.drafter, same_vocabulary=loaded.same_vocabulary, caches=self.caches
            )
        self.at_once = 1 if self.own is not None or not self.session.model.takes_several else options.parallel
        self.seats = [Seat(self.session, None if self.side is None else self.side.session, self.caches)]
        self.text_sessions, self._where = list[Session](), self._placements()
        self._guard = Guard(self.pricing)
        self.history_guard = Guard(self.pricing, "proposals from the history brought tokens")
        self._is_closed = False

    def constraint(self, request: Request, *, is_chat: bool = True) -> Constraint | None:
        """The constraint of the answer to a conversation or a text; None if it may be anything."""
        request.check_vocabulary(self.session.model.vocab_size)
        wanted = answer_format(self.target, request) if is_chat else request.response_format
        return None if wanted is None else self._grammars.constraint(wanted)

    def prompt(self, prompt: PromptInput | Hole, request: Request) -> PromptTokens:
        """Read a prompt."""
        hole, record = None, None
        prompt = seen(self.target, prompt, request, self.options.image_tokens)
        source = None if isinstance(prompt, Hole) or request.special else prompt
        if isinstance(prompt, Hole):
            from edgespec.asking.fill import fill_tokens

            tokens, hole = fill_tokens(self.target, prompt, request, self.session.model.longest)
            prompt = hole.prefix.encode().removesuffix(hole.held).decode(errors="ignore")
        else:
            tokens = prompt_tokens(self.target, prompt, request)
        if ids_of(prompt) is not None:  # a drafter of another vocabulary reads their text
            prompt = self.target.tokenizer.decode(tokens, skip_special=False)
            request, source = replace(request, special=True), None
        if len(tokens) >= self.session.model.longest:
            raise DoesNotFit(self._too_long(len(tokens)))
        side = self.side if request.speculate and request.drafter is None else None
        drafters: list[int] | Exception = []
        if side is not None:
            try:
                drafters = side.prompt(tokens, lambda bundle: drafter_tokens(bundle, prompt, request))
            except Exception as error:  # noqa: BLE001 - the target goes on alone
                drafters = error
        predicted = None
        if request.prediction and request.speculate:
            from edgespec.drafting.prediction import PredictedText

            predicted = PredictedText(self.target.tokenizer.encode(request.prediction))
        if self.options.keep_prompts and request.prompt_cache and source is not None:
            with suppress(TypeError, ValueError):  # such as content that is no JSON
                record = json.dumps(source, ensure_ascii=False).encode()
        state = thoughts_behind(self.target, prompt, tokens)
        images, pictures = images_of(prompt), None
        if images and self.target.manifest.vision is not None:
            see = partial(self._see, on_disk=request.prompt_cache)
            pictures = Pictures(tokens, images, self.target, see)
        return PromptTokens(tokens, drafters, state, hole, predicted, record, pictures)

    def _see(
        self, name: str, image: Image, budget: int, rows: int, stop: Callable[[], bool], *, on_disk: bool
    ) -> Floats:
        """The vectors of a picture, kept or made now; Cancelled if ``stop`` says so."""
        tower = self.target.manifest.vision
        assert tower is not None  # its prompts have pictures
        shape, model = (rows, tower.width), self.session.model

        def make() -> Floats:
            made = self._vision.vectors(image.pixels, budget, stop)
            give_back()
            return made

        return self.caches.vectors(model, name, shape, make, on_disk=on_disk)

    @cached_property
    def _vision(self) -> "VisionSession":
        from edgespec_runtimes.vision import VisionSession

        return VisionSession(self.target, self.options.cpu())

    def begin(self, ticket: Ticket, prices: Prices) -> Sequence | None:
        """Begin a request: reserve room, and copy the known beginning of its prompt into the KV cache.

        None if there is no memory for it beside running requests. An answer that would not fit the context is
        shortened.
        """
        prompt, constraint = ticket.prompt, ticket.constraint
        started, queued_s, count = self._clock(), ticket.queued_s, len(prompt.target)
        new = min(ticket.request.max_new_tokens, self.session.model.longest - count)
        request = ticket.request = replace(ticket.request, max_new_tokens=new)
        if prompt.thoughts is not None:
            from edgespec.running.thinking import with_thoughts

            eos = self.target.manifest.special_tokens.eos
            state, tokenizer = prompt.thoughts, self.target.tokenizer
            constraint = with_thoughts(state, tokenizer, eos, request.thinking, constraint)
        constraint = self._with_calls(request, constraint)
        room = count + min(new, USUAL_TOKENS)  # more comes when passes need it
        if any(seat.taken for seat in self.seats) and not self._has_room(room):
            return None
        seat, starts = self._seat(prompt.rows), message_starts(prompt.target, self.target.tokenizer)
        if prompt.pictures is not None:
            starts.append(prompt.pictures.end_of_last)
        others = [other.target for other in self.seats if other.taken]
        checkpoints = self.caches.fetch(
            seat.target, prompt.rows, others, starts, on_disk=request.prompt_cache
        )
        seat.taken = True
        with ExitStack() as undoing:
            undoing.callback(seat.free)
            seat.target.reserve(room)
            if request.prompt_logprobs:
                seat.target.rewind(0)  # a cached token has no log probability
            policy = self._policy(prompt, request, constraint, seat, prices)
            undoing.callback(policy.close)
            remarks, clock, most = policy.remarks, self._clock, self.options.max_draft
            answer = Answer(self.target, prompt, request, constraint, remarks, clock, started, queued_s)
            verifier, ends = self._verifier(prompt, request, constraint), self._ends(prompt, request)
            sequence = Sequence(
                ticket, seat, policy, verifier, answer, max_draft=most, stop=ends, checkpoints=checkpoints
            )
            undoing.pop_all()  # it closes them at its end
        return sequence

    def _verifier(self, prompt: PromptTokens, request: Request, constraint: Constraint | None) -> Verifier:
        special, count = self.target.manifest.special_tokens, len(prompt.target)
        masks: list[RowStep] = [] if constraint is None else [constraint]
        if prompt.hole is not None and prompt.hole.held:
            masks.append(Spelled(self.target.tokenizer, prompt.hole.held, count))
        excluded = special.suppressed or special.suppressed_first or special.bad_words
        return Verifier(request.sampler, masks, Suppressed(special, count) if excluded else None)

    def _ends(self, prompt: PromptTokens, request: Request) -> frozenset[int]:
        """The tokens that end an answer."""
        of_fills = () if prompt.hole is None else prompt.hole.ends
        ends = *self.target.manifest.special_tokens.eos, *of_fills
        return frozenset(ends if request.stop_at_eos else ())

    def _with_calls(self, request: Request, constraint: Constraint | None) -> Constraint | None:
        """``constraint``, and a grammar for the calls that the model begins of its own accord."""
        form = begun_form(self.target, request)
        if form is None:
            return constraint
        from edgespec.asking.tool_calls import BegunCalls, marks_of
        from edgespec.running.begun import BegunParts

        tokenizer, tools = self.target.tokenizer, request.tools
        names = [tool["function"]["name"] for tool in tools]

        @cache
        def grammar_of(name: str) -> GrammarConstraint | None:
            with suppress(
                RequestError
            ):  # without llguidance, or for schemas that it refuses, answers are free
                return self._grammars.constraint(BegunCalls(form, tools, tokenizer, name))
            return None

        return BegunParts(tokenizer, marks_of(form, names, tokenizer), grammar_of, constraint)

    def _has_room(self, tokens: int) -> bool:
        """Whether there is enough memory for another KV cache of this many tokens."""
        return self.target.manifest.kept_bytes(tokens) <= machine_memory().available // _SHARE

    @cached_property
    def text_reader(self) -> "TextReader":
        """The reader of texts that become vectors or get scores. RequestError beside a head."""
        if self.side is not None and self.side.bundle.config.is_head:
            raise RequestError(
                "this target has a head as drafter and makes no vectors or scores of texts; load it without "
                "a drafter"
            )
        from edgespec.running.embedding import TextReader

        return TextReader(self.target, self.session.model, self.text_sessions)

    def texts(self, tickets: list[Ticket]) -> "list[TextsTicket[Any]]":
        """Those of the tickets whose texts become vectors or scores."""
        if "text_reader" not in vars(self):
            return []
        from edgespec.running.embedding import TextsTicket

        return [ticket for ticket in tickets if isinstance(ticket, TextsTicket)]

    def read_texts(self, texts: "list[TextsTicket[Any]]", beside: int) -> None:
        """Read texts that become vectors or scores, in a pass of their own.

        They wait if there is no memory for them beside the other requests, so many.
        """
        prices = self.pricing.at(Load(max(1, beside)))
        piece = prices.piece(beside) if beside else self.session.model.piece
        has_room = not beside or self._has_room(max(ticket.longest for ticket in texts))
        self.text_reader.turn(texts, piece if has_room else 0)

    def use_history(self, path: Path) -> None:
        """Draft from the history at ``path``, and learn into it, from the next request on."""
        from edgespec.history.store import Scope
        from edgespec.history.use import open_use

        if self.history is not None:
            self.history.close()
        scope = Scope.of(self.target, self.options.namespace)
        self.history = open_use(path, scope, self.target.tokenizer)

    def forget(self, *, on_disk: bool = True) -> None:
        """Delete earlier requests from KV caches, and the texts of these models from disk."""
        if not on_disk:
            self.caches.write_behind()
        for session in self._sessions:
            session.rewind(0)
            self.caches.forget(session, on_disk=on_disk)
        if self.side is not None:
            self.side.forget()

    def trim(self) -> int:
        """Free unused KV caches, and caches of texts that become vectors, and return their bytes."""
        taken = [session for seat in self.seats if seat.taken for session in (seat.target, seat.drafter)]
        freed = self.caches.trim([seat.target for seat in self.seats if seat.taken])
        return freed + sum(session.release() for session in self._sessions if session not in taken)

    def close(self) -> None:
        """Store what was learned, free both models, for good."""
        if self._is_closed:
            return
        self._is_closed = True
        vars(self).pop("_vision", None)
        for running in filter(None, (self.loaded.target, self.loaded.drafter)):
            if template := vars(running.bundle).get("chat_template"):  # it is compiled at its first use
                template.close()
        try:
            self.caches.write_behind()
            if self.history is not None:
                self.history.close()
        finally:  # a second Ctrl-C, perhaps
            for session in reversed(self._sessions):
                self.caches.forget(session)
                session.close()

    @property
    def _sessions(self) -> list[Session]:
        """The sessions of all seats and texts."""
        drafters = [seat.drafter for seat in self.seats if seat.drafter is not None]
        return [*(seat.target for seat in self.seats), *drafters, *self.text_sessions]

    def _seat(self, tokens: list[int]) -> Seat:
        """A free seat, whose target holds the longest known beginning of ``tokens``."""
        free = [seat for seat in self.seats if not seat.taken]
        if not free:
            target, drafter = self.session.model, self.seats[0].drafter
            several = drafter is not None and drafter.model.takes_several
            second = drafter.model.session() if drafter is not None and several else None
            free = [Seat(target.session(), second, self.caches)]
            self.seats += free
        return max(free, key=lambda seat: seat.target.shared_prefix(tokens))

    def _placements(self) -> str:
        drafter = self.loaded.drafter
        beside = "" if drafter is None else f"; drafter on {drafter.placement}"
        return f"target on {self.loaded.target.placement}{beside}"

    def _too_long(self, count: int) -> str:
        longest, context = self.session.model.longest, self.target.config.context_length
        if longest < context and count < context:
            return (
                f"prompt {too_long(count, longest)}, the largest bucket of this bundle, which holds the "
                f"answer too; shorten it, or export the model with --buckets up to {context:,}"
            )
        reason = f"prompt {too_long(count, context)}"
        return f"{reason}, the model's context, which holds the answer too; shorten it"

    def _policy(
        self,
        prompt: PromptTokens,
        request: Request,
        constraint: Constraint | None,
        seat: Seat,
        prices: Prices,
    ) -> Policy:
        """The drafting policy of a request."""
        if any(session.model.compiled for session in (seat.target, seat.drafter) if session is not None):
            self._where = self._placements()  # a bucket may have been opened
        remarks = Remarks(placement=self._where)
        remarks.prompt_cache_problem = self.caches.problem
        policy = partial(Policy, pricing=self.pricing, guard=self._guard, remarks=remarks, clock=self._clock)
        has_source = self.drafts or request.drafter is not None or prompt.prediction is not None
        if not request.speculate or not has_source:
            remarks.speculation_off_reason = "speculate=False" if self.drafts else "the drafter is None"
            return policy()
        finders: list[Finder] = [ContextTree()]
        if self.history is not None:
            context = None
            if prompt.record is not None:
                from edgespec.history.drafter import TurnContext

                eos = self.target.manifest.special_tokens.eos
                context = TurnContext(prompt.record, eos, self.target.tokenizer.bytes_of)
            finders.append(self.history.begin(self.history_guard, remarks, context))
        opening = None
        if prompt.prediction is not None:
            from edgespec.drafting.prediction import PredictionFinder

            predicted = PredictionFinder(prompt.prediction, len(prompt.target))
            finders, opening = [*finders, predicted] if self.drafts else [predicted], NO_DRAFT
        if prompt.hole is not None:  # a cut word of the prompt may be written again as it was
            again = tuple(self.target.tokenizer.encode_bytes(prompt.hole.held))
            opening = Draft(again, ("ngram",) * len(again), (_AGAIN,) * len(again))
        model = self._model(prompt, request, remarks, seat, prices)
        return policy(CopyDrafter(*finders), model, constraint=constraint, opening=opening)

    def _custom(self, drafter: Drafter) -> "Custom":
        from edgespec.drafting.custom import Custom

        return Custom(drafter, self.session.model.vocab_size)

    def _model(
        self, prompt: PromptTokens, request: Request, remarks: Remarks, seat: Seat, prices: Prices
    ) -> Source | None:
        """A model or an app's own drafter."""
        own = self.own if request.drafter is None else self._custom(request.drafter)
        is_short = prompt.hole and prompt.hole.ends_line  # reading the prompt takes longer than it saves
        if self.side is None or own is not None or seat.drafter is None or is_short:
            return own
        eos = self.target.manifest.special_tokens.eos if request.stop_at_eos else ()
        others = [other.drafter for other in self.seats if other.taken and other is not seat]
        try:
            if isinstance(prompt.drafter, Exception):
                raise prompt.drafter
            return self.side.begin(
                prompt.target,
                prompt.drafter,
                (seat.drafter, [other for other in others if other is not None]),
                target=seat.target,
                max_new_tokens=request.max_new_tokens,
                max_draft=self.options.max_draft,
                target_end=eos[0] if eos else None,
                token_s=prices.token_s,
                add_pictures=None if prompt.pictures is None else prompt.pictures.of_head,
            )
        except Exception as error:  # noqa: BLE001 - mostly for lack of memory; the target goes on alone
            remarks.note_failure(error)
            return None
