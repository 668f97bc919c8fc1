"""How likely a prompt's tokens are: over NumPy's softmax of the same logits, and as clients of OpenAI ask."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from typer.testing import CliRunner

import edgespec
from edgespec import LoadOptions, Model
from edgespec.answering.results import Generation
from edgespec.cli import app
from edgespec_models.errors import RequestError
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from tests.kit.models import VOCAB, printable, runner_of, toy_model
from tests.kit.native import tiny_native
from tests.kit.serving import ask, events, serving
from tests.kit.several import Driven
from tests.kit.toy import F32, ToySession, markov_logits

TEXT = "/v1/completions"
LONG = "a naïve document of many words 日本 " * 4
PROMPTS = ["a", "ab", LONG[:8], LONG[:9], LONG]  # of passes of 8 tokens
NEXT = printable(markov_logits(0, VOCAB, scale=4.0))


def toy(parallel: int = 4) -> Model:
    session = ToySession(NEXT, VOCAB, several=True)
    return toy_model(session, options=LoadOptions(parallel=parallel))


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with toy() as model:
        yield model


def log_softmax(rows: Any) -> F32:
    rows = np.array(rows, np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return np.array(rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)))


def check(answer: Generation, ids: list[int], rows: F32, top: int) -> None:
    """``rows`` are NumPy's log probabilities behind each token."""
    first, *others = answer.prompt
    assert (first.id, first.logprob, first.top_logprobs) == (ids[0], None, ())
    assert [token.id for token in answer.prompt] == ids
    assert {token.source for token in answer.prompt} == {"prompt"}
    for other, row in zip(others, rows, strict=False):
        assert other.logprob == pytest.approx(row[other.id], abs=1e-9)
        assert [logprob for _, logprob in other.top_logprobs] == pytest.approx(np.sort(row)[::-1][:top])
        assert all(row[id_] == pytest.approx(logprob) for id_, logprob in other.top_logprobs)


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("new", [0, 1, 9])
def test_a_prompt_has_the_probabilities_that_numpy_says(model: Model, new: int, top: int) -> None:
    for text in PROMPTS:
        plain = model.generate(text, max_tokens=new)
        answer = model.generate(text, max_tokens=new, prompt_logprobs=True, top_logprobs=top)
        ids = model.tokenize(text)
        check(answer, ids, log_softmax([NEXT(ids[: at + 1]) for at in range(len(ids))]), top)
        assert (answer.tokens, answer.finish_reason) == (plain.tokens, plain.finish_reason)
        assert (len(answer.tokens), answer.finish_reason) == (new, "length")
        assert answer.stats.cached_tokens == 0 and plain.prompt == ()
        assert all(record.logprob is None for record in answer.records)


def test_what_the_cache_holds_has_probabilities_too(tmp_path: Path) -> None:
    """On edgespec's kernels, with the same bits as in one pass over the whole."""
    tiny = tiny_native(tmp_path / "target")
    with edgespec.load(tiny.path, "ngram", options=LoadOptions(threads=1)) as model:
        ids = model.tokenize(LONG)
        session = open_cpu(tiny.bundle, CpuOptions(threads=1))
        rows = log_softmax(session.predict(ids).logits)
        session.close()
        model.generate(LONG, max_tokens=4)
        answers = [
            model.generate(LONG, max_tokens=new, prompt_logprobs=True, top_logprobs=2) for new in (0, 4, 0)
        ]
        for answer in answers:
            check(answer, ids, rows, 2)
            assert answer.prompt == answers[0].prompt
        assert model.generate(LONG, max_tokens=4).stats.cached_tokens == len(ids) - 1


def test_prompts_are_scored_beside_other_requests(model: Model) -> None:
    alone = [model.generate(text, max_tokens=5, prompt_logprobs=True).prompt for text in PROMPTS]
    others = [model.stream(LONG, max_tokens=200, temperature=1.0, seed=1) for _ in range(2)]
    for other in others:
        next(other)
    streams = [model.stream(text, max_tokens=5, prompt_logprobs=True) for text in PROMPTS]
    for stream in streams:
        stream.start()
    assert [stream.run().prompt for stream in streams] == alone
    assert len({other.run().tokens for other in others}) == 1


def test_a_prompt_whose_cache_was_emptied_is_scored_once(model: Model) -> None:
    """As it is where another request's cache finds no memory."""
    one = Driven(toy())
    stream = one.queue(one.model.stream(LONG, max_tokens=2, prompt_logprobs=True))
    for _ in range(3):
        one.turn()
    runner_of(one.model).session.rewind(0)
    one.run()
    assert stream.result.prompt == model.generate(LONG, max_tokens=2, prompt_logprobs=True).prompt
    one.close()


