"""``response_format`` from the request to the result, on random models."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import AnyJson, Choice, JsonSchema, LoadOptions, Model, Regex
from edgespec_models.errors import RequestError
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.formats import accepts
from tests.kit.native import tiny_native
from tests.kit.tokenizers import sentencepiece_json
from tests.kit.toy import LLAMA

PROMPT = "def add(a, b):"
LOAD = LoadOptions(threads=1)
CHANGED = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": {5: 100.0}}
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.5, "seed": 3}, CHANGED)
ANIMAL = JsonSchema(
    {
        "type": "object",
        "properties": {
            "the quick brown": {"enum": ["fox", "dog"]},
            "legs": {"type": "integer", "minimum": 0, "maximum": 99},
            "lazy": {"type": "boolean"},
        },
        "required": ["the quick brown", "legs", "lazy"],
        "additionalProperties": False,
    }
)
pytestmark = pytest.mark.usefixtures("free_passes")  # drafts are made whatever this machine measures


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a drafter of another vocabulary."""
    folder, text = tmp_path_factory.mktemp("models"), sentencepiece_json()
    other = replace(LLAMA, vocab_size=Tokenizer.from_json(text).vocab_size)
    target = tiny_native(folder / "target", LLAMA, "Q4_1").path
    return target, tiny_native(folder / "other", other, "Q4_0", seed=6, tokenizer_json=text).path


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> Iterator[Model]:
    with edgespec.load(*folders, options=LOAD) as model:
        yield model


FORMATS = [ANIMAL, Regex("(fox|dog){2,5}!"), Choice(["the target verifies", "the drafter proposes"])]


@pytest.mark.parametrize("wanted", FORMATS, ids=lambda wanted: type(wanted).__name__)
@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "sampled", "changed"])
def test_answers_fit_and_are_those_of_plain_decoding(
    model: Model, wanted: JsonSchema, options: dict[str, Any]
) -> None:
    plain = model.generate(PROMPT, response_format=wanted, speculate=False, **options)
    fast = model.generate(PROMPT, response_format=wanted, **options)
    assert fast.tokens == plain.tokens and accepts(wanted, fast.text)
    assert fast.finish_reason == plain.finish_reason == "stop"
    assert plain.stats.drafted == 0
    by_grammar = fast.stats.by_source["grammar"]
    assert by_grammar.drafted >= by_grammar.accepted > 0
    assert fast.stats.rounds < plain.stats.rounds


def test_without_a_drafter_decoding_is_plain_and_fits(folders: tuple[Path, Path]) -> None:
    with edgespec.load(folders[0], None, options=LOAD) as model:
        answer = model.generate(PROMPT, response_format=ANIMAL)
    assert accepts(ANIMAL, answer.text) and answer.stats.drafted == 0


def test_a_bad_format_is_refused_before_anything_runs(model: Model) -> None:
    with pytest.raises(RequestError, match="cannot be followed"):
        model.stream(PROMPT, response_format=Regex("("))
    with pytest.raises(RequestError, match="response_format is 'json'; allowed: a JsonSchema or"):
        model.stream(PROMPT, response_format="json")  # type: ignore[arg-type]


def test_an_answer_that_is_cut_short_says_so(model: Model) -> None:
    whole = model.generate(PROMPT, response_format=ANIMAL)
    for count in range(1, len(whole.tokens) + 2):
        answer = model.generate(PROMPT, response_format=ANIMAL, max_new_tokens=count)
        assert answer.tokens == whole.tokens[:count]
        assert answer.finish_reason == ("length" if count < len(whole.tokens) else "stop")


def test_a_stop_string_ends_it_before_its_time(model: Model) -> None:
    answer = model.generate(PROMPT, response_format=ANIMAL, stop=["legs"])
    assert answer.text == model.generate(PROMPT, response_format=ANIMAL).text.split("legs")[0]
    assert answer.finish_reason == "stop"


def test_a_format_ends_the_answer_even_where_the_model_may_not(model: Model) -> None:
    answer = model.generate(PROMPT, response_format=Regex("[a-z]{1,4}"), stop_at_eos=False)
    assert answer.finish_reason == "stop" and 1 <= len(answer.text) <= 4


def test_several_answers_each_fit(model: Model) -> None:
    answer = model.generate(PROMPT, response_format=ANIMAL, n=3, temperature=2.0, seed=1)
    assert len({choice.text for choice in answer.choices}) > 1
    assert all(accepts(ANIMAL, choice.text) for choice in answer.choices)


def test_a_request_without_a_format_after_one_with(model: Model) -> None:
    free = model.generate(PROMPT, max_new_tokens=20)
    model.generate(PROMPT, response_format=AnyJson(), max_new_tokens=20)
    assert model.generate(PROMPT, max_new_tokens=20).tokens == free.tokens
    assert "grammar" not in model.generate(PROMPT, max_new_tokens=20).stats.by_source
