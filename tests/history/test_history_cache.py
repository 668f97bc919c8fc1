"""The user's n-gram cache: bounded, true to what was learned, and distrustful of what misled."""

import random
from collections.abc import Sequence
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.draft import NO_DRAFT, Draft
from edgespec.drafting.copies import Copy, CopyDrafter, Finder, Proposal
from edgespec.drafting.ngram import ContextTree
from edgespec.drafting.rates import Rate
from edgespec.history.drafter import HistoryFinder
from edgespec.history.memory import MAX_N, Delta, Index, Match, Memory, Snapshot
from edgespec.history.passages import HALF_LIFE, LEAD, LONGEST, Cutter, Entry, Passage
from tests.kit.histories import cut
from tests.kit.toy import round_of

# Ids whose big-endian bytes end in zeros, and the largest there are.
tokens = st.sampled_from([0, 1, 2, 255, 256, 65535, 2**31 - 2])
answers = st.lists(st.lists(tokens, min_size=1, max_size=200), max_size=6)


def _memory(*texts: Sequence[int], max_tokens: int = 1 << 20) -> Memory:
    memory = Memory(Snapshot(), max_tokens=max_tokens)
    for text in texts:
        memory.learn(cut(text))
        memory.refresh()
    return memory


def _noise(seed: int, count: int, vocab: int = 5000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(count)]


class TestPassages:
    @given(st.lists(tokens, max_size=300), st.integers(1, 40))
    def test_they_are_the_answer_cut_up_however_it_came(self, answer: list[int], step: int) -> None:
        cutter = Cutter()
        pieces = [p for at in range(0, len(answer), step) for p in cutter.push(answer[at : at + step])]
        pieces += cutter.finish()
        assert pieces == cut(answer)
        assert [token for piece in pieces for token in piece.body] == answer
        done = 0
        for piece in pieces:
            assert piece.lead == tuple(answer[max(0, done - LEAD) : done])
            assert 1 <= len(piece.body) <= LONGEST
            done += len(piece.body)

    def test_an_edit_changes_the_passages_near_it_alone(self) -> None:
        document = _noise(0, 2000)
        edited = [*document[:700], 1, 2, 3, *document[705:]]
        before, after = ({p.digest for p in cut(text)} for text in (document, edited))
        assert len(before & after) > 0.9 * len(before)

    def test_the_digest_tells_lead_from_body(self) -> None:
        one, two = Passage((1,), (2, 3)), Passage((1, 2), (3,))
        assert one.digest != two.digest and one.digest == Passage((1,), (2, 3)).digest


class TestEntries:
    def test_uses_fade_by_half_with_what_is_learned_after(self) -> None:
        entry = Entry(Passage((), (1, 2)))
        entry.use(8.0, 100)
        assert entry.worth(100 + HALF_LIFE) == pytest.approx(4.0)
        entry.use(1.0, 100 + HALF_LIFE)
        assert entry.uses == pytest.approx(5.0)
        entry.use(1.0, 50)  # from a process whose clock is behind
        assert entry.at == 100 + HALF_LIFE

    def test_what_misled_is_worth_less_and_may_recover(self) -> None:
        entry, other = (Entry(Passage((), (1, 2)), 1.0, 0) for _ in range(2))
        for _ in range(40):
            entry.judge(0, right=0, wrong=1)
        assert entry.worth(0) < 0.2 * other.worth(0)
        assert entry.right[0] + entry.wrong[0] <= 32
        for _ in range(100):
            entry.judge(0, right=1, wrong=0)
        assert entry.worth(0) > 0.8 * other.worth(0)

    def test_tallies_forget(self) -> None:
        tally = Rate()
        for number in range(2600):
            tally.add(number >= 2000, 1)
        assert tally.right / tally.judged > 0.85


class TestIndex:
    @settings(max_examples=60, deadline=None)
    @given(answers, st.lists(tokens, max_size=12))
    def test_it_finds_the_longest_context_and_nothing_that_was_not_there(
        self, texts: list[list[int]], context: list[int]
    ) -> None:
        entries = {p.digest: Entry(p, 1.0) for text in texts for p in cut(text)}
        match = Index(list(entries.values()), 0).find(context)
        by_length = [
            [token for entry in entries.values() for token in _followers(entry.passage, tuple(context[-n:]))]
            for n in range(1, min(len(context), MAX_N) + 1)
        ]
        known = [(n, followers) for n, followers in enumerate(by_length, 1) if followers]
        if match is None:
            assert not known
            return
        length, followers = known[-1]
        assert (match.length, match.count) == (length, len(followers))
        assert match.token in followers and 0.0 < match.share <= 1.0
        assert match.entry.passage.body[match.offset] == match.token
        assert len(followers) > 32 or followers.count(match.token) == max(map(followers.count, followers))

    def test_votes_weigh_by_uses_and_record_and_of_equals_the_latest_wins_however_long_ago(self) -> None:
        often, seldom = Entry(Passage((), (1, 10)), 3.0), Entry(Passage((), (1, 11)), 1.0)
        index = Index([often, seldom], 0)
        match = index.find([1])
        assert match is not None and (match.token, match.share) == (10, 0.75)
        for _ in range(20):
            often.judge(1, right=0, wrong=1)
        again = index.find([1])
        assert again is not None and again.token == 11
        rivals = [Entry(Passage((), (1, token)), 1.0) for token in (10, 11)]
        match = Index(rivals, 200 * HALF_LIFE).find([1])
        assert match is not None and (match.token, match.entry, match.share) == (11, rivals[1], 0.5)

    def test_of_many_occurrences_early_and_late_ones_vote(self) -> None:
        followers = [10] * 40 + [11] * 60
        match = Index([Entry(Passage((), (1, token)), 1.0) for token in followers], 0).find([1])
        assert match is not None and (match.token, match.count) == (11, 100)
        assert match.share == pytest.approx(0.6, abs=0.05)


