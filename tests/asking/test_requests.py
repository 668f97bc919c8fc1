"""What developers bring along, from options to answers: on random models, and on one that writes a script."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import edgespec
from edgespec import LoadOptions, Model, RequestOptions
from edgespec.asking.request import Request, encode_chat
from edgespec_models.errors import RequestError
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_runtimes import cpu
from edgespec_runtimes.graph_io import NativeModel
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.session import Rows
from tests.kit.native import tiny_native
from tests.kit.templates import HERMES, LLAMA3, MISTRAL, SHOWN, TOOLS, showing
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import LLAMA

PROMPT = "def add(a, b):"
ASK = [{"role": "user", "content": "What is 1 + 2?"}]
OPTIONS = LoadOptions(threads=1)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_native(tmp_path_factory.mktemp("requests") / "target", template=HERMES).path


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another family: its template knows two roles and shows no tools."""
    source = """{% for message in messages %}{% if message.role not in ('user', 'assistant') %}
        {{- raise_exception('no ' + message.role) }}{% endif %}{{ message.content }}{% endfor %}"""
    return tiny_native(tmp_path_factory.mktemp("requests") / "drafter", seed=3, template=source).path


@pytest.fixture(scope="module")
def model(target: Path) -> Iterator[Model]:
    with edgespec.load(target, "ngram", options=OPTIONS) as model:
        yield model


class Writing(NativeModel):
    """A model that says ``script`` behind ``start`` tokens of prompt, whatever they are."""

    script: ClassVar[Sequence[int]] = ()
    start: ClassVar[int] = 0

    def predict_together(self, rows: Sequence[Rows]) -> list[Predictions]:
        super().predict_together(rows)
        return [self._predictions(part) for part in rows]

    def _predictions(self, part: Rows) -> Predictions:
        at = part.session.length + 1 - part.wanted - self.start
        rows = np.zeros((part.wanted, self.vocab_size), np.float32)
        for row in range(part.wanted):
            if 0 <= at + row < len(self.script):
                rows[row, self.script[at + row]] = 20.0
        return Predictions(rows)


