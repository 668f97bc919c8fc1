"""``/infill`` and ``suffix``: what llama.cpp's plug-ins for editors send and read."""

from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest

from edgespec.asking.fill import fill_tokens
from edgespec.asking.request import Hole, Request
from tests.asking.test_fill import QWEN, bundle_of, ending, with_marks
from tests.kit.models import toy_model
from tests.kit.serving import ServedModel, ask, events, serving
from tests.kit.toy import ToySession

PATH = "/infill"
EDITOR = {  # as llama.vim and llama.vscode send it
    "id_slot": 0,
    "input_prefix": "a\n",
    "input_suffix": "\nc\n",
    "input_extra": [{"text": "A", "time": [1, 2], "filename": "a.py"}, {"text": "B"}],
    "prompt": "b = ",
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
}


@pytest.fixture
def model() -> ServedModel:
    return ServedModel()


@pytest.fixture
def url(model: ServedModel) -> Iterator[str]:
    with serving(model.as_model()) as url:
        yield url


def test_an_editors_request_is_filled(model: ServedModel, url: str) -> None:
    answer = ask(url, PATH, EDITOR).json
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("re: a\nb = ", True, "eos")
    assert answer["truncated"] is False
    assert answer["tokens_cached"] == 7 + answer["tokens_predicted"] and answer["tokens_evaluated"] == 7
    told = answer["timings"]
    assert (told["prompt_n"], told["cache_n"], told["prompt_ms"]) == (4, 3, 100.0)
    assert (told["predicted_n"], told["predicted_ms"], told["predicted_per_second"]) == (20, 1000.0, 20.0)
    assert told["prompt_per_second"] == 40.0
    ((hole, options),) = model.calls
    assert hole == ("a\nb = ", "\nc\n", (("a.py", "A"), ("file", "B")), None)
    assert options == {
        "max_lines": None,
        "top_k": 40,
        "top_p": 0.9,
        "stop": (),
        "max_new_tokens": 128,
        "timeout": pytest.approx(600.0, abs=10),
    }


def test_a_stream_ends_with_what_it_cost(url: str) -> None:
    *pieces, last = events(ask(url, PATH, EDITOR | {"stream": True}))
    assert "".join(piece["content"] for piece in pieces) == "re: a\nb = " and last["content"] == ""
    assert [piece["stop"] for piece in (*pieces, last)] == [False] * len(pieces) + [True]
    assert last["tokens_predicted"] == sum(len(piece["tokens"]) for piece in pieces)


def test_only_the_fields_that_are_asked_for_come(url: str) -> None:
    fields = ["content", "timings/prompt_n", "truncated", "timings/none"]
    answer = ask(url, PATH, EDITOR | {"response_fields": fields}).json
    assert answer == {"content": "re: a\nb = ", "timings/prompt_n": 4, "truncated": False}


@pytest.mark.parametrize("stream", [False, True])
def test_a_cache_is_warmed_without_text(model: ServedModel, url: str, stream: bool) -> None:
    warm = EDITOR | {"n_predict": 0, "stream": stream, "response_fields": [""]}
    answer = ask(url, PATH, warm)
    told = events(answer) if stream else [answer.json]
    assert all(each.get("content", "") == "" for each in told) and told[-1] == {}
    assert model.calls[0][1]["max_new_tokens"] == 0


def test_what_infill_does_not_take_is_named(url: str) -> None:
    for wrong, told in (
        ({"input_prefix": None}, "input_prefix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra"),
        ({"n_predict": -2}, "n_predict"),
        ({"n": 2}, "'n'"),
        ({"grammar": "x"}, "grammar"),
    ):
        reply = ask(url, PATH, EDITOR | wrong)
        assert reply.status == 400 and told in reply.json["error"]["message"]
    assert ask(url, PATH, EDITOR | {"model": "other"}).status == 404
    assert ask(url, PATH, EDITOR | {"model": "served", "max_lines": 2}).status == 200


def test_a_suffix_makes_a_completion_a_fill(model: ServedModel, url: str) -> None:
    body = {"model": "served", "prompt": ["a", "b"], "suffix": "c"}
    answer = ask(url, "/v1/completions", body).json
    assert [choice["text"] for choice in answer["choices"]] == ["re: a", "re: b"]
    assert sorted(hole for hole, _ in model.calls) == [("a", "c", (), None), ("b", "c", (), None)]
    assert ask(url, "/v1/completions", body | {"suffix": ""}).status == 200
    reply = ask(url, "/v1/completions", body | {"echo": True, "logprobs": 0})
    assert reply.status == 400 and "leave out suffix" in reply.error
    assert sorted(hole for hole, _ in model.calls[2:]) == ["a", "b"]  # threads encode them side by side


def test_tokens_and_their_offsets_are_of_the_text_that_comes() -> None:
    """Of a cut word, what is written again is none of it."""
    tokenizer, prompt, written = with_marks(QWEN), "x = the_qui", "quick_brown_fox"
    bundle = bundle_of(tokenizer)
    read, _ = fill_tokens(bundle, Hole(prompt, "\n"), Request(), 4096)
    session = ToySession(ending(tokenizer, written, len(read)), 500, context=4096)
    body = {"model": "toy", "prompt": prompt, "suffix": "\n", "logprobs": 0, "speculate": False}
    with toy_model(session, bundle=lambda *_: bundle) as model, serving(model) as url:
        whole = ask(url, "/v1/completions", body).json["choices"][0]
        reply = ask(url, "/v1/completions", body | {"stream": True})
    chunks = [event["choices"][0] for event in events(reply)[:-1]]
    said, shown = whole["logprobs"], whole["edgespec"]["tokens"]
    *ends, mark = accumulate(map(len, said["tokens"]))
    assert whole["text"] == "ck_brown_fox" and mark > len(written) == ends[-1]
    assert said["text_offset"] == [max(0, end - 3) for end in (0, *ends)]
    assert [each["text"] for each in shown][:-1] == [
        written[max(3, at) : end] for at, end in pairwise([0, *ends])
    ]
    assert [at for chunk in chunks if chunk["logprobs"] for at in chunk["logprobs"]["text_offset"]] == said[
        "text_offset"
    ]
    assert [each for chunk in chunks for each in chunk["edgespec"].get("tokens", ())] == shown
