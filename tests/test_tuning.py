"""A drafter's gains learn a text, are told in sums, and are put back where they mislead."""

from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.learning.decoder import NumpyDecoder, Reading
from edgespec.learning.gains import ROWS, Example, Lesson, Table
from edgespec.learning.tuning import Tuning
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.config import ModelConfig
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from tests.kit.native import tiny_native
from tests.kit.toy import GEMMA, LLAMA

STRANGE = Example((5, 17, 300, 2, 2, 41, 17, 300, 99, 250, 7, 63, 11, 390, 18, 5, 17, 301, 4, 77, 6), 6)
"""Nothing that a random model would write."""
PROMPT, WRITTEN = (5, 17, 300, 2), 40
CHECKED = 4
"""Every so many texts, gains are compared with those that proved themselves."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_native(tmp_path_factory.mktemp("tuning") / "m", LLAMA, "Q8_0", role="drafter").bundle


@pytest.fixture(scope="module")
def own(bundle: Bundle) -> Example:
    """What the drafter itself writes: all of it is guessed right."""
    session, tokens = open_cpu(bundle, CpuOptions(threads=1, exact_rows=False)), list(PROMPT)
    for _ in range(WRITTEN):
        tokens.append(session.predict_next(tokens).best(0))
    session.close()
    return Example(tuple(tokens), len(PROMPT))


class _Decoder(NumpyDecoder):
    """Its gradients are no numbers in ``broken``."""

    broken = slice(0)

    def read(self, *arguments: Any, **options: Any) -> Reading:
        reading = super().read(*arguments, **options)
        if reading.gradient is not None:
            reading.gradient[self.broken] = np.nan
        return reading


@pytest.fixture
def decoder(bundle: Bundle) -> _Decoder:
    return _Decoder(bundle)


def _gains(tuning: Tuning) -> np.ndarray:
    return np.concatenate(list(tuning.gains.values()))


def _poison(decoder: NumpyDecoder, factor: float = -2.0) -> Table:
    """Gains that point the other way."""
    table = np.zeros((ROWS, len(decoder.gains)), np.float32)
    table[0] = np.float32(factor) * decoder.gains.stored
    return table


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=lambda config: config.architecture)
def test_a_text_is_learned(tmp_path: Path, config: ModelConfig) -> None:
    tuning = Tuning(NumpyDecoder(tiny_native(tmp_path / "m", config, "Q8_0", role="drafter").bundle))
    readings = [tuning.learn(STRANGE) for _ in range(160)]
    first, last = readings[0], readings[-1]
    assert first.right.mean() < 0.2 and last.right.mean() > 0.8
    assert last.loss < 0.5 * first.loss
    losses = [reading.loss for reading in readings]
    assert losses[0] > losses[40] > losses[80] > losses[159]
    assert (tuning.texts, tuning.undone) == (160, 0)


def test_lessons_add_up(decoder: NumpyDecoder, own: Example) -> None:
    tuning = Tuning(decoder)
    assert tuning.lesson() is None
    lessons: list[Lesson] = []
    for count in (1, 3, 2):
        for _ in range(count):
            tuning.learn(STRANGE)
            tuning.learn(own)
        lesson = tuning.lesson()
        assert lesson is not None and not lesson.anew
        assert lesson.change.shape == (ROWS, len(decoder.gains)) and lesson.change.dtype == np.float32
        lessons.append(lesson)
        assert tuning.lesson() is None
    answers = len(STRANGE.tokens) - STRANGE.start + WRITTEN
    assert [lesson.tokens for lesson in lessons] == [answers, 3 * answers, 2 * answers]
    table = sum((lesson.change for lesson in lessons[1:]), lessons[0].change)
    together = reduce(lambda earlier, lesson: lesson.after(earlier), lessons)
    np.testing.assert_allclose(together.change, table, atol=1e-7)
    assert together.tokens == 6 * answers
    given, again = table.copy(), Tuning(decoder, table)
    np.testing.assert_allclose(_gains(again), _gains(tuning), atol=1e-6)
    for gain in again.gains.values():
        gain[:] = 0.0  # a copy
    ours, theirs = tuning.learn(STRANGE), again.learn(STRANGE)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
    np.testing.assert_array_equal(ours.right, theirs.right)
    np.testing.assert_array_equal(table, given)  # it stays the caller's


def test_a_stored_state_is_not_thrown_off_by_the_next_text(decoder: NumpyDecoder) -> None:
    tuning = Tuning(decoder)
    for _ in range(30):
        tuning.learn(STRANGE)
    lesson = tuning.lesson()
    assert lesson is not None
    again = Tuning(decoder, lesson.change)
    losses = [again.learn(STRANGE).loss for _ in range(5)]
    assert max(losses) <= losses[0] * 1.02


SHAPES = [((ROWS, 7), 1), ((2, 480), 1), (480, 1), ((ROWS, 480), np.inf), ((ROWS, 480), np.nan)]


@pytest.mark.parametrize(("shape", "value"), SHAPES)
def test_tables_of_no_use_are_ignored(decoder: NumpyDecoder, shape: tuple[int, ...], value: float) -> None:
    assert len(decoder.gains) == 480
    tuning, anew = Tuning(decoder, np.full(shape, value, np.float32)), Tuning(decoder)
    np.testing.assert_array_equal(_gains(tuning), decoder.gains.stored)
    for either in (tuning, anew):
        either.learn(STRANGE)
    np.testing.assert_array_equal(_gains(tuning), _gains(anew))


def test_what_misleads_is_put_back(
    decoder: NumpyDecoder, own: Example, caplog: pytest.LogCaptureFixture
) -> None:
    tuning = Tuning(decoder, _poison(decoder))
    assert tuning.learn(own).right.sum() < WRITTEN / 2
    [said] = caplog.messages
    assert tuning.undone == 1 and "right less often" in said
    np.testing.assert_array_equal(_gains(tuning), decoder.gains.stored)
    lesson = tuning.lesson()
    assert lesson is not None and lesson.anew and not lesson.change.any()
    assert tuning.learn(own).right.mean() > 0.9  # but for a near-tie that the session's rounding decided


@pytest.mark.parametrize("factor", [1e10, -1e25, 1e30])
def test_gains_that_compute_no_numbers_are_put_back_at_once_or_at_the_next_check(
    decoder: NumpyDecoder, own: Example, factor: float
) -> None:
    tuning = Tuning(decoder, _poison(decoder, factor))
    for _ in range(CHECKED):
        tuning.learn(own)
    assert tuning.undone == 1
    assert tuning.learn(own).right.sum() > 0.9 * WRITTEN


def test_gradients_that_are_no_numbers_put_back_what_was_good(
    decoder: _Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    tuning = Tuning(decoder)
    tuning.learn(STRANGE)
    assert tuning.lesson() is not None
    decoder.broken = slice(3, 4)
    tuning.learn(STRANGE)
    assert tuning.undone == 1 and "not finite" in caplog.text
    np.testing.assert_array_equal(_gains(tuning), decoder.gains.stored)
    decoder.broken = slice(0)
    tuning.learn(STRANGE)
    lesson = tuning.lesson()
    assert lesson is not None and lesson.anew and np.isfinite(lesson.change).all()
    np.testing.assert_allclose(_gains(Tuning(decoder, lesson.change)), _gains(tuning), atol=1e-6)


def test_the_gains_that_proved_themselves_are_what_is_put_back(decoder: _Decoder) -> None:
    tuning = Tuning(decoder)
    for _ in range(20 * CHECKED):
        tuning.learn(STRANGE)
    assert tuning.lesson() is not None
    decoder.broken = slice(None)
    tuning.learn(STRANGE)
    lesson = tuning.lesson()
    assert lesson is not None and not lesson.anew  # what others learned meanwhile stays
    good = _gains(tuning)
    assert not np.array_equal(good, decoder.gains.stored)
    tuning.learn(STRANGE)  # they fail too
    np.testing.assert_array_equal(_gains(tuning), decoder.gains.stored)
    lesson = tuning.lesson()
    assert lesson is not None and lesson.anew and tuning.undone == 2
    read = decoder.read(STRANGE.tokens, STRANGE.start, good, differentiate=False)
    assert read.right.any()


class _StopError(Exception):
    pass


@pytest.mark.parametrize("texts", [0, CHECKED])
def test_a_text_that_is_given_up_between_layers_changes_nothing(decoder: NumpyDecoder, texts: int) -> None:
    left = 0

    def breathe() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _StopError

    tuning, undisturbed = Tuning(decoder), Tuning(decoder)
    for each in (tuning, undisturbed):
        for _ in range(texts):
            each.learn(STRANGE)
        each.lesson()
    # Each layer's way there and back, and the head; then the gains that proved themselves, where checked.
    breaths = 2 * LLAMA.num_layers + 1 + (LLAMA.num_layers + 1) * (texts == CHECKED)
    for most in range(breaths):
        left = most
        with pytest.raises(_StopError):
            tuning.learn(STRANGE, breathe)
    assert (tuning.texts, tuning.lesson()) == (texts, None)
    left = breaths
    assert tuning.learn(STRANGE, breathe).loss == undisturbed.learn(STRANGE).loss and left == 0
    np.testing.assert_array_equal(_gains(tuning), _gains(undisturbed))


def test_an_answer_that_it_cannot_write_is_no_lesson(tmp_path: Path) -> None:
    decoder = NumpyDecoder(tiny_native(tmp_path / "m", LLAMA, role="drafter", head_tokens=(400, 401)).bundle)
    tuning = Tuning(decoder)
    for _ in range(CHECKED):
        tuning.learn(STRANGE)
    assert tuning.lesson() is None and tuning.undone == 0
    np.testing.assert_array_equal(_gains(tuning), decoder.gains.stored)
    tuning.learn(Example((*STRANGE.tokens, 400), STRANGE.start))
    lesson = tuning.lesson()
    assert lesson is not None and lesson.tokens == 1


def test_lessons_after_one_another() -> None:
    def lesson(value: float, *, anew: bool = False, tokens: int = 1) -> Lesson:
        return Lesson(np.full((ROWS, 2), value, np.float32), anew, tokens)

    assert lesson(1.0).after(None).change[0, 0] == 1.0
    both = lesson(2.0).after(lesson(1.0, anew=True, tokens=3))
    assert (both.change[0, 0], both.anew, both.tokens) == (3.0, True, 4)
    both = lesson(2.0, anew=True).after(lesson(1.0, tokens=3))
    assert (both.change[0, 0], both.anew) == (2.0, True)
