"""What was read stays read: blocks of texts in memory and on disk, against a list of what was read."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec_models.decoders.kept import BLOCK
from edgespec_runtimes.block_files import BlockFiles, stored
from edgespec_runtimes.kv_cache import shared_length
from edgespec_runtimes.kv_store import KvStore
from edgespec_runtimes.predictions import Floats
from tests.kit.models import toy_session
from tests.kit.prompts import SIZE, Showing, request, sizes, text
from tests.kit.toy import KV_BYTES, ToySession

LEAST = 4
"""Tokens that are worth a copy."""


def read(
    store: KvStore,
    session: ToySession,
    tokens: list[int],
    beside: Sequence[ToySession] = (),
    *,
    on_disk: bool = True,
) -> int:
    """Read ``tokens`` as a request would; how many were there."""
    store.fetch(session, tokens, beside, on_disk=on_disk)
    held = session.shared_prefix(tokens)
    session.prefill(tokens)
    return held


def texts(count: int, length: int = 50) -> list[list[int]]:
    return [[10 * n + 1, *range(100, 99 + length)] for n in range(count)]


def longest(known: list[list[int]], tokens: list[int]) -> int:
    """How many of ``tokens`` one of these texts begins with."""
    return max((shared_length(earlier, tokens) for earlier in known), default=0)


requests = st.lists(
    st.tuples(
        st.integers(0, 2),  # a session
        st.integers(0, 5),  # a text
        st.integers(1, 200),  # its length
        st.booleans(),  # on disk
        st.sampled_from(["nothing", "write", "write a little", "trim", "restart", "damage"]),  # what follows
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(asked=requests, memory=st.sampled_from([0, 40, 200, 1 << 20]), disk=st.sampled_from([0, 3, 1000]))
def test_what_was_read_stays_read_and_has_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory,
    asked: list[tuple[int, int, int, bool, str]],
    memory: int,
    disk: int,
) -> None:
    """A :class:`Showing` compares all keys and values that it is given with those that it computes."""
    folder = tmp_path_factory.mktemp("prompts")
    store = KvStore(memory * KV_BYTES, BlockFiles(folder, disk * SIZE))
    sessions = [Showing() for _ in range(3)]
    for session in sessions[1:]:
        session.model = sessions[0].model
    known, public, written, is_damaged = list[list[int]](), list[list[int]](), list[list[int]](), False
    for at, number, length, on_disk, then in asked:
        session, tokens = sessions[at], text(number, length)
        found = read(store, session, tokens, sessions[:at] + sessions[at + 1 :], on_disk=on_disk)
        if memory > 1000:
            lost = BLOCK if is_damaged else 2 * LEAST  # which the session itself had, before a file was read
            assert found > longest(known, tokens) - lost
        if on_disk and disk == 1000 and not is_damaged:
            assert found > longest(written, tokens) // BLOCK * BLOCK - LEAST
        known.append(tokens)
        public += [tokens] * on_disk
        if then == "damage":
            is_damaged = True
            for block in list(stored(folder))[::2]:
                block.path.write_bytes(block.path.read_bytes()[:-1] + b"x")
        elif then == "write a little":
            left = iter(range(3))
            store.write_behind(lambda left=left: next(left, None) is None)  # type: ignore[misc]
        elif then != "nothing":
            store.write_behind()
            written = public.copy() if memory > 1000 else []
        if then == "trim":
            store.trim([])
            assert store.nbytes == 0
        if then == "restart":
            store = KvStore(memory * KV_BYTES, BlockFiles(folder, disk * SIZE))
        if then in ("trim", "restart"):
            known = []
            for each in sessions:
                each.rewind(0)
        assert store.nbytes <= memory * KV_BYTES and sizes(folder) <= disk * SIZE
    store.write_behind()
    for number in range(6):
        session, store = Showing(), KvStore(0, BlockFiles(folder))
        assert read(store, session, text(number, 200)) <= longest(public, text(number, 200))


def test_the_least_recently_used_go_first_and_ends_before_beginnings() -> None:
    store, session = KvStore(3 * 64 * KV_BYTES), toy_session()
    first, second, third, fourth = texts(4, 64)
    for tokens in (first, second, third, second, fourth):
        read(store, session, tokens)
    assert read(store, session, second) == 64
    assert read(store, session, third) == 64
    for tokens, held in ((fourth, 64), (first, 0)):
        assert read(store, session, tokens) == held
    short = [5, *range(300, 331)]
    for tokens in (short, fourth):
        read(store, session, tokens)
    assert store.nbytes <= 3 * 64 * KV_BYTES


@pytest.mark.parametrize(("budget", "gives", "held"), [(40, True, 32), (49, False, 0), (0, True, 0)])
def test_of_a_text_too_large_its_beginning_is_kept(budget: int, gives: bool, held: int) -> None:
    store, session = KvStore(budget * KV_BYTES), toy_session()
    if not gives:
        session.save = lambda at: None  # type: ignore[method-assign]
    first, second = texts(2)
    for tokens in (first, second):
        assert read(store, session, tokens) == 0
    assert read(store, session, first) == held


def test_beginnings_are_there_once() -> None:
    store, session = KvStore(1 << 20), toy_session()
    beginning = [*range(64)]
    for number in range(5):
        read(store, session, [*beginning, *[200 + number] * 20])
    read(store, session, [*range(300, 310)])
    assert store.nbytes == (64 + 5 * 20) * KV_BYTES


def test_what_another_text_holds_but_for_three_tokens_goes() -> None:
    store, session, other = KvStore(1 << 20), toy_session(), [*range(50, 60)]
    for tokens in ([*range(1, 7)], other, [1, 2, 3, *range(70, 80)], other):
        read(store, session, tokens)
    assert store.nbytes == (13 + 10) * KV_BYTES


@pytest.mark.parametrize(("length", "kept"), [(3, 0), (4, 4), (5, 5)])
def test_a_copy_is_worth_four_tokens(length: int, kept: int) -> None:
    store, session = KvStore(1 << 20), toy_session()
    first, second = list(range(10, 10 + length)), list(range(50, 60))
    for tokens in (first, second):
        read(store, session, tokens)
    assert store.nbytes == kept * KV_BYTES
    assert read(store, session, first) == kept


def test_models_have_their_own() -> None:
    store, sessions, (first, second) = KvStore(1 << 20), [toy_session(), toy_session()], texts(2)
    for session in sessions:
        for tokens in (first, second):
            assert read(store, session, tokens) == 0
    store.forget(sessions[0])
    assert read(store, sessions[0], first) == 0
    assert read(store, sessions[1], first) == 50


def test_texts_that_were_put_aside_are_written_later_private_ones_never(tmp_path: Path) -> None:
    """Also where another text has taken up their beginnings."""
    store, session, private = KvStore(1 << 20, BlockFiles(tmp_path)), Showing(), text(5, 200)
    for tokens in (text(0, 200), text(3, 200)):
        read(store, session, tokens)
    read(store, session, private, on_disk=False)
    for tokens in ([*text(0, 100), *range(100)], [*private[:100], *range(100)]):
        assert read(store, session, tokens) == 100
    store.write_behind()
    for tokens, found in ((text(0, 200), 192), (text(3, 200), 192), (private, 96)):
        assert request(tmp_path, tokens) == found


def test_what_a_session_held_before_is_not_written_for_a_text_it_never_read(tmp_path: Path) -> None:
    """As a drafter whose prompt does not pay leaves its KV cache as it was."""
    store, session, private = KvStore(1 << 20, BlockFiles(tmp_path)), Showing(), text(5, 200)
    read(store, session, private, on_disk=False)
    store.fetch(session, text(0, 200))
    store.write_behind()
    assert request(tmp_path, private) == 0


# ---- Pictures ----

pictures = st.lists(
    st.tuples(
        st.integers(0, 3),  # a picture
        st.booleans(),  # on disk
        st.sampled_from(["nothing", "write", "trim", "restart", "damage", "forget"]),  # what follows
    ),
    min_size=1,
    max_size=16,
)


@given(asked=pictures, memory=st.sampled_from([0, 100, 1000]), disk=st.sampled_from([0, 100, 1 << 20]))
def test_vectors_of_pictures_stay_within_bounds_and_are_those_that_were_made(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[int, bool, str]], memory: int, disk: int
) -> None:
    folder, session = tmp_path_factory.mktemp("prompts"), Showing()
    store = KvStore(memory, BlockFiles(folder, disk))
    held, public, written = set[int](), set[int](), set[int]()
    damaged = set[int]()  # and not read since: a file that is there is not written again
    for number, on_disk, then in asked:
        rows, made = 2 + number, list[int]()

        def make(number: int = number, rows: int = rows, made: list[int] = made) -> Floats:
            made.append(number)
            return np.full((rows, 3), number + 0.5, np.float32)

        found = store.vectors(session.model, f"picture {number}", (rows, 3), make, on_disk=on_disk)
        if memory == 1000 and disk != 100:
            assert bool(made) != (number in held or (on_disk and number in written))
        np.testing.assert_array_equal(found, make())
        assert store.nbytes <= memory and sizes(folder) <= disk
        if on_disk and number not in held:
            damaged.discard(number)
        if memory == 1000:
            held.add(number)
            public |= {number} if on_disk else set()
        if then != "nothing":
            store.write_behind()
            written |= public - damaged if disk > 100 else set()
            public = set()
        if then == "trim":
            assert store.trim([]) <= memory and store.nbytes == 0
        elif then == "restart":
            store = KvStore(memory, BlockFiles(folder, disk))
        elif then == "damage":
            for block in stored(folder):
                block.path.write_bytes(block.path.read_bytes()[:-1] + b"x")
        elif then == "forget":
            store.forget(session, on_disk=True)
            assert store.nbytes == 0 and not [*stored(folder)]
        if then in ("trim", "restart", "forget"):
            held, public = set(), set()
        if then in ("damage", "forget"):
            damaged, written = damaged | written if then == "damage" else set(), set()
