"""Requests at once on edgespec's own kernels: a target and a drafter with random weights, in one thread."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgespec
from edgespec import LoadOptions, Model
from tests.kit.drafters import draft_eagerly
from tests.kit.native import tiny_native
from tests.kit.several import Driven, facts

PROMPTS = ("def add(a, b):", "def add(a, b, c):\n    return", "x", "one two three " * 12)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The drafter is the target, so that what it drafts is right."""
    folder = tmp_path_factory.mktemp("several")
    target = tiny_native(folder / "target").path
    return target, tiny_native(folder / "drafter", role="drafter").path


@pytest.fixture(scope="module")
def alone(pair: tuple[Path, Path]) -> Iterator[Model]:
    with edgespec.load(pair[0], None, options=LoadOptions(threads=1, parallel=1)) as model:
        yield model


@pytest.fixture(scope="module", params=["ngram", "model"])
def driven(request: pytest.FixtureRequest, pair: tuple[Path, Path]) -> Iterator[Driven]:
    drafter = pair[1] if request.param == "model" else "ngram"
    options = LoadOptions(threads=1, parallel=3, cache_bytes=200_000)
    one = Driven(edgespec.load(pair[0], drafter, options=options))
    draft_eagerly(one.model)
    yield one
    one.close()


requests = st.fixed_dictionaries(
    {"prompt": st.sampled_from(PROMPTS), "max_new_tokens": st.integers(1, 40)},
    optional={
        "temperature": st.just(0.8),
        "logprobs": st.just(True),
        "repetition_penalty": st.just(1.1),
        "stop_at_eos": st.just(False),
        "wait": st.integers(0, 8),
        "leaves": st.integers(0, 6),
    },
)


@settings(max_examples=15, deadline=None)
@given(st.lists(requests, min_size=1, max_size=5), st.booleans())
def test_rows_of_others_change_no_bit(
    alone: Model, driven: Driven, asked: list[dict[str, Any]], forgets: bool
) -> None:
    if forgets:
        driven.model.forget()
    streams = []
    for each in asked:
        options = {"seed": 1} | {key: each[key] for key in each if key not in ("wait", "leaves")}
        told = driven.queue(driven.model.stream(**options))
        for at in range(each.get("wait", 0)):
            if at == each.get("leaves"):
                told.cancel()
            driven.turn()
        streams.append((options, told))
    driven.run()
    for options, told in streams:
        whole, answer = alone.generate(**options), told.result
        if answer.finish_reason == "cancelled":
            assert answer.tokens == whole.tokens[: len(answer.tokens)]
        else:
            assert facts(answer) == facts(whole)


def test_threads_and_choices_get_their_own_answers(alone: Model, driven: Driven) -> None:
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": 5, "n": 5, "max_new_tokens": 30}
    with ThreadPoolExecutor(4) as pool:
        given = list(pool.map(lambda prompt: driven.model.generate(prompt, **drawn), PROMPTS * 2))
    if driven.model.drafter is not None:
        assert sum("model" in answer.stats.by_source for answer in given) == len(given)
    for prompt, answer in zip(PROMPTS * 2, given, strict=True):
        whole = alone.generate(prompt, **drawn)
        assert [facts(choice) for choice in answer.choices] == [facts(choice) for choice in whole.choices]
        assert answer.others[0].stats.cached_tokens >= answer.stats.prompt_tokens // 32 * 32 - 1
