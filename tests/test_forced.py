"""Under a grammar, with any drafter, the output is plain constrained decoding's, and fits the grammar."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.draft import NO_DRAFT, Draft, Extending, Remarks, Source, Step
from edgespec.decoding.grammar import Choice, Constraint, Grammars, JsonSchema, Regex, ResponseFormat
from edgespec.decoding.loop import decode
from edgespec.decoding.sampling import DRAFT_LANE, SamplingParams, uniform
from edgespec.decoding.verification import Verifier
from edgespec.drafting.bridge import ByteBridge
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.policy import Forced, Policy
from edgespec.drafting.pricing import Guard, Pricing
from edgespec.measuring.chi_square import pool_rare, two_samples
from edgespec_models.text.tokenizer import Tokenizer
from tests.drafters_for_tests import FREE, GREEDY, model_of, policy_of
from tests.formats_for_tests import accepts, formats
from tests.tokenizers_for_tests import byte_level_json, sentencepiece_json
from tests.toy import Deaf, NextLogits, RandomDrafter, Silent, ToySession, markov_logits

PROMPT = (40, 41, 42)
NEW = 60
SPEED = JsonSchema(
    {
        "type": "object",
        "properties": {"the drafter": {"type": "boolean"}, "the target": {"enum": ["same", "other"]}},
        "required": ["the drafter", "the target"],
        "additionalProperties": False,
    }
)


@lru_cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "byte":
        return Tokenizer.from_json(byte_level_json(), vocab_size=410)  # the last ids are padding
    return Tokenizer.from_json(sentencepiece_json())


@lru_cache
def ends(kind: str) -> tuple[int, ...]:
    texts = ("<|im_end|>", "<|endoftext|>") if kind == "byte" else ("<eos>",)
    ids = [tokenizer(kind).special_id(text) for text in texts]
    return tuple(id_ for id_ in ids if id_ is not None)


@lru_cache
def grammars(kind: str) -> Grammars:
    return Grammars(tokenizer(kind), ends(kind))


markov = lru_cache(maxsize=4)(markov_logits)


def plain(constraint: Constraint) -> Source:
    return Silent()


def write(
    wanted: ResponseFormat,
    source_of: Callable[[Constraint], Source] = plain,
    *,
    kind: str = "byte",
    seed: int = 0,
    params: SamplingParams = GREEDY,
) -> tuple[list[int], list[Step]]:
    """What a random target writes under a format: its answer, and the rounds."""
    constraint = grammars(kind).constraint(wanted)
    target = ToySession(markov(seed, tokenizer(kind).vocab_size), tokenizer(kind).vocab_size)
    source, tokens, steps = source_of(constraint), [*PROMPT], list[Step]()
    rounds = decode(
        target,
        source,
        Verifier(params, [constraint]),
        tokens,
        max_new_tokens=NEW,
        max_draft=6,
        stop=ends(kind),
    )
    for step in rounds:
        steps.append(step)
        if constraint.ends(tokens):
            break
    source.close()
    assert target.cache == tokens[:-1]
    return tokens[len(PROMPT) :], steps


def text_of(tokens: Sequence[int], kind: str = "byte") -> str:
    return tokenizer(kind).bytes_of(t for t in tokens if t not in ends(kind)).decode()


def ended(answer: list[int], kind: str, name: str) -> list[int]:
    """An answer as it is where no proposal completes it: then the pass adds the token that ends texts."""
    return answer[:-1] if name.endswith("uncut") and answer[-1] in ends(kind) else answer


def across(kind: str, seed: int) -> ModelDrafter:
    """A random drafter of another vocabulary."""
    other = "sentencepiece" if kind == "byte" else "byte"
    session = ToySession(markov(seed, tokenizer(other).vocab_size), tokenizer(other).vocab_size)
    bridge = ByteBridge(tokenizer(kind), tokenizer(other), prompt_length=len(PROMPT), drafter_prompt=[60, 61])
    return model_of(session, bridge)


def with_policy(free: Extending, model: Source | None = None) -> Callable[[Constraint], Source]:
    def source_of(constraint: Constraint) -> Source:
        pricing = Pricing(FREE)
        return Forced(policy_of(free, model, pricing=pricing), constraint, pricing)

    return source_of


def drafters(kind: str, seed: int) -> dict[str, Callable[[Constraint], Source]]:
    vocab = tokenizer(kind).vocab_size
    oracle = markov(seed, vocab)
    return {
        "forced": lambda constraint: Forced(Silent(), constraint, Pricing(FREE)),
        "ngrams": with_policy(NgramDrafter(stop_below=0.0)),
        "ngrams and model": with_policy(NgramDrafter(stop_below=0.0), across(kind, seed)),
        "random": lambda c: Forced(RandomDrafter(seed, vocab, oracle), c, Pricing(FREE)),
        "random, uncut": lambda c: RandomDrafter(seed, vocab, oracle),
        "oracle": lambda c: Forced(Oracle(oracle), c, Pricing(FREE)),
    }


class Oracle(Deaf):
    """Proposes what the target would say without the grammar, as long as it may."""

    def __init__(self, oracle: NextLogits) -> None:
        self._oracle = oracle

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        drafted: list[int] = []
        while len(drafted) < limit:
            drafted.append(int(self._oracle([*tokens, *drafted]).argmax()))
        return Draft(tuple(drafted), None, ("oracle",) * len(drafted), (0.9,) * len(drafted))


KINDS = ("byte", "sentencepiece")
NAMES = tuple(drafters("byte", 0))


@settings(max_examples=60, deadline=None)
@given(formats, st.sampled_from(KINDS), st.sampled_from(NAMES), st.integers(0, 99))
def test_greedy_output_is_plain_constrained_decodings(
    wanted: ResponseFormat, kind: str, name: str, seed: int
) -> None:
    expected, _ = write(wanted, kind=kind, seed=seed)
    answer, _ = write(wanted, drafters(kind, seed)[name], kind=kind, seed=seed)
    assert ended(answer, kind, name) == ended(expected, kind, name)
    if len(answer) < NEW:
        assert accepts(wanted, text_of(answer, kind))


@settings(max_examples=40, deadline=None)
@given(formats, st.sampled_from(KINDS), st.sampled_from(NAMES), st.integers(0, 99))
def test_seeded_output_is_plain_constrained_samplings(
    wanted: ResponseFormat, kind: str, name: str, seed: int
) -> None:
    params = SamplingParams(temperature=1.5, top_p=0.95, repetition_penalty=1.2, seed=seed)
    expected, _ = write(wanted, kind=kind, seed=seed, params=params)
    answer, _ = write(wanted, drafters(kind, seed)[name], kind=kind, seed=seed, params=params)
    assert ended(answer, kind, name) == ended(expected, kind, name)
    if len(answer) < NEW:
        assert accepts(wanted, text_of(answer, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_forced_tokens_are_drafts_that_are_always_accepted(kind: str) -> None:
    expected, rounds = write(SPEED, kind=kind)
    answer, steps = write(SPEED, drafters(kind, 0)["forced"], kind=kind)
    assert answer == expected and len(steps) < len(rounds) / 2
    assert all(step.accepted == len(step.draft.tokens) == step.draft.forced for step in steps)
    assert {source for step in steps for source in step.draft.sources} == {"grammar"}


def test_a_draft_is_cut_where_the_grammar_forbids_it_and_what_is_forced_follows() -> None:
    constraint = grammars("byte").constraint(Choice(["12x", "12y3456789"]))
    y, other, one = tokenizer("byte").encode_bytes(b"yx1")

    class Proposing(Deaf):
        def propose(self, tokens: Sequence[int], limit: int) -> Draft:
            assert tokenizer("byte").bytes_of(tokens) == b"12"
            return Draft((y, other, one), None, ("said",) * 3, (0.5, 0.4, 0.3))

    draft = Forced(Proposing(), constraint, Pricing(FREE)).propose([], 40)
    assert tokenizer("byte").bytes_of(draft.tokens) == b"12y345678"  # the last completes the text
    at = draft.sources.index("said")
    assert at == draft.forced and draft.tokens[at] == y
    assert set(draft.sources[:at] + draft.sources[at + 1 :]) == {"grammar"}
    assert set(draft.confidence[:at] + draft.confidence[at + 1 :]) == {1.0}


def test_what_drafting_costs_beside_the_pass_is_told_on() -> None:
    class Beside(Deaf):
        def propose(self, tokens: Sequence[int], limit: int) -> Draft:
            return Draft(slowdown=1.5)

    constraint = grammars("byte").constraint(Choice(["12x", "12y3456789"]))
    draft = Forced(Beside(), constraint, Pricing(FREE)).propose([], 40)
    assert (draft.slowdown, draft.forced) == (1.5, len(draft.tokens))


def test_the_token_that_completes_the_text_is_not_proposed() -> None:
    """Neither forced, nor from a source; the pass gives it without."""
    wanted = Choice(["the output stays the same"])
    answer, steps = write(wanted, drafters("byte", 0)["forced"])
    assert text_of(answer) == wanted.texts[0] and answer[-1] not in ends("byte")
    assert [*steps[-1].draft.tokens] == answer[-1 - len(steps[-1].draft.tokens) : -1]


def test_what_the_policy_remarks_is_the_requests() -> None:
    remarks = Remarks()
    assert Forced(Silent(), grammars("byte").constraint(SPEED), Pricing(FREE), remarks).remarks is remarks
    assert Forced(Silent(), grammars("byte").constraint(SPEED), Pricing(FREE)).remarks == remarks


def test_the_grammar_follows_what_is_taken_back() -> None:
    """Proposals are read, rolled back and read again; masks stay those of a fresh constraint."""
    wanted = Regex("(the|that|[a-f]{2}){1,4}")
    spell = tokenizer("byte").encode
    used = grammars("byte").constraint(wanted)
    for said in (["the", "that"], ["a", "b", "the"], [], ["th", "a", "t", "f"]):
        drafted = [token for part in said for token in spell(part)]
        for at in range(len(drafted) + 1):
            fresh = grammars("byte").constraint(wanted)
            row, other = np.zeros((2, 410), np.float32)
            used.apply(row, drafted[:at])
            fresh.apply(other, drafted[:at])
            assert np.array_equal(row, other)


class _Drawing(Deaf):
    """Draws proposals from a distribution of its own: those are verified by speculative sampling."""

    def __init__(self, seed: int, vocab: int) -> None:
        self._seed, self._vocab = seed, vocab

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        count = min(limit, 2)
        if count < 1:
            return NO_DRAFT
        probs = np.zeros((count, self._vocab))
        likely = tokenizer("byte").encode_bytes(b"abc")
        probs[:, likely] = (0.5, 0.3, 0.2)
        draws = (uniform(self._seed, len(tokens) + at, DRAFT_LANE) for at in range(count))
        drafted = tuple(likely[int(np.searchsorted([0.5, 0.8, 1.0], u, side="right"))] for u in draws)
        return Draft(drafted, probs, ("drawn",) * count, (0.9,) * count)


@pytest.mark.parametrize("name, count", [("ngrams and model", 250), ("drawn", 1000)])
def test_samples_follow_the_distribution_of_plain_constrained_sampling(name: str, count: int) -> None:
    wanted = Regex("[ad]{4}")  # half of what is drawn is forbidden
    vocab = tokenizer("byte").vocab_size

    def samples(
        source_of: Callable[[int], Callable[[Constraint], Source]], first: int
    ) -> list[tuple[int, ...]]:
        params = (SamplingParams(temperature=2.0, seed=first + each) for each in range(count))
        answers = (write(wanted, source_of(each), params=p)[0] for each, p in enumerate(params))
        return [tuple(t for t in answer if t not in ends("byte")) for answer in answers]

    def source_of(each: int) -> Callable[[Constraint], Source]:
        if name == "drawn":
            return lambda c: Forced(_Drawing(each, vocab), c, Pricing(FREE))
        return drafters("byte", 1)[name]

    first, second = pool_rare(samples(lambda _: plain, 0), samples(source_of, 10_000), minimum=24)
    assert len(first) > 6
    p_value = two_samples(first, second).p_value
    assert p_value is not None and p_value > 1e-4


def test_sources_are_judged_by_what_came_where_they_were_asked() -> None:
    whole = (*PROMPT, *write(SPEED)[0])
    seen: list[tuple[int, ...]] = []

    class Watching(Silent):
        def propose(self, tokens: Sequence[int], limit: int) -> Draft:
            seen.append(tuple(tokens))
            return NO_DRAFT

        def observe(self, step: Step) -> None:
            if seen:
                seen[-1] += step.judged

    write(SPEED, lambda constraint: Forced(Watching(), constraint, Pricing(FREE)))
    assert all(tokens == whole[: len(tokens)] for tokens in seen) and seen[-1] == whole


def _behind_forced(*said: int) -> Draft:
    """Two forced tokens and what a source proposes behind them."""
    sources = ("grammar", "grammar", *["said"] * len(said))
    return Draft((1, 2, *said), None, sources, (1.0, 1.0, *[0.5] * len(said)), forced=2)


def _loses(draft: Draft, committed: tuple[int, ...], seconds: float, rounds: int = 40) -> bool:
    """Whether rounds like this have drafting paused, where a pass takes a second and a row no time."""
    pricing = Pricing(FREE)
    guard = Guard(pricing)
    policy = Policy(Silent(), pricing=pricing, guard=guard)
    for _ in range(rounds):
        policy.observe(Step(committed, draft, len(committed) - 1, 0.0, 1.0, seconds))
    return guard.reason is not None


def test_sources_have_no_credit_for_what_is_forced() -> None:
    """Three tokens in 1.8 seconds are more than plain decoding's, but two of them came for nothing."""
    assert _loses(_behind_forced(3), (1, 2, 9), 1.8)
    assert not _loses(_behind_forced(3), (1, 2, 3, 9), 1.8)
    assert not _loses(_behind_forced(), (1, 2, 9), 1.8)  # no source drafted in these


def test_ngrams_learn_from_where_they_were_asked() -> None:
    ngrams = NgramDrafter()
    text = [7, 8, 9, 10] * 6
    before = ngrams.propose(text, 4).confidence[0]
    for _ in range(20):
        ngrams.propose(text, 4)
        ngrams.observe(Step((1, 2, 7, 8, 9, 10), _behind_forced(7, 8, 9, 10)))
    assert ngrams.propose(text, 4).confidence[0] > before
