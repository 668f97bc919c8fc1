"""``/api``: what Ollama's clients send and read, and what is refused in the shape that they know."""

import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec import LoadOptions
from edgespec.answering.results import Generation, GenerationStats, TokenRecord
from edgespec.models import Models
from edgespec.serve.bodies import parse
from edgespec.serve.ollama import MANAGING, OllamaChatBody, OllamaReply
from edgespec.serve.options import ServeOptions
from edgespec_models.bundles.bundle import MANIFEST, Bundle
from edgespec_models.errors import Busy, Closed, EdgespecError, RequestError
from tests.kit.models import toy_model, toy_session
from tests.kit.native import edit_manifest, tiny_native
from tests.kit.serving import Reply, ServedModel, ask, ready, serving, serving_models, tokenizer
from tests.kit.templates import HERMES
from tests.kit.toy import until

CHAT, GENERATE = "/api/chat", "/api/generate"
BOTH = pytest.mark.parametrize("path", [CHAT, GENERATE])
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
KEY = "a-key-of-this-test"


@pytest.fixture
def model() -> ServedModel:
    return ServedModel()


def asked(path: str = CHAT, text: str = "hello", **more: object) -> dict[str, Any]:
    content = {"prompt": text} if path == GENERATE else {"messages": [{"role": "user", "content": text}]}
    return {"model": "served", **content, **more}


def lines(reply: Reply) -> list[Any]:
    """Of a stream."""
    assert reply.status == 200 and reply.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in reply.body.decode("ascii").splitlines()]


def text_of(piece: Any) -> str:
    return str(piece["response"] if "response" in piece else piece["message"]["content"])


@BOTH
def test_an_answer_is_what_ollamas_clients_read(url: str, path: str) -> None:
    """Streams, which are the default, have the same in pieces; U+2028 ends no line."""
    text = "naïve 😀\u2028then"
    whole = ask(url, path, asked(path, text, stream=False)).json
    *pieces, last = lines(ask(url, path, asked(path, text)))
    assert text_of(whole) == f"re: {text}" == "".join(map(text_of, pieces)) and len(pieces) > 3
    assert whole.get("message", {"role": "assistant"})["role"] == "assistant"
    assert not any(piece["done"] or "done_reason" in piece for piece in pieces)
    for end in (whole, last):
        assert (end["model"], end["done"], end["done_reason"]) == ("served", True, "stop")
        assert datetime.now(UTC) - datetime.fromisoformat(end["created_at"]) < timedelta(seconds=30)
        assert (end["prompt_eval_count"], end["prompt_eval_duration"]) == (7, 100_000_000)
        assert end["eval_duration"] == 1_000_000_000 and end["eval_count"] > 4
        assert 0 <= end["load_duration"] <= end["total_duration"] < 30e9
        assert end["edgespec"]["stats"]["new_tokens"] == end["eval_count"]
    assert text_of(last) == ""


