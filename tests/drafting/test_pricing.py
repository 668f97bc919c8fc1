from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.decoding.draft import Load
from edgespec.drafting.pricing import Pricing
from edgespec_runtimes.cost import CostCurve, ExpertCosts

FLAT = CostCurve({1: 0.010, 2: 0.011, 4: 0.012, 8: 0.014})
"""A memory-bound target: more rows cost next to nothing."""
STEEP = CostCurve({1: 0.010, 2: 0.020, 4: 0.040, 8: 0.080})
"""A compute-bound target: verifying a token costs what decoding one does."""

probabilities = st.lists(st.floats(0.0, 1.0), max_size=12)
curves = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8).map(
    lambda steps: CostCurve({n: sum(steps[:n]) for n in range(1, len(steps) + 1)})
)


def _surplus(pricing: Pricing, confidence: list[float], count: int) -> float:
    """Expected accepted tokens less what the time would yield otherwise, from the definition."""
    expected: float = [0.0, *accumulate(accumulate(confidence, mul))][count]
    return expected - pricing.at().rate * (
        pricing.at().pass_seconds(count + 1) - pricing.at().pass_seconds(1)
    )


@given(curves, probabilities, st.floats(0.0, 500.0))
@example(CostCurve({1: 1.0, 8: 1.0}), [0.5, 0.0, 0.0], 0.0)
def test_keep_finds_the_best_prefix(curve: CostCurve, confidence: list[float], realised: float) -> None:
    pricing = Pricing(curve)
    for _ in range(50):
        pricing.observe_round(1, 1.0 / max(realised, 1e-3))
    every = [_surplus(pricing, confidence, count) for count in range(len(confidence) + 1)]
    count, surplus = pricing.at().keep(confidence)
    assert surplus == max(every)
    assert count == every.index(surplus)  # of equals the shortest


@given(curves, st.floats(0.0, 1.0), st.integers(1, 10), st.floats(0.0, 0.1))
def test_a_token_pays_when_its_gain_is_worth_more_than_its_time(
    curve: CostCurve, survival: float, rows: int, drafting_s: float
) -> None:
    pricing = Pricing(curve)
    price = (drafting_s + curve.seconds(rows + 1) - curve.seconds(rows)) / curve.seconds(1)
    if abs(survival - price) > 1e-9:
        assert pricing.at().pays(survival, rows, drafting_s) == (survival > price)


@given(curves, st.integers(1, 11), st.floats(0.0, 0.05), st.floats(0.0, 1.0))
def test_a_draft_of_tokens_that_each_pay_beats_plain_decoding(
    curve: CostCurve, limit: int, drafting_s: float, probability: float
) -> None:
    """Expected tokens per second of the rounds: never less than plain decoding's."""
    pricing = Pricing(curve)
    drafted, survival, committed = 0, 1.0, 1.0
    while drafted < limit and pricing.at().pays(survival * probability, 1 + drafted, drafting_s):
        survival *= probability
        committed += survival
        drafted += 1
    seconds = curve.seconds(1 + drafted) + drafted * drafting_s
    assert committed / seconds >= (1 - 1e-9) / curve.seconds(1)


CLIFF = CostCurve({1: 0.010, 2: 0.018, 3: 0.018, 4: 0.018})


@pytest.mark.parametrize(
    ("curve", "confidence", "kept"),
    [
        (STEEP, [0.99] * 8, 0),
        (STEEP, [], 0),
        (FLAT, [0.0, 1.0], 0),
        (FLAT, [0.9] * 7, 7),
        (FLAT, [0.9, 0.9, 0.01, 0.9], 2),
        (CLIFF, [0.7], 0),
        (CLIFF, [0.7, 1.0, 1.0], 3),  # jumped where what lies behind it pays
    ],
)
def test_likely_tokens_are_kept_where_verification_is_cheap(
    curve: CostCurve, confidence: list[float], kept: int
) -> None:
    count, surplus = Pricing(curve).at().keep(confidence)
    assert count == kept and (surplus > 0.0) == (kept > 0)


