"""The promise of the whole project: with any drafter, the output is that of decoding without one."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.draft import NO_DRAFT, Passed, Round
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.bridge import ByteBridge
from edgespec.drafting.copies import CopyDrafter
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import ContextTree
from edgespec.drafting.policy import Policy
from edgespec.drafting.pricing import Prices
from edgespec.drafting.source import Extending, Source, Wanted
from edgespec.running.verifier import Verifier
from edgespec_models.decoders.transformer import Transformer
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Session
from tests.kit.drafters import GREEDY, model_of, policy_of, tokenizer
from tests.kit.machines import X86
from tests.kit.native import tiny_native
from tests.kit.tokenizers import CORPUS
from tests.kit.toy import (
    COLUMNS,
    GEMMA,
    LLAMA,
    PRICES,
    RandomDrafter,
    Silent,
    ToySession,
    decode,
    in_loop,
    loop_of,
    markov_logits,
    tiny_bundle,
)

SCRIPT = "\n".join(CORPUS).encode()


def ngrams() -> CopyDrafter:
    return CopyDrafter(ContextTree())


def _across(kind: str, seed: int, *, script: bool) -> ModelDrafter:
    """A drafter of another vocabulary for prompts of 3 tokens; by script often right, else hardly ever."""
    other = tokenizer(kind)
    prompt = other.encode("go on: ")
    session = (
        ToySession.writing(other, SCRIPT, len(prompt))
        if script
        else ToySession.markov(seed, other.vocab_size, scale=50.0)
    )
    bridge = ByteBridge(tokenizer("byte"), other, prompt_length=3, drafter_prompt=prompt)
    return model_of(session, bridge)


def _drafters(seed: int) -> dict[str, Callable[[], Source | Extending | Policy]]:
    """Every kind of drafter for a target with the tokenizer ``byte``."""
    vocab = tokenizer("byte").vocab_size
    oracle = markov_logits(0, vocab)
    across = {
        f"{what}, {kind}": partial(_across, kind, seed, script=what == "script")
        for what in ("across", "script")
        for kind in ("small byte", "sentencepiece")
    }
    return across | {
        "ngram": lambda: CopyDrafter(ContextTree(), stop_below=0.0),
        "random": lambda: RandomDrafter(seed, vocab),
        "oracle with errors": lambda: RandomDrafter(seed, vocab, oracle),
        "same model": lambda: model_of(ToySession(oracle, vocab)),
        "other model": lambda: model_of(ToySession.markov(seed, vocab, scale=50.0)),
        "policy": lambda: policy_of(ngrams(), _across("sentencepiece", seed, script=True)),
        "policy with an oracle": lambda: policy_of(
            CopyDrafter(ContextTree()), model_of(ToySession(oracle, vocab))
        ),
    }


DRAFTERS = tuple(_drafters(0))


def _drafter(kind: str, seed: int = 0) -> Source | Extending | Policy:
    return _drafters(seed)[kind]()


def _target(script: bool) -> ToySession:
    target = tokenizer("byte")
    return ToySession.writing(target, SCRIPT, 3) if script else ToySession.markov(0, target.vocab_size)


def _plain(
    target: Session, prompt: list[int], count: int, params: SamplingParams = GREEDY, stop: Sequence[int] = ()
) -> list[int]:
    """Without the loop: one token after another."""
    tokens, verify = list(prompt), Verifier(params)
    target.rewind(0)
    while len(tokens) < len(prompt) + count:
        tokens.append(verify(target.predict_next(tokens), NO_DRAFT, tokens)[1])
        if tokens[-1] in stop:
            break
    return tokens


class _Watched(Source):
    """A source that is asked for no more than may come, and told of every round."""

    def __init__(self, inner: Source | Extending | Policy, first: int, end: int, max_draft: int) -> None:
        self.inner, self.told = in_loop(inner), list[Round]()
        self._first, self._end, self._max_draft = first, end, max_draft

    def begin(self, tokens: Sequence[int], limit: int, prices: Prices) -> Wanted:
        assert len(tokens) >= self._first
        assert 0 < limit == min(self._max_draft, self._end - len(tokens) - 1)
        return self.inner.begin(tokens, limit, prices)

    def take(self, predictions: Predictions, passed: Passed) -> Wanted:
        return self.inner.take(predictions, passed)

    def observe(self, round_: Round) -> None:
        self.told.append(round_)
        self.inner.observe(round_)

    def close(self) -> None:
        raise AssertionError("the loop closes nothing")


def _run(
    target: Session,
    drafter: Source | Extending | Policy | None,
    prompt: list[int],
    *,
    count: int,
    max_draft: int = 4,
    verify: Verifier | None = None,
    stop: Collection[int] = (),
) -> tuple[list[int], int]:
    """Decode, checking the invariants at every yield; returns all tokens, and how many drafts were kept."""
    tokens, end = list(prompt), len(prompt) + count
    source = _Watched(drafter or policy_of(), len(prompt), end, max_draft)
    verify = verify or Verifier(GREEDY)
    rounds = decode(target, source, verify, tokens, max_new_tokens=count, max_draft=max_draft, stop=stop)
    seen, before = list[Round](), len(prompt)
    for round_ in rounds:
        seen.append(round_)
        assert source.told == seen
        assert target.length == len(tokens) - 1
        assert (target.cache if isinstance(target, ToySession) else target.stretch.tokens) == tokens[:-1]
        assert tokens[before:] == list(round_.tokens)
        assert round_.accepted in (len(round_.tokens), len(round_.tokens) - 1)
        assert round_.accepted <= len(round_.draft.tokens) <= max_draft
        assert len(round_.draft.confidence) == len(round_.draft.sources) == len(round_.draft.tokens)
        assert round_.draft.tokens[: round_.accepted] == round_.tokens[: round_.accepted]
        assert round_.drafter_s >= 0 and round_.target_s >= 0
        assert round_.seconds >= round_.drafter_s + round_.target_s
        assert len(tokens) <= end and not {*round_.draft.tokens[:-1]} & {*stop}
        before = len(tokens)
    return tokens, sum(round_.accepted for round_ in seen)


SAMPLED = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.6, repetition_penalty=1.3),
)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("script", [False, True])
@settings(max_examples=12, deadline=None)
@given(
    params=st.sampled_from((GREEDY, *SAMPLED)),
    seed=st.integers(0, 1000),
    count=st.integers(1, 70),
    max_draft=st.integers(1, 9),
)
def test_output_is_that_of_plain_decoding(
    kind: str, script: bool, params: SamplingParams, seed: int, count: int, max_draft: int
) -> None:
    params, prompt = replace(params, seed=seed), [seed % 400, 7, 9]
    expected = _plain(_target(script), prompt, count, params)
    drafter, verify = _drafter(kind, seed), Verifier(params)
    result, _ = _run(_target(script), drafter, prompt, count=count, max_draft=max_draft, verify=verify)
    assert result == expected


@pytest.mark.parametrize(
    ("kind", "script"),
    [("same model", False), ("oracle with errors", False), ("ngram", True), ("policy", True)]
    + [(f"script, {k}", True) for k in ("small byte", "sentencepiece")],
)
def test_drafts_that_should_be_accepted_are(kind: str, script: bool) -> None:
    """Or the test above would show nothing."""
    target = _target(script)
    _, accepted = _run(target, _drafter(kind, 1), [5, 7, 9], count=300, max_draft=6)
    assert accepted > 75
    assert len(target.passes) < 230


@pytest.mark.parametrize("kind", ["oracle with errors", "same model", "script, sentencepiece"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), where=st.integers(0, 50), max_draft=st.integers(1, 9))
def test_a_stop_token_ends_the_text_wherever_it_stands(
    kind: str, seed: int, where: int, max_draft: int
) -> None:
    script = kind.startswith("script")
    prompt = [seed % 400, 7, 9]
    free = _plain(_target(script), prompt, 60)
    stop = free[len(prompt) + where]
    expected = _plain(_target(script), prompt, 60, stop=[stop])
    assert expected[-1] == stop and stop not in expected[len(prompt) : -1]
    target = _target(script)
    result, _ = _run(target, _drafter(kind, seed), prompt, count=60, max_draft=max_draft, stop={stop, 9999})
    assert result == expected
    assert target.length == len(result) - 1


@pytest.mark.parametrize("kind", ["same model", "random", "ngram"])
@pytest.mark.parametrize("prompt", [[5], [1, 2, 3]])
def test_as_many_tokens_as_asked_for(kind: str, prompt: list[int]) -> None:
    for count in (0, 1, 2, 3, 7):
        result, _ = _run(_target(False), _drafter(kind, 3), prompt, count=count, max_draft=9)
        assert result == _plain(_target(False), prompt, count)


def test_a_prompt_is_read_a_pass_a_round_from_where_the_cache_ends() -> None:
    target, tokens = _target(False), [*range(24)]
    target.prefill(range(5))
    target.passes.clear()
    decoding = loop_of(target, in_loop(Silent()), Verifier(GREEDY), tokens, max_new_tokens=2, max_draft=3)
    left = list[int]()
    while decoding.reason is None:
        assert decoding.propose(PRICES) is None
        rows = decoding.rows(8, 0)
        left.append(decoding.unread)
        (said,) = target.model.predict_together([rows])
        round_ = decoding.commit(said, Passed(1, 0.0, 0.0))
        assert (round_ is None) == (decoding.unread > 0)
    assert target.passes == [8, 8, 3, 1] and left == [18, 10, 2, 0]
    assert len(tokens) == 26 and target.cache == tokens[:-1]


@pytest.mark.parametrize("portable", [False, pytest.param(True, marks=X86)])
@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=lambda config: config.architecture)
def test_real_graphs_keep_the_promise(tmp_path: Path, config: Transformer, portable: bool) -> None:
    """Target and drafter on ONNX Runtime, int4, the drafter of another vocabulary and of the same."""
    options = CpuOptions(threads=1)
    folder = tmp_path / "target"
    model = tiny_bundle(folder, config, COLUMNS) if portable else tiny_native(folder, config, "Q4_1")
    target = open_cpu(model.bundle, options)
    assert target.model.row_exact
    prompt = [5, 7, 9]
    expected = _plain(target, prompt, 60)
    small = open_cpu(tiny_native(tmp_path / "drafter", LLAMA, "Q4_0", seed=5).bundle, options)
    same = open_cpu(model.bundle, options)
    bridge = ByteBridge(tokenizer("byte"), tokenizer("byte"), prompt_length=3, drafter_prompt=[1, 2])
    for drafter, least in (
        (model_of(small, bridge), 0),
        (model_of(same), 20),
        (RandomDrafter(1, 404, None), 0),
        (CopyDrafter(ContextTree(), stop_below=0.0), 0),
    ):
        target.rewind(0)
        result, accepted = _run(target, drafter, prompt, count=60, max_draft=5)
        assert result == expected and accepted >= least
