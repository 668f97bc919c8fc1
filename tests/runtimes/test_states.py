"""Sequences whose layers have states: whatever is read, kept or undone, rows stay the same."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.running.verifier import Verifier
from edgespec_models.bundles.graph_contract import Part
from edgespec_models.decoders.kept import BLOCK, LOGGED, KeptTensor, bytes_per_sequence, bytes_per_token
from edgespec_models.errors import RequestError
from edgespec_runtimes.block_files import BlockFiles, stored
from edgespec_runtimes.cost import CostCurve, measure_context, measure_cost
from edgespec_runtimes.kv_store import KvStore
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Session
from edgespec_runtimes.states import ResumePoints, States
from tests.kit.drafters import GREEDY
from tests.kit.states import CONVOLUTION, DELTA, KEYS, VOCAB, StatesModel, check_rows
from tests.kit.toy import F32, RandomDrafter, decode

KINDS = pytest.mark.parametrize("kept", [CONVOLUTION, DELTA], ids=["convolution", "delta"])
TOKENS = st.integers(0, VOCAB - 1)
TEXT = [(7 * i * i + 3) % VOCAB for i in range(400)]


def rows_of(kept: Sequence[KeptTensor], text: Sequence[int]) -> F32:
    """What a model of its own says behind each token, read in one pass."""
    return Session(StatesModel(kept)).predict(text).logits


def law(kept: Sequence[KeptTensor], text: Sequence[int]) -> F32:
    last: F32 = rows_of(kept, text)[-1]
    return last


@KINDS
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_are_those_of_one_plain_run(kept: Sequence[KeptTensor], data: st.DataObject) -> None:
    """Of several sequences, which are opened and closed, in passes that may fail."""
    model = StatesModel(kept)

    def fail(session: Session) -> None:
        model.raises = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            session.predict(data.draw(st.lists(TOKENS, min_size=1, max_size=30)))
        model.raises = None

    every = BLOCK if kept is CONVOLUTION else model.longest + 1  # where places behind a block lie
    rows = partial(rows_of, kept)
    check_rows(data, model, rows, place_behind=lambda length: length // every * every, fail=fail)


@KINDS
def test_how_far_back_a_sequence_goes(kept: Sequence[KeptTensor]) -> None:
    session = Session(StatesModel(kept))
    for token in TEXT[:100]:
        session.predict([token])
    # A ring of inputs has those of many passes; a state was brought up to the last.
    assert session.rewind(90) == (90 if kept is CONVOLUTION else 0)
    session.prefill(TEXT[:100])
    assert session.rewind(70) == (64 if kept is CONVOLUTION else 0)
    session.predict([5])
    session.predict(TEXT[: LOGGED + 2])
    with pytest.raises(RequestError, match=rf"cannot undo {LOGGED + 2} rows of a pass; .* allow {LOGGED}"):
        session.keep(0)
    session.keep(2)
    assert session.rewind(session.length) == session.length


@KINDS
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 3), lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3))
def test_drafts_change_no_text(kept: Sequence[KeptTensor], seed: int, lengths: list[int]) -> None:
    """Drafts are as long as can be undone, and texts begin alike."""
    session = Session(StatesModel(kept))
    longest = 0
    for length in lengths:
        tokens = TEXT[:length]
        drafter = RandomDrafter(seed, VOCAB, lambda text: law(kept, text))
        steps = list(decode(session, drafter, Verifier(GREEDY), tokens, max_new_tokens=40, max_draft=32))
        longest = max(longest, *(len(step.draft.tokens) for step in steps))
        expected = TEXT[:length]
        for _ in range(40):
            expected.append(int(law(kept, expected).argmax()))
        assert tokens == expected
    assert longest <= LOGGED


@KINDS
def test_caches_put_aside_give_the_same_rows(kept: Sequence[KeptTensor], tmp_path: Path) -> None:
    """In memory, of another seat, and from the disk after a restart."""
    texts = [TEXT[:200], [*TEXT[:150], *TEXT[300:350]], TEXT[100:180], TEXT[:130]]
    prompts = BlockFiles(tmp_path / "prompts")
    for _ in range(2):
        model = StatesModel(kept)
        caches = KvStore(1 << 20, prompts)
        seats = [model.session(), model.session()]
        for at, text in enumerate(texts * 2):
            session = seats[at % 2]
            caches.fetch(session, text, [seats[1 - at % 2]])
            held = session.shared_prefix(text)
            predictions = session.predict_next(text)
            np.testing.assert_array_equal(predictions.logits[0], law(kept, text))
            caches.write_behind()
        if kept is CONVOLUTION:
            assert held == 129 // BLOCK * BLOCK or held == 129
    assert any((tmp_path / "prompts").rglob("*"))


@KINDS
def test_costs_of_wide_passes_are_measured(kept: Sequence[KeptTensor]) -> None:
    session = Session(StatesModel(kept))
    curve = measure_cost(session, (1, 4, 32), repeats=1)
    assert session.length == 0 and set(curve.seconds_by_rows) == {1, 4, 32}


def test_slots_are_as_many_as_there_were_sessions_at_once() -> None:
    model = StatesModel(CONVOLUTION)
    sessions = [model.session() for _ in range(3)]
    assert [session.stretch.slot for session in sessions] == [0, 1, 2]
    for session in sessions:
        session.predict(TEXT[:20])
    assert model.states.nbytes == 3 * bytes_per_sequence(CONVOLUTION)
    assert model.kv_bytes == model.states.nbytes + 3 * BLOCK * bytes_per_token(CONVOLUTION)
    sessions[1].close()
    again = model.session()
    assert again.stretch.slot == 1
    again.predict(TEXT[:20])
    assert model.states.nbytes == 3 * bytes_per_sequence(CONVOLUTION)


def test_after_a_lack_of_memory_states_are_reserved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    states = States(DELTA)
    lacking = Mock(side_effect=[np.zeros((2, 1), np.float32), MemoryError()])
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(np, "zeros", lacking)
        states.reserve(2)
    states.reserve(2)
    assert [state.shape for state in states.of_slot(1)] == [(1,), (LOGGED,)]


def test_places_show_in_what_is_kept() -> None:
    assert [ResumePoints.of(kept).every for kept in ([KEYS], CONVOLUTION, DELTA, (*CONVOLUTION, *DELTA))] == [
        1,
        BLOCK,
        0,
        0,
    ]


TEXTS = [TEXT, [*TEXT[:150], 1, *TEXT[:90]], [*TEXT[:150], 2, *TEXT[90:200]], TEXT[::-1]]
"""Texts, of which three begin alike."""


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_texts_go_on_from_checkpoints_with_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Of sessions that take texts in turn; in memory and on disk, with restarts, damage and little room."""
    folder, model = tmp_path_factory.mktemp("blocks"), StatesModel(DELTA)
    memory, disk = data.draw(st.sampled_from([0, 1000, 1 << 20])), data.draw(st.sampled_from([3000, 1 << 20]))
    store, sessions = KvStore(memory, BlockFiles(folder, disk)), [model.session(), model.session()]
    for _ in range(data.draw(st.integers(1, 8))):
        session, text = data.draw(st.sampled_from(sessions)), data.draw(st.sampled_from(TEXTS))
        text = text[: data.draw(st.integers(1, len(text)))]
        starts = data.draw(st.lists(st.integers(0, len(text)), max_size=2))
        others = [other for other in sessions if other is not session]
        for length in store.fetch(session, text, others, starts):
            assert session.shared_prefix(text) < length < len(text)
            session.prefill(text[:length])
            store.checkpoint(session)
        np.testing.assert_array_equal(session.predict_next(text).logits[-1], law(DELTA, text))
        store.checkpoint(session)
        for answer in data.draw(st.lists(st.lists(TOKENS, min_size=1, max_size=LOGGED), max_size=2)):
            rows = session.predict(answer).logits
            np.testing.assert_array_equal(rows, rows_of(DELTA, [*text, *answer])[len(text) :])
            session.keep(0)
        follows = data.draw(st.sampled_from(["nothing", "write", "restart", "damage"]))
        if follows != "nothing":
            store.write_behind()
        if follows == "damage":
            for path in sorted(folder.rglob("*"))[::2]:
                if path.is_file():
                    path.write_bytes(path.read_bytes()[:-1] + b"x")
        if follows in ("restart", "damage"):
            store = KvStore(memory, BlockFiles(folder, disk))
            for reading in sessions:
                reading.rewind(0)
        assert store.nbytes <= memory


