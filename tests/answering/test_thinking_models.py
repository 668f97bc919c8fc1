"""Models that think: thoughts beside the text, switched, bounded, before a grammar, kept by rules."""

import pytest

from edgespec import Choice, RequestError
from tests.kit.templates import TOOLS
from tests.kit.thoughts import ANSWER, ASK, GRANITE, HEAD, MAGISTRAL, NONE, QWEN3, R1, kinds, scripted

OPENED = ANSWER.removeprefix("<think>\n")  # behind a prompt that opens the thoughts


@kinds
def test_an_answer_has_its_thoughts_beside_its_text(kind: str) -> None:
    with scripted(QWEN3, kind=kind) as model:
        answer = model.chat(ASK)
        assert (answer.reasoning, answer.text) == ("One and two. One and two.", "Three.")
        assert answer.finish_reason == "stop" and answer.message["reasoning_content"] == answer.reasoning
        closed = model.detokenize(answer.tokens[: answer.stats.reasoning_tokens])
        assert closed == ANSWER.partition("\n\n")[0]
        stream = model.stream_chat(ASK)
        records = list(stream.records())
        assert "".join(record.reasoning for record in records) == answer.reasoning
        assert "".join(record.text for record in records) == answer.text == "".join(model.stream_chat(ASK))
        assert stream.result.thoughts == answer.thoughts
        assert model.chat(ASK, speculate=False).tokens == answer.tokens
        assert answer.stats.by_source["ngram"].accepted > 0
        raw = model.generate(f"{HEAD}")  # a text is in no template
        assert (raw.reasoning, raw.stats.reasoning_tokens) == ("", 0)


def test_thinking_is_switched_by_the_template_or_closed_at_once() -> None:
    with scripted(QWEN3) as model:
        (prompt,) = {model.count_tokens(ASK, thinking=each) for each in (None, True, 9)}
        assert model.count_tokens(ASK, thinking=False) == model.count_tokens(ASK, thinking=0) > prompt
        assert model.chat(ASK, thinking=False).reasoning == ""
    bracketed = ANSWER.replace("<", "[").replace(">", "]").replace("think", "THINK")
    for source, script, kind in ((R1, OPENED, "added"), (MAGISTRAL, bracketed, "spelled")):
        with scripted(source, script, kind) as model:
            assert model.chat(ASK, thinking=True).text == "Three."
            assert model.chat(ASK, thinking=False).reasoning == ""
    with scripted(GRANITE, kind="spelled") as model:
        assert model.count_tokens(ASK, thinking=True) > model.count_tokens(ASK)


def test_a_budget_ends_thoughts_and_max_tokens_ends_answers() -> None:
    with scripted(R1, OPENED) as model:
        answer = model.chat(ASK, thinking=4)
        assert ANSWER[8:].startswith(answer.reasoning) and answer.stats.reasoning_tokens == 5
        assert (answer.text, answer.finish_reason) == ("Three.", "stop")
        assert model.chat(ASK, thinking=4, speculate=False).tokens == answer.tokens
        cut = model.chat(ASK, max_tokens=6)
        assert (cut.text, cut.finish_reason, cut.stats.reasoning_tokens) == ("", "length", 6)
        assert ANSWER[8:].startswith(cut.reasoning) and cut.message["content"] == ""
        stopped = model.chat(ASK, stop=["two", "Thr"])
        assert (stopped.reasoning, stopped.text, stopped.stop) == ("One and two. One and two.", "", "Thr")


def test_a_grammar_is_for_the_text_behind_the_thoughts() -> None:
    wanted = Choice(["Three!", "Four!"])
    for source, script in ((QWEN3, ANSWER), (R1, OPENED)):
        with scripted(source, script) as model:
            answer = model.chat(ASK, response_format=wanted)
            assert (answer.reasoning, answer.finish_reason) == ("One and two. One and two.", "stop")
            assert answer.text in wanted.texts
            assert answer.tokens == model.chat(ASK, response_format=wanted, speculate=False).tokens
            short = model.chat(ASK, response_format=wanted, thinking=3)
            assert short.text == answer.text and short.stats.reasoning_tokens < 8
    with scripted(QWEN3, "Three.") as model:  # which need not think
        assert model.chat(ASK, response_format=wanted).text in wanted.texts


