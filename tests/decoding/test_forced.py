"""Under a grammar, with any drafter, the output is plain constrained decoding's, and fits the grammar."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.draft import NO_DRAFT, Draft, Round
from edgespec.decoding.grammar import Allowed, Choice, Constraint, Grammars, JsonSchema, Regex, ResponseFormat
from edgespec.decoding.sampling import Row, SamplingParams
from edgespec.drafting.bridge import ByteBridge
from edgespec.drafting.copies import CopyDrafter
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import ContextTree
from edgespec.drafting.policy import Policy
from edgespec.drafting.source import Extending, Source
from edgespec.measuring.chi_square import pool_rare, two_samples
from tests.kit.drafters import GREEDY, draft_of, model_of, policy_of, tokenizer
from tests.kit.formats import NEW, PROMPT, accepts, formats, written
from tests.kit.toy import Deaf, RandomDrafter, Silent, ToySession, markov_logits

SPEED = JsonSchema(
    {
        "type": "object",
        "properties": {"the drafter": {"type": "boolean"}, "the target": {"enum": ["same", "other"]}},
        "required": ["the drafter", "the target"],
        "additionalProperties": False,
    }
)


@lru_cache
def ends(kind: str) -> tuple[int, ...]:
    texts = ("<|im_end|>", "<|endoftext|>") if kind == "byte" else ("<eos>",)
    ids = [tokenizer(kind).special_id(text) for text in texts]
    return tuple(id_ for id_ in ids if id_ is not None)


@lru_cache
def grammars(kind: str) -> Grammars:
    return Grammars(tokenizer(kind), ends(kind))


markov = lru_cache(maxsize=4)(markov_logits)


def plain(constraint: Constraint) -> Source | Policy:
    return Silent()


def write(
    wanted: ResponseFormat,
    source_of: Callable[[Constraint], Source | Policy] = plain,
    *,
    kind: str = "byte",
    seed: int = 0,
    params: SamplingParams = GREEDY,
) -> tuple[list[int], list[Round]]:
    """What a random target writes under a format: its answer, and the rounds."""
    constraint = grammars(kind).constraint(wanted)
    target = ToySession(markov(seed, tokenizer(kind).vocab_size), tokenizer(kind).vocab_size)
    return written(target, source_of(constraint), constraint, params, ends(kind))


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


def under(free: Extending, model: Source | None = None) -> Callable[[Constraint], Source | Policy]:
    return lambda constraint: policy_of(free, model, constraint=constraint)


def drafters(kind: str, seed: int) -> dict[str, Callable[[Constraint], Source | Policy]]:
    vocab = tokenizer(kind).vocab_size
    oracle = markov(seed, vocab)
    return {
        "forced": under(Silent()),
        "ngrams": under(CopyDrafter(ContextTree(), stop_below=0.0)),
        "ngrams and model": under(CopyDrafter(ContextTree(), stop_below=0.0), across(kind, seed)),
        "random": under(RandomDrafter(seed, vocab, oracle)),
        "random, uncut": lambda c: RandomDrafter(seed, vocab, oracle),
        "the target without the grammar": under(Silent(), model_of(ToySession(oracle, vocab))),
    }


KINDS = ("byte", "sentencepiece")
NAMES = tuple(drafters("byte", 0))


@settings(max_examples=100, deadline=None)
@given(formats, st.sampled_from(KINDS), st.sampled_from(NAMES), st.integers(0, 99), st.booleans())
def test_output_is_plain_constrained_decodings(
    wanted: ResponseFormat, kind: str, name: str, seed: int, greedy: bool
) -> None:
    sampled = SamplingParams(temperature=1.5, top_p=0.95, repetition_penalty=1.2, seed=seed)
    params = GREEDY if greedy else sampled
    expected, _ = write(wanted, kind=kind, seed=seed, params=params)
    answer, _ = write(wanted, drafters(kind, seed)[name], kind=kind, seed=seed, params=params)
    assert ended(answer, kind, name) == ended(expected, kind, name)
    if len(answer) < NEW:
        assert accepts(wanted, text_of(answer, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_forced_tokens_are_drafts_that_are_always_accepted(kind: str) -> None:
    expected, plain = write(SPEED, kind=kind)
    answer, rounds = write(SPEED, drafters(kind, 0)["forced"], kind=kind)
    assert answer == expected and len(rounds) < len(plain) / 2
    assert all(round_.accepted == len(round_.draft.tokens) for round_ in rounds)
    assert {source for round_ in rounds for source in round_.draft.sources} == {"grammar"}


def test_a_draft_is_cut_where_the_grammar_forbids_it_and_what_is_forced_follows() -> None:
    constraint = grammars("byte").constraint(Choice(["12x", "12y3456789"]))
    y, other, one = tokenizer("byte").encode_bytes(b"yx1")

    class Proposing(Deaf):
        def propose(self, tokens: Sequence[int], limit: int) -> Draft:
            assert tokenizer("byte").bytes_of(tokens) == b"12"
            return Draft((y, other, one), ("said",) * 3, (0.5, 0.4, 0.3))

    draft = draft_of(policy_of(Proposing(), constraint=constraint, opening=NO_DRAFT), [], 40)
    assert tokenizer("byte").bytes_of(draft.tokens) == b"12y345678"  # the last completes the text
    at = draft.sources.index("said")
    assert tokenizer("byte").bytes_of(draft.tokens[:at]) == b"12" and draft.tokens[at] == y
    assert set(draft.sources[:at] + draft.sources[at + 1 :]) == {"grammar"}
    assert set(draft.confidence[:at] + draft.confidence[at + 1 :]) == {1.0}


def test_the_token_that_completes_the_text_is_not_proposed() -> None:
    """Neither forced, nor from a source; the pass gives it without."""
    wanted = Choice(["the output stays the same"])
    answer, rounds = write(wanted, drafters("byte", 0)["forced"])
    assert text_of(answer) == wanted.texts[0] and answer[-1] not in ends("byte")
    assert [*rounds[-1].draft.tokens] == answer[-1 - len(rounds[-1].draft.tokens) : -1]


def test_the_grammar_follows_what_is_taken_back() -> None:
    """Proposals are read, rolled back and read again; masks stay those of a fresh constraint."""
    wanted = Regex("(the|that|[a-f]{2}){1,4}")
    spell = tokenizer("byte").encode
    used = grammars("byte").constraint(wanted)
    for words in (["the", "that"], ["a", "b", "the"], [], ["th", "a", "t", "f"]):
        drafted = [token for part in words for token in spell(part)]
        for at in range(len(drafted) + 1):
            fresh = grammars("byte").constraint(wanted)
            row, other = np.zeros((2, 410), np.float32)
            used.apply(row, drafted[:at])
            fresh.apply(other, drafted[:at])
            assert np.array_equal(row, other)


def test_samples_follow_the_distribution_of_plain_constrained_sampling() -> None:
    def samples(source_of: Callable[[Constraint], Source | Policy], first: int) -> list[tuple[int, ...]]:
        params = (SamplingParams(temperature=2.0, seed=first + each) for each in range(250))
        answers = (write(Regex("[ad]{4}"), source_of, params=param)[0] for param in params)
        return [tuple(token for token in answer if token not in ends("byte")) for answer in answers]

    two = samples(plain, 0), samples(drafters("byte", 1)["ngrams and model"], 10_000)
    first, second = pool_rare(*two, minimum=24)
    assert len(first) > 6
    p_value = two_samples(first, second).p_value
    assert p_value is not None and p_value > 1e-4


def test_sources_are_judged_by_what_came_where_they_were_asked() -> None:
    whole = (*PROMPT, *write(SPEED)[0])
    asked, judged = list[int](), list[tuple[int, ...]]()

    class Watching(Silent):
        def propose(self, tokens: Sequence[int], limit: int) -> Draft:
            asked[:] = tokens
            return NO_DRAFT

        def observe(self, round_: Round) -> None:
            if asked:
                judged.append((*asked, *round_.judged))
                asked.clear()

    write(SPEED, under(Watching()))
    assert len(judged) > 1 and all(tokens == whole[: len(tokens)] for tokens in judged)


class _Behind(Deaf):
    """Proposes the same each time."""

    def __init__(self, *proposed: int) -> None:
        self._proposed = proposed

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        count = len(self._proposed)
        return Draft(self._proposed, ("said",) * count, (0.5,) * count)


class _TwoForced(Constraint):
    """Forces 1 and 2, and then nothing."""

    def begin(self, tokens: Sequence[int]) -> None:
        pass

    def apply(self, row: Row, drafted: Sequence[int]) -> None:
        pass

    def ends(self, tokens: Sequence[int]) -> bool:
        return False

    def completes(self, drafted: Sequence[int]) -> bool:
        return False

    def allowed(self, drafted: Sequence[int]) -> Allowed:
        bits = np.full(32, len(drafted) > 1)
        bits[len(drafted) + 1] = True
        return Allowed.where(bits)


def _loses(source: _Behind, committed: tuple[int, ...], seconds: float, rounds: int = 40) -> bool:
    """Whether rounds like this have drafting paused, where a pass takes a second and a row no time."""
    policy = policy_of(source, constraint=_TwoForced())
    for _ in range(rounds):
        draft = draft_of(policy, [0], 8)
        policy.observe(Round(committed, draft, len(committed) - 1, 0.0, 1.0, seconds))
    policy.close()
    return policy.remarks.speculation_off_reason is not None


def test_sources_have_no_credit_for_what_is_forced() -> None:
    """Three tokens in 1.8 seconds are more than plain decoding's, but two of them came for nothing."""
    assert _loses(_Behind(3), (1, 2, 9), 1.8)
    assert not _loses(_Behind(3), (1, 2, 3, 9), 1.8)
    assert not _loses(_Behind(), (1, 2, 9), 1.8)  # no source drafted in these


def test_ngrams_learn_from_where_they_were_asked() -> None:
    ngrams = CopyDrafter(ContextTree())
    text = [7, 8, 9, 10] * 6
    before = ngrams.propose(text, 4).confidence[0]
    for _ in range(20):
        ngrams.propose(text, 4)
        ngrams.observe(Round((1, 2, 7, 8, 9, 10), forced=2))
    assert ngrams.propose(text, 4).confidence[0] > before