def test_a_cliff_is_drafted_over_where_several_tokens_pay_and_one_does_not() -> None:
    pairs = Pricing(CostCurve({1: 0.010, 2: 0.010, 3: 0.016, 4: 0.016, 5: 0.022, 6: 0.022}))
    assert not pairs.at().pays(0.6, 2, 0.001)
    assert pairs.at().pays(0.6, 2, 0.001, typical=0.8)
    assert not pairs.at().pays(0.6, 2, 0.001, typical=0.1)
    assert not pairs.at().pays(0.2, 2, 0.001, typical=0.8)
    assert not pairs.at().pays(0.6, 2, 0.004, typical=0.8)  # each token has to be drafted


def test_time_is_dearer_when_rounds_realise_more() -> None:
    pricing = Pricing(FLAT)
    assert pricing.at().rate == pricing.at().plain_rate == pytest.approx(100.0)
    assert pricing.at().pays(0.3, 1, 0.001)
    for _ in range(200):
        pricing.observe_round(4, 0.016)
    assert pricing.at().rate == pytest.approx(250.0, rel=0.01)
    assert not pricing.at().pays(0.3, 1, 0.001)
    for _ in range(200):
        pricing.observe_round(1, 0.050)  # slow rounds bring the price back down, to plain decoding's
    assert pricing.at().rate == pytest.approx(100.0, rel=0.01)
    assert pricing.at().pays(0.3, 1, 0.001)


def test_the_curve_follows_the_machine() -> None:
    pricing = Pricing(FLAT)
    for _ in range(80):
        for rows in (1, 2, 4):
            pricing.observe_pass(rows, 2 * FLAT.seconds(rows))
    for rows in (1, 2, 4):
        assert pricing.at().pass_seconds(rows) == pytest.approx(2 * FLAT.seconds(rows), rel=0.01)
    assert pricing.at().pass_seconds(8) == pytest.approx(2 * 0.014, rel=0.2)  # not seen: most of the way
    for _ in range(80):
        pricing.observe_pass(1, 0.010)
    assert pricing.at().pass_seconds(1) == pytest.approx(0.010, rel=0.02)


def test_a_slow_size_seen_alone_is_the_machine() -> None:
    pricing = Pricing(FLAT)
    for _ in range(80):
        pricing.observe_pass(4, 0.024)
    for rows in (1, 4, 8):
        assert pricing.at().pass_seconds(rows) == pytest.approx(2 * FLAT.seconds(rows), rel=0.01)


PASSES = {1: 0.0529, 2: 0.0578, 4: 0.0603, 6: 0.0612, 8: 0.0688, 16: 0.122, 32: 0.239}


def test_a_machine_that_throttles_makes_no_row_free() -> None:
    """Passes over one and four rows say all about the machine, and nothing of sizes between them."""
    curve = CostCurve(PASSES)
    pricing = Pricing(curve)
    for factor in (2.0, 1.0):
        for _ in range(200):
            for rows in (1, 4):
                pricing.observe_pass(rows, factor * curve.seconds(rows))
        for rows in range(1, 9):
            assert pricing.at().pass_seconds(rows) == pytest.approx(factor * curve.seconds(rows), rel=0.02)
        assert pricing.at().keep((0.9, 0.9, 0.9, 0.01, 0.01))[0] == 3