def test_options_reach_the_model_and_what_changes_nothing_is_told(
    model: ServedModel, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    options = {
        "temperature": 1,
        "top_k": 4,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 7,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "stop": ["x"],
        "num_predict": 5,
        "num_ctx": 2048,
        "num_thread": 4,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "tfs_z": 1,
        "typical_p": 1.0,
        "repeat_last_n": -1,
        "speculate": False,
        "num_gpu": None,
    }
    reply = ask(url, CHAT, asked(options=options, keep_alive="5m", truncate=True, stream=False))
    assert reply.status == 200
    same = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty")
    expected = {name: options[name] for name in (*same, "speculate")} | {"stop": ("x",), "max_new_tokens": 5}
    assert model.calls[0][1] == expected | {"repetition_penalty": 1.5, "timeout": pytest.approx(600, abs=10)}
    told = "".join(record.getMessage() for record in caplog.records)
    assert all(repr(name) in told for name in ("num_ctx", "num_thread", "mirostat_tau", "truncate"))
    assert "'seed'" not in told and "'num_gpu'" not in told
    for limit in (-1, -2, 0):
        ask(url, CHAT, asked(options={"num_predict": limit}))
        assert model.calls[-1][1]["max_new_tokens"] == 1024


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_their_results_go_back(model: ServedModel, url: str, stream: bool) -> None:
    """Arguments are objects; older clients send neither identifiers back nor what ``type`` calls are of."""
    reply = ask(url, CHAT, asked(text=f"see {CALL}{CALL}", tools=[WEATHER], stream=stream))
    pieces = lines(reply) if stream else [reply.json]
    calls = [call for piece in pieces for call in piece["message"].get("tool_calls", ())]
    functions = [{"index": at, "name": "weather", "arguments": {"city": "Bonn"}} for at in (0, 1)]
    assert [call["function"] for call in calls] == functions and calls[0]["id"] != calls[1]["id"]
    assert "".join(map(text_of, pieces)).strip() == "re: see" and pieces[-1]["done_reason"] == "stop"
    for keeps in (True, False):
        sent = calls if keeps else [{"function": call["function"]} for call in calls]
        results = [{"role": "tool", "content": text, "tool_name": "weather"} for text in ("sun", "rain")]
        if keeps:
            results = [
                result | {"tool_call_id": call["id"]} for result, call in zip(results, calls, strict=True)
            ]
        answer = {"role": "assistant", "content": "", "thinking": "so", "tool_calls": sent}
        messages = [*asked()["messages"], answer, *results, {"role": "user", "content": "now?"}]
        ask(url, CHAT, asked() | {"messages": messages, "tools": [WEATHER]})
        first, second, *rest, last = model.calls[-1][0]
        assert (first, last) == (messages[0], messages[-1])
        assert second["reasoning_content"] == "so"
        ids = [call["id"] for call in second["tool_calls"]]
        assert len({*ids}) == 2 and (ids == [call["id"] for call in calls]) == keeps
        assert [call["function"]["arguments"] for call in second["tool_calls"]] == [{"city": "Bonn"}] * 2
        assert [message["tool_call_id"] for message in rest] == ids
        assert [message["content"] for message in rest] == ["sun", "rain"]
        assert all(message["name"] == "weather" for message in rest)


def test_prompts_are_questions_fills_or_read_as_they_are(model: ServedModel, url: str) -> None:
    ask(url, GENERATE, asked(GENERATE, system="Be brief.", template="", context=[], images=None, suffix=""))
    ask(url, GENERATE, asked(GENERATE, "<|im_start|>", raw=True, think=False))
    ask(url, GENERATE, asked(GENERATE, "def f(", suffix="):"))
    system = {"role": "system", "content": "Be brief."}
    (chat, _), (raw, options), (fill, _) = model.calls
    assert chat == [system, {"role": "user", "content": "hello"}]
    assert raw == "<|im_start|>" and options["special"] is True and "thinking" not in options
    assert fill[:2] == ("def f(", "):")


def test_texts_that_need_not_end_have_a_limit_and_no_advice(model: ServedModel) -> None:
    """Unlike chats."""
    with serving(model.as_model(), ServeOptions(port=0, sampling="recommended")) as url:
        ask(url, CHAT, asked())
        ask(url, GENERATE, asked(GENERATE))
        ask(url, GENERATE, asked(GENERATE, raw=True))
        ask(url, GENERATE, asked(GENERATE, "def f(", suffix="):"))
        ask(url, GENERATE, asked(GENERATE, raw=True, options={"num_predict": 2000}))
    chat, text = (2**31 - 1, "recommended"), (1024, None)
    found = [(options["max_new_tokens"], options.get("sampling")) for _, options in model.calls]
    assert found == [chat, chat, text, text, (2000, None)]


def test_forms_are_followed() -> None:
    """Objects have the properties that are named, and no others where a schema says nothing of them."""
    city = {"type": "object", "properties": {"name": {"enum": ["Bonn", "Köln"]}}, "required": ["name"]}
    schema = {"$defs": {"city": city}, "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"]}
    model = toy_model(toy_session(context=2000))
    with model, serving(model) as url:
        for path in (CHAT, GENERATE):
            body = asked(path, stream=False, options={"num_predict": 60}) | {"model": "toy:latest"}
            formed = json.loads(text_of(ask(url, path, body | {"format": {"type": "object", **schema}}).json))
            assert formed in ({"city": {"name": "Bonn"}}, {"city": {"name": "Köln"}})
            free = text_of(ask(url, path, body | {"format": ""}).json)
            assert not free.startswith("{")
            assert text_of(ask(url, path, body | {"format": "json"}).json)[:1] in ("{", "[", '"')
        raw = asked(GENERATE, raw=True, stream=False, format="json", logprobs=True, top_logprobs=2)
        scored = ask(url, GENERATE, raw | {"model": "toy", "options": {"num_predict": 3}}).json
        assert [len(logprob["top_logprobs"]) for logprob in scored["logprobs"]] == [2] * scored["eval_count"]
        assert all(
            logprob["logprob"] <= 0 and isinstance(logprob["token"], str) for logprob in scored["logprobs"]
        )


