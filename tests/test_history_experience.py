"""What reading prompts gained a drafter, in the history's file: hashes only, apart by target and drafter."""

from pathlib import Path

import pytest

from edgespec.drafting.experience import Outcome
from edgespec.history import database
from edgespec.history.memory import Delta
from edgespec.history.store import Scope, Store
from edgespec.history.use import open_use
from edgespec_models.text.tokenizer import Tokenizer
from tests.histories_for_tests import OTHERS, SCOPE, stored, text_of
from tests.tokenizers_for_tests import byte_level_json

PROMPT = list(range(40))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(byte_level_json(), vocab_size=404)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / f"me{database.SUFFIX}"


def _lose(path: Path, tokenizer: Tokenizer, times: int = 6) -> None:
    """Requests of one program in which reading the prompt did not pay."""
    use = open_use(path, SCOPE, tokenizer)
    for _ in range(times):
        use.experience("d").add(PROMPT, -0.1)
    use.close()


def _pays(path: Path, scope: Scope, tokenizer: Tokenizer, drafter: str = "d") -> bool:
    use = open_use(path, scope, tokenizer)
    try:
        return use.experience(drafter).expected(PROMPT) > 0.02
    finally:
        use.close()


def _gained(*outcomes: Outcome) -> Delta:
    delta = Delta()
    for outcome in outcomes:
        delta.gained("d", outcome)
    return delta


def _merge(path: Path, *deltas: Delta) -> None:
    store = Store.open(path)
    for delta in deltas:
        store.merge(SCOPE, delta, text_of)
    store.close()


def _stored(path: Path) -> dict[bytes, tuple[float, float]]:
    records = stored(path).records.get("d", {})
    return {digest: (record.gain, record.count) for digest, record in records.items()}


def test_it_outlives_the_program_by_target_drafter_and_namespace(path: Path, tokenizer: Tokenizer) -> None:
    assert _pays(path, SCOPE, tokenizer)
    _lose(path, tokenizer)
    assert not _pays(path, SCOPE, tokenizer)
    assert _pays(path, SCOPE, tokenizer, "another")
    assert all(_pays(path, scope, tokenizer) for scope in OTHERS)


def test_hashes_are_stored_and_no_prompt(path: Path, tokenizer: Tokenizer) -> None:
    _lose(path, tokenizer)
    records = _stored(path)
    assert len(records) == 11 and {len(digest) for digest in records} == {8}
    assert [count for _, count in records.values()] == pytest.approx([4.6856] * 11, abs=1e-3)


def test_what_several_programs_saw_adds_up(path: Path) -> None:
    waiting = _gained(Outcome((b"12345678",), 0.5))
    waiting.gained("d", Outcome((b"12345678",), 0.1))
    assert waiting
    _merge(path, waiting, _gained(Outcome((b"12345678",), -0.2)))
    assert _stored(path)[b"12345678"] == pytest.approx((0.81 * 0.5 + 0.9 * 0.1 - 0.2, 2.71))


def test_the_latest_beginnings_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.history.store.MOST", 3)
    _merge(path, *(_gained(Outcome((bytes([number] * 8),), 0.1)) for number in range(5)))
    assert [digest[0] for digest in _stored(path)] == [2, 3, 4]
