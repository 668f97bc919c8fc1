"""Answers of several messages in channels, as gpt-oss writes them: read, forced, and over HTTP."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec import JsonSchema, Model
from edgespec.answering.channel_reading import ChannelReader
from edgespec_models.errors import RequestError
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.thoughts import tags_of
from edgespec_models.text.tokenizer import Tokenizer
from edgespec_models.text.tokenizer_files import ends_of_generation
from tests.kit.calls import DO, REST, reader_of
from tests.kit.serving import ask, named_events, serving
from tests.kit.templates import HARMONY
from tests.kit.thoughts import speaking
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import F32, ToySession

CONTROL = (
    *("<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"),
    "<|call|>",
)
SAID = {"role": "user", "content": "Say it."}
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
TO_DO_IT = "<|channel|>commentary to=functions.do_it <|constrain|>json<|message|>"
CALL = TO_DO_IT + '{"number": 1, "text": "é"}<|call|>'
FINAL = "<|channel|>final<|message|>"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(byte_level_json(specials=CONTROL))


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, special=True)


def places(tokens: Sequence[int], of: list[int]) -> list[int]:
    return [at for at in range(len(tokens)) if [*tokens[at : at + len(of)]] == of]


class Writing(ToySession):
    """Behind the user's words it writes the first of ``answers`` that it can, and then the end."""

    def __init__(self, *answers: list[int]) -> None:
        asked, head, (end,) = ids("<|start|>user"), ids(NEXT), ids("<|return|>")

        def next_logits(tokens: Sequence[int]) -> F32:
            question = max(places(tokens, asked), default=len(tokens))
            heads = [place for place in places(tokens, head) if place > question]
            before = [*tokens[heads[0] + len(head) :]] if heads else []
            fitting = (answer for answer in answers if answer[: len(before)] == before)
            row = np.zeros(tokenizer().vocab_size, np.float32)
            row[[*next(fitting, before), end][len(before)]] = 9.0
            return row

        super().__init__(next_logits, tokenizer().vocab_size)


def writing(*answers: str | list[int]) -> Model:
    eos = tuple(ends_of_generation(tokenizer().special_id))
    session = Writing(*(ids(answer) if isinstance(answer, str) else answer for answer in answers))
    return speaking(HARMONY, session, tokenizer(), eos)


# ---- reading ---------------------------------------------------------------------------------------------