def test_schemas_are_closed_where_they_are_open() -> None:
    """Properties may be called as keywords are; what a schema says itself stays."""
    named = {"type": "object", "properties": {"a": {"type": "null"}}}
    whole = {"properties": {"properties": named, "default": named}, "anyOf": [{"allOf": [named, named]}]}
    open_ = {"items": {**named, "additionalProperties": True}, "enum": [{"properties": {}}]}
    schema = {"$defs": {"whole": whole, "open": open_}, "$ref": "#/$defs/whole"}
    before = json.dumps(schema)
    body = parse(OllamaChatBody, {"model": "m", "messages": asked()["messages"], "format": schema})
    form = body.chat().response_format
    closed = {**named, "additionalProperties": False}
    expected = {
        **whole,
        "properties": {"properties": closed, "default": closed},
        "additionalProperties": False,
    }
    assert form == {"type": "json_schema", "schema": {**schema, "$defs": {"whole": expected, "open": open_}}}
    assert json.dumps(schema) == before
    deep = reduce(lambda inner, _: {"items": inner}, range(2000), dict[str, Any]())
    with pytest.raises(RequestError, match="format has too many levels"):
        parse(OllamaChatBody, {"model": "m", "format": deep}).chat()


def test_contents_may_be_parts_with_texts(model: ServedModel, url: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    ask(url, CHAT, asked() | {"messages": [{"role": "user", "content": parts}]})
    assert model.calls[0][0] == [{"role": "user", "content": "one\ntwo"}]


def test_a_time_of_many_digits_is_read_at_once() -> None:
    for keep, unloads in (("0" * 100_000, True), ("0" * 100_000 + "!", False), ("5m", False), ("-1", False)):
        assert parse(OllamaChatBody, {"model": "m", "keep_alive": keep}).unloads == unloads


def test_thoughts_are_apart() -> None:
    thought = tuple(TokenRecord(id_, "target", -0.5) for id_ in tokenizer().encode("so"))
    text = tuple(TokenRecord(id_, "target", -0.5) for id_ in tokenizer().encode("yes"))
    thoughts, tokens = ("so", *[""] * (len(thought) - 1)), thought + text
    ids = tuple(token.id for token in tokens)
    answer = Generation(
        "yes", ids, "length", GenerationStats(), records=tokens, content="yes", thoughts=thoughts
    )
    form = ready(OllamaReply("served", began=0.0, logprobs=True))
    whole = form.whole([answer])
    assert whole["message"] == {"role": "assistant", "content": "yes", "thinking": "so"}
    assert whole["done_reason"] == "length" and len(whole["logprobs"]) == len(text)
    text_form = ready(OllamaReply("served", began=0.0, is_text=True))
    generated = text_form.whole([answer])
    assert (generated["response"], generated["thinking"]) == ("yes", "so") and "message" not in generated


def test_think_is_a_switch_or_a_level(model: ServedModel, url: str) -> None:
    levels = {False: False, True: True, "low": "low", "medium": "medium", "high": "high", "max": "max"}
    for level, expected in levels.items():
        ask(url, CHAT, asked(think=level))
        assert model.calls[-1][1]["thinking"] == expected
    with toy_model(toy_session()) as toy, serving(toy) as other:
        assert ask(other, CHAT, asked(think=False) | {"model": "toy"}).status == 200
        for level in (True, "low"):
            reply = ask(other, CHAT, asked(think=level) | {"model": "toy"})
            told = f"think is {level!r}, and toy does not support thinking; leave it out"
            assert (reply.status, reply.json) == (400, {"error": told})
        reply = ask(other, CHAT, asked(tools=[WEATHER]) | {"model": "toy"})
        assert reply.status == 400 and "does not support tools" in reply.json["error"]


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        (CHAT, {"banana": 1}, "'banana' is not known; allowed: model"),
        (CHAT, {"options": {"banana": 1}}, "options: 'banana' is not known; allowed: temperature"),
        (CHAT, {"options": {"temperature": "hot"}}, "options: temperature is 'hot'"),
        (CHAT, {"options": {"mirostat": 2}}, "mirostat is 2; allowed: 0"),
        (CHAT, {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "repeat_last_n is 64 beside a pen"),
        (CHAT, {"options": {"typical_p": 0.5}}, "typical_p is 0.5"),
        (CHAT, {"format": "xml"}, "format is 'xml'"),
        (CHAT, {"format": {"type": "banana"}}, "banana"),
        (CHAT, {"think": "hard"}, "think is 'hard'"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "reads no images"),
        (CHAT, {"messages": [{"role": "cat", "content": "a"}]}, "messages[0].role is 'cat'; allowed: 'sys"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls[0] is 3"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages[0].tool_calls is 3"),
        (GENERATE, {"images": ["x"]}, "reads no images"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template is '{{ .Prompt }}'; allowed: a text that is"),
        (GENERATE, {"context": [1, 2]}, "/api/chat takes a conversation"),
        (GENERATE, {"raw": True, "system": "x"}, "leave out all but one"),
        (GENERATE, {"raw": True, "think": True}, "use chat"),
        (GENERATE, {"suffix": "b", "system": "x"}, "leave out all but one"),
        (CHAT, {"options": {"repeat_penalty": 0}}, "repeat_penalty is 0.0; allowed: a number from 0.1"),
        (GENERATE, {"raw": True, "options": {"repeat_penalty": 99}}, "repeat_penalty is 99.0"),
    ],
)  # fmt: skip
def test_what_there_is_not_is_refused_by_name(path: str, more: dict[str, Any], message: str) -> None:
    with toy_model(toy_session()) as model, serving(model) as url:
        reply = ask(url, path, asked(path) | {"model": "toy"} | more)
    assert reply.status == 400 and list(reply.json) == ["error"] and message in reply.json["error"], (
        reply.json
    )


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [(Busy("64 wait"), 429), (Closed("closed"), 503), (EdgespecError("it broke"), 500)],
)
def test_errors_have_ollamas_shape(
    model: ServedModel, url: str, path: str, stream: bool, error: EdgespecError, status: int
) -> None:
    model.refusal = error
    reply = ask(url, path, asked(path, stream=stream))
    assert reply.status == status and isinstance(reply.json["error"], str)
    others: list[tuple[str, Any, dict[str, str], int, str]] = [
        (
            path,
            asked(path) | {"model": "llama3"},
            {},
            404,
            "model 'llama3' not found; this server has 'served'",
        ),
        ("/api/show", {"name": "llama3"}, {}, 404, "not found"),
        ("/api/banana", {}, {}, 404, "POST /api/banana: Not Found"),
        (path, asked(path), {"Origin": "https://evil.example"}, 403, "is not allowed here"),
        (path, asked(path), {"Host": "evil.example"}, 421, "evil.example"),
        (path, asked(path), {"Content-Type": "text/plain"}, 415, "send application/json"),
        (path, b"{", {}, 400, "not JSON"),
    ]
    for where, body, headers, wrong, told in others:
        reply = ask(url, where, body, headers=headers)
        assert reply.status == wrong and told in reply.json["error"], reply.json
    assert model.calls == []