@given(
    curves,
    st.lists(st.tuples(st.integers(1, 12), st.floats(1e-6, 10.0), st.integers(0, 90)), max_size=60),
    st.integers(1, 4),
    st.floats(0.0, 1e4),
    st.booleans(),
)
@example(CostCurve(PASSES), [(1, 0.11, 0), (4, 0.12, 0)] * 60, 1, 0.0, False)
@example(CostCurve(PASSES), [(4, 0.6, 0), (8, 0.07, 0)] * 30, 1, 0.0, False)
@example(CostCurve({1: 0.001}), [(3, 1.0, 1)], 1, 0.0, True)  # the experts take longer than the pass
def test_more_rows_never_cost_less_whatever_passes_took(
    curve: CostCurve,
    passes: list[tuple[int, float, int]],
    sequences: int,
    context: float,
    is_mixture: bool,
) -> None:
    experts = ExpertCosts(0.001, 8, 0.25) if is_mixture else None
    pricing = Pricing(CostCurve(curve.seconds_by_rows, True, 1e-7, 1e-8, experts))
    for rows, seconds, read in passes:
        pricing.observe_pass(rows, seconds, read, "model" if read % 2 else "")
    prices = pricing.at(Load(sequences, context))
    for source in ("", "model"):
        times = [prices.pass_seconds(rows, source) for rows in range(1, 40)]
        assert times == sorted(times) and times[0] >= 0


@pytest.mark.parametrize("sizes", [(1,), (4,), (1, 4), (2, 3, 5, 6)])
def test_what_was_learned_survives_a_hiccup(sizes: tuple[int, ...]) -> None:
    """A neighbour makes passes twice as long for a while; then they take what they took before."""
    curve, pricing = CostCurve(PASSES), Pricing(CostCurve({1: 0.060, 8: 0.060}))
    for hiccup in (False, True, False):
        for _ in range(20 if hiccup else 100):
            for rows in sizes if hiccup else (1, 2, 4, 6):
                pricing.observe_pass(rows, (1 + hiccup) * curve.seconds(rows))
    for rows in (1, 2, 4, 6):
        assert pricing.at().pass_seconds(rows) == pytest.approx(curve.seconds(rows), rel=0.02)


def test_what_a_size_showed_long_ago_is_forgotten() -> None:
    pricing = Pricing(FLAT)
    for count, size, seconds in ((100, 4, 0.024), (20_000, 8, FLAT.seconds(8))):
        for _ in range(count):
            pricing.observe_pass(1, FLAT.seconds(1))
            pricing.observe_pass(size, seconds)
    assert pricing.at().pass_seconds(4) == pytest.approx(FLAT.seconds(4), rel=0.02)


def test_what_the_curve_got_wrong_for_one_size_stays_with_that_size() -> None:
    pricing = Pricing(FLAT)
    for _ in range(200):
        for _ in range(4):
            pricing.observe_pass(1, 0.010)
        pricing.observe_pass(4, 0.024)
    assert pricing.at().pass_seconds(1) == pytest.approx(0.010, rel=0.02)
    assert pricing.at().pass_seconds(4) == pytest.approx(0.024, rel=0.02)
    assert pricing.at().pass_seconds(2) < 0.015


@pytest.mark.parametrize(("seconds", "counts_as"), [(1e-6, 0.5), (30.0, 2.0)])
def test_a_disturbed_pass_counts_for_little_and_passes(seconds: float, counts_as: float) -> None:
    pricing, bounded = Pricing(FLAT), Pricing(FLAT)
    pricing.observe_pass(2, seconds)
    bounded.observe_pass(2, counts_as * FLAT.seconds(2))
    assert pricing.at().pass_seconds(2) == pytest.approx(bounded.at().pass_seconds(2))
    assert pricing.at().pass_seconds(1) == pytest.approx(0.010, rel=0.11)
    assert pricing.at().keep([0.9] * 7)[0] == 7
    for _ in range(200):
        pricing.observe_pass(1, 0.010)
    assert pricing.at().pass_seconds(1) == pytest.approx(0.010, rel=0.01)


@pytest.mark.parametrize("committed_seconds", [(1, 30.0), (9, 1e-3), (1, 0.0)])
def test_a_disturbed_round_does_not_decide_for_good(committed_seconds: tuple[int, float]) -> None:
    good, bad = [0.9] * 7, [0.01] * 7
    pricing = Pricing(FLAT)
    pricing.observe_round(*committed_seconds)
    for _ in range(100):
        pricing.observe_round(1, 0.010)
    assert pricing.at().keep(good)[0] == 7
    assert pricing.at().keep(bad)[0] == 0