def test_what_is_thought_of_calling_is_not_called() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    source = '{% if tools %}{{ tools }}{% endif %}{# <tool_call>{"name": #}' + QWEN3
    for script, calls in ((f"<think>Or {call}?</think>No.", 0), (f"<think>So.</think>{call}", 1)):
        with scripted(source, script) as model:
            answer = model.chat(ASK, tools=TOOLS)
            assert len(answer.tool_calls) == calls and answer.reasoning
            assert answer.content == ("" if calls else "No.") == answer.message["content"]


def test_calls_between_tags_may_follow_thoughts_that_the_prompt_opens() -> None:
    """As Nemotron 3 writes them."""
    source = "{% if tools %}{{ tools }}{% endif %}{# <tool_call>\n<function= #}" + R1
    calls = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
    with scripted(source, f"Add them.\n</think>\n{calls * 2}") as model:
        answer = model.chat(ASK, tools=TOOLS)
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("add", {"a": 1})] * 2
        assert (answer.reasoning, answer.content) == ("Add them.", "")


@pytest.mark.parametrize("thoughts", ["", "[THINK]Add them.[/THINK]", "[THINK]Add them.[/THINK]\n"])
def test_a_call_that_a_control_token_begins_may_follow_thoughts_at_once(thoughts: str) -> None:
    source = "{% if tools %}{{ tools }}{% endif %}{# [TOOL_CALLS] [ARGS] #}" + MAGISTRAL
    script = f'{thoughts}[TOOL_CALLS]add[ARGS]{{"a": 1}}'
    with scripted(source, script, "mistral") as model:
        stream = model.stream_chat(ASK, tools=TOOLS)
        records = list(stream.records())
        assert [(call.name, call.arguments) for call in stream.result.tool_calls] == [("add", {"a": 1})]
        assert tuple(part for record in records for part in record.calls) == stream.result.tool_calls
        assert stream.result.reasoning == ("Add them." if thoughts else "")
        assert "".join(record.content for record in records) == ""


def test_what_contradicts_itself_is_refused() -> None:
    with scripted(NONE, "Hi", "spelled") as model:
        assert model.chat(ASK, thinking=False).text == "Hi"
        for thinking in (True, 5):
            with pytest.raises(
                RequestError, match=f"thinking is {thinking}, and toy does not support thinking"
            ):
                model.chat(ASK, thinking=thinking)
    with scripted(QWEN3) as model:
        with pytest.raises(RequestError, match="template_args has enable_thinking=False, which contradicts"):
            model.chat(ASK, thinking=5, template_args={"enable_thinking": False})
        assert model.chat(ASK, thinking=5, template_args={"enable_thinking": True}).text == "Three."
        with pytest.raises(RequestError, match="thinking is for conversations"):
            model.generate("a", thinking=True)
        with pytest.raises(RequestError, match="thinking is -1; allowed: True or False or 'minimal'"):
            model.chat(ASK, thinking=-1)


def test_conversations_keep_thoughts_by_the_templates_rules() -> None:
    """Messages carry them; this template shows them in the last message alone."""
    with scripted(QWEN3) as model:
        talk = model.conversation()
        first = talk.ask("1 + 2?")
        message = {"role": "assistant", "content": "Three.", "reasoning_content": "One and two. One and two."}
        assert talk.messages[-1] == first.message == message
        second = talk.ask("Sure?")
        assert second.stats.cached_tokens >= first.stats.prompt_tokens  # all before what the template drops
        assert second.tokens == model.chat([*talk.messages[:2], {"role": "user", "content": "Sure?"}]).tokens
        assert model.count_tokens(talk.messages[:2]) > model.count_tokens([*talk.messages[:2], *ASK])
