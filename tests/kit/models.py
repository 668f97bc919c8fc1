"""Whole models over toy sessions: everything but weights is as in use."""

import threading
from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import cast

from edgespec.answering.answer import Answer
from edgespec.asking.request import PromptTokens, Request
from edgespec.decoding.draft import Clock
from edgespec.drafting.policy import Policy
from edgespec.drafting.pricing import Prices, Pricing
from edgespec.drafting.side import DrafterSide
from edgespec.engine import LoadOptions, Model
from edgespec.loading.opening import Loaded, TimedModel
from edgespec.running.runner import Runner
from edgespec.running.scheduler import Scheduler
from edgespec.running.sequence import Seat
from edgespec.running.sequence import Sequence as RunningSequence
from edgespec.running.stream import Stream
from edgespec.running.ticket import Ticket
from edgespec.running.verifier import Verifier
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.devices import KINDS, Device, Placement
from edgespec_runtimes.kv_store import KvStore
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import F32, KV_BYTES, NextLogits, ToySession, markov_logits

VOCAB = 404
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"  # Jinja drops a template's last line break
)


@cache
def toy_tokenizer() -> Tokenizer:
    return Tokenizer.from_json(byte_level_json(), vocab_size=VOCAB)


def printable(next_logits: NextLogits) -> NextLogits:
    """The same model, but that it writes ASCII letters only: its text has the tokens it wrote, again."""
    tokenizer = toy_tokenizer()
    single = [i for i in range(VOCAB) if len(tokenizer.bytes_of([i])) == 1]
    letters = [i for i in single if tokenizer.bytes_of([i]).isupper()]

    def only_letters(tokens: Sequence[int]) -> F32:
        logits = next_logits(tokens)
        logits[letters] += 1000.0
        return logits

    return only_letters


def toy_session(seed: int = 0, *, context: int = 4096) -> ToySession:
    return ToySession(printable(markov_logits(seed, VOCAB, scale=4.0)), VOCAB, context=context)


class Slow(ToySession):
    """An answer is not over when its first piece has been read."""

    def forward(self, tokens: Sequence[int]) -> F32:
        sleep(0.002)
        return super().forward(tokens)


def slow_session() -> Slow:
    return Slow(printable(markov_logits(0, VOCAB, scale=4.0)), VOCAB, context=4096)


class Gated(ToySession):
    """Its passes wait until they are let through.

    Attributes:
        arrived: released at every pass that waits.
    """

    def __init__(self, next_logits: NextLogits | None = None) -> None:
        super().__init__(next_logits or printable(markov_logits(0, VOCAB, scale=4.0)), VOCAB)
        self.arrived, self._gate = threading.Semaphore(0), threading.Semaphore(0)
        self._is_open = False

    def let(self, passes: int) -> None:
        self._gate.release(passes)

    def do(self, passes: int) -> None:
        """Let so many passes through, and wait until the next one waits."""
        self.let(passes)
        for _ in range(passes + 1):
            self.arrived.acquire()

    def open(self) -> None:
        self._is_open = True
        self._gate.release(1000)

    def forward(self, tokens: Sequence[int]) -> F32:
        self.arrived.release()
        if not self._is_open:
            assert self._gate.acquire(timeout=60)
        return super().forward(tokens)


def filling_tokenizer() -> Tokenizer:
    """The toys', with tokens to fill in the middle."""
    marks = ("<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    return Tokenizer.from_json(byte_level_json(specials=marks), vocab_size=VOCAB)


def toy_bundle(name: str, context: int, tokenizer: Tokenizer | None = None) -> Bundle:
    """All that a model asks of its bundle; without a tokenizer it has the toys'."""
    ends = SpecialTokens(None, (), add_bos=False)
    bundle = SimpleNamespace(
        manifest=SimpleNamespace(
            name=name, special_tokens=ends, kept_bytes=KV_BYTES.__mul__, sampling=None, vision=None
        ),
        config=SimpleNamespace(context_length=context, vocab_size=VOCAB, is_head=False, reads_cache=False),
        tokenizer=tokenizer or toy_tokenizer(),
        chat_template=ChatTemplate(TEMPLATE),
        head_tokens=None,
        digest="toy",
        reads_images=False,
    )
    return cast(Bundle, bundle)


def toy_model(
    session: ToySession | None = None,
    drafter: ToySession | None = None,
    *,
    options: LoadOptions | None = None,
    clock: Clock = perf_counter,
    drafter_s: float = 0.1,
    bundle: Callable[[str, int], Bundle] = toy_bundle,
    same_vocabulary: bool = True,
) -> Model:
    """A model over ``session``, a second a pass; with a drafter over the same vocabulary."""

    def running(name: str, session: ToySession, seconds: float) -> TimedModel:
        curve = CostCurve({1: seconds, 8: 1.1 * seconds, 32: 1.5 * seconds})
        return TimedModel(
            bundle(name, session.model.longest),
            session,
            curve,
            Placement(Device(KINDS["cpu"], "ready"), "made up"),
        )

    target = running("toy", session or toy_session(), 1.0)
    small = None if drafter is None else running("small", drafter, drafter_s)
    loaded = Loaded(target, small, same_vocabulary)
    return Model(Runner(loaded, options or LoadOptions(), clock=clock))


def runner_of(model: Model) -> Runner:
    """What a model runs on."""
    return model._runner


def side_of(model: Model) -> DrafterSide:
    """The drafter's half of a model that has one."""
    side = runner_of(model).side
    assert side is not None
    return side


def queue_of(model: Model) -> Scheduler:
    """Where a model's requests wait."""
    return model._queue


def answering(
    session: ToySession,
    policy: Callable[[], Policy],
    request: Request,
    clock: Clock = perf_counter,
    *,
    prompt: Sequence[int] = (3, 1, 4),
    max_draft: int = 8,
    pricing: Pricing | None = None,
) -> Stream:
    """A request over a session alone, which drafts by a policy of its own."""
    bundle, read = toy_bundle("toy", session.model.longest), PromptTokens([*prompt], [], None)

    def begin(ticket: Ticket, prices: Prices) -> RunningSequence:
        drafts = policy()
        answer = Answer(bundle, read, request, None, drafts.remarks, clock, clock(), 0.0)
        verify, seat = Verifier(request.sampler), Seat(session, None, KvStore(0))
        return RunningSequence(ticket, seat, drafts, verify, answer, max_draft=max_draft)

    models = SimpleNamespace(
        begin=begin,
        pricing=pricing or Pricing(CostCurve({1: 1.0})),
        texts=lambda tickets: [],
        write_behind=lambda stop: None,
    )
    return Stream(Ticket(request, lambda: read), Scheduler(0, cast(Runner, models)))
