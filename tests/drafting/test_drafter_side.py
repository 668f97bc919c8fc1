"""A drafter's part in a request: whether it drafts, and the room it takes."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from edgespec.drafting.model import ModelDrafter, context_tokens
from edgespec.drafting.side import DrafterSide
from edgespec.drafting.source import Source
from edgespec.loading.opening import TimedModel
from edgespec_models.text.tokenizer import SpecialTokens
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.devices import KINDS, Device, Placement
from edgespec_runtimes.kv_store import KvStore
from tests.kit.drafters import draft_of
from tests.kit.models import toy_bundle, toy_session

EOS = 3
QUICK = CostCurve({1: 1e-6})


def _side(*, context: int = 4096, curve: CostCurve = QUICK) -> DrafterSide:
    """Beside a target whose passes take a second; both end texts with ``EOS``."""
    target, small = toy_bundle("toy", 4096), toy_bundle("small", context)
    for bundle in (target, small):
        special = SpecialTokens(None, (EOS,), add_bos=False)
        cast(Any, bundle).manifest = SimpleNamespace(name="toy", special_tokens=special)
    placement = Placement(Device(KINDS["cpu"], "ready"), "made up")
    return DrafterSide(
        target,
        TimedModel(small, toy_session(context=context), curve, placement),
        same_vocabulary=True,
        caches=KvStore(0),
    )


def _begin(side: DrafterSide, prompt: list[int], max_new_tokens: int = 20) -> Source | None:
    return side.begin(
        prompt,
        list(prompt),
        (side.session, ()),
        target=side.session,
        max_new_tokens=max_new_tokens,
        max_draft=4,
        target_end=EOS,
        token_s=1.0,
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
    source = _begin(side, [5] * length)
    assert (source is not None) == drafts
    assert side.session.capacity == capacity


def test_a_prompt_that_takes_longer_to_read_than_it_will_gain_is_not_read() -> None:
    """15 % of twenty seconds is expected of it: three seconds."""
    for seconds, drafts in ((2.9, True), (3.1, False)):
        side = _side(curve=CostCurve({1: seconds / 36, 32: seconds / 36 * 32}))
        source = _begin(side, [5] * 500)  # of which it would read 36 tokens
        assert (source is not None) == drafts


def test_words_of_the_prompt_are_offered_to_a_trimmed_head() -> None:
    side, offered, prompt = _side(), list[Sequence[int]](), [300, 20, 310]
    kept = cast(Any, side.bundle).head_tokens = np.arange(200, dtype=np.int32)
    cast(Any, side.session.model).offer = offered.append
    model = cast(ModelDrafter, _begin(side, prompt))
    assert model.ends == (EOS,)
    assert offered == [context_tokens(prompt, side.bundle.tokenizer, kept)]
    assert {300, 310} <= set(offered[0]) and 20 not in offered[0]


@pytest.mark.parametrize(
    ("length", "held", "read"),
    [
        (10, 0, [*range(10)]),
        (36, 0, [*range(36)]),
        (100, 0, [*range(4), *range(68, 100)]),  # of the end what two passes' time reads, or 32
        (100, 50, [*range(50), *range(68, 100)]),  # what its cache holds costs nothing
        (100, 80, [*range(100)]),
    ],
)
def test_of_a_long_prompt_it_reads_the_end(length: int, held: int, read: list[int]) -> None:
    side = _side(curve=CostCurve({1: 3 / 32, 32: 3.0}))
    prompt = list(range(5, 5 + length))
    side.session.reserve(200)
    side.session.prefill(prompt[:held])
    source = _begin(side, prompt, max_new_tokens=100)
    assert isinstance(source, ModelDrafter)
    draft_of(source, prompt, 1)
    expected = [prompt[at] for at in read]
    assert side.session.shared_prefix([*expected, 0]) == len(expected)