@given(curves, st.lists(st.lists(st.floats(0.0, 1.0), max_size=4), min_size=1, max_size=4))
def test_the_rows_of_a_pass_go_to_whose_drafts_promise_most(
    curve: CostCurve, confidences: list[list[float]]
) -> None:
    """No other beginnings of the drafts are expected to bring more for their time."""
    prices = Pricing(curve).at(Load(len(confidences)))
    survivals = [list(accumulate(confidence, mul)) for confidence in confidences]

    def surplus(counts: Sequence[int]) -> float:
        expected = sum(sum(survival[:count]) for survival, count in zip(survivals, counts, strict=True))
        return expected - prices.rate * prices.rows_seconds(sum(counts))

    shared = prices.share(confidences)
    every = product(*(range(len(confidence) + 1) for confidence in confidences))
    assert surplus(shared) == pytest.approx(max(map(surplus, every)), abs=1e-9)
    assert prices.share(confidences[:1]) == [prices.keep(confidences[0])[0]]


def test_drafts_shrink_to_nothing_where_rows_of_others_fill_the_pass() -> None:
    """T(n) is flat up to eight rows, and steep behind."""
    pricing, drafts = Pricing(CostCurve({1: 1.0, 8: 1.05, 16: 2.0, 32: 4.0})), [[0.8, 0.7, 0.6]]
    each = []
    for sequences in (1, 2, 4, 8):
        each.append(sum(pricing.at(Load(sequences)).share(drafts * sequences)) / sequences)
    assert each == sorted(each, reverse=True) and (each[0], each[-1]) == (3, 0)


@given(curves, st.integers(1, 16))
def test_a_piece_of_a_prompt_makes_a_pass_at_most_thrice_as_long(curve: CostCurve, rows: int) -> None:
    pricing = Pricing(curve)
    count = pricing.at().piece(rows)
    assert 8 <= count <= 128
    assert count == 8 or pricing.at().pass_seconds(rows + count) <= 3 * pricing.at().pass_seconds(rows)


def test_drafts_are_shorter_where_rows_are_dear_along_a_context() -> None:
    pricing, confidence = (
        Pricing(CostCurve({1: 0.030, 8: 0.033}, True, 1e-6, 1.2e-6)),
        [0.9, 0.8, 0.7, 0.6, 0.5],
    )
    lengths = []
    for context in (0, 2000, 8000, 32000):
        lengths.append(pricing.at(Load(1, context)).keep(confidence)[0])
    assert lengths == [5, 5, 4, 3]


def test_each_request_of_a_pass_has_a_context() -> None:
    pricing = Pricing(CostCurve({1: 1.0, 8: 1.0}, True, 0.001, 0.0001))
    assert pricing.at(Load(3, 100)).pass_seconds(5) == pytest.approx(1.0 + 3 * 0.1 + 5 * 0.01)


MIXTURE = ExpertCosts(read_s=1e-5, used=384, overlap=0.3)
EXPERTS = CostCurve({1: 0.010, 2: 0.013, 4: 0.018, 8: 0.026}, experts=MIXTURE)


def _report(pricing: Pricing, rows: int, overlap: float, source: str) -> float:
    """Report a pass whose rows overlap so much, and return its seconds."""
    experts = round(MIXTURE.expected(rows, overlap))
    seconds = EXPERTS.seconds(rows) + MIXTURE.read_s * (experts - MIXTURE.expected(rows))
    pricing.observe_pass(rows, seconds, experts, source)
    return seconds