def test_an_error_behind_the_first_piece_is_a_line(model: ServedModel, url: str) -> None:
    model.fault = EdgespecError("a session broke")
    first, last = lines(ask(url, CHAT, asked()))
    assert text_of(first) and last == {"error": "a session broke"}


def test_while_nothing_comes_pieces_are_empty(
    model: ServedModel, url: str, impatient: Callable[[float, float], None]
) -> None:
    """Lines of JSON have no comments, and whoever waits gives up."""
    impatient(0.05, 1.0)
    model.pause_s = 0.4
    pieces = lines(ask(url, GENERATE, asked(GENERATE, "a")))
    assert "".join(map(text_of, pieces)) == "re: a" and sum(not text_of(piece) for piece in pieces) > 2


@pytest.fixture
def shelves(tmp_path: Path) -> Iterator[Models]:
    """Two models, none of which is loaded yet: one that chats, and one that makes vectors."""
    chats, embeds = (
        tiny_native(tmp_path / "chats", template=HERMES).path,
        tiny_native(tmp_path / "embeds").path,
    )
    edit_manifest(embeds, lambda value: value.update(embedding={"pooling": "last", "end": 2}))
    options = LoadOptions(threads=1, prompt_cache_bytes=0)
    given = {path.name: {"target": path, "drafter": None, "options": options} for path in (chats, embeds)}
    with Models(given) as models:
        yield models


