"""Pictures in requests of each protocol, sent by its own client."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import anthropic
import numpy as np
import ollama
import openai
import pytest

from edgespec.asking.images import MOST_IMAGES, Image, read_image
from tests.kit.images import base64_of, claiming, data_url, encoded, images_in, picture
from tests.kit.serving import ServedModel, ask, serving

PNG, JPEG = encoded(picture(7, 5)), encoded(picture(4, 6), "JPEG")
SIZES = [(5, 7, 3), (6, 4, 3)]  # of these two
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
URL = data_url(PNG)
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}


@pytest.fixture
def seeing() -> ServedModel:
    return ServedModel(reads_images=True)


@pytest.fixture
def seen_at(seeing: ServedModel) -> Iterator[str]:
    with serving(seeing.as_model()) as url:
        yield url


def shown(model: ServedModel) -> tuple[list[Image], list[list[str]]]:
    """The pictures that the last request showed, and the kinds of parts of each message."""
    messages = model.calls[-1][0]
    lists = [message["content"] for message in messages if isinstance(message["content"], list)]
    return images_in(messages), [[part["type"] for part in parts] for parts in lists]


def test_chats_of_openai(seeing: ServedModel, seen_at: str) -> None:
    content: Any = [
        {"type": "text", "text": "Which is larger,"},
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "text", "text": "or"},
        {"type": "image_url", "image_url": {"url": base64_of(JPEG), "detail": "original"}},
    ]
    with openai.OpenAI(base_url=f"{seen_at}/v1", api_key="none", max_retries=0) as client:
        question: Any = [{"role": "user", "content": content}]
        client.chat.completions.create(model="served", messages=question, extra_body={"image_tokens": 70})
    images, kinds = shown(seeing)
    assert kinds == [["text", "image", "text", "image"]]
    assert [image.pixels.shape for image in images] == SIZES
    assert [(image.detail, image.image_tokens) for image in images] == [("low", 70), ("high", 70)]


def test_responses_of_openai_with_pictures_in_messages_and_results(seeing: ServedModel, seen_at: str) -> None:
    output = [{"type": "input_text", "text": "here"}, {"type": "input_image", "image_url": data_url(JPEG)}]
    items: Any = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "a"},
                {"type": "input_image", "image_url": URL, "detail": "high"},
                {"type": "input_text", "text": "b"},
                {"type": "input_text", "text": "c"},
            ],
        },
        CALL,
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    with openai.OpenAI(base_url=f"{seen_at}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="served", input=items)
        images, kinds = shown(seeing)
        assert [image.pixels.shape for image in images] == SIZES
        assert [image.detail for image in images] == ["high", "auto"]
        assert kinds == [["text", "image", "text", "text"], ["text", "image"]]
        assert [part.get("text") for part in seeing.calls[-1][0][0]["content"]] == ["a", None, "b", "\nc"]
        client.responses.create(model="served", input="And?", previous_response_id=first.id)
        assert [image.pixels.shape for image in shown(seeing)[0]] == SIZES
    custom = {"type": "custom_tool_call_output", "call_id": "c", "output": output}
    assert ask(seen_at, RESPONSES, {"model": "served", "input": [custom]}).status == 200
    assert [image.pixels.shape for image in shown(seeing)[0]] == SIZES[1:]


def test_messages_of_anthropic_with_pictures_beside_texts_and_in_results(
    seeing: ServedModel, seen_at: str
) -> None:
    def block(data: bytes, kind: str) -> Any:
        source = {"type": "base64", "media_type": f"image/{kind}", "data": base64_of(data)}
        return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}

    call = {"type": "tool_use", "id": "t", "name": "Read", "input": {"file_path": "a.png"}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Look"}, block(PNG, "png")]},
        {"role": "assistant", "content": [call]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block(JPEG, "jpeg")]}],
        },
    ]
    with anthropic.Anthropic(base_url=seen_at, api_key="none", max_retries=0) as client:
        client.messages.create(model="served", max_tokens=9, messages=messages)
        images, kinds = shown(seeing)
        assert [image.pixels.shape for image in images] == SIZES and kinds == [["text", "image"], ["image"]]
        assert seeing.calls[-1][0][-1]["role"] == "tool"
        client.messages.count_tokens(model="served", messages=messages)
        assert [image.pixels.shape for image in shown(seeing)[0]] == SIZES
    inline = {"type": "image", "source": {"type": "url", "url": URL}}  # as the page counts its tokens
    question = [{"role": "user", "content": [inline, {"type": "text", "text": "b"}]}]
    assert ask(seen_at, MESSAGES, {"model": "served", "messages": question}).status == 200
    assert shown(seeing)[1] == [["image", "text"]]


def test_chats_and_prompts_of_ollama(seeing: ServedModel, seen_at: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(JPEG)
    with ollama.Client(seen_at) as client:
        client.chat("served", [{"role": "user", "content": "What?", "images": [PNG, str(file)]}])
        images, kinds = shown(seeing)
        assert [image.pixels.shape for image in images] == SIZES and kinds == [["image", "image", "text"]]
        client.generate("served", "What?", images=[file], options={"image_tokens": 280})
        (image,), kinds = shown(seeing)
        assert (image.pixels.shape, image.image_tokens) == (SIZES[1], 280) and kinds == [["image", "text"]]
        client.generate("served", images=[PNG])
        assert shown(seeing)[1] == [["image"]]


BAD: list[tuple[str, Any, str]] = [
    ("a text file", data_url(b"I am called a.png"), "is no PNG, JPEG, WebP or GIF picture"),
    ("cut", data_url(PNG[:80]), "is no whole picture"),
    (
        "too many pixels",
        data_url(claiming(9000, 9000)),
        "is 9000 x 9000 pixels large; allowed: 67,108,864 pixels in all",
    ),
    ("an address", "https://example.com/a.png?key=1", "is the address 'https://example.com/a.png?key=1'"),
    ("a file", "file:///etc/passwd", "edgespec fetches nothing; send the picture itself as data:image/png"),
    ("a path", "/etc/passwd", "is no PNG"),
    ("no base64", "data:image/png;base64,@@", "is no base64"),
    ("another encoding", "data:image/svg+xml,<svg/>", "edgespec fetches nothing"),
    ("nothing", None, "is None; allowed: data:image/png;base64,BASE64"),
    ("a number", 3, "is 3; allowed: data:image/png;base64,BASE64"),
    ("empty", "", "is no PNG"),
]


PLAIN = base64_of(PNG)  # it has all of "+/="


@pytest.mark.parametrize(
    "url",
    [
        f" {URL}\n",
        f"data:image/png;name=a.png;charset=utf-8;base64,{PLAIN}",
        f"DATA:image/PNG;BASE64,{PLAIN}",
        "\r\n".join(PLAIN[at : at + 76] for at in range(0, len(PLAIN), 76)),
        f"data:;base64,{PLAIN.rstrip('=')}",
        PLAIN.replace("+", "-").replace("/", "_"),
    ],
)
def test_all_ways_to_write_base64_are_read(seeing: ServedModel, seen_at: str, url: str) -> None:
    body = {"model": "served", **_user({"type": "image_url", "image_url": {"url": url}})}
    assert ask(seen_at, CHAT, body).status == 200
    (image,), _ = shown(seeing)
    np.testing.assert_array_equal(image.pixels, np.asarray(picture(7, 5)))


def _bodies(url: Any) -> dict[str, tuple[Any, str]]:
    """The same wrong picture at every place, with the name of the place."""
    image = {"type": "image_url", "image_url": {"url": url}}
    part = {"type": "input_image", "image_url": url}
    text = {"type": "text", "text": "a"}
    block = {"type": "image", "source": {"type": "url", "url": url}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text, block]}
    chat, ollama_chat = {"content": [text, image]}, {"content": "a", "images": [url]}
    output = {"type": "function_call_output", "call_id": "c", "output": [part]}
    return {
        CHAT: ({"messages": [{"role": "user"} | chat]}, "messages[0].content[1].image_url.url"),
        RESPONSES: (
            {"instructions": "Be brief.", "input": [{"role": "user", "content": [part]}]},
            "input[0].content[0].image_url",
        ),
        f"{RESPONSES}/": ({"input": [CALL, output]}, "input[1].output[0].image_url"),
        MESSAGES: (
            {"system": "Be brief.", "messages": [{"role": "user", "content": [text, block]}]},
            "messages[0].content[1].source.url",
        ),
        f"{MESSAGES}/count_tokens": (
            {"messages": [{"role": "user", "content": [result]}]},
            "messages[0].content[0].content[1].source.url",
        ),
        "/api/chat": ({"messages": [{"role": "user"} | ollama_chat]}, "messages[0].images[0]"),
        "/api/generate": ({"prompt": "a", "images": [url]}, "images[0]"),
    }  # fmt: skip


@pytest.mark.parametrize(("url", "told"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_pictures_that_cannot_be_read_are_refused_by_their_place(
    seeing: ServedModel, seen_at: str, url: Any, told: str
) -> None:
    for path, (body, field) in _bodies(url).items():
        if path == "/api/generate" and not isinstance(url, str):
            continue  # the body's own form says so
        reply = ask(seen_at, path, {"model": "served", **body})
        assert reply.status == 400 and reply.error.startswith(field) and told in reply.error, reply.error
        if path in (CHAT, RESPONSES):
            assert reply.json["error"]["param"] == field
        assert len(reply.body) < 1000
    assert seeing.calls == []
    assert (
        ask(seen_at, CHAT, {"model": "served", "messages": [{"role": "user", "content": "a"}]}).status == 200
    )


def test_a_model_that_reads_no_images_says_so_before_it_looks(model: ServedModel, url: str) -> None:
    for path, (body, field) in _bodies(data_url(b"not read")).items():
        for stream in (False, True):
            more = {} if "count" in path else {"stream": stream}
            reply = ask(url, path, {"model": "served", **body, **more})
            told = f"{field} is a picture, and served reads no images; use a model that does, or leave it out"
            assert reply.status == 400 and reply.error == told
    assert model.calls == []


def test_a_client_cannot_have_files_of_the_server_read(seen_at: str, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    parts = [{"type": "image", "image": str(file)}, {"type": "image", "image": URL}]
    for part in parts:
        body = {"model": "served", "messages": [{"role": "user", "content": [part]}]}
        reply = ask(seen_at, CHAT, body)
        assert reply.status == 400 and "messages[0].content[0].type is 'image'; allowed" in reply.error
    for path, (body, _) in _bodies(str(file)).items():
        assert ask(seen_at, path, {"model": "served", **body}).status == 400


def test_texts_do_not_wait_while_many_pictures_are_decoded(
    seen_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def slow(*args: Any, **options: Any) -> Image:
        assert go_on.wait(60)
        return read_image(*args, **options)

    monkeypatch.setattr("edgespec.asking.images.read_image", slow)
    shown = {"model": "served", **_user({"type": "image_url", "image_url": {"url": URL}})}
    with ThreadPoolExecutor(40) as clients:  # more than a pool of threads has
        asked = [clients.submit(ask, seen_at, CHAT, shown) for _ in range(40)]
        try:
            sleep(0.5)
            text = ask(seen_at, CHAT, {"model": "served", **_user({"type": "text", "text": "a"})})
            assert text.status == 200 and not any(one.done() for one in asked)
        finally:
            go_on.set()
        assert {one.result().status for one in asked} == {200}


def test_pictures_of_a_request_have_a_bound(seeing: ServedModel, seen_at: str) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(encoded(picture(1, 1)))}}
    body: Any = {"model": "served", "messages": [{"role": "user", "content": [image] * MOST_IMAGES}]}
    assert ask(seen_at, CHAT, body).status == 200
    body["messages"][0]["content"] += [image]
    reply = ask(seen_at, CHAT, body)
    assert reply.status == 400 and "content[64].image_url.url is one picture too many" in reply.error
    rest = {"type": "image_url", "image_url": {"url": data_url(claiming(8192, 8192))}}
    body["messages"][0]["content"] = [image, rest]
    reply = ask(seen_at, CHAT, body)
    assert (
        "content[1].image_url.url is 8192 x 8192 pixels large; allowed: 67,108,864 pixels in all"
        in reply.error
    )


def test_a_server_without_pillow_names_the_extra(seen_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "served", **_user({"type": "image_url", "image_url": {"url": URL}})}
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    reply = ask(seen_at, CHAT, body)
    assert reply.status == 400 and 'pip install "edgespec[images]"' in reply.error
    assert reply.json["error"]["param"] == "messages[0].content[0].image_url.url"


def _user(*parts: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


def test_other_wrong_parts_are_refused(seen_at: str) -> None:
    def with_detail(detail: object) -> dict[str, Any]:
        return _user({"type": "image_url", "image_url": {"url": URL, "detail": detail}})

    of_file = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    by_id = [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]
    no_list = {"messages": [{"role": "user", "content": "a", "images": "x"}]}
    cases: list[tuple[str, Any, str]] = [
        (CHAT, with_detail("most"), "has the detail 'most'; allowed: auto, low, high, original"),
        (CHAT, with_detail(["low"]), "has the detail ['low']"),
        (CHAT, _user("a") | {"image_tokens": 0}, "image_tokens is 0"),
        (MESSAGES, _user(of_file), "source.type is 'file'; allowed: 'base64', 'url'"),
        (MESSAGES, _user({"type": "image"}), "source.type is None"),
        (MESSAGES, _user({"type": "document"}), "is 'document'; allowed: 'text', 'image'"),
        (RESPONSES, {"input": by_id}, "image_url is None; allowed: data:image/png"),
        ("/api/chat", no_list, "images is 'x'; allowed"),
        ("/api/generate", {"prompt": "a", "images": ["x"], "raw": True}, "images are for questions"),
    ]
    for path, body, told in cases:
        reply = ask(seen_at, path, {"model": "served", **body})
        assert reply.status == 400 and told in reply.error, reply.error


def test_models_say_whether_they_see(seen_at: str, url: str) -> None:
    assert ask(seen_at, "/v1/models/served").json["edgespec"]["images"] is True
    assert ask(url, "/v1/models/served").json["edgespec"]["images"] is False