def _followers(passage: Passage, context: tuple[int, ...]) -> list[int]:
    """The tokens of the body in front of which ``context`` stands."""
    whole, n = (*passage.lead, *passage.body), len(context)
    return [whole[at] for at in range(max(len(passage.lead), n), len(whole)) if whole[at - n : at] == context]


class TestMemory:
    @settings(max_examples=40, deadline=None)
    @given(
        st.dictionaries(st.integers(0, 99), st.integers(60, 300), min_size=3, max_size=6),
        st.integers(100, 180),
    )
    def test_it_is_bounded_and_knows_only_what_it_learned(
        self, drawn: dict[int, int], max_tokens: int
    ) -> None:
        texts = [_noise(seed, count, vocab=40) for seed, count in drawn.items()]  # more than the bound
        memory = _memory(*texts, max_tokens=max_tokens)
        assert 0 < len(memory) <= max_tokens
        learned = {passage for text in texts for passage in cut(text)}
        assert {entry.passage for entry in memory.entries} <= learned
        pairs = {pair for text in texts for pair in pairwise(text)}
        for text in texts:
            match = memory.find(text[:5])
            assert match is None or (text[:5][-1], match.token) in pairs

    def test_what_fits_the_bound_to_the_last_token_stays(self) -> None:
        entries = [Entry(passage, 1.0) for passage in cut(_noise(5, 300))]
        whole = sum(len(entry.passage) for entry in entries)
        assert len(Memory(Snapshot(entries=entries), max_tokens=whole)) == whole
        assert 0 < len(Memory(Snapshot(entries=entries), max_tokens=whole - 1)) < whole - 1

    def test_verdicts_are_kept_by_how_far_occurrences_agree_and_how_long_the_match_is(self) -> None:
        """By these names files have them, of earlier versions too."""
        delta, entry = Delta(), Entry(Passage((), (1, 2)), 1.0)
        memory = Memory(Snapshot(entries=[entry]), max_tokens=100, tell=lambda note: note(delta))
        shares = [(1, 1.0), (2, 1.0), (2, 0.75), (2, 0.5)]
        for length, (count, share) in zip((1, 3, 4, 8), shares, strict=True):
            memory.judge(Match(2, length, count, share, entry, 1), True)
        assert [*delta.verdicts] == ["unique 1", "agreed 2", "most 3", "split 4"]

    def test_what_is_learned_is_found_from_the_next_refresh_on(self) -> None:
        memory, text = _memory(), _noise(1, 100)
        memory.learn(cut(text))
        assert memory.find(text[:20]) is None
        memory.refresh()
        match = memory.find(text[:20])
        assert match is not None and match.token == text[20]

    def test_of_equals_what_was_learned_last_wins(self) -> None:
        memory = Memory(Snapshot(entries=[Entry(Passage((), (1, 2, 10)), 1.0)]), max_tokens=1 << 20)
        memory.learn(cut([1, 2, 11]))
        memory.refresh()
        match = memory.find([1, 2])
        assert match is not None and (match.token, match.length) == (11, 2)

    def test_what_is_written_often_stays(self) -> None:
        memory, often = Memory(Snapshot(), max_tokens=2000), _noise(2, 120)
        for number in range(100):
            memory.learn(cut(_noise(100 + number, 100)))
            if number % 5 == 0 and number < 50:
                memory.learn(cut(often))
            memory.refresh()
        match = memory.find(often[:50])
        assert match is not None and match.length == MAX_N and match.token == often[50]


class _Near(Finder):
    """Proposes from the text what it is told to."""

    source = "ngram"

    def __init__(self, tokens: Sequence[int], confidence: float) -> None:
        super().__init__()
        self._tokens, self._confidence = tokens, confidence

    def find(self, context: Sequence[int], ahead: int) -> Copy | None:
        return Copy(self._tokens[ahead], "near", 0.5) if ahead < len(self._tokens) else None

    def probability(self, proposal: Proposal) -> float:
        return self._confidence