def test_models_are_listed_shown_loaded_and_unloaded(
    shelves: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_models(shelves) as url:
        unseen = ask(url, "/api/tags").json["models"]
        assert [entry["name"] for entry in unseen] == ["chats:latest", "embeds:latest"]
        assert len({entry["digest"] for entry in unseen}) == 2 and ask(url, "/api/ps").json == {"models": []}
        nothing_asked: tuple[tuple[str, dict[str, Any]], ...] = ((CHAT, {"messages": []}), (GENERATE, {}))
        for path, empty in nothing_asked:
            loaded = ask(url, path, {"model": "chats:latest", **empty})
            assert (loaded.json["done"], loaded.json["done_reason"]) == (True, "load")
            (running,) = ask(url, "/api/ps").json["models"]
            model = shelves.loaded["chats"]
            assert (running["name"], running["size_vram"]) == ("chats:latest", 0)
            assert running["size"] == shelves.memory_bytes["chats"]
            assert running["context_length"] == model.target.config.context_length
            assert datetime.fromisoformat(running["expires_at"]) > datetime.now(UTC) + timedelta(days=30)
            for nothing in (0, "0", "0s", "0h0m0s", 0.0):
                left = ask(url, path, {"model": "chats", "keep_alive": nothing, **empty})
                assert (left.status, left.json["done_reason"]) == (200, "unload")
            until(lambda: not shelves.loaded)
        seen, _ = ask(url, "/api/tags").json["models"]
        size = sum(file.stat().st_size for file in model.target.path.iterdir() if file.name != MANIFEST)
        assert (seen["details"]["family"], seen["size"]) == ("llama", size)
        assert seen == unseen[0] and seen["details"]["parameter_size"] == "0M"
        shown = ask(url, "/api/show", {"name": "chats"}).json
        assert (
            set(shown["capabilities"]) == {"completion", "tools", "thinking"} and shown["template"] == HERMES
        )
        assert shown["model_info"]["general.architecture"] == "llama"
        assert shown["model_info"]["llama.context_length"] == model.target.config.context_length
        assert shelves.loaded == {}  # for that was seen, too
        vectors = ask(url, "/api/show", {"model": "embeds:latest", "verbose": True}).json
        assert vectors["capabilities"] == ["embedding"] and shelves.loaded == {}
        monkeypatch.setattr(Bundle, "reads_images", True)
        with serving_models(shelves) as seeing:
            shown = ask(seeing, "/api/show", {"name": "chats"}).json
        assert "vision" in shown["capabilities"]
        other = ask(url, GENERATE, {"model": "none", "keep_alive": 0})
        assert other.status == 404


def test_times_far_away_are_named(tmp_path: Path) -> None:
    with (
        Models({"m": {"target": tiny_native(tmp_path / "m").path, "drafter": None}}, keep=1e15) as models,
        serving_models(models) as url,
    ):
        ask(url, CHAT, {"model": "m"})
        (running,) = ask(url, "/api/ps").json["models"]
        assert datetime.fromisoformat(running["expires_at"]) > datetime.now(UTC) + timedelta(days=1000)


def test_vectors_are_the_models(shelves: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, uses, use = ["def add(a, b):", "the quick brown fox"], list[str](), shelves.use_async

    def counted(name: str, **more: Any) -> Any:
        uses.append(name)
        return use(name, **more)

    monkeypatch.setattr(shelves, "use_async", counted)
    with serving_models(shelves) as url:
        empty = ask(url, "/api/embed", {"model": "embeds", "input": []}).json
        assert empty["embeddings"] == [] and set(shelves.loaded) == {"embeds"}
        expected = shelves.loaded["embeds"].embed(texts)
        found = ask(url, "/api/embed", {"model": "embeds:latest", "input": texts, "truncate": True}).json
        assert np.array_equal(np.float32(found["embeddings"]), expected.vectors)
        assert found["prompt_eval_count"] == sum(expected.tokens) and found["total_duration"] > 0
        single = ask(url, "/api/embed", {"model": "embeds", "input": texts[0], "dimensions": 8}).json
        assert np.shape(single["embeddings"]) == (1, 8)
        older = ask(url, "/api/embeddings", {"model": "embeds", "prompt": texts[0], "options": {}}).json
        assert np.array_equal(np.float32(older["embedding"]), expected.vectors[0])
        assert uses == ["embeds"] * 4  # a second use would wait for a load that waits for the first to end
        assert ask(url, "/api/embeddings", {"model": "embeds"}).json == {"embedding": []}
        reply = ask(url, "/api/embed", {"model": "chats", "input": "x"})
        assert reply.status == 400 and "chats makes no vectors of texts" in reply.json["error"]


def test_what_changes_models_says_what_to_do_instead(url: str) -> None:
    for path in MANAGING:
        method = "DELETE" if path.endswith("delete") else "POST"
        reply = ask(url, path.format(digest="sha256:00"), {"model": "a"}, method=method)
        assert reply.status == 501 and "edgespec pull" in reply.json["error"]
    assert ask(url, "/api/blobs/sha256:00", method="HEAD").status == 501


def test_clients_find_an_ollama_and_browsers_the_page(url: str) -> None:
    reply = ask(url, "/")
    assert (reply.status, reply.body) == (200, b"Ollama is running")
    assert "Accept" in reply.headers["vary"]
    assert ask(url, "/", method="HEAD").status == ask(url, "/api/version", method="HEAD").status == 200
    page = ask(url, "/", headers={"Accept": "text/html,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html") and b"<html" in page.body
    version = ask(url, "/api/version").json["version"]
    assert [*map(int, version.split("."))] >= [0, 14, 2]  # which clients want at least
    with serving(ServedModel().as_model(), ServeOptions(port=0, api_key=KEY)) as locked:
        for path in ("/api/tags", "/api/ps", "/api/version"):
            assert ask(locked, path).status == 401
        assert ask(locked, "/api/version", headers={"Authorization": f"Bearer {KEY}"}).status == 200
