"""What a drafter will write is guessed, and one pass of it checks that: drafts stay the drafter's own."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.draft import ALONE, Draft
from edgespec.drafting.cascade import Followers
from edgespec.drafting.pricing import Prices, Pricing
from edgespec.drafting.reading import Reader
from edgespec.running.passes import step_shares
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.session import Rows
from tests.kit.drafters import draft_of, model_of, read, step
from tests.kit.toy import ToySession, markov_logits

VOCAB = 12
NEXT = markov_logits(3, VOCAB)
CHEAP, DEAR = CostCurve({1: 1.0, 4: 1.07, 32: 2.0}), CostCurve({1: 1.0, 2: 2.0})


def _tokens(followers: Followers, text: Sequence[int], rows: int = 1, most: int = 9) -> list[int]:
    return [follower.token for follower in followers.behind(text, rows, most)]


def test_the_longest_context_and_the_latest_text_decide() -> None:
    followers = Followers(CHEAP)
    assert _tokens(followers, [1, 2, 3]) == []
    followers.learn([1, 2, 3, 4, 9, 3, 5, 6], 0)
    assert _tokens(followers, [7, 3]) == [5, 6]
    assert _tokens(followers, [1, 2, 3]) == [4, 9, 3]  # three at most
    assert _tokens(followers, [1, 2, 3], most=1) == [4]
    followers.learn([1, 2, 3, 8], 3)
    assert _tokens(followers, [1, 2, 3]) == [8]
    followers.forget()
    assert _tokens(followers, [1, 2, 3]) == []


def test_what_was_learned_first_is_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.drafting.cascade._KEPT", 20)
    followers = Followers(CHEAP)
    followers.learn([1, 2, 3, 4, 5, 6, 7], 0)
    followers.learn(range(100, 108), 0)
    assert _tokens(followers, [1, 2, 3])[0] == 4
    followers.learn(range(200, 208), 0)
    assert _tokens(followers, [1, 2, 3]) == []
    assert _tokens(followers, [200, 201])[0] == 202


def test_a_guess_is_made_where_it_spares_more_than_its_row_costs() -> None:
    followers, text = Followers(CHEAP), [1, 2, 3, 4]
    followers.learn(text, 0)
    assert _tokens(Followers(DEAR), [1, 2, 3]) == []
    tried = 0
    for _ in range(2000):  # it is never right
        for follower in followers.behind([1, 2, 3], 1, 1):
            followers.fared(follower, spared=False)
            tried += 1
    assert 100 < tried < 700  # a verdict that nothing tests any more fades


def _session() -> ToySession:
    session = ToySession(NEXT, VOCAB)
    session.reserve(400)
    return session


class _Eager(Prices):
    """Drafts as far as it may: a step that takes no pass would else lead further than one that does."""

    def pays(self, *args: object, **kwargs: object) -> bool:
        return True


def _drafts(followers: Followers, texts: Sequence[Sequence[int]]) -> tuple[list[Draft], ToySession]:
    """What is drafted behind each of these texts, one after the other."""
    session = _session()
    prices = _Eager(Pricing(CostCurve({1: 100.0, 32: 100.01})), ALONE)
    drafter = model_of(session, reader=Reader(session, CHEAP, followers))
    return [draft_of(drafter, text, 6, prices=prices) for text in texts], session


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), st.data())
def test_drafts_are_the_same_and_take_fewer_passes(text: list[int], data: st.DataObject) -> None:
    ends = sorted(data.draw(st.lists(st.integers(1, len(text)), min_size=1, max_size=6)))
    texts = [[*text[:end], data.draw(st.integers(0, VOCAB - 1))] for end in ends]
    (plain, alone_), (guessed, session) = (_drafts(Followers(curve), texts) for curve in (DEAR, CHEAP))
    assert guessed == plain
    assert any(draft.tokens for draft in plain)
    assert len(session.passes) <= len(alone_.passes)


def test_a_text_that_it_knows_takes_a_pass_for_four_tokens() -> None:
    followers, text = Followers(CHEAP), [1, 2, 3]
    for _ in range(12):
        text.append(int(NEXT(text).argmax()))
    followers.learn(text, 0)
    session = _session()
    reader = Reader(session, CHEAP, followers)
    guesses = [read(reader, text[:3])]
    for _ in range(7):
        guesses.append(step(reader, guesses[-1].following))
    assert [guess.following for guess in guesses] == text[3:11]
    assert session.passes == [6, 4]
    assert reader.seconds_of_step(guesses[-1].following) > 0.0
    assert session.length == 10


def test_it_guesses_no_further_than_the_cache_has_room() -> None:
    followers, text = Followers(CHEAP), [1, 2, 3]
    for _ in range(12):
        text.append(int(NEXT(text).argmax()))
    followers.learn(text, 0)
    for room in range(1, 6):
        session = _session()
        before = [1] * (session.capacity - room - 2)
        session.prefill(before)
        capacity = session.capacity
        session.passes.clear()
        reader = Reader(session, CHEAP, followers)
        read(reader, [*before, *text[1:3]])
        assert session.passes == [2 + min(room, 3)] and session.capacity == capacity


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_a_shared_pass_is_paid_for_once_and_by_steps_alike(parts: list[tuple[int, int]]) -> None:
    session = _session()
    rows = [Rows(session, [1] * count, min(count, wanted)) for count, wanted in parts]
    shares = step_shares(rows, 2.0)
    assert sum(share.share_s for share in shares) == pytest.approx(2.0)
    steps = {
        round(passed.share_s, 9)
        for passed, part in zip(shares, rows, strict=True)
        if part.wanted == len(part.tokens)
    }
    assert len(steps) <= 1  # whatever they guessed besides


def test_what_is_read_of_a_text_is_not_shared_by_the_steps_beside_it() -> None:
    session = _session()
    first, step = step_shares([Rows(session, [1] * 128, 1), Rows(session, [1], 1)], 129.0)
    assert (first.share_s, step.share_s) == pytest.approx((128.0, 1.0))
