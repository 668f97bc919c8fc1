"""A drafter's part in a request: whether it drafts, the room it takes, what it offers to learn from."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.draft import Remarks
from edgespec.drafting.experience import Experience
from edgespec.drafting.model import context_tokens
from edgespec.drafting.policy import Part
from edgespec.drafting.pricing import Pricing
from edgespec.drafting.side import DrafterSide
from edgespec.learning.trainer import Trainer
from edgespec.loading.opening import Running
from edgespec_export.align.settings import Text
from edgespec_models.text.tokenizer import SpecialTokens
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.devices import KINDS, Device, Placement
from edgespec_runtimes.kv_buffers import KvStore
from tests.models_for_tests import toy_bundle, toy_session

EOS = 3
QUICK = CostCurve({1: 1e-6})


class _Trainer:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told = list[Any]()

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")

    def offer(self, example: Text) -> None:
        self.told.append(example)

    def take(self) -> None:
        return None


def _side(*, context: int = 4096, curve: CostCurve = QUICK) -> DrafterSide:
    """Beside a target whose passes take a second; both end texts with ``EOS``."""
    target, small = toy_bundle("toy", 4096), toy_bundle("small", context)
    for bundle in (target, small):
        special = SpecialTokens(None, (EOS,), add_bos=False, pad=None)
        cast(Any, bundle).manifest = SimpleNamespace(name="toy", special_tokens=special)
    placement = Placement(Device(KINDS["cpu"], "ready"), "made up")
    return DrafterSide(
        target,
        Running(small, toy_session(context=context), curve, placement),
        same_vocabulary=True,
        pricing=Pricing(CostCurve({1: 1.0, 8: 1.001})),
        caches=KvStore(0),
    )


def _begin(side: DrafterSide, prompt: list[int]) -> Part:
    sessions = side.session, ()
    return side.begin(
        prompt, list(prompt), sessions, max_new_tokens=20, max_draft=4, target_end=EOS, remarks=Remarks()
    )


@pytest.mark.parametrize(
    ("context", "length", "drafts", "capacity"),
    [
        (4096, 10, True, 10 + 2 * 20 + 4 * 4),  # room for an answer of more tokens than the target's
        (30, 10, True, 30),
        (30, 29, True, 30),
        (30, 30, False, 30),  # a prompt that fills its context is decoded without it
        (30, 31, False, 30),
    ],
)
def test_its_cache_has_room_for_the_answer_too(
    context: int, length: int, drafts: bool, capacity: int
) -> None:
    side = _side(context=context)
    assert (_begin(side, [5] * length).source is not None) == drafts
    assert side.session.capacity == capacity


def test_a_prompt_that_takes_longer_to_read_than_it_will_gain_is_not_read() -> None:
    """15 % of twenty seconds is expected of it: three seconds."""
    for seconds, drafts in ((2.9, True), (3.1, False)):
        side = _side(curve=CostCurve({1: seconds / 64, 32: seconds / 2, 64: seconds, 256: 4 * seconds}))
        part = _begin(side, [5] * 64)
        assert (part.source is not None) == drafts
        assert part.reading_s == (pytest.approx(seconds) if drafts else 0.0)
        assert not part.source or _begin(side, [5] * 64).source


def test_words_of_the_prompt_are_offered_to_a_trimmed_head() -> None:
    side, offered, prompt = _side(), list[Sequence[int]](), [300, 20, 310]
    kept = cast(Any, side.bundle).head_tokens = np.arange(200, dtype=np.int32)
    cast(Any, side.session).offer = offered.append
    model = cast(Any, _begin(side, prompt).source)
    assert (model._ends, model._target_end) == ((EOS,), EOS)
    assert offered == [context_tokens(prompt, side.bundle.tokenizer, kept)]
    assert {300, 310} <= set(offered[0]) and 20 not in offered[0]


SHORT, LONG = list(range(20, 30)), [20 + i % 7 for i in range(600)]


@pytest.mark.parametrize(
    ("prompt", "answer", "offered"),
    [
        ([7, 8], SHORT, [Text((7, 8, *SHORT), 2)]),
        ([7, 8], [*SHORT, EOS], [Text((7, 8, *SHORT, EOS), 2)]),
        ([7, 8], SHORT[:8], [Text((7, 8, *SHORT[:8]), 2)]),
        ([7, 8], SHORT[:7], []),
        ([7, 8], [], []),
        (LONG, LONG, [Text((*LONG[-256:], *LONG[:512]), 256)]),
        (None, SHORT * 2, []),
    ],
)
def test_what_was_answered_is_offered_to_learn_from(
    prompt: list[int] | None, answer: list[int], offered: list[Text]
) -> None:
    """Of long texts the end of the prompt and the beginning of the answer; nothing without a draft."""
    side, trainer = _side(), _Trainer()
    side.trainer = cast(Trainer, trainer)
    part = side.part() if prompt is None else _begin(side, prompt)
    assert trainer.told == ["pause"] and (part.source is None) == (prompt is None)
    part.ended(answer)
    assert trainer.told == ["pause", "resume", *offered]


TEMPLATE = list(range(24))
TRANSLATE, WRITE = [500, 501, 502, 503, 504, 505, 506, 507], [600, 601, 602, 603, 604, 605, 606, 607]


def _request(experience: Experience, instruction: list[int], text: int, gain: float, price: float) -> bool:
    """Whether the prompt was read; if so, what that gained."""
    prompt = TEMPLATE + instruction + [text] * 20
    read = experience.expected(prompt) > price
    if read:
        experience.add(prompt, gain)
    else:
        experience.skip(prompt)
    return read


def test_instructions_that_gain_nothing_are_not_read_and_others_are() -> None:
    experience = Experience()
    for text in range(6):
        _request(experience, TRANSLATE, 1000 + text, -0.02, 0.05)
        assert _request(experience, WRITE, 2000 + text, 0.2, 0.05)
    assert not _request(experience, TRANSLATE, 3000, -0.02, 0.05)
    assert _request(experience, [700, 701, 702, 703], 3001, 0.2, 0.05)


def test_what_is_not_read_is_tried_again() -> None:
    experience = Experience()
    while _request(experience, TRANSLATE, 1, -0.1, 0.05):
        pass
    rounds = next(n for n in range(1000) if _request(experience, TRANSLATE, 1, 0.3, 0.05))
    assert rounds > 5


def test_asking_changes_nothing() -> None:
    experience, told = Experience(), list[object]()
    for text in range(5):
        _request(experience, TRANSLATE, text, -0.02, 0.05)
    asked = Experience(experience._records, tell=lambda *gained: told.append(gained))
    first = asked.expected(TEMPLATE + TRANSLATE)
    assert {asked.expected(TEMPLATE + TRANSLATE) for _ in range(100)} == {first}
    assert told == []
    asked.skip(TEMPLATE + TRANSLATE)
    assert asked.expected(TEMPLATE + TRANSLATE) > first and told == []


def test_each_beginning_is_weighed_against_what_shorter_ones_let_expect() -> None:
    experience, prompt = Experience(), [*TEMPLATE, *TRANSLATE]
    experience.add(prompt, 0.5)
    # Ten beginnings that say the same count as one request, beside a prior of 15 %.
    assert experience.expected(prompt) == pytest.approx((0.5 + 0.15) / 2)
    experience.add([*TEMPLATE, *WRITE], 0.1)
    shared = (0.9 * 0.5 + 0.1 + 0.15) / (1.9 + 1)
    assert experience.expected(TEMPLATE) == pytest.approx(shared)
    assert experience.expected(prompt) == pytest.approx((0.5 + 0.3 * shared) / (1 + 0.3))
    experience.skip(prompt)
    shared = (0.97 * (0.9 * 0.5 + 0.1) + 0.15) / (0.97 * 1.9 + 1)
    assert experience.expected(TEMPLATE) == pytest.approx(shared)


@pytest.mark.parametrize("length", [0, 3, 4, 7, 95, 96, 97, 300])
def test_a_prompt_begins_at_every_fourth_token_up_to_96(length: int) -> None:
    told = list[tuple[Sequence[bytes], float]]()
    experience, prompt = Experience(tell=lambda *gained: told.append(gained)), list(range(length))
    experience.add(prompt, 0.1)
    experience.add([*prompt, 9, 9, 9, 9], 0.2)
    first, longer = (beginnings for beginnings, _ in told)
    assert len(set(first)) == len(first) == 1 + min(length, 96) // 4
    assert len(longer) == 1 + min(length + 4, 96) // 4 and longer[: len(first)] == first
    assert {len(each) for each in longer} == {8}
    assert [share for _, share in told] == [0.1, 0.2]


def test_the_beginnings_seen_last_are_remembered() -> None:
    experience = Experience()
    experience.add([1] * 4, 0.9)
    experience.add([2] * 4, 0.9)
    for text in range(3, 4090):
        experience.add([text] * 4, 0.0)
    experience.add([1] * 4, 0.9)
    for text in range(5000, 5010):
        experience.add([text] * 4, 0.0)
    assert len(experience._records) == 4096
    assert experience.expected([1] * 4) > 0.5 > 0.1 > experience.expected([2] * 4)


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=60), st.floats(-1, 1)), max_size=30))
def test_expectations_stay_within_what_was_seen(requests: list[tuple[list[int], float]]) -> None:
    experience = Experience()
    for prompt, gain in requests:
        experience.add(prompt, gain)
        assert -1.01 < experience.expected(prompt) < 1.01