class TestDrafter:
    def test_a_repeated_answer_is_copied_across_passages(self) -> None:
        text = _noise(4, 400)
        drafter = CopyDrafter(HistoryFinder(_memory(text)))
        accepted = 0
        for end in range(10, 380):
            draft = drafter.propose(text[:end], 8)
            assert draft.sources == ("history",) * len(draft.tokens)
            accepted += draft.tokens == tuple(text[end : end + 8])
        assert accepted > 330

    def test_nothing_known_nothing_proposed(self) -> None:
        unknown, without_room = ((), 8), (([1, 2, 3, 4],), 0)
        for known, limit in (unknown, without_room):
            drafter = CopyDrafter(HistoryFinder(_memory(*known)))
            assert drafter.propose([1, 2, 3], limit) is NO_DRAFT
            assert drafter.extend([1, 2, 3], NO_DRAFT, limit) is NO_DRAFT

    def test_an_entry_that_misleads_is_given_up(self) -> None:
        text, proposed = _noise(5, 30), []
        memory = _memory(text)
        for round_ in range(16):
            drafter = CopyDrafter(HistoryFinder(memory))
            proposed.append(bool(drafter.propose(text[:10], 1).tokens))
            drafter.observe(round_of(9999 + round_))
        assert proposed[0] and not proposed[-1]

    def test_confidence_comes_to_what_is_accepted(self) -> None:
        """Answers of a distribution that mostly repeats: what is promised is kept."""
        rng, memory = random.Random(0), _memory()
        stated, right = [], []
        for number in range(60):
            answer = [token if rng.random() < 0.9 else rng.randrange(50) for token in _noise(7, 60, 50)]
            drafter = CopyDrafter(HistoryFinder(memory))
            drafter.observe(round_of(answer[0]))
            for end in range(1, len(answer)):
                draft = drafter.propose(answer[:end], 1)
                if draft.tokens and number > 20:
                    stated.append(draft.confidence[0])
                    right.append(draft.tokens[0] == answer[end])
                drafter.observe(round_of(answer[end]))
            drafter.close()
        assert sum(stated) / len(stated) == pytest.approx(sum(right) / len(right), abs=0.06)

    def test_what_stood_behind_a_rejected_token_is_not_judged(self) -> None:
        text = _noise(6, 30)
        memory = _memory(text)
        drafter = CopyDrafter(HistoryFinder(memory), stop_below=0.0)
        assert len(drafter.propose(text[:10], 4).tokens) == 4
        drafter.observe(round_of(text[10], 9999, *text[12:14]))
        entries = memory.entries
        verdicts = {(e.passage.body[i], e.right[i], e.wrong[i]) for e in entries for i in range(len(e.right))}
        judged = {verdict for verdict in verdicts if verdict[1:] != (0, 0)}
        assert judged == {(text[10], 1, 0), (text[11], 0, 1)}

    def test_a_draft_stops_where_it_would_hardly_be_reached(self) -> None:
        text = _noise(6, 60)
        memory = _memory(text)
        whole = CopyDrafter(HistoryFinder(memory), stop_below=0.0).propose(text[:10], 30).confidence
        cut_off = CopyDrafter(HistoryFinder(memory), stop_below=0.3).propose(text[:10], 30).confidence
        assert 1 < len(cut_off) < len(whole) and cut_off == whole[: len(cut_off)]
        assert prod(cut_off) >= 0.3 > prod(whole[: len(cut_off) + 1])

    @pytest.mark.parametrize("source", ["ngram", "model"])
    def test_a_draft_of_others_is_gone_on_with(self, source: str) -> None:
        """The history does not know the context, but what others propose behind it."""
        text = _noise(8, 60)
        context, history = [7777, *text[18:20]], HistoryFinder(_memory(text[15:]))
        if source == "ngram":
            near = _Near(text[20:22], 0.99)
            draft = CopyDrafter(near, history, stop_below=0.0).propose(context, 6)
        else:
            alone = CopyDrafter(history, stop_below=0.0)
            alone.propose(context, 6)
            draft = alone.extend(context, Draft(tuple(text[20:22]), ("model",) * 2, (0.9, 0.9)), 6)
        assert draft.tokens == tuple(text[20:26]) and draft.sources == (source,) * 2 + ("history",) * 4
        assert len(draft.confidence) == 6

    def test_the_better_promise_wins(self) -> None:
        text = _noise(9, 60)
        history = HistoryFinder(_memory(text))
        nears = _Near([9999], 0.1), _Near([9999] * 4, 0.99)
        worse, better = (CopyDrafter(near, history).propose(text[:20], 4) for near in nears)
        assert worse.tokens == tuple(text[20:24]) and better.sources == ("ngram",) * 4

    @settings(max_examples=30, deadline=None)
    @given(answers, st.lists(tokens, min_size=1, max_size=30), st.integers(0, 9))
    def test_drafts_are_well_formed_within_the_limit_and_repeatable(
        self, texts: list[list[int]], context: list[int], limit: int
    ) -> None:
        sources = (CopyDrafter(ContextTree(), HistoryFinder(_memory(*texts))) for _ in range(2))
        draft, again = (source.propose(context, limit) for source in sources)
        assert draft == again
        assert len(draft.tokens) == len(draft.sources) == len(draft.confidence) <= limit
        assert all(0.0 <= value <= 1.0 for value in draft.confidence)
