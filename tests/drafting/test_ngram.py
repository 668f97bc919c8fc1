import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.draft import NO_DRAFT, Draft
from edgespec.drafting.copies import Copy, CopyDrafter
from edgespec.drafting.ngram import ContextTree, copied
from edgespec_runtimes.kv_cache import shared_length
from tests.kit.toy import round_of

texts = st.lists(st.integers(0, 3), max_size=40)


def _scan(tokens: list[int], context: list[int], max_n: int, first: int = 0) -> Copy | None:
    """The definition of ``find``, by looking everywhere; ``first`` is the oldest position in the window."""
    for n in range(min(max_n, len(context)), 0, -1):
        suffix = context[-n:]
        positions = [p for p in range(max(n, first), len(tokens)) if tokens[p - n : p] == suffix]
        if not positions:
            continue
        counts = Counter(tokens[p] for p in positions)
        chosen = positions[-1]
        if len(positions) > 1 and counts[tokens[positions[-2]]] > counts[tokens[chosen]]:
            chosen = positions[-2]
        length = 0
        while length < min(chosen, len(context), 32) and tokens[chosen - 1 - length] == context[-1 - length]:
            length += 1
        return copied(tokens[chosen], length, len(positions), counts[tokens[chosen]])
    return None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(texts, min_size=1, max_size=6),
    st.lists(st.integers(0, 3), max_size=8),
    st.integers(1, 6),
    st.sampled_from([1, 3, 7, 12, 1000]),
)
def test_a_tree_that_is_moved_about_finds_what_a_scan_of_its_window_finds(
    histories: list[list[int]], context: list[int], max_n: int, window: int
) -> None:
    tree, held, first = ContextTree(max_n=max_n, window=window), list[int](), 0
    for tokens in histories:
        moved = tokens if len(tokens) % 3 else held[: len(tokens)] + tokens
        tree.follow(moved)
        shared = shared_length(held, moved)
        held, first = moved, max(min(first, shared), len(moved) - window)
        for text in (context, held):
            assert tree.find(text) == _scan(held, text, max_n, first)


def test_a_copy_goes_on_into_its_own_proposals() -> None:
    draft = CopyDrafter(ContextTree(), stop_below=0.0).propose([9, 1, 2, 3, 1, 2, 3, 1], 7)
    assert draft.tokens == (2, 3, 1, 2, 3, 1, 2)
    assert draft.sources == ("ngram",) * 7
    assert len(draft.confidence) == 7


@pytest.mark.parametrize(
    ("tokens", "limit", "count"),
    [([], 4, 0), ([1], 4, 0), ([1, 2, 3], 4, 0), ([1, 2, 3, 4] * 5, 3, 3), ([1, 2, 3, 4] * 5, 0, 0)],
)
def test_what_matches_is_proposed_up_to_the_limit(tokens: list[int], limit: int, count: int) -> None:
    draft = CopyDrafter(ContextTree()).propose(tokens, limit)
    assert len(draft.tokens) == count and (draft is NO_DRAFT) == (count == 0)


def test_longer_and_undisputed_matches_are_trusted_more() -> None:
    def confidence(text: list[int]) -> float:
        return CopyDrafter(ContextTree(), stop_below=0.0).propose(text, 1).confidence[0]

    unique_1 = confidence([1, 10, 5, 1])
    unique_3 = confidence([1, 2, 3, 10, 5, 1, 2, 3])
    agreed_1 = confidence([1, 10, 5, 1, 10, 6, 1])
    disputed_1 = confidence([1, 10, 5, 1, 11, 6, 1])
    assert disputed_1 < unique_1 < unique_3 < 1.0
    assert unique_1 < agreed_1


def _replay(drafter: CopyDrafter, text: list[int], start: int) -> tuple[float, float]:
    """Mean confidence and share accepted of first proposals, while the text is committed token by token."""
    stated, right = [], []
    for end in range(start, len(text)):
        draft = drafter.propose(text[:end], 1)
        if draft.tokens:
            stated.append(draft.confidence[0])
            right.append(draft.tokens[0] == text[end])
        drafter.observe(round_of(text[end]))
    return sum(stated) / len(stated), sum(right) / len(right)


def test_confidence_learns_from_what_is_committed() -> None:
    noise = random.Random(0)
    noisy = [noise.randrange(20) for _ in range(1500)]
    # On noise the priors promise far too much; in the end the stated confidence is the true rate.
    drafter = CopyDrafter(ContextTree(), stop_below=0.0)
    first, _ = _replay(drafter, noisy[:330], 300)
    stated, right = _replay(drafter, noisy, 500)
    assert first > 0.15
    assert stated == pytest.approx(right, abs=0.05)


def test_matches_that_fell_out_of_favour_are_still_judged() -> None:
    """Token by token: unique matches of one token that are wrong 60 times, then right 60 times."""
    drafter = CopyDrafter(ContextTree())
    text: list[int] = []

    def proposals(block: list[int]) -> list[bool]:
        proposed = []
        for token in block:
            drafter.observe(round_of(token))
            text.append(token)
            proposed.append(bool(drafter.propose(text, 1).tokens))
        return proposed

    for i in range(100, 400, 5):
        last = proposals([i, i + 1, i + 2, i, i + 3])
    assert not any(last)
    for i in range(1000, 1300, 5):
        last = proposals([i, i + 1, i + 2, i, i + 1])
    assert last[3]


def test_the_draft_of_another_is_gone_on_with() -> None:
    drafter, text = CopyDrafter(ContextTree(), stop_below=0.0), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    drafter.propose(text, 8)
    other = Draft((4, 5), ("model",) * 2, (0.9, 0.8))
    longer = drafter.extend(text, other, 6)
    assert longer.tokens == (4, 5, 6, 7, 8, 9)
    assert longer.sources == ("model",) * 2 + ("ngram",) * 4 and len(longer.confidence) == 6
    assert drafter.extend(text, other, 2) is other
    assert drafter.extend(text, Draft((99,), ("model",), (0.9,)), 6).tokens == (99,)


def test_nothing_is_added_that_would_hardly_be_reached() -> None:
    text = [1, 10, 11, 12, 13, 14, 15, 5, 1]
    whole, cut = (CopyDrafter(ContextTree(), stop_below=least).propose(text, 6) for least in (0.0, 0.05))
    assert 0 < len(cut.tokens) < len(whole.tokens) == 6
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    drafter, text = CopyDrafter(ContextTree(), stop_below=0.3), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    likely, unlikely = (Draft((4, 5), ("model",) * 2, (p, p)) for p in (0.9, 0.5))
    drafter.propose(text, 6)
    assert len(drafter.extend(text, likely, 6).tokens) > 2
    assert drafter.extend(text, unlikely, 6) is unlikely


def test_what_stood_behind_a_rejected_token_is_not_judged() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    stated = []
    for behind in ((), (6, 7, 8)):
        drafter = CopyDrafter(ContextTree(), stop_below=0.0)
        assert drafter.propose(text, 5).tokens == (4, 5, 6, 7, 8)
        drafter.observe(round_of(4, 99, *behind))
        stated.append(drafter.propose(text, 5).confidence)
    assert stated[0] == stated[1]


@given(texts, texts)
def test_proposals_depend_on_the_tokens_and_not_on_how_they_came(one: list[int], two: list[int]) -> None:
    fresh = CopyDrafter(ContextTree(), stop_below=0.0).propose(two, 5)
    moved = CopyDrafter(ContextTree(), stop_below=0.0)
    moved.propose(one, 5)
    assert moved.propose(two, 5).tokens == fresh.tokens
    assert moved.propose(tuple(two), 5).tokens == fresh.tokens
