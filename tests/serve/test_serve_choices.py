"""Several answers in one stream: whose pieces they are, what they cost, and that they end together."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import sleep
from typing import Any

import pytest
from typer.testing import CliRunner

from edgespec.cli import app
from edgespec.engine import Model
from edgespec.loading.options import LoadOptions
from edgespec.serve.options import ServeOptions
from edgespec_models.errors import EdgespecError
from tests.kit.models import VOCAB, printable, toy_model
from tests.kit.serving import ask, events, open_stream, serving
from tests.kit.toy import ToySession, markov_logits

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "a document of many words " * 4
DRAWN: dict[str, Any] = {"model": "toy", "max_tokens": 12, "temperature": 1.5, "seed": 7, "n": 3}
USAGE = {"stream_options": {"include_usage": True}}


def several(parallel: int = 4, **options: Any) -> Model:
    session = ToySession(printable(markov_logits(0, VOCAB, scale=4.0)), VOCAB, several=True)
    return toy_model(session, options=LoadOptions(parallel=parallel, **options))


@pytest.fixture(params=[1, 2, 4])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with several(request.param) as model, serving(model) as url:
        yield url


def chats(**more: Any) -> dict[str, Any]:
    return DRAWN | {"messages": [{"role": "user", "content": LONG}]} | more


def texts(chunks: list[Any]) -> list[str]:
    """Of every choice, whose chunks are as they should be."""
    pieces = dict[int, list[Any]]()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        pieces.setdefault(choice["index"], []).append(choice)
    assert sorted(pieces) == list(range(len(pieces)))
    for choices in pieces.values():
        ends = [choice["finish_reason"] for choice in choices]
        assert ends[-1] is not None and not any(ends[:-1])
        assert "delta" not in choices[0] or choices[0]["delta"] == {"role": "assistant", "content": ""}
    return [
        "".join(each.get("text", "") or each.get("delta", {}).get("content", "") for each in pieces[index])
        for index in range(len(pieces))
    ]


@pytest.mark.parametrize("greedy", [False, True])
def test_a_stream_has_the_answers_that_the_whole_has(url: str, greedy: bool) -> None:
    drawn: dict[str, Any] = {"temperature": 0} if greedy else {}
    prompts = {"prompt": ["abc", LONG, "de"], "logprobs": 1}
    for path, body in ((CHAT, chats(**drawn)), (TEXT, DRAWN | prompts | drawn)):
        whole = ask(url, path, body).json
        *chunks, used, done = events(ask(url, path, {**body, **USAGE, "stream": True}))
        assert done == "[DONE]" and used["choices"] == []
        assert len({chunk["id"] for chunk in chunks}) == 1
        choices = whole["choices"]
        assert texts(chunks) == [choice.get("text") or choice["message"]["content"] for choice in choices]
        read = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert {name: used["usage"][name] for name in read} == {name: whole["usage"][name] for name in read}
        assert used["usage"]["completion_tokens"] == 12 * len(choices)
        if path == TEXT:
            for at, choice in enumerate(choices):
                told = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == at]
                offsets = [o for each in told if each["logprobs"] for o in each["logprobs"]["text_offset"]]
                assert offsets == choice["logprobs"]["text_offset"]


def test_answers_come_side_by_side() -> None:
    """As many as run at once; a prompt's progress is told once for answers that are one."""
    with several() as model, serving(model) as url:
        order = [chunk["choices"][0]["index"] for chunk in events(ask(url, CHAT, chats(stream=True)))[:-1]]
        assert order != sorted(order)
        model.forget()
        body = chats(temperature=0, stream=True, return_progress=True)
        told = [event for event in events(ask(url, CHAT, body))[:-1] if "prompt_progress" in event]
        assert {each["choices"][0]["index"] for each in told} == {0}
        read = [each["prompt_progress"]["processed"] for each in told]
        assert read == sorted(set(read)) and len(read) > 3


def test_more_answers_than_may_wait_take_their_turns() -> None:
    with several(2, max_waiting=0) as model, serving(model) as url:
        body = DRAWN | {"prompt": ["a", "b", "c"], "n": 16}
        streamed = texts(events(ask(url, TEXT, body | {"stream": True}))[:-1])
        assert len(streamed) == 48 and streamed == [
            choice["text"] for choice in ask(url, TEXT, body).json["choices"]
        ]
        drawn: Any = {"max_tokens": 12, "temperature": 1.5, "seed": 7, "n": 16}
        assert [choice.text for choice in model.generate("a", **drawn).choices] == streamed[:16]