def test_a_text_that_was_read_is_not_read_again(tmp_path: Path) -> None:
    """By another session, after a restart, and where the next text goes on otherwise near the end."""
    store, model = KvStore(1 << 20, BlockFiles(tmp_path)), StatesModel(DELTA)
    session = model.session()
    store.fetch(session, TEXT)
    session.predict_next(TEXT)
    store.checkpoint(session)
    session.predict(TEXT[:5])
    for other in ([*TEXT, 1, 2, 3], [*TEXT[:-3], 9, 9, 9, 9, 9]):
        store.fetch(session, other)
        assert session.shared_prefix(other) >= len(TEXT) - 3 and session.stretch.behind <= session.length
        np.testing.assert_array_equal(session.predict_next(other).logits[-1], law(DELTA, other))
    store.fetch(session, TEXT[::-1])
    store.write_behind()
    restarted = StatesModel(DELTA).session()
    KvStore(0, BlockFiles(tmp_path)).fetch(restarted, [*TEXT, 4])
    assert restarted.length == len(TEXT)
    np.testing.assert_array_equal(restarted.predict_next([*TEXT, 4]).logits[-1], law(DELTA, [*TEXT, 4]))


class Asking:
    """Reads prompts as requests do, on two seats in turn."""

    def __init__(self, store: KvStore) -> None:
        self.store, self.model = store, StatesModel(DELTA)
        self.sessions = [self.model.session(), self.model.session()]

    def __call__(self, text: list[int], *starts: int, at: int = 0) -> int:
        """How many rows were read."""
        session, before = self.sessions[at], self.model.read
        for length in self.store.fetch(session, text, [self.sessions[1 - at]], starts):
            session.prefill(text[:length])
            self.store.checkpoint(session)
        np.testing.assert_array_equal(session.predict_next(text).logits[-1], law(DELTA, text))
        self.store.checkpoint(session)
        read = self.model.read - before
        session.predict(TEXT[:3])
        return read


