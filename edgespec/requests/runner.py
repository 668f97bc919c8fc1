"""The loaded models as one thread uses them, and one request as it runs on them."""

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from edgespec.decoding.draft import Clock, Drafter, Extending, Remarks, Step
from edgespec.decoding.grammar import Constraint, Grammars
from edgespec.decoding.loop import Verifier, decode, read_prompt
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.policy import Part, Policy
from edgespec.drafting.pricing import Guard, Pricing
from edgespec.loading.opening import Loaded, LoadOptions
from edgespec.requests.request import (
    Messages,
    Prompt,
    Request,
    answer_format,
    answer_place,
    call_reader,
    drafter_tokens,
    prompt_tokens,
)
from edgespec.requests.results import FinishReason, Generation, Record, nothing, statistics, token_records
from edgespec.requests.stream import AnswerReader
from edgespec.requests.worker import Answer
from edgespec_models.errors import Cancelled, DoesNotFit
from edgespec_models.storage import prompts_dir
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.devices import Placement
from edgespec_runtimes.kv_buffers import KvStore
from edgespec_runtimes.prompt_cache import PromptCache
from edgespec_runtimes.session import Session

if TYPE_CHECKING:  # requests import nothing of drafter models or histories that they do not have
    from edgespec.drafting.ahead import Beside
    from edgespec.drafting.custom import Custom
    from edgespec.drafting.side import DrafterSide
    from edgespec.history.use import HistoryUse
    from edgespec.requests.call_reading import CallReader
    from edgespec_models.text.thoughts import Place


@dataclass(slots=True, kw_only=True)
class PreparedRequest:
    """One request, with what it runs on: rounds in, records out, and the result as far as it came.

    ``tokens`` is the prompt and grows. ``begin`` makes the policy, which is closed when the request ends.
    ``started`` is when making it ready began; None is when it is decoded.
    """

    session: Session
    tokenizer: Tokenizer
    tokens: list[int]
    request: Request
    eos: frozenset[int]
    max_draft: int
    begin: Callable[[], Policy]
    constraint: Constraint | None = None
    place: "Place | None" = None
    calls: "CallReader | None" = None
    clock: Clock = perf_counter
    started: float | None = None
    _reader: AnswerReader = field(init=False)
    _steps: list[Step] = field(init=False, default_factory=list)
    _records: list[Record] = field(init=False, default_factory=list)
    _remarks: Remarks = field(init=False, default_factory=Remarks)
    _reason: FinishReason | None = field(init=False, default=None)
    _measured: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._reader = AnswerReader(self.tokenizer, self.place, self.calls, stop=self.request.stop)
        self._measured["prompt_tokens"] = len(self.tokens)

    def records(self, why_end: Callable[[], FinishReason | None], queued_s: float = 0.0) -> Iterator[Record]:
        """Decode; the last record has the reason of the end.

        ``why_end`` is asked between passes what is to end the request now; None lets it go on.
        """

        def cancelled() -> bool:
            return why_end() is not None

        started, measured = self.clock() if self.started is None else self.started, self._measured
        measured["queued_s"] = queued_s
        measured["cached_tokens"] = self.session.shared_prefix(self.tokens[:-1])
        with closing(self.begin()) as policy, suppress(Cancelled):
            self._remarks = policy.remarks
            for progress in read_prompt(self.session, self.tokens[:-1], cancelled, self.clock):
                yield Record("", (), progress=progress)
            for step in self._rounds(policy, cancelled):
                now = self.clock()
                if not self._steps:
                    first_at = now
                    measured["ttft_s"] = now - started
                record = self._record(step)
                measured["decode_s"] = self.clock() - first_at
                yield record
                if record.finish_reason is not None:
                    break
        if self._reason is None:
            self._reason = why_end() or "cancelled"
            yield self._shown(Record("", ()))

    @property
    def result(self) -> Generation:
        """As far as it came."""
        thoughts = tuple(self._reader.thoughts)
        tokens = tuple(token for record in self._records for token in record.tokens)
        return Generation(
            "".join(record.text for record in self._records),
            tuple(token.id for token in tokens),
            self._reason or "error",
            statistics(self._steps, self._remarks, **self._measured, reasoning_tokens=len(thoughts)),
            self._reader.stop_string,
            tokens,
            tuple(self._reader.called),
            "".join(record.content for record in self._records),
            thoughts=thoughts,
        )

    def _record(self, step: Step) -> Record:
        """What a round adds."""
        self._steps.append(step)
        record = replace(self._reader.push(step.tokens), tokens=token_records(step))
        if self._reader.ended or self._is_complete(step.tokens[-1]):
            self._reason = "stop"
        elif len(self.tokens) >= self._measured["prompt_tokens"] + self.request.max_new_tokens:
            self._reason = "length"
        return self._shown(record)

    def _is_complete(self, last: int) -> bool:
        """Whether the model has ended its text, or the request's grammar allows nothing behind it."""
        over = self.constraint is not None and self.constraint.ends(self.tokens)
        return over or last in self.eos

    def _shown(self, record: Record) -> Record:
        """The next record, with what was held back if it is the last."""
        if self._reason is not None:
            rest = self._reader.push((), final=True)
            if self._reason == "stop" and self._reader.called:
                self._reason = "tool_calls"
            record = replace(
                record,
                text=record.text + rest.text,
                content=record.content + rest.content,
                calls=record.calls + rest.calls,
                finish_reason=self._reason,
                stop=self._reader.stop_string,
            )
        self._records.append(record)
        return record

    def _rounds(self, policy: Policy, cancelled: Callable[[], bool]) -> Iterator[Step]:
        return decode(
            self.session,
            policy,
            Verifier(self.request.sampling, [] if self.constraint is None else [self.constraint]),
            self.tokens,
            max_new_tokens=self.request.max_new_tokens,
            max_draft=self.max_draft,
            stop=self.eos,
            top_logprobs=self.request.top_logprobs if self.request.logprobs else None,
            cancelled=cancelled,
            clock=self.clock,
        )