FORGED = st.lists(
    st.sampled_from(["<|end|>", NEXT, ANALYSIS, FINAL, CALL, "to=functions.rest", "{", "é", "😀", " so"]),
    max_size=4,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(FORGED, FORGED, FORGED, st.sampled_from(["before", "behind"]), st.booleans(), st.data())
def test_messages_are_told_apart_however_they_come(
    thoughts: str, preamble: str, text: str, place: str, tools: bool, data: st.DataObject
) -> None:
    """What ordinary tokens spell begins and ends nothing."""
    arguments = {"text": text, "items": [1]}
    header = TO_DO_IT
    if place == "before":
        header = " to=functions.do_it<|channel|>commentary json<|message|>"
    plain, body = tokenizer().encode, json.dumps(arguments, ensure_ascii=False)
    tokens = [*ids(ANALYSIS), *plain(thoughts), *ids(f"{NEXT}<|channel|>commentary<|message|>")]
    opened = len(tokens)
    tokens += [*plain(preamble), *ids(NEXT + header), *plain(body), *ids("<|call|>")]
    reader = ChannelReader(tokenizer(), reader_of(HARMONY) if tools else None)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=9)))
    records = [reader.push(tokens[a:b]) for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    records.append(reader.push((), final=True))
    assert "".join(record.reasoning for record in records) == "".join(reader.thoughts) == thoughts
    assert len(reader.thoughts) == opened
    assert "".join(record.text for record in records) == preamble + body
    assert "".join(record.content for record in records) == preamble + ("" if tools else body)
    assert [(call.name, call.arguments) for call in reader.called] == [("do_it", arguments)] * tools
    assert [part for record in records for part in record.calls] == reader.called


@pytest.mark.parametrize(
    ("answer", "thoughts", "content"),
    [
        (f"{FINAL}Hi", "", "Hi"),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "ab", "c"),
        (f"{ANALYSIS}a{NEXT}<|channel|>commentary to=python<|message|>1{NEXT}{FINAL}c", "a1", "c"),
        (f"<|channel|>commentary<|message|>a{NEXT}{FINAL}b", "", "a\n\nb"),
        ("to be or not", "", "to be or not"),
        (" Hi<|channel|>", "", " Hi"),
        (f"{ANALYSIS}a", "a", ""),
        (f"{FINAL}a STOP b", "", "a "),
        (f"{ANALYSIS}STOP{NEXT}{FINAL}aST{NEXT}{FINAL}OP", "STOP", "aST\n\nOP"),
        ("<|channel|>commentary to=functions.do_it<|message|>{1", "", "to=functions.do_it{1"),
        (f"<|channel|>commentary to=assistant<|message|>a{NEXT}{FINAL}b", "", "a\n\nb"),
        (f"{ANALYSIS[:-11]} to=assistant<|message|>a{NEXT}{FINAL}b", "a", "b"),
    ],
)
def test_whatever_comes_is_read(answer: str, thoughts: str, content: str) -> None:
    for size in (1, 99):
        reader, tokens = ChannelReader(tokenizer(), reader_of(HARMONY), stop=["STOP"]), ids(answer)
        records = [reader.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        records.append(reader.push((), final=True))
        assert "".join(reader.thoughts) == thoughts
        assert "".join(record.content for record in records) == content


@pytest.mark.parametrize("name", ["rest", "functions.rest"])
def test_a_call_may_leave_out_the_namespace(name: str) -> None:
    reader = ChannelReader(tokenizer(), reader_of(HARMONY))
    reader.push(ids(f"<|channel|>commentary to={name} <|constrain|>json<|message|>{{}}<|call|>"))
    reader.push((), final=True)
    assert [(call.name, call.arguments) for call in reader.called] == [("rest", {})]
    assert not "".join(reader.thoughts)


def test_an_end_of_a_message_ends_no_answer() -> None:
    ends = [tokenizer().token_bytes(id_).decode() for id_ in ends_of_generation(tokenizer().special_id)]
    assert ends == ["<|endoftext|>", "<|return|>", "<|call|>"]
    other = Tokenizer.from_json(byte_level_json(specials=("<|end|>", "<|endoftext|>")))
    assert len(ends_of_generation(other.special_id)) == 2


# ---- a model ---------------------------------------------------------------------------------------------

ANSWER = f"{ANALYSIS}Hm, hm. Hm, hm.{NEXT}{FINAL}So "


def test_thoughts_text_and_calls_of_a_conversation() -> None:
    with writing(ANSWER) as model:
        answer = model.chat([SAID])
        assert (answer.reasoning, answer.text, answer.finish_reason) == ("Hm, hm. Hm, hm.", "So ", "stop")
        again = model.chat([SAID, answer.message, SAID])
        assert again.text == "So "
    with writing(f"{ANALYSIS}Do.{NEXT}{CALL}") as model:
        answer = model.chat([SAID], tools=[DO, REST])
        (call,) = answer.tool_calls
        assert (answer.finish_reason, answer.content, answer.reasoning) == ("tool_calls", "", "Do.")
        assert (call.name, call.arguments) == ("do_it", {"number": 1, "text": "é"})
        template, result = ChatTemplate(HARMONY), {"role": "tool", "content": "1", "tool_call_id": call.id}
        prompt = template.render([SAID, answer.message, result])
        assert f"{ANALYSIS}Do.{NEXT} to=functions.do_it" in prompt
        assert "Do." not in template.render([SAID, answer.message | {"content": "Now."}, result])


def test_efforts_are_told_and_bounds_are_held() -> None:
    template = ChatTemplate(HARMONY)
    tags = tags_of(template, tokenizer())
    assert tags is not None and tags.variables(True) == {}
    assert tags.variables("high") == {"reasoning_effort": "high"}
    assert tags.variables(300) == {} and tags.variables(False) == {"reasoning_effort": "low"}
    with writing(ANSWER, f"{ANALYSIS}H{NEXT}{FINAL}So ", f"{ANALYSIS}{NEXT}{FINAL}So ") as model:
        sizes = [model.count_tokens([SAID], thinking=effort) for effort in (None, "medium", "low")]
        assert sizes[0] == sizes[1] > sizes[2]
        counts = [model.chat([SAID], thinking=most) for most in (False, 1, "low", "high")]
        assert [answer.text for answer in counts] == ["So "] * 4
        assert [answer.reasoning for answer in counts] == ["", "H", *["Hm, hm. Hm, hm."] * 2]
        with pytest.raises(
            RequestError, match="template_args has reasoning_effort='high', which contradicts"
        ):
            model.chat([SAID], thinking="low", template_args={"reasoning_effort": "high"})
    with writing(f"{ANALYSIS}H{NEXT}{ANALYSIS}again") as model:
        assert model.chat([SAID], thinking=1).reasoning == "H"  # and no further thoughts


def test_forms_and_calls_that_must_come_stand_in_their_channels() -> None:
    """Behind thoughts, which a spelled mark does not end."""
    wanted = JsonSchema({"enum": [{"a": 1}]})
    spelled = f"Hm {NEXT}<|channel|>{{ hm."
    with writing([*ids(ANALYSIS), *tokenizer().encode(spelled), *ids("<|end|>")]) as model:
        answer = model.chat([SAID], response_format=wanted)
        assert (answer.reasoning, answer.text) == (spelled, '{"a": 1}')
        pick = {"properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
        picking: Any = {"type": "function", "function": {"name": "pick", "parameters": pick}}
        answer = model.chat([SAID], tools=[picking], tool_choice="required", thinking=0)
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("pick", {"n": 7})]
        assert not answer.reasoning
        rest: Any = {"type": "function", "function": {"name": "rest"}}
        answer = model.chat([SAID], tools=[DO, REST], tool_choice=rest, response_format=wanted)
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("rest", {})]
        assert answer.reasoning.startswith("Hm") and answer.finish_reason == "tool_calls"