def test_records_have_the_prompt_once_behind_the_progress(model: Model) -> None:
    for new in (0, 5):
        stream = model.stream(LONG, max_tokens=new, prompt_logprobs=True)
        told = [record for record in stream.records() if record.progress is None]
        assert [bool(record.prompt) for record in told] == [True] + [False] * (len(told) - 1)
        assert told[0].prompt == stream.result.prompt


def test_a_prompt_may_be_read_without_an_answer(model: Model) -> None:
    model.forget()
    nothing = model.generate(LONG, max_tokens=0)
    assert (nothing.text, nothing.tokens, nothing.finish_reason) == ("", (), "length")
    assert model.generate(LONG, max_tokens=1).stats.cached_tokens == len(model.tokenize(LONG)) - 1
    with pytest.raises(RequestError, match="0, or more with logprobs=True or prompt_logprobs=True"):
        model.generate("a", top_logprobs=1)


@pytest.fixture(scope="module")
def url(model: Model) -> Iterator[str]:
    with serving(model) as url:
        yield url


def scored(url: str, prompt: Any, **more: Any) -> Any:
    return ask(url, TEXT, {"model": "toy", "prompt": prompt, "echo": True, "logprobs": 1} | more).json


def test_openais_client_scores_prompts(model: Model, url: str) -> None:
    """As evaluations ask: a prompt's second half behind its first, greedy or not."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for new in (0, 1):
            told: Any = client.completions.create(
                model="toy", prompt=PROMPTS, max_tokens=new, echo=True, logprobs=1
            )
            assert told.usage.completion_tokens == new * len(PROMPTS)
            for text, choice in zip(PROMPTS, told.choices, strict=True):
                written = model.generate(text, max_tokens=new, prompt_logprobs=True, top_logprobs=1)
                lists = choice.logprobs
                assert choice.text == text + written.text and choice.finish_reason == "length"
                wanted = [token.logprob for token in written.prompt]
                assert lists.token_logprobs[0] is lists.top_logprobs[0] is None
                assert lists.token_logprobs[: len(wanted)] == wanted
                assert len(lists.token_logprobs) == len(wanted) + new
                best = [max(logprob.values()) for logprob in lists.top_logprobs[1:]]
                assert all(own <= most for own, most in zip(lists.token_logprobs[1:], best, strict=True))


def test_offsets_count_the_characters_of_prompt_and_answer(url: str) -> None:
    choice = scored(url, LONG, max_tokens=4)["choices"][0]
    lists = choice["logprobs"]
    pairs = zip(lists["tokens"], lists["text_offset"], strict=True)
    for token, offset in pairs:
        if not token.startswith("bytes:"):  # not a part of a character
            assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1.0, "seed": 3}, {"n": 2}, {"max_tokens": 0}])
def test_a_stream_echoes_what_the_whole_does(url: str, more: dict[str, Any]) -> None:
    prompts, more = ["ab", LONG, "c"], {"max_tokens": 6} | more
    whole = scored(url, prompts, **more)["choices"]
    body = {"model": "toy", "prompt": prompts, "echo": True, "logprobs": 1, "stream": True}
    *chunks, done = events(ask(url, TEXT, body | more))
    assert done == "[DONE]" and [each["index"] for each in whole] == list(range(len(whole)))
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    texts, lists = [""] * len(whole), [{name: list[Any]() for name in names} for _ in whole]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        for name in names if choice["logprobs"] else ():
            lists[choice["index"]][name] += choice["logprobs"][name]
    assert texts == [each["text"] for each in whole] and lists == [each["logprobs"] for each in whole]
    assert all(text.startswith(prompts[at * 3 // len(whole)]) for at, text in enumerate(texts))


@pytest.mark.usefixtures("consoles")
@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_half_a_character_is_told_by_the_command_and_by_the_model(
    loads: Callable[[Any], None], raw: tuple[str, ...]
) -> None:
    """As a terminal gives a byte that is no UTF-8."""
    said = "has a lone surrogate, U+DCFF, at position 2"
    with toy() as model:
        loads(lambda *names, **settings: model)
        with pytest.raises(ValueError, match=re.escape(said)):
            model.chat([{"role": "user", "content": [{"type": "text", "text": "ab\udcff"}]}])
        result = CliRunner().invoke(app, ["generate", "toy", "ab\udcff", *raw])
    assert result.exit_code == 1 and said in " ".join(result.stderr.split())


def test_an_echo_alone_scores_nothing(model: Model, url: str) -> None:
    model.generate(LONG, max_tokens=1)
    told = ask(url, TEXT, {"model": "toy", "prompt": LONG, "echo": True, "max_tokens": 3}).json
    assert told["choices"][0]["text"].startswith(LONG) and told["choices"][0]["logprobs"] is None
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    refused = ask(url, TEXT, {"model": "toy", "prompt": "a", "echo": "yes"})
    assert refused.status == 400 and "echo is 'yes'; allowed: True or False" in refused.error
    assert ask(url, TEXT, {"model": "toy", "prompt": "a", "max_tokens": -1}).status == 400
