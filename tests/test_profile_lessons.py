"""What drafters learned, in the profile's file: it adds up, stays apart, and goes when text is forgotten."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import LoadOptions, sessions
from edgespec.drafting.experience import Outcome
from edgespec.learning import Correction
from edgespec.learning.correction import Lesson
from edgespec.learning.weights import SLOTS
from edgespec.profile import schema
from edgespec.profile.manage import Profile
from edgespec.profile.memory import Delta
from edgespec.profile.passages import cut
from edgespec.profile.store import Scope, Store
from edgespec.profile.use import ProfileUse, open_use
from edgespec_models.tokenizer import Tokenizer
from edgespec_runtimes.cost import CostCurve
from tests.tokenizers_for_tests import byte_level_json
from tests.toy import COLUMNS, F32, LLAMA, tiny_bundle

SCOPE = Scope("target", "digest", "mail")
OTHERS = (Scope("other", "digest", "mail"), Scope("target", "other", "mail"), Scope("target", "digest"))
TEXT = [5, 3, 1]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(byte_level_json(), vocab_size=404)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / f"me{schema.SUFFIX}"


def _logits() -> F32:
    return np.array([0.0, -1.0, -2.0] + [-9.0] * 9, np.float32)


def _teach(use: ProfileUse, drafter: str, token: int) -> Correction:
    correction = use.correction(drafter)
    for _ in range(20):
        correction._allowed_s = 1.0
        correction.guess(TEXT, _logits(), None)
        correction.settle([*TEXT, token])
    return correction


def _guess(path: Path, scope: Scope, tokenizer: Tokenizer, drafter: str = "d") -> int:
    use = open_use(path, scope, tokenizer)
    try:
        return use.correction(drafter).guess(TEXT, _logits(), None)[0]
    finally:
        use.close()


def _lesson(value: float, *, anew: bool = False) -> Delta:
    delta = Delta()
    delta.learned("d", Lesson(np.full((2, SLOTS), value, np.float32), anew))
    return delta


def _stored(path: Path) -> dict[str, float]:
    store = Store.open(path)
    try:
        return {name: float(table[0, 0]) for name, table in store.read(SCOPE).weights.items()}
    finally:
        store.close()


def _merge(path: Path, *deltas: Delta) -> None:
    store = Store.open(path)
    for delta in deltas:
        store.merge(SCOPE, delta, lambda tokens: b"x" * len(tokens))
    store.close()


def test_a_restart_keeps_it_apart_from_other_scopes_and_drafters(path: Path, tokenizer: Tokenizer) -> None:
    use = open_use(path, SCOPE, tokenizer)
    assert _teach(use, "d", 1).guess(TEXT, _logits(), None)[0] == 1
    use.close()
    assert _guess(path, SCOPE, tokenizer) == 1
    assert _guess(path, SCOPE, tokenizer, "another") == 0
    assert [_guess(path, scope, tokenizer) for scope in OTHERS] == [0, 0, 0]


def test_two_targets_of_one_profile_teach_one_drafter_opposite_things(
    path: Path, tokenizer: Tokenizer
) -> None:
    uses = [open_use(path, scope, tokenizer) for scope in (SCOPE, OTHERS[0])]
    for use, token in zip(uses, (1, 2), strict=True):
        _teach(use, "d", token)
    for use in uses:
        use.close()
    assert [_guess(path, scope, tokenizer) for scope in (SCOPE, OTHERS[0])] == [1, 2]


def test_what_several_programs_learn_adds_up(path: Path) -> None:
    _merge(path, _lesson(1.0), _lesson(0.5))
    assert _stored(path) == {"d": 1.5}
    _merge(path, _lesson(0.25, anew=True))
    assert _stored(path) == {"d": 0.25}


def test_lessons_that_wait_add_up_as_well(path: Path) -> None:
    waiting = _lesson(1.0)
    waiting.add(_lesson(2.0))
    assert waiting
    _merge(path, waiting)
    assert _stored(path) == {"d": 3.0}


def test_only_the_latest_drafters_are_kept(path: Path) -> None:
    for number in range(6):
        delta = Delta()
        delta.learned(f"d{number}", Lesson(np.ones((2, SLOTS), np.float32), anew=False))
        _merge(path, delta)
    assert sorted(_stored(path)) == ["d2", "d3", "d4", "d5"]


def test_half_a_megabyte_of_nothing_takes_no_room(path: Path) -> None:
    _merge(path, _lesson(1.0))
    assert path.stat().st_size < 100_000


def test_forgetting_text_forgets_what_was_learned_with_it(path: Path, tokenizer: Tokenizer) -> None:
    delta = _lesson(1.0)
    passage = cut(list(range(100, 130)))[0]
    delta.wrote(passage)
    _merge(path, delta)
    assert Profile(path).forget("no such text") == 0
    assert _stored(path) == {"d": 1.0}
    assert Profile(path).forget("xxx") == 1
    assert _stored(path) == {}


def test_a_file_of_the_first_format_is_brought_up_to_date(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(schema._MIGRATIONS[0])
    connection.execute(f"PRAGMA application_id = {schema._APPLICATION}")
    connection.execute("PRAGMA user_version = 1")
    connection.execute("INSERT INTO scope VALUES (1, 'target', 'digest', 'mail', 7, 0, 0.0)")
    connection.commit()
    connection.close()
    _merge(path, _lesson(1.0))
    assert _stored(path) == {"d": 1.0}
    store = Store.open(path)
    assert store.read(SCOPE).clock == 7
    store.close()


def test_weights_that_are_none_are_reported_and_not_used(path: Path, tokenizer: Tokenizer) -> None:
    _merge(path, _lesson(1.0))
    connection = sqlite3.connect(path)
    connection.execute("UPDATE weights SET data = x'00'")
    connection.commit()
    connection.close()
    use = open_use(path, SCOPE, tokenizer)
    assert use.problem is not None and "not as edgespec writes them" in use.problem
    assert use.correction("d").guess(TEXT, _logits(), None)[0] == 0
    use.close()


@pytest.fixture
def flat_costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Verifying is free, so what is drafted does not depend on this machine."""
    monkeypatch.setattr(sessions, "measure_cost", lambda *_, **__: CostCurve({1: 1.0, 64: 1.0001}))
    monkeypatch.setattr("edgespec.pricing.Pricing.pass_seconds", lambda self, rows: 1e-9)
    monkeypatch.setattr("edgespec.pricing.Pricing.pays", lambda self, *_, **__: True)
    monkeypatch.setattr("edgespec.drafting.choice.Guard.allows", lambda self: True)
    monkeypatch.setattr("edgespec.drafting.experience.Experience.pays", lambda self, *_: True)
    return iter([None])