def respond(prepare: Callable[[], PreparedRequest], answer: Answer) -> None:
    """Answer a request whose turn has come; what goes wrong, its reader is told."""
    prepared, error = None, None
    try:
        prepared = prepare()
        for record in prepared.records(answer.why_end, answer.queued_s):
            answer.put(record)
    except BaseException as caught:  # noqa: BLE001 - raised where the answer is read
        error = caught
    answer.end(nothing("error") if prepared is None else prepared.result, error)


class Runner:
    """A target, its drafter, and what they learn.

    :meth:`prompt` and :meth:`constraint` may be called from any thread, the rest from one at a time.

    ``write_behind`` brings to disk what was read, while no request runs; see :class:`KvStore`.

    It closes what was ``loaded``. ``beside`` lets the drafter go on while the target verifies; None where
    both run on one device. ``side``, ``own`` and ``history`` are None where there is no drafter model, no
    drafter of the app's own, nothing that is learned across requests.
    """

    def __init__(
        self,
        loaded: Loaded,
        options: LoadOptions,
        *,
        drafts: bool = True,
        clock: Clock = perf_counter,
        beside: "Beside | None" = None,
        own: Drafter | None = None,
    ) -> None:
        self.target, self.session = loaded.target.bundle, loaded.target.session
        self.options, self.drafts, self.cost_curve = options, drafts, loaded.target.curve
        self._loaded, self._clock = loaded, clock
        self.own: Custom | None = None
        if own is not None:
            self.own = self._custom(own)
        self._grammars = Grammars(self.target.tokenizer, self.target.manifest.special_tokens.eos)
        self.pricing = Pricing(loaded.target.curve)
        self._prompts: PromptCache | None = None
        if options.prompt_cache_bytes != 0:
            self._prompts = PromptCache(prompts_dir(), options.prompt_cache_bytes)
        self._caches = KvStore(options.cache_bytes, self._prompts)
        self.write_behind = self._caches.write_behind
        self.history: HistoryUse | None = None
        self.side: DrafterSide | None = None
        if loaded.drafter is not None:
            from edgespec.drafting import side

            self.side = side.DrafterSide(
                self.target,
                loaded.drafter,
                same_vocabulary=loaded.same_vocabulary,
                pricing=self.pricing,
                caches=self._caches,
                beside=beside,
                clock=clock,
            )
        self._guard = Guard(self.pricing)
        self.history_guard = Guard(self.pricing, "proposals from the history brought tokens")
        sessions = self.session, None if self.side is None else self.side.session
        self._reopens = any(session is not None and session.compiled for session in sessions)
        self._where = self._placements()
        self._is_closed = False

    @property
    def placement(self) -> Placement:
        """Where the target runs, and why; opening a longer bucket may change the reason."""
        return self._loaded.target.placement

    @property
    def drafter_placement(self) -> Placement | None:
        """The same of the drafter; None without a drafter model."""
        return None if self._loaded.drafter is None else self._loaded.drafter.placement

    def constraint(self, request: Request) -> Constraint | None:
        """What the answer may be; None where that is anything."""
        request.check_vocabulary(self.session.vocab_size)
        wanted = answer_format(self.target, request)
        return None if wanted is None else self._grammars.constraint(wanted)

    def prompt(self, said: str | Messages, request: Request) -> Prompt:
        """Read a prompt."""
        tokens = prompt_tokens(self.target, said, request)
        if len(tokens) >= self.session.longest:
            raise DoesNotFit(self._too_long(len(tokens)))
        side = self.side if request.speculate and request.drafter is None else None
        aside = side.prompt(tokens, lambda each: drafter_tokens(each, said, request)) if side else []
        return Prompt(tokens, aside, answer_place(self.target, said, tokens))

    def prepared(self, prompt: Prompt, request: Request, constraint: Constraint | None) -> PreparedRequest:
        """A request made ready: room is reserved, and what is known of its prompt lies in the KV cache.

        An answer that would not fit the context is shortened.
        """
        started, tokens, tokenizer = self._clock(), prompt.target.copy(), self.target.tokenizer
        eos = self.target.manifest.special_tokens.eos
        if prompt.place is not None:
            from edgespec.decoding.thinking import with_thoughts

            constraint = with_thoughts(prompt.place, tokenizer, eos, request.thinking, constraint)
        fits = min(request.max_new_tokens, self.session.longest - len(tokens))
        request = replace(request, max_new_tokens=fits)
        self._caches.fetch(self.session, tokens, on_disk=request.prompt_cache)
        self.session.reserve(len(tokens) + fits)
        return PreparedRequest(
            session=self.session,
            tokenizer=tokenizer,
            tokens=tokens,
            request=request,
            eos=frozenset(eos if request.stop_at_eos else ()),
            max_draft=self.options.max_draft,
            begin=partial(self._begin, prompt, request, constraint),
            constraint=constraint,
            place=prompt.place,
            calls=call_reader(self.target, request, tokens),
            clock=self._clock,
            started=started,
        )

    def use_history(self, path: Path) -> None:
        """Draft from the history at ``path``, and learn into it, from the next request on."""
        from edgespec.history.memory import DrafterKey
        from edgespec.history.store import Scope
        from edgespec.history.use import open_use

        if self.history is not None:
            self.history.close()
        scope = Scope(self.target.manifest.name, self.target.tokenizer.digest, self.options.namespace)
        self.history = use = open_use(path, scope, self.target.tokenizer)
        if self.side is None:
            return
        side, share, drafter = self.side, self.options.training_share, self.side.bundle
        key = DrafterKey(drafter.digest, drafter.manifest.name)
        side.experience = use.experience(key.digest)
        trains = share > 0.0 and side.trainable
        side.teach(use.trainer(key, side.tuning, share=share) if trains else None)
        if share > 0.0 and not trains:
            use.warn(
                "the drafter is not trained: that takes a bundle for the CPU with inputs for its gains; "
                "export it again with this version of edgespec"
            )

    def forget(self, *, on_disk: bool = True) -> None:
        """Leave nothing of earlier requests in KV caches, nor on disk of what these models read."""
        if not on_disk:
            self._caches.write_behind()
        for session in [self.session, *([self.side.session] if self.side is not None else [])]:
            session.truncate(0)
            self._caches.forget(session, on_disk=on_disk)

    def close(self) -> None:
        """Store what was learned, free both models, for good."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.side is not None:
            self.side.stop()
        try:
            self._caches.write_behind()
            if self.history is not None:
                self.history.close()
        finally:  # a second Ctrl-C, perhaps
            if self.side is not None:
                self._caches.forget(self.side.session)
                self.side.session.close()
            self._caches.forget(self.session)
            self.session.close()

    def _placements(self) -> str:
        aside = self.drafter_placement
        return f"target on {self.placement}" + (f"; drafter on {aside}" if aside else "")

    def _too_long(self, count: int) -> str:
        longest, context = self.session.longest, self.target.config.context_length
        prompt = f"a prompt of {count:,} tokens does not fit"
        if longest < context and count < context:
            return (
                f"{prompt} the largest bucket of this bundle, {longest:,}, which holds the answer too; "
                f"shorten it, or export the model with --buckets up to {context:,}"
            )
        return f"{prompt} the model's context of {context:,}, which holds the answer too; shorten it"

    def _begin(self, prompt: Prompt, request: Request, constraint: Constraint | None) -> Policy:
        """What drafts in a request."""
        if self._reopens:
            self._where = self._placements()
        side, remarks = self.side, Remarks(placement=self._where)
        remarks.prompt_cache_problem = None if self._prompts is None else self._prompts.problem
        policy = partial(Policy, pricing=self.pricing, guard=self._guard, remarks=remarks)
        if not request.speculate or not (self.drafts or request.drafter):
            remarks.speculation_off_reason = "speculate=False" if self.drafts else "the drafter is None"
            return policy(None, Part() if side is None else side.part())
        free: Extending = NgramDrafter()
        if self.history is not None:
            from edgespec.history.drafter import BestOf

            free = BestOf(free, self.history.begin(self.history_guard, remarks))
        return policy(free, self._part(prompt, request, remarks), constraint=constraint)

    def _custom(self, drafter: Drafter) -> "Custom":
        from edgespec.drafting.custom import Custom

        return Custom(drafter, self.session.vocab_size)

    def _part(self, prompt: Prompt, request: Request, remarks: Remarks) -> Part:
        """The part of a model or of an app's own drafter."""
        own = self.own if request.drafter is None else self._custom(request.drafter)
        if self.side is None:
            return Part(own)
        if own is not None:
            return self.side.part(own)
        eos = self.target.manifest.special_tokens.eos if request.stop_at_eos else ()
        return self.side.begin(
            prompt.target,
            prompt.drafter,
            max_new_tokens=request.max_new_tokens,
            max_draft=self.options.max_draft,
            target_end=eos[0] if eos else None,
            remarks=remarks,
            on_disk=request.prompt_cache,
        )
