"""Model drafters, policies and requests that draft, over toy sessions."""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec import LoadOptions, Model, RequestOptions, load
from edgespec.decoding.draft import NO_DRAFT, Clock, Draft
from edgespec.decoding.grammar import Constraint
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.bridge import Bridge, IdentityBridge
from edgespec.drafting.cascade import Followers
from edgespec.drafting.model import Calibration, ModelDrafter
from edgespec.drafting.policy import Policy
from edgespec.drafting.pricing import Guard, Prices, Pricing
from edgespec.drafting.reading import Chain, Prediction, Reader
from edgespec.drafting.source import Extending, Source
from edgespec.running.verifier import Verifier
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Session
from tests.kit.models import runner_of
from tests.kit.several import Driven, facts
from tests.kit.tokenizers import byte_level_json, sentencepiece_json
from tests.kit.toy import F32, PRICES, NextLogits, ToySession, alone
from tools import replay

VOCAB = 50
PROMPT = [3, 1, 4]
QUICK = CostCurve({1: 1e-7})
FREE = CostCurve({1: 1.0, 32: 1.0001})
"""Verification costs next to nothing, so everything likely enough is drafted."""
GREEDY = SamplingParams()


def draft_eagerly(model: Model) -> None:
    """Drafting pays, whatever passes take."""
    runner: Any = runner_of(model)
    runner.pricing._curve, runner.pricing._prices = FREE, None
    runner.pricing.observe_pass = runner.pricing.observe_round = lambda *told: None
    if runner.side is not None:
        runner.side.curve = QUICK


def check_drafts(target: Path, drafter: Path, options: RequestOptions) -> None:
    """Check that answers with a drafter are the plain ones, and that it and n-grams drafted.

    Requests run at once, and then again behind prompts that the target has read.
    """
    prompts = "one two one two one two", "a longer prompt of several words", "x"
    drafted = Counter[str]()
    with load(target, drafter) as model, load(target, None) as plain:
        draft_eagerly(model)
        driven = Driven(model)
        for _ in range(2):
            streams = [driven.queue(model.stream(text, **options)) for text in prompts]
            driven.run()
            for text, stream in zip(prompts, streams, strict=True):
                assert stream.result.tokens == plain.generate(text, **options).tokens
                counts = stream.result.stats.by_source
                drafted.update({source: count.drafted for source, count in counts.items()})
    assert drafted["model"] > 20 and drafted["ngram"] > 0


def check_acceptance(target: Path, drafter: Path) -> None:
    """Check that most drafts are accepted, and that the answer is the plain one."""
    with load(target, drafter) as model, load(target, None) as plain:
        draft_eagerly(model)
        answer = model.generate("one two", max_new_tokens=60)
        count = answer.stats.by_source["model"]
        assert count.accepted > 0.5 * count.drafted > 2
        assert answer.tokens == plain.generate("one two", max_new_tokens=60).tokens


@lru_cache
def tokenizer(kind: str) -> Tokenizer:
    """Four that differ; the last ids of each are padding."""
    if kind == "byte":
        return Tokenizer.from_json(byte_level_json(), vocab_size=410)
    if kind == "small byte":
        return Tokenizer.from_json(byte_level_json(size=300, specials=("<eos>",)), vocab_size=330)
    return Tokenizer.from_json(sentencepiece_json(prefix=kind == "prefixed"), vocab_size=520)


class Timed(ToySession):
    """A toy whose passes take the time of a curve, on a clock that the tests turn."""

    def __init__(
        self, next_logits: NextLogits, vocab_size: int, clock: replay.Clock, curve: CostCurve
    ) -> None:
        super().__init__(next_logits, vocab_size)
        self._clock, self._curve = clock, curve
        self.reserve(2000)

    def forward(self, tokens: Sequence[int]) -> F32:
        self._clock.spend(self._curve.seconds(len(tokens)))
        return super().forward(tokens)


def plain(
    next_logits: NextLogits, count: int, params: SamplingParams = GREEDY, prompt: Sequence[int] = PROMPT
) -> list[int]:
    """Without the loop: one token after another."""
    tokens, verify = list(prompt), Verifier(params)
    for _ in range(count):
        tokens.append(verify(Predictions(next_logits(tokens)[None]), NO_DRAFT, tokens)[1])
    return tokens


def model_of(
    session: Session,
    bridge: Bridge | None = None,
    *,
    curve: CostCurve = QUICK,
    reader: Reader | None = None,
    calibration: Calibration | None = None,
    ends: Collection[int] = (),
    target_end: int | None = None,
) -> ModelDrafter:
    """A drafter with ``session``; of the target's own vocabulary without a bridge."""
    session.reserve(min(1000, session.model.longest))
    return ModelDrafter(
        reader or reader_of(session, curve),
        bridge or IdentityBridge(session.model.vocab_size),
        ends=ends,
        target_end=target_end,
        calibration=calibration or Calibration(),
    )


def policy_of(
    free: Extending | None = None,
    model: Source | None = None,
    *,
    pricing: Pricing | None = None,
    constraint: Constraint | None = None,
    opening: Draft | None = None,
) -> Policy:
    if pricing is None:
        pricing = Pricing(FREE)
        learning: Any = pricing  # a toy's microseconds say nothing of passes that take a second here
        learning.observe_pass = learning.observe_round = lambda *observed: None
    return Policy(
        free,
        model,
        pricing=pricing,
        guard=Guard(pricing),
        constraint=constraint,
        opening=opening,
    )


def reader_of(session: Session, curve: CostCurve = QUICK) -> Reader:
    return Reader(session, curve, Followers(curve))


def draft_of(
    source: Source | Policy,
    tokens: Sequence[int],
    limit: int,
    clock: Clock = perf_counter,
    prices: Prices = PRICES,
) -> Draft:
    """What a source proposes, with passes of its own; nothing where it only reads."""
    return alone(source.begin(tokens, limit, prices), source.take, clock) or NO_DRAFT


def read(reader: Chain, text: Sequence[int], clock: Clock = perf_counter) -> Prediction:
    """What a reader predicts behind a text."""
    alone(reader.read(text), reader.take, clock)
    return reader.latest


def step(reader: Chain, token: int, clock: Clock = perf_counter) -> Prediction:
    """What a reader predicts behind a drafted token."""
    alone(reader.step(token), reader.take, clock)
    return reader.latest


def mixed(next_logits: NextLogits, other: NextLogits, right: float) -> NextLogits:
    """``next_logits`` in a share of all places, ``other`` elsewhere."""

    def law_here(tokens: Sequence[int]) -> F32:
        return (next_logits if hash(tuple(tokens[-4:])) % 1000 < 1000 * right else other)(tokens)

    return law_here


def same_with_drafts(
    target: Path,
    drafters: Sequence[str | Path],
    prompts: Sequence[str],
    opened: LoadOptions | None = None,
    **options: Any,
) -> list[tuple[int, int]]:
    """Check that answers are those without drafts.

    Returns the tokens that each drafter drafted, and those of them that were accepted.
    """
    opened, counts = opened or LoadOptions(threads=1, parallel=2), []
    with load(target, None, options=opened) as model:
        wanted = [facts(model.generate(prompt, **options)) for prompt in prompts]
    for drafter in drafters:
        with load(target, drafter, options=opened) as model:
            draft_eagerly(model)
            answers = [model.generate(prompt, **options) for prompt in prompts]
        assert [facts(answer) for answer in answers] == wanted
        counts.append((sum(a.stats.drafted for a in answers), sum(a.stats.accepted for a in answers)))
    return counts