@pytest.fixture
def write(model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the models that are loaded from now on answer a conversation with a text."""

    def script(text: str, messages: Any = ASK, **options: Any) -> None:
        end = model.target.tokenizer.special_id("<|im_end|>")
        assert end is not None
        facts = {"script": [*model.tokenize(text), end], "start": model.count_tokens(messages, **options)}
        monkeypatch.setattr(cpu, "NativeModel", type("Scripted", (Writing,), facts))

    return script


CHANGED: list[dict[str, Any]] = [
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.8, "repetition_penalty": 1.1},
    {"logit_bias": {5: -100.0, 20: 2.5}},
    {"temperature": 0.8, "seed": 4, "frequency_penalty": 1.2, "logit_bias": {9: 4.0}},
]


@pytest.mark.parametrize("options", CHANGED)
def test_speculation_changes_nothing_whatever_changes_the_rows(model: Model, options: dict[str, Any]) -> None:
    answers = [
        model.generate(PROMPT, max_tokens=60, speculate=each, logprobs=True, top_logprobs=2, **options)
        for each in (True, False)
    ]
    told = [[(record.id, record.logprob, record.top_logprobs) for record in a.records] for a in answers]
    assert told[0] == told[1]
    assert answers[0].tokens == answers[1].tokens != model.generate(PROMPT, max_tokens=60).tokens
    for id_, logprob, top in told[0]:
        assert logprob is not None and logprob <= top[0][1] + 1e-9 and len(top) == 2
        assert dict(top).get(id_, logprob) == logprob


def test_penalties_and_biases_do_what_they_say(model: Model) -> None:
    whole = model.generate(PROMPT, max_tokens=80, stop_at_eos=False)
    plain, middle = whole.tokens, whole.text[2:6]
    stopped = model.generate(PROMPT, max_tokens=80, stop_at_eos=False, stop=middle)
    assert stopped.text == whole.text[: whole.text.index(middle)]
    assert all(record.logprob is None for record in whole.records)
    varied = model.generate(PROMPT, max_tokens=80, stop_at_eos=False, frequency_penalty=2.0).tokens
    assert len(set(varied)) > len(set(plain))
    assert set(model.generate(PROMPT, max_tokens=9, logit_bias={20: 100}).tokens) == {20}
    assert plain[0] not in model.generate(PROMPT, max_tokens=80, logit_bias={plain[0]: -100}).tokens
    with pytest.raises(RequestError, match=r"logit_bias is for token 404; allowed: the model's, 0 to 403"):
        model.generate(PROMPT, logit_bias={404: 1})


def test_several_answers_have_the_seeds_in_turn(model: Model) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0}
    several = model.generate(PROMPT, n=3, seed=7, **options)
    in_a_task = asyncio.run(model.generate_async(PROMPT, n=3, seed=7, **options))
    assert several.choices[0] is several
    alone = [model.generate(PROMPT, seed=7 + i, **options).tokens for i in range(3)]
    for each in (several, in_a_task):
        assert [choice.tokens for choice in each.choices] == alone
    assert several.choices[1].stats.cached_tokens == several.stats.prompt_tokens - 1
    fresh = model.generate(PROMPT, n=3, **options)
    assert len({choice.tokens for choice in fresh.choices}) > 1
    last = model.generate(PROMPT, n=2, seed=2**64 - 1, **options)
    assert last.choices[1].tokens == model.generate(PROMPT, seed=0, **options).tokens
    greedy = model.generate(PROMPT, n=3, max_tokens=6)
    assert [choice.tokens for choice in greedy.choices] == [model.generate(PROMPT, max_tokens=6).tokens] * 3
    for reason, ended in (("cancelled", {"cancelled": lambda: True}), ("timeout", {"timeout": 1e-9})):
        choices = model.generate(PROMPT, n=3, temperature=1.0, **ended).choices
        assert {(choice.finish_reason, choice.tokens) for choice in choices} == {(reason, ())}
    for refuses in (model.stream, model.conversation):
        with pytest.raises(RequestError, match="n is 2; allowed: 1"):
            refuses(PROMPT, n=2)


def test_tokens_are_counted_as_requests_read_them(model: Model) -> None:
    parts = [{"type": "text", "text": "Be brief."}]
    messages: list[dict[str, Any]] = [{"role": "developer", "content": parts}, *ASK]
    for options in (RequestOptions(max_tokens=1), RequestOptions(max_tokens=1, tools=TOOLS)):
        answer = model.chat(messages, **options)
        assert model.count_tokens(messages, **options) == answer.stats.prompt_tokens
    assert model.count_tokens(PROMPT) == model.generate(PROMPT, max_tokens=1).stats.prompt_tokens
    for text in ("naïve 日本語 😀 <|im_end|>", "", "  x"):
        assert model.detokenize(model.tokenize(text)) == text
    assert model.detokenize([2]) == "<|im_end|>"
    for wrong in ([404], [-1], "ab", None, ["a"]):
        with pytest.raises(RequestError, match=r"tokens is .*; allowed: token ids from 0 to 403"):
            model.detokenize(wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="text is 3"):
        model.tokenize(3)  # type: ignore[arg-type]


def test_prompts_may_be_tokens_or_texts_whose_control_tokens_are_meant(target: Path, drafter: Path) -> None:
    text = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    for each in (None, drafter):
        with edgespec.load(target, each, options=OPTIONS) as model:
            tokens = model.tokenize(text, special=True)
            spelled = model.tokenize(text)
            assert tokens[0] == model.target.tokenizer.special_id("<|im_start|>") != spelled[0]
            assert model.detokenize(tokens) == text and len(tokens) < len(spelled)
            meant = model.generate(text, special=True, max_tokens=9)
            by_numpy = model.generate([*map(np.int64, tokens)], max_tokens=9)  # type: ignore[list-item]
            assert meant.tokens == by_numpy.tokens == model.generate(tokens, max_tokens=9).tokens
            assert meant.stats.prompt_tokens == model.count_tokens(tokens) == len(tokens)
            assert model.count_tokens(text, special=True) == len(tokens)
            assert model.generate(text, max_tokens=1).stats.prompt_tokens == len(spelled)
            wrongs: list[Any] = [[404], [1, -1], [], [True], ["a"], [1, "a"], 3]
            for wrong in wrongs:
                with pytest.raises(RequestError, match="prompt"):
                    model.generate(wrong)
            for wrong in (*wrongs[:2], [True], [1, "a"]):
                with pytest.raises(RequestError, match=r"prompt is .*; allowed: a text, or the model's ids"):
                    model.count_tokens(wrong)
            for no_messages in ("What?", tokens):
                with pytest.raises(RequestError, match=r"messages is .*use generate"):
                    model.chat(no_messages)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="use chat"):
                model.generate(tokens, tools=TOOLS)
            refused: list[Callable[[], object]] = [
                lambda: model.chat(ASK, special=True),
                lambda: model.generate([1], special=True),
            ]
            for ask in refused:
                with pytest.raises(RequestError, match="special is for text prompts"):
                    ask()


def test_a_chat_template_may_be_given(tmp_path: Path) -> None:
    folder = tiny_native(tmp_path / "target").path
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}!", encoding="utf-8")
    with edgespec.load(folder, None, options=LoadOptions(chat_template=own)) as model:
        assert model.count_tokens(ASK) == model.count_tokens(ASK[0]["content"] + "!")
    with pytest.raises(RequestError, match=r"cannot read .*no.jinja"):
        edgespec.load(folder, None, options=LoadOptions(chat_template=tmp_path / "no.jinja"))


def test_tools_go_into_the_template_that_is_for_them(target: Path) -> None:
    with edgespec.load(target, None, options=OPTIONS) as model:
        named = ChatTemplate("{{ messages[0].content }}", named={"tool_use": HERMES})
        model.target.chat_template = named
        assert model.count_tokens(ASK, tools=TOOLS) > 100 > model.count_tokens(ASK)
        calls: list[Any] = [
            *ASK,
            {"role": "assistant", "tool_calls": [edgespec.ToolCall("a", "add", {}).to_message()]},
        ]
        assert model.count_tokens(calls) == model.count_tokens(ASK)  # written into the content
        assert model.chat(ASK, tools=TOOLS, max_tokens=3).finish_reason == "length"


def test_template_arguments_reach_the_template(model: Model) -> None:
    thinking = model.count_tokens(ASK)
    assert model.count_tokens(ASK, template_args={"enable_thinking": False}) > thinking
    assert model.chat(ASK, max_tokens=1, template_args={"enable_thinking": True}).text is not None
    with pytest.raises(
        RequestError,
        match="enable_thinkng, which the chat template does not read; it reads enable_thinking, tools",
    ):
        model.chat(ASK, template_args={"enable_thinkng": False})
    for options in (RequestOptions(template_args={"enable_thinking": False}), RequestOptions(tools=TOOLS)):
        with pytest.raises(RequestError, match="use chat"):
            model.generate(PROMPT, **options)


def test_calls_come_back_parsed(target: Path, write: Callable[..., None]) -> None:
    write(f"Let me see.\n{CALL}", tools=TOOLS)
    with edgespec.load(target, "ngram", options=OPTIONS) as model:
        answer = model.chat(ASK, tools=TOOLS, max_tokens=200)
        assert (answer.text, answer.finish_reason) == (f"Let me see.\n{CALL}", "tool_calls")
        assert answer.content == "Let me see."
        (call,) = answer.tool_calls
        assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2})
        messages = [*ASK, answer.message, {"role": "tool", "content": "3", "tool_call_id": call.id}]
        prompt = model.detokenize(encode_chat(model.target, messages, {"tools": TOOLS}))
        assert f"Let me see.{CALL}" in prompt
        assert "<tool_response>\n3\n</tool_response>" in prompt
        conversation = model.conversation(tools=TOOLS)
        again = conversation.ask(ASK[0]["content"], max_tokens=200, speculate=False)
        assert again.tool_calls == answer.tool_calls and again.records[-1].source == "target"
        assert conversation.messages == [*ASK, answer.message]


def test_calls_come_as_they_are_written(target: Path, write: Callable[..., None]) -> None:
    write(f"See.\n{CALL}\n{CALL}", tools=TOOLS)
    with edgespec.load(target, "ngram", options=OPTIONS) as model:
        # One token a pass: how many a draft brings depends on what passes cost here.
        stream = model.stream_chat(ASK, tools=TOOLS, max_tokens=200, speculate=False)
        records = list(stream.records())
        answer = stream.result
        assert "".join(record.text for record in records) == f"See.\n{CALL}\n{CALL}"
        assert "".join(record.content for record in records) == answer.content == "See."
        places = [at for at, record in enumerate(records) for _ in record.calls]
        assert len(places) == 2 and places[0] < places[1] < len(records) - 3
        assert tuple(part for record in records for part in record.calls) == answer.tool_calls
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("add", {"a": 1, "b": 2})] * 2
        short = model.chat(ASK, tools=TOOLS, max_tokens=len(answer.tokens) * 3 // 4)
        assert (short.finish_reason, len(short.tool_calls)) == ("length", 1)
        assert short.content.startswith("See.\n\n<tool_call>")
        for speculate in (True, False):
            one = model.chat(ASK, tools=TOOLS, max_tokens=200, parallel_tool_calls=False, speculate=speculate)
            assert (one.finish_reason, one.content) == ("tool_calls", "See.")
            assert one.tool_calls == answer.tool_calls[:1] and len(one.tokens) < len(answer.tokens)


def test_templates_that_show_no_calls_and_tools_of_the_systems_message(tmp_path: Path) -> None:
    """As those of Granite 3.3 and Phi-4-mini."""
    phi = """{% for message in messages %}{{ message.role }}: {{ message.content }}{% if 'tools' in message %}
        {{- '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}{{ '\n' }}{% endfor %}"""
    call = edgespec.ToolCall("abcdefghi", "add", {"a": 1}).to_message()
    asked: list[Any] = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    shown = "user: What is 1 + 2?\nassistant: "
    granite = showing("<|tool_call|>").replace("{{ message.tool_calls or '' }}", "")
    for number, (source, begins, ends) in enumerate(
        [(phi, "system: <|tool|>[{", "]<|/tool_call|>\n"), (granite, "[{", "]\n")]
    ):
        with edgespec.load(tiny_native(tmp_path / f"{number}", template=source).path, None) as model:
            prompt = model.detokenize(encode_chat(model.target, asked, {"tools": TOOLS}))
            assert prompt.startswith(begins) and "Adds two numbers." in prompt
            assert prompt.endswith(f'{shown}<|tool_call|>[{{"name": "add", "arguments": {{"a": 1}}}}{ends}')
            broken: list[Any] = [{"role": "assistant", "content": "", "tool_calls": [{"function": 3}]}]
            with pytest.raises(RequestError, match=r"is .*allowed: a table with a 'function'"):
                encode_chat(model.target, broken)
            assert "tools" not in model.detokenize(encode_chat(model.target, ASK))


def test_without_tools_nothing_is_parsed(target: Path, write: Callable[..., None]) -> None:
    write(CALL)
    for tools in ([], TOOLS):
        with edgespec.load(target, None, options=OPTIONS) as model:
            answer = model.chat(ASK, max_tokens=200, tools=tools, tool_choice="none")
        assert (answer.text, answer.tool_calls, answer.finish_reason) == (CALL, (), "stop")
        assert answer.message == {"role": "assistant", "content": CALL}


@pytest.mark.parametrize(
    ("shows", "message"), [("", "does not support tools"), ("{{ tools }}", "has a form")]
)
def test_a_template_that_cannot_do_tools_says_so(tmp_path: Path, shows: str, message: str) -> None:
    folder = tiny_native(tmp_path / "target", template=shows + "{{ messages[0].content }}").path
    says = pytest.raises(RequestError, match=f"^tools cannot be .*target.*{message}")
    with edgespec.load(folder, None, options=OPTIONS) as model, says:
        model.chat(ASK, tools=TOOLS)


def test_a_drafter_whose_template_knows_less_drafts_all_the_same(target: Path, drafter: Path) -> None:
    messages: list[dict[str, Any]] = [{"role": "developer", "content": "Be brief."}, *ASK]
    options = RequestOptions(max_tokens=20, tools=TOOLS, template_args={"enable_thinking": False})
    texts = []
    for each in (drafter, None):
        with edgespec.load(target, each, options=OPTIONS) as model:
            texts.append(model.chat(messages, **options).tokens)
    assert texts[0] == texts[1]


def test_the_signature_and_the_docs_show_the_options(model: Model) -> None:
    for method in (Model.generate, Model.chat, Model.stream, Model.stream_chat, model.generate):
        parameters = inspect.signature(method).parameters
        assert RequestOptions.__annotations__.keys() <= parameters.keys()
        assert "options" not in parameters
        assert parameters["max_tokens"].default == Request().max_new_tokens
        assert parameters["temperature"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "seed: int | None = None" in str(inspect.signature(Model.generate))
    docs = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8").splitlines()
    documented = {name for line in docs if line[:3] == "- `" for name in line.split(":")[0].split("`")}
    assert RequestOptions.__annotations__.keys() <= documented


KNOWN = {"colour": {"enum": ["red", "green"]}, "coats": {"enum": [1, 2]}}
FORM = {"type": "object", "properties": KNOWN, "required": [*KNOWN], "additionalProperties": False}
BOUNDED: dict[str, Any] = {"type": "function", "function": {"name": "paint", "parameters": FORM}}


@pytest.mark.parametrize("source", [HERMES, MISTRAL, LLAMA3, SHOWN["xml"], SHOWN["args"], SHOWN["phi"]])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 2}])
def test_a_call_can_be_required(tmp_path: Path, source: str, options: dict[str, Any]) -> None:
    """Whatever the model would say, and whatever form its calls have."""
    wide = replace(LLAMA, context_length=2000)
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>")
    text = byte_level_json(specials=specials)
    folder = tiny_native(tmp_path / "target", wide, tokenizer_json=text, template=source).path
    with edgespec.load(folder, "ngram", options=OPTIONS) as model:
        for choice in ("required", {"type": "function", "function": {"name": "paint"}}):
            tools = [BOUNDED] if choice == "required" else [*TOOLS, BOUNDED]
            answers = [
                model.chat(ASK, tools=tools, tool_choice=choice, max_tokens=300, speculate=each, **options)
                for each in (True, False)
            ]
            assert answers[0].tokens == answers[1].tokens
            assert answers[0].finish_reason == "tool_calls"
            (call,) = answers[0].tool_calls
            assert call.name == "paint" and answers[0].content == ""
            assert call.arguments["colour"] in ("red", "green") and call.arguments["coats"] in (1, 2)
        twice = {"type": "array", "minItems": 2, "maxItems": 2, "items": {"const": 1}, "uniqueItems": True}
        form = edgespec.JsonSchema(twice)
        wanted: Any = {"response_format": form, "max_tokens": 300}
        answer = model.chat(ASK, tools=[BOUNDED], tool_choice="required", **wanted)
        assert answer.tool_calls and answer.stats.schema_problems == ()
        for more_tools in ([BOUNDED], ()):
            answer = model.chat(ASK, tools=more_tools, **wanted)
            assert answer.tool_calls or answer.content == "[1, 1]"
            broken = () if answer.tool_calls else ("the answer breaks uniqueItems at #",)
            assert answer.stats.schema_problems == broken
        assert not answer.tool_calls
        stream = model.stream_chat(ASK, tools=[BOUNDED], tool_choice="required", max_tokens=20)
        shown = "".join(record.content for record in stream.records())
        assert stream.result.content.startswith(shown) and not stream.result.tool_calls
