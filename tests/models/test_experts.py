"""Models whose layers have experts: what is refused, what passes say they read, and what rows then cost."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.drafting.pricing import Pricing
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.decoders.operations import Experts
from edgespec_models.decoders.transformer import Transformer
from edgespec_models.errors import UnsupportedModelError
from edgespec_runtimes.cost import CostCurve, ExpertCosts, measure_cost, measure_experts, recheck_cost
from edgespec_runtimes.cpu import open_cpu
from edgespec_runtimes.session import Session
from tests.kit.native import tiny_native
from tests.kit.toy import HALVES, LLAMA

EXPERTS = Experts(count=12, used=3, width=32, dense_layers=1)
CONFIG = replace(LLAMA, architecture="qwen3", num_layers=3, rope=HALVES, experts=EXPERTS)
COSTS = ExpertCosts(read_s=0.001, used=10, overlap=0.1)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    shared = replace(EXPERTS, shared_width=64, shared_gate=True)
    model = tiny_native(
        tmp_path_factory.mktemp("experts") / "bundle", replace(CONFIG, experts=shared), "Q8_0"
    )
    with closing(open_cpu(Bundle(model.path))) as opened:
        yield opened


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("a token uses 13 experts; there are 12", {"used": 13}),
        ("used", {"used": 0}),
        ("gating", {"gating": "hash"}),
        ("shared_gate is true", {"shared_gate": True}),
    ],
)
def test_impossible_experts_are_refused(words: str, facts: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        replace(EXPERTS, **facts)


def test_a_pass_says_how_many_experts_it_read(session: Session) -> None:
    assert session.self_test()
    routed = 2 * EXPERTS.used  # two layers have some
    session.predict([5])
    assert session.model.experts_read == routed
    session.predict([9, 80, 300, 12, 7])
    assert routed <= session.model.experts_read <= min(5 * routed, 2 * EXPERTS.count)


def test_what_experts_cost_is_measured_where_there_are_some(session: Session) -> None:
    measured = measure_experts(session, measure_cost(session, rows=(1, 2, 8)))
    assert session.length == 0
    if measured.experts is not None:  # else eight rows of any kind use the same
        assert measured.experts.used == 2 * EXPERTS.used
        assert measured.experts.read_s >= 0 and 0 < measured.experts.overlap <= 1
    rechecked = recheck_cost(session, measured, 8)
    assert rechecked is None or (rechecked.experts is None) == (measured.experts is None)


@given(st.integers(2, 64), st.floats(0.02, 1.0))
def test_the_overlap_is_what_a_count_tells(rows: int, overlap: float) -> None:
    read = COSTS.expected(rows, overlap)
    assert COSTS.used <= read <= COSTS.used * rows
    if read < 0.99 * COSTS.used / overlap or rows == 2:  # more rows find nothing new, whatever they share
        assert COSTS.overlap_of(rows, read) == pytest.approx(overlap, abs=2e-3)


def test_rows_are_as_dear_as_their_experts() -> None:
    curve = CostCurve({1: 0.020, 2: 0.029, 4: 0.0444, 8: 0.0657}, experts=COSTS)
    pricing, plain = Pricing(curve), Pricing(replace(curve, experts=None))
    # A quarter is shared until passes tell, which is more than the measured tokens did.
    assert pricing.at().pass_seconds(1) == pytest.approx(plain.at().pass_seconds(1))
    assert pricing.at().pass_seconds(2) == pytest.approx(0.029 - 0.001 * 10 * 0.15)
    for _ in range(100):
        pricing.observe_pass(4, 0.0444 - 0.001 * (COSTS.expected(4) - 12), 12)
    assert pricing.at().pass_seconds(4) == pytest.approx(0.0444 - 0.001 * (COSTS.expected(4) - 12), rel=0.01)
    assert pricing.at().pass_seconds(2) < 0.0225 < plain.at().pass_seconds(2)
    for _ in range(100):  # others that share nothing
        pricing.observe_pass(4, 0.0444 + 0.001 * (40 - COSTS.expected(4)), 40)
    assert pricing.at().pass_seconds(2) == pytest.approx(0.030, rel=0.02)


def test_a_draft_of_rows_that_share_experts_is_longer() -> None:
    curve = CostCurve({1: 0.020, 2: 0.029, 4: 0.0444, 8: 0.0657}, experts=COSTS)
    alike, apart = Pricing(curve), Pricing(curve)
    for _ in range(100):
        alike.observe_pass(4, 0.0444 - 0.001 * (COSTS.expected(4) - 11), 11)
        apart.observe_pass(4, 0.0444 + 0.001 * (39 - COSTS.expected(4)), 39)
    confidence = [0.6, 0.6, 0.6]
    assert alike.at().keep(confidence)[0] == 3 > apart.at().keep(confidence)[0]
    assert sum(alike.at().share([confidence])) == 3


def test_a_pass_of_one_row_reads_the_experts_that_it_uses(tmp_path: Path) -> None:
    manifest = Bundle(tiny_native(tmp_path / "bundle", CONFIG, "Q8_0").path).manifest
    weighed = replace(
        manifest, bytes_by_class={"embedding": 7, "attention": 100, "experts": 2400, "other": 3}
    )
    assert isinstance(weighed.config, Transformer)
    assert weighed.bytes_per_pass == 100 + 2400 * 3 // 12
    assert weighed.expert_bytes == 2400 / (12 * 2)


def test_each_source_has_the_overlap_of_its_rows() -> None:
    """A copy repeats tokens that other experts know already; guesses of a model do not."""
    curve = CostCurve({1: 0.01, 8: 0.01 + 7 * 0.009}, experts=COSTS)
    pricing = Pricing(curve)
    for _ in range(200):
        for source, overlap in (("ngram", 0.9), ("model", 0.1)):
            read = round(COSTS.expected(4, overlap))
            seconds = curve.seconds(4) + COSTS.read_s * (read - COSTS.expected(4))
            pricing.observe_pass(4, seconds, read, source)
    copies, guesses = (pricing.at().rows_seconds(3, source=source) for source in ("ngram", "model"))
    assert copies < 0.5 * guesses
    assert copies < pricing.at().rows_seconds(3) < guesses
    kept = [pricing.at().keep([0.55] * 4, source)[0] for source in ("ngram", "model")]
    assert kept[0] > kept[1]