SYSTEM = TEXT[:230]


def test_prompts_share_the_states_behind_what_they_begin_with(tmp_path: Path) -> None:
    """From where messages begin; without that from where two texts went apart, from the third text on."""
    ask = Asking(KvStore(1 << 20, BlockFiles(tmp_path)))
    questions = [[*SYSTEM, *TEXT[300 + at : 350 + at]] for at in range(4)]
    assert [ask(questions[0], 230), ask(questions[1], 230)] == [280, 50]
    changed = [[0, *question[1:]] for question in questions]
    assert [ask(prompt) for prompt in changed] == [280, 280, 280 - 224, 280 - 224]
    ask.store.write_behind()
    restarted = Asking(KvStore(1 << 20, BlockFiles(tmp_path)))
    assert [restarted(questions[2], 230), restarted(changed[3])] == [50, 1]
    assert restarted([*changed[3], *TEXT[5:45]]) == 40


def test_a_prompt_that_another_seat_holds_is_not_read_again() -> None:
    ask = Asking(KvStore(1 << 20))
    assert [ask(TEXT), ask(TEXT, at=1), ask([*TEXT, 7, 8], at=1)] == [400, 1, 2]


def test_a_state_that_is_put_aside_and_lies_in_a_file_counts_once(tmp_path: Path) -> None:
    ask = Asking(KvStore(1 << 20, BlockFiles(tmp_path)))
    ask(TEXT)
    ask.store.write_behind()
    ask.store = KvStore(1 << 20, BlockFiles(tmp_path))
    assert ask([*TEXT[:390], 1, 2, 3, 4, 5]) == 5
    alone = Asking(KvStore(1 << 20))
    alone(TEXT)
    alone.store = KvStore(1 << 20)
    alone.store.fetch(alone.sessions[0], [1])  # what is put aside
    assert ask.store.nbytes == alone.store.nbytes > 0