def test_prompts_behind_an_answer_that_ends_early_have_none() -> None:
    with several(1) as model:
        answers = model.answers(["a", "b"], {"n": 2, "temperature": 1.0, "cancelled": lambda: True})
        assert [[choice.finish_reason for choice in answer.choices] for answer in answers.run()] == [
            ["cancelled"]
        ] * 2
        assert all(stream.ended for stream in answers.streams)


def slow(pause_s: float, read: Event, parallel: int, **options: Any) -> Model:
    """A model whose rows take their time; ``read`` is set when it reads the first."""
    logits = printable(markov_logits(0, VOCAB, scale=4.0))

    def slowly(tokens: Any) -> Any:
        read.set()
        sleep(pause_s)
        return logits(tokens)

    session = ToySession(slowly, VOCAB, several=True)
    return toy_model(session, options=LoadOptions(parallel=parallel, **options))


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("parallel", [1, 2])
def test_all_answers_share_the_time_of_their_request(parallel: int, greedy: bool) -> None:
    """Those that had no time to begin are left out, in streams too; an answer that stands for all is not."""
    body = DRAWN | {"prompt": "a", "max_tokens": 200} | ({"temperature": 0} if greedy else {})
    options = ServeOptions(port=0, timeout_s=1.0)
    with slow(0.05, Event(), parallel) as model, serving(model, options) as url:
        whole = ask(url, TEXT, body).json
        assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * (
            3 if greedy else parallel
        )
        *chunks, used, _ = events(ask(url, TEXT, {**body, **USAGE, "stream": True}))
        assert len(texts(chunks)) == len(whole["choices"])
        assert used["usage"]["completion_tokens"] == sum(
            len(c["choices"][0]["edgespec"].get("tokens", ())) for c in chunks
        )


@pytest.mark.parametrize("stream", [False, True])
def test_answers_behind_the_first_wait_for_room_and_are_not_refused(stream: bool) -> None:
    """Others fill the queue while the first is written."""
    read, pool = Event(), ThreadPoolExecutor(max_workers=8)
    with slow(0.02, read, 1, max_waiting=1) as model, serving(model) as url, pool:
        asked = pool.submit(ask, url, TEXT, DRAWN | {"prompt": "a", "stream": stream})
        assert read.wait(10)
        others = [pool.submit(ask, url, TEXT, DRAWN | {"prompt": "b", "n": 1}) for _ in range(6)]
        reply = asked.result()
        assert {other.result().status for other in others} == {200, 429}
    choices = texts(events(reply)[:-1]) if stream else reply.json["choices"]
    assert reply.status == 200 and len(choices) == 3


def test_an_answer_begins_as_soon_as_another_has_ended() -> None:
    with slow(0.05, Event(), 2) as model:
        wanted: Any = {"temperature": 1.5, "seed": 6, "n": 4, "stop": [*"eoPXab123"]}
        first, *others = model.generate("a", max_new_tokens=24, **wanted).choices
    assert len(first.tokens) == 12 and [len(other.tokens) for other in others] == [1] * 3
    assert others[-1].stats.queued_s < first.stats.decode_s


def test_no_time_for_a_first_token_is_an_error() -> None:
    """Another request of the app has the model until the time is up, and a stream's headers are sent."""
    with (
        slow(0.02, Event(), 1) as model,
        serving(model, ServeOptions(port=0, timeout_s=0.3)) as url,
        model.stream("b", max_new_tokens=1000) as running,
    ):
        next(running)
        whole = ask(url, TEXT, DRAWN | {"prompt": "a"})
        stream = ask(url, TEXT, DRAWN | {"prompt": "a", "stream": True})
        assert not running.ended
    (event,) = events(stream)
    assert (whole.status, whole.json["error"]["code"]) == (503, "timeout")
    assert (stream.status, event["error"]["code"]) == (200, "timeout")


def test_the_command_says_how_many_run_at_once(loads: Callable[[Any], None]) -> None:
    given = list[LoadOptions]()

    def load(options: LoadOptions, **more: object) -> None:
        given.append(options)
        raise EdgespecError("enough")

    loads(load)
    for more in ([], ["--parallel", "7"]):
        CliRunner().invoke(app, ["serve", "t", "--port", "0", *more])
    assert [options.parallel for options in given] == [4, 7]
    assert CliRunner().invoke(app, ["serve", "t", "--parallel", "0"]).exit_code == 2