def test_a_model_with_a_drafter_learns_and_answers_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flat_costs: None
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    target, drafter = (tiny_bundle(tmp_path / name, LLAMA, COLUMNS).path for name in ("target", "drafter"))
    options = LoadOptions(threads=1)
    with edgespec.load(target, None, options=options) as model:
        plain = model.generate("x = 1", max_new_tokens=40, stop_at_eos=False)
    with edgespec.load(target, drafter, options=options, profile="me") as model:
        result = model.generate("x = 1", max_new_tokens=40, stop_at_eos=False)
        assert model._profile is not None
        assert len(model._profile._corrections) == 1
    assert result.tokens == plain.tokens
    assert result.stats.learning_undone == 0
    assert result.stats.to_json()["learning_undone"] == 0


def test_what_reading_prompts_gained_is_remembered_by_drafter(path: Path, tokenizer: Tokenizer) -> None:
    prompt = list(range(40))
    use = open_use(path, SCOPE, tokenizer)
    for _ in range(6):
        use.experience("d").begin(prompt, lambda: -0.1)
    use.close()
    again = open_use(path, SCOPE, tokenizer)
    assert not again.experience("d").pays(prompt, 0.02)
    assert again.experience("another").pays(prompt, 0.02)
    again.close()
    store = Store.open(path)
    records = store.read(SCOPE).records["d"]
    store.close()
    assert len(records) == 11 and {len(digest) for digest in records} == {8}
    assert all(record.count == pytest.approx(4.69, abs=0.01) for record in records.values())


def test_the_latest_beginnings_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.profile.store.MOST", 3)
    for number in range(5):
        delta = Delta()
        delta.gained("d", Outcome((bytes([number] * 8),), 0.1))
        _merge(path, delta)
    store = Store.open(path)
    assert [digest[0] for digest in store.read(SCOPE).records["d"]] == [2, 3, 4]
    store.close()
