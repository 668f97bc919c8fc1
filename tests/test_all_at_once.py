"""N-grams, a history and a drafter, all at once: the tokens are those of plain decoding."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgespec
from edgespec import History, LoadOptions
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.copies import CopyDrafter
from edgespec.drafting.model import Calibration
from edgespec.drafting.ngram import ContextTree
from edgespec.drafting.policy import Policy
from edgespec.drafting.pricing import Guard, Pricing
from edgespec.history.memory import Snapshot
from edgespec.history.use import HistoryUse
from edgespec.measuring.audit import audit_answers, audit_sampling
from edgespec.measuring.chi_square import pool_rare, two_samples
from edgespec.measuring.prompts import Prompt
from edgespec.running.verifier import Verifier
from edgespec_runtimes.cost import CostCurve
from tests.kit.drafters import GREEDY, Timed, model_of, plain
from tests.kit.native import tiny_native
from tests.kit.toy import LLAMA, ToySession, decode, markov_logits
from tools.replay import Clock

VOCAB = 12
NEXT_LOGITS, OTHER = (markov_logits(seed, VOCAB, scale=1.0) for seed in (1, 2))
FLAT = CostCurve({1: 1.0, 64: 1.0001})


class _Machine:
    """A target, and all that drafts for it, over many requests; the model in two of three."""

    def __init__(self) -> None:
        self.use = HistoryUse(Snapshot(), None, None)
        self.pricing, self.calibration = Pricing(FLAT), Calibration()
        self.guards = Guard(self.pricing), Guard(self.pricing)
        self.requests = 0
        self.accepted = dict.fromkeys(("ngram", "history", "model"), 0)
        self.clock = Clock()
        self.target = Timed(NEXT_LOGITS, VOCAB, self.clock, CostCurve({1: 1.0}))

    def answer(self, prompt: Sequence[int], params: SamplingParams, count: int) -> list[int]:
        tokens = list(prompt)
        model = model_of(self._trained(), calibration=self.calibration)
        free = CopyDrafter(ContextTree(), self.use.begin(self.guards[1]))
        self.requests += 1
        drafter = model if self.requests % 3 else None
        policy = Policy(free, drafter, pricing=self.pricing, guard=self.guards[0])
        ends = partial(decode, max_new_tokens=count, max_draft=4, clock=self.clock, prices=self.pricing.at())
        for step in ends(self.target, policy, Verifier(params), tokens):
            for source in step.draft.sources[: step.accepted]:
                self.accepted[source] += 1
        policy.close()
        return tokens

    def _trained(self) -> ToySession:
        """Another drafter for each request, nearer and nearer to the target, as training makes it."""
        share = self.requests / (self.requests + 10.0)
        return ToySession(lambda text: share * NEXT_LOGITS(text) + (1.0 - share) * OTHER(text), VOCAB)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=6),
    st.sampled_from([GREEDY, SamplingParams(temperature=1.0, seed=3)]),
)
def test_every_token_is_that_of_plain_decoding(prompts: list[list[int]], params: SamplingParams) -> None:
    machine = _Machine()
    for prompt in prompts:
        assert machine.answer(prompt, params, 40) == plain(NEXT_LOGITS, 40, params, prompt)


def test_every_source_has_its_share() -> None:
    """Else the tests around this one would show nothing."""
    machine = _Machine()
    for number in range(60):
        machine.answer([number % VOCAB], SamplingParams(temperature=1.0, seed=number), 40)
    assert min(machine.accepted.values()) > 10


def test_samples_keep_their_law_while_everything_learns_from_them() -> None:
    """Without a seed in common: 1,000 answers of four tokens each way, Pearson's chi-square."""
    machine = _Machine()
    drawn: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}
    for number in range(1000):
        fixed, learning = (SamplingParams(temperature=1.0, seed=2 * number + learns) for learns in (0, 1))
        drawn[False].append(tuple(plain(NEXT_LOGITS, 4, fixed, [1, 2])[2:]))
        drawn[True].append(tuple(machine.answer([1, 2], learning, 4)[2:]))
    assert machine.accepted["model"] > 100 and machine.accepted["history"] > 30
    counts = pool_rare(drawn[False], drawn[True], minimum=20)
    p_value = two_samples(*counts).p_value
    assert len(counts[0]) > 10
    assert p_value is not None and p_value > 1e-3


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny_native(folder / "target", LLAMA)
    return target.path, tiny_native(folder / "drafter", LLAMA, "Q8_0", role="drafter").path


@pytest.fixture
def eager(free_passes: None, drafter_reads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter is asked in every round."""
    monkeypatch.setattr("edgespec.drafting.pricing.Prices.pays", lambda self, *_, **__: True)
    monkeypatch.setattr("edgespec.drafting.policy.Policy.__init__", _asking_the_model)


_policy = Policy.__init__


def _asking_the_model(self: Policy, *sources: Any, **options: Any) -> None:
    _policy(self, *sources, **options)
    self._model_surplus = 1e9


def test_a_model_with_a_history_learns_and_answers_as_ever(bundles: tuple[Path, Path], eager: None) -> None:
    target, drafter = bundles
    with edgespec.load(target, None, options=LoadOptions(threads=1)) as model:
        plain = model.generate("x = 1", max_new_tokens=40, stop_at_eos=False)
    with edgespec.load(target, drafter, options=LoadOptions(threads=1), history="me") as model:
        result = model.generate("x = 1", max_new_tokens=40, stop_at_eos=False)
    assert result.tokens == plain.tokens
    assert result.stats.by_source["model"].accepted > 0
    assert result.stats.rolled_back == () and result.stats.to_json()["rolled_back"] == []
    assert sum(History("me").namespaces().values()) > 20


def test_an_audit_of_a_model_with_a_history_covers_what_is_learned(
    bundles: tuple[Path, Path], eager: None
) -> None:
    with edgespec.load(*bundles, options=LoadOptions(threads=1), history="me") as model:
        greedy = audit_answers(model, [Prompt("a", "code", ("def add(a, b):",))], max_new_tokens=16)
        sampling = audit_sampling(model, samples=20, texts=["3 1 6 2 2 5 4 1 3 6 5 4 2 1 1 6 3 5"])
    assert greedy["identical"] == 1 and greedy["drafted"] > 0
    seeds = sampling["equal_seeds"]
    assert seeds["pairs"] == seeds["identical"] > 0
    assert History("me").show()