def test_prompts_of_tokens_and_of_markup() -> None:
    text, plain = "<|im_start|>user\nHi<|im_end|>", {"model": "toy", "max_tokens": 6}
    with several() as model, serving(model) as url:
        tokens = model.tokenize(text, special=True)

        def answers(prompt: Any, **more: Any) -> tuple[list[str], int]:
            reply = ask(url, TEXT, plain | {"prompt": prompt} | more).json
            return [choice["text"] for choice in reply["choices"]], reply["usage"]["prompt_tokens"]

        meant = answers(text, special=True)
        assert meant == answers(tokens) and meant[1] == len(tokens)
        assert answers([tokens, [5]])[0][0] == answers([text, "x"], special=True)[0][0] == meant[0][0]
        assert answers(text)[1] == len(model.tokenize(text)) > len(tokens)
        assert answers(text, special=True, echo=True) == answers(tokens, echo=True)
        assert answers(tokens, echo=True)[0] == ["user\nHi" + meant[0][0]]  # control tokens are no text
        scored = ask(url, TEXT, plain | {"prompt": tokens, "echo": True, "logprobs": 0}).json["choices"][0]
        assert scored["logprobs"]["text_offset"][len(tokens)] == len("user\nHi")
        wrongs: list[Any] = [[1, "a"], [[1], 2], ["a"] * 65, [404], [[]], [True], [1.5]]
        for wrong in wrongs:
            reply = ask(url, TEXT, plain | {"prompt": wrong})
            assert (reply.status, "prompt" in reply.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("stop", "reason", "written"),
    [(None, "length", 6), ("<|im_start|>", "stop", 1), ("<|im_", "length", 6)],
)
def test_control_tokens_that_are_stop_strings_stop(stop: str | None, reason: str, written: int) -> None:
    body = {"model": "toy", "prompt": "def", "max_tokens": 6, "logit_bias": {"1": 100}}
    with toy_model(ToySession(markov_logits(0, VOCAB), VOCAB)) as model, serving(model) as url:
        reply = ask(url, TEXT, body | ({} if stop is None else {"stop": [stop]})).json
    choice = reply["choices"][0]
    assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == (reason, written)
    assert (choice["text"], choice["edgespec"]["stop"]) == ("", stop if written == 1 else None)


@pytest.mark.parametrize("stream", [False, True])
def test_more_prompts_than_the_queue_has_places_are_answered(stream: bool) -> None:
    body: dict[str, Any] = {"model": "toy", "prompt": ["a", "b", "c", "d"], "n": 3, "max_tokens": 4}
    body |= {"temperature": 1.0, "seed": 1}
    with several(2, max_waiting=1) as model, serving(model) as url:
        whole = ask(url, TEXT, body).json
        assert [choice["index"] for choice in whole["choices"]] == list(range(12))
        alone = ask(url, TEXT, body | {"prompt": ["c"]}).json["choices"]
        assert [c["text"] for c in whole["choices"][6:9]] == [c["text"] for c in alone]
        if stream:
            reply = ask(url, TEXT, body | {"stream": True})
            assert texts(events(reply)[:-1]) == [choice["text"] for choice in whole["choices"]]


def test_comments_tell_of_the_answer_that_is_furthest(impatient: Callable[[float, float], None]) -> None:
    """Beside one that is written the prompt of another is read, and goes on when the first has ended."""
    impatient(0.02, 1.0)
    body = {"model": "toy", "prompt": ["x", LONG * 2], "max_tokens": 4, "stream": True}
    begun, ended, told = set[int](), set[int](), {True: set[str](), False: set[str]()}
    with slow(0.01, Event(), 2) as model, serving(model) as url, open_stream(url, body, TEXT) as response:
        for line in map(bytes.decode, response):
            if line.startswith(": "):
                told[begun > ended].add(line.split(",")[0].strip())
            elif line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                begun.add(choice["index"])
                if choice["finish_reason"] is not None:
                    ended.add(choice["index"])
    assert begun == ended == {0, 1}
    assert told[True] == {": working"} and ": reading the prompt" in told[False]