def test_clients_stream_channels() -> None:
    asked: Any = {"model": "toy", "messages": [SAID], "tools": [DO], "reasoning_effort": "low"}
    preamble = f"<|channel|>commentary<|message|>I see.{NEXT}"
    with writing(f"{ANALYSIS}Do.{NEXT}{preamble}{CALL}") as model, serving(model) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole: Any = client.chat.completions.create(**asked).choices[0]
            chunks: Any = client.chat.completions.create(**asked, stream=True)
            deltas = [chunk.choices[0].delta for chunk in chunks]
        assert (whole.message.reasoning_content, whole.message.content) == ("Do.", "I see.")
        for name, text in (("reasoning_content", "Do."), ("content", "I see.")):
            assert "".join(getattr(delta, name, None) or "" for delta in deltas) == text
        pieces = [call for delta in deltas for call in delta.tool_calls or ()]
        given = "".join(piece.function.arguments for piece in pieces)
        assert pieces[0].function.name == "do_it"
        assert json.loads(given) == json.loads(whole.message.tool_calls[0].function.arguments)
        function = {"type": "function", **DO["function"]}
        body = {"model": "toy", "input": "Say it.", "tools": [function], "stream": True}
        last = named_events(ask(url, "/v1/responses", body))[-1]["response"]
        assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
        tool = {"name": "do_it", "input_schema": DO["function"]["parameters"]}
        body = {"model": "toy", "messages": [SAID], "max_tokens": 200, "tools": [tool]}
        blocks = ask(url, "/v1/messages", body).json["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
        body = {"model": "toy", "messages": [SAID], "tools": [DO], "think": "low", "stream": False}
        message = ask(url, "/api/chat", body).json["message"]
        assert (message["thinking"], message["content"]) == ("Do.", "I see.")
        assert message["tool_calls"][0]["function"]["name"] == "do_it"


def test_plain_texts_have_no_channels() -> None:
    with writing("") as model:
        answer = model.generate("Say it.<|end|>", response_format=JsonSchema({"enum": [7]}))
    assert (answer.text, answer.reasoning) == ("7", "")