@pytest.mark.parametrize("rows", [2, 5, 8])
@pytest.mark.parametrize(("copied", "guessed"), [(0.8, 0.4), (0.35, 0.6)])
def test_the_rows_of_each_source_have_the_price_of_their_experts(
    rows: int, copied: float, guessed: float
) -> None:
    pricing = Pricing(EXPERTS)
    for _ in range(150):
        of_ngrams = _report(pricing, rows, copied, "ngram")
        of_model = _report(pricing, rows, guessed, "model")
    prices = pricing.at()
    assert prices.pass_seconds(rows, "ngram") == pytest.approx(of_ngrams, rel=2e-3)
    assert prices.pass_seconds(rows, "model") == pytest.approx(of_model, rel=2e-3)
    between = prices.pass_seconds(rows, "another")  # whose rows nobody has seen: as the late ones of all
    assert min(of_ngrams, of_model) < between < max(of_ngrams, of_model)
    assert prices.pass_seconds(1) == pytest.approx(0.010, rel=1e-2)  # the machine is as fast as before
    cheap, dear = ("ngram", "model") if copied > guessed else ("model", "ngram")
    assert prices.keep([0.5] * 7, cheap)[1] > prices.keep([0.5] * 7, dear)[1]
    chance = prices.rate * (prices.rows_seconds(1, 1, cheap) + prices.rows_seconds(1, 1, dear)) / 2
    assert prices.pays(chance, 2, 0.0, source=cheap) and not prices.pays(chance, 2, 0.0, source=dear)


def test_a_single_row_and_a_pass_without_a_count_say_nothing_of_overlap() -> None:
    pricing, before = Pricing(EXPERTS), Pricing(EXPERTS)
    for _ in range(20):
        pricing.observe_pass(1, EXPERTS.seconds(1), 384, "ngram")
        pricing.observe_pass(4, before.at().pass_seconds(4), 0, "ngram")
    assert pricing.at().pass_seconds(4, "ngram") == pytest.approx(before.at().pass_seconds(4))
    dense = Pricing(FLAT)
    dense.observe_pass(4, FLAT.seconds(4), 700, "ngram")
    assert dense.at().pass_seconds(4) == FLAT.seconds(4)


@pytest.mark.parametrize("curve", [FLAT, EXPERTS], ids=["dense", "experts"])
def test_requests_that_share_a_pass_report_it_together(curve: CostCurve) -> None:
    alone, shared = Pricing(curve), Pricing(curve)
    for _ in range(20):
        alone.observe_pass(8, 0.030, 900, "ngram")
        for _ in range(4):
            shared.observe_pass(8, 0.030, 900, "ngram", Load(4))
    assert shared.at().pass_seconds(8, "ngram") == pytest.approx(
        alone.at().pass_seconds(8, "ngram"), rel=0.02
    )
    assert shared.at().pass_seconds(1) == pytest.approx(alone.at().pass_seconds(1), rel=0.02)


@given(curves, probabilities, st.floats(0.0, 0.2))
def test_time_of_drafting_counts_where_a_draft_is_still_to_be_made(
    curve: CostCurve, confidence: list[float], token_s: float
) -> None:
    pricing = Pricing(curve)
    every = [
        _surplus(pricing, confidence, count) - pricing.at().rate * token_s * count
        for count in range(len(confidence) + 1)
    ]
    count, surplus = pricing.at().keep(confidence, drafting_s=lambda count: token_s * count)
    assert surplus == pytest.approx(max(every), abs=1e-9)
    assert every[count] == pytest.approx(max(every), abs=1e-9)


@pytest.mark.parametrize(
    ("row_s", "rows", "piece"),
    [
        (2**-7, 1, 8),
        (2**-7, 7, 8),
        (2**-7, 8, 16),
        (2**-7, 31, 32),
        (2**-7, 32, 64),
        (2**-7, 900, 128),
        (0, 1, 128),
    ],
)
def test_a_piece_of_a_prompt_takes_a_pass_to_three_times_its_time(
    row_s: float, rows: int, piece: int
) -> None:
    """Here a row takes the same wherever it is, or nothing; so a piece is twice the answers' rows at most."""
    pricing = Pricing(CostCurve({1: row_s or 0.01, 2048: 2048 * row_s or 0.01}))
    assert pricing.at().piece(rows) == piece