def test_states_of_a_private_text_stay_off_the_disk(tmp_path: Path) -> None:
    """Though a text that is kept there begins alike, and would go on from them."""
    store, session = KvStore(1 << 20, BlockFiles(tmp_path)), StatesModel(DELTA).session()
    private, public = [*TEXT[:90], *[77] * 20], [*TEXT[:90], *TEXT[200:220]]
    for text, on_disk in ((private, False), (public, True)):
        store.fetch(session, text, on_disk=on_disk)
        session.predict_next(text)
        if not on_disk:
            store.checkpoint(session)
    store.write_behind()
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert contents and not any(np.full(4, 77, "<i8").tobytes() in content for content in contents)


@pytest.mark.parametrize("fault", [-1, LOGGED + BLOCK + 1, "behind", "shape"])
def test_a_state_of_no_use_in_a_file_is_none(tmp_path: Path, fault: int | str) -> None:
    """Facts that contradict each other under a right digest, and a state of another shape."""
    files = BlockFiles(tmp_path)
    asking = Asking(KvStore(1 << 20, files))
    asking(TEXT)
    asking.store.write_behind()
    key, sizes = "states", {block.path.name: block.size - 48 for block in stored(tmp_path)}
    name = max(sizes, key=lambda name: sizes[name])
    raw = bytearray(files.read(key, name, sizes[name]) or b"")
    facts = np.frombuffer(raw, "<i8", 2)
    facts[0] = facts[1] + 1 if fault == "behind" else fault if isinstance(fault, int) else facts[0]
    (tmp_path / key / name).unlink()
    assert files.write(key, [name], lambda _: bytes(raw), lambda: False)
    other = Asking(KvStore(1 << 20, files))
    if fault == "shape":
        other.model = StatesModel([DELTA[0], replace(DELTA[1], shape=(2,)), DELTA[2]])
        other.sessions = [other.model.session(), other.model.session()]
    assert other(TEXT) == len(TEXT)


def test_checkpoints_stand_apart() -> None:
    """What is nearer to the last, or to the end, costs more than it saves."""
    session = Session(StatesModel(DELTA))
    store = KvStore(1 << 20)
    assert store.fetch(session, TEXT, starts=(10, 70, 100, 134, 384, 385)) == [70, 134, 384]
    assert KvStore(1 << 20).fetch(Session(StatesModel(CONVOLUTION)), TEXT, starts=(70,)) == []


@KINDS
def test_what_a_context_adds_is_measured_over_copies(kept: Sequence[KeptTensor]) -> None:
    model = StatesModel(kept)
    session = Session(model)
    measured = measure_context(session, CostCurve({1: 0.01, 8: 0.02}))
    assert measured.context_s >= 0 and session.length == 0 and session.capacity < 2048
    np.testing.assert_array_equal(session.predict(TEXT).logits, rows_of(kept, TEXT))


def test_a_context_is_as_long_however_large_states_are() -> None:
    """They do not grow with it, so they leave it the memory that it may take."""
    longest = 0

    class Large(StatesModel):
        def run(self, parts: Sequence[Part]) -> list[Predictions]:
            nonlocal longest
            longest = max(longest, *(part.start for part in parts))
            return super().run(parts)

    model = Large([DELTA[0], replace(DELTA[1], shape=(1 << 24,)), DELTA[2]])
    measure_context(Session(model), CostCurve({1: 0.01, 8: 0.02}))
    assert longest >= 1024
