"""Thoughts: told from text however tokens cut them, bounded, before a grammar, kept by templates' rules."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import numpy as np
import openai
import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgespec import Choice, JsonSchema, Model, RequestError
from edgespec.cli import options
from edgespec.cli.answers import answer_json, stream_as_markdown, stream_to_terminal
from edgespec.decoding.draft import NO_DRAFT, Source, Step
from edgespec.decoding.grammar import Constraint, Grammars, ResponseFormat
from edgespec.decoding.loop import Verifier
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.thinking import ThoughtsFirst
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.pricing import Pricing
from edgespec.requests.answer_reading import AnswerReader
from edgespec.requests.attribution import Attribution
from edgespec.requests.results import FinishReason, Record, TokenRecord
from edgespec.serve.bodies import ChatBody, parse
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.thoughts import Place, Tags, place_behind, tags_of
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from tests.drafters_for_tests import GREEDY, model_of, policy_of
from tests.formats_for_tests import accepts
from tests.models_for_tests import toy_model
from tests.serving_for_tests import ask, events, serving
from tests.templates_for_tests import TOOLS
from tests.tokenizers_for_tests import byte_level_json
from tests.toy import F32, RandomDrafter, Silent, ToySession, decode, markov_logits

ASK = [{"role": "user", "content": "1 + 2?"}]
CONTROL = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK = Tags("<think>", "</think>")


def vocabulary(added: Sequence[str] = (), controls: Sequence[str] = ()) -> Tokenizer:
    """One with tags as added tokens, as control tokens, or with neither."""
    spec = json.loads(byte_level_json(specials=(*CONTROL, *added, *controls)))
    for token in spec["added_tokens"]:
        token["special"] = token["content"] not in ("<tool>", *added)
    return Tokenizer.from_json(json.dumps(spec))


TOKENIZERS = {
    "added": cache(partial(vocabulary, ("<think>", "</think>"))),
    "control": cache(partial(vocabulary, (), ("<think>", "</think>"))),
    "spelled": cache(vocabulary),
    "mistral": cache(partial(vocabulary, (), ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"))),
}
kinds = pytest.mark.parametrize("kind", ["added", "control", "spelled"])

BODY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ shown(m, loop) }}<|im_end|>\n{% endfor %}"
HEAD = "<|im_start|>assistant\n"


def template(shown: str, end: str, before: str = "") -> str:
    """A template that shows a message by the expression ``shown``, and ends in ``end``."""
    macro = "{% macro shown(m, loop) %}" + shown + "{% endmacro %}"
    return macro + before + BODY + HEAD + "{{ '' }}" + end


PLAIN = "{{ m.content.split('</think>')[-1] }}"
QWEN3 = template(
    "{% if m.role == 'assistant' and m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content }}",
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)
SMOLLM3 = template(
    PLAIN,
    "{% if not enable_thinking %}{{ '<think>\n\n</think>\n' }}{% endif %}",
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}",
)
R1 = template(PLAIN, "{{ '<think>\n' }}")
GRANITE = template(
    "{{ m.content }}",
    "",
    "{% if thinking %}Write thoughts between <think></think> and the answer between <response></response>"
    "{% endif %}",
)
MAGISTRAL = template("{{ m.content }}", "", "Think like this: [THINK]thoughts[/THINK] answer.")
NONE = template("{{ m.content }}", "")


# ---- telling thoughts from text --------------------------------------------------------------------------


def test_tags_and_switches_are_read_from_templates_and_vocabularies() -> None:
    def found(source: str, kind: str = "spelled") -> Tags | None:
        return tags_of(ChatTemplate(source), TOKENIZERS[kind]())

    assert found(QWEN3) == found(SMOLLM3) == Tags("<think>", "</think>", switch="enable_thinking")
    assert found(R1) == THINK
    assert found(GRANITE) == Tags("<think>", "</think>", "<response>", "thinking")
    assert found(MAGISTRAL) == Tags("[THINK]", "[/THINK]")
    assert found("{{ '</seed:think>' }}") == Tags("<seed:think>", "</seed:think>")
    assert found(NONE) is None
    assert found(NONE, "added") == found(NONE, "control") == THINK


@pytest.mark.parametrize(
    ("source", "arguments", "stage"),
    [
        (QWEN3, {}, "before"),
        (QWEN3, {"enable_thinking": False}, "text"),
        (SMOLLM3, {"enable_thinking": False}, "text"),
        (R1, {}, "opened"),
        (MAGISTRAL, {}, "before"),
    ],
)
@kinds
def test_prompts_may_open_the_thoughts_or_close_them(
    source: str, arguments: dict[str, Any], stage: Any, kind: str
) -> None:
    tokenizer, chat = TOKENIZERS[kind](), ChatTemplate(source)
    tags = tags_of(chat, tokenizer)
    assert tags is not None
    for text in ("Hi", "<think>"):  # what a user types opens nothing
        messages = [{"role": "user", "content": text}]
        prompt = chat.encode(messages, tokenizer, arguments)
        assert place_behind(prompt, tags, tokenizer).stage == stage


def pieces(tokenizer: Tokenizer, text: str, sizes: Sequence[int], place: Place | None, stop: str) -> Any:
    """What a reader shows of ``text``, cut into such records, and what attribution shows of these."""
    ids = tokenizer.encode(text, special=True)
    reader, attribution = AnswerReader(tokenizer, place, stop=[stop] if stop else []), Attribution(tokenizer)
    thoughts, said, shown, at = list[str](), "", list[dict[str, Any]](), 0
    for size in [*sizes, len(ids) + 1]:
        now, at = ids[at : at + size], at + size
        last = at >= len(ids)
        record = reader.push(now)
        thought, piece = record.thoughts, record.text
        last |= reader.ended
        if last:
            piece += reader.push((), final=True).text
        assert record.content in piece
        records = [TokenRecord(id_, "model") for id_ in now]
        reason: FinishReason | None = "stop" if last else None
        cut = attribution.push(Record(piece, tuple(records), reason, thoughts=thought))
        assert "".join(each["text"] for each in cut) == "".join(thought) + piece
        thoughts, said, shown = [*thoughts, *thought], said + piece, shown + cut
        if last:
            break
    return "".join(thoughts), said, shown


TEXTS = st.text(alphabet="ab<>/ é😀\n", max_size=9)


@settings(deadline=None)
@given(
    st.sampled_from(["added", "control", "spelled"]),
    st.sampled_from(["", " \n"]),
    TEXTS,
    st.sampled_from(["\n</think>\n\n", "</think>", ""]),
    TEXTS,
    st.lists(st.integers(1, 5), max_size=30),
    st.booleans(),
)
@example("spelled", "", "a", "</think>", "<b", [1] * 9, False)
@example("spelled", "", "a", "", "", [1] * 9, False)
def test_thoughts_are_told_from_text_however_tokens_cut_them(
    kind: str, space: str, thoughts: str, end: str, text: str, sizes: list[int], is_open: bool
) -> None:
    place = Place(THINK, "opened" if is_open else "before")
    text = text if end else ""
    whole = f"{space}{'' if is_open else '<think>'}{space}{thoughts}{end}{text}"
    reasoning, said, shown = pieces(TOKENIZERS[kind](), whole, sizes, place, "")
    if not end:  # it may have begun
        thoughts = re.sub(r"\s*(<|</)\Z", "", thoughts)
    assert (reasoning, said) == (thoughts.strip(" \n"), text.lstrip(" \n"))
    assert all(each["source"] == "model" for each in shown)
    assert "".join(each["text"] for each in shown if "reasoning" in each) == reasoning


@given(TEXTS, st.lists(st.integers(1, 5), max_size=30))
@example("<thin", [1])
@example(" <thought> a", [3, 2])
def test_an_answer_without_the_tag_is_text_to_the_letter(text: str, sizes: list[int]) -> None:
    """Also where the prompt has closed the thoughts; tags that come later are text."""
    for place in (None, Place(THINK), Place(THINK, "text")):
        assert pieces(TOKENIZERS["spelled"](), text, sizes, place, "")[:2] == ("", text)
    later = f"x{text}<think>a</think>"
    assert pieces(TOKENIZERS["added"](), later, sizes, Place(THINK), "")[:2] == ("", later)


@given(st.lists(st.integers(1, 5), max_size=30))
def test_stop_strings_end_text_and_not_thoughts(sizes: list[int]) -> None:
    read = pieces(TOKENIZERS["added"](), "<think>a STOP b</think>c STOP d", sizes, Place(THINK), "STOP")
    assert read[:2] == ("a STOP b", "c ")


@given(st.lists(st.integers(1, 5), max_size=30), st.sampled_from(["Hi", "", "a <b", "1 < 2"]))
def test_granites_tags_around_the_text_are_no_text(sizes: list[int], text: str) -> None:
    place = Place(Tags("<think>", "</think>", "<response>"))
    for begin, end in (("\n<response>\n", "</response>\n"), ("<response>", ""), ("\n", "")):
        whole = f"<think>Hm.</think>{begin}{text}{end}"
        assert pieces(TOKENIZERS["spelled"](), whole, sizes, place, "")[:2] == ("Hm.", text)


# ---- constraints: budgets and grammars -------------------------------------------------------------------


def noisy(kind: str, seed: int) -> Callable[[Sequence[int]], F32]:
    """A random model that likes tags and ends."""
    tokenizer, liked = TOKENIZERS[kind](), "<think></think><|im_end|>"
    law = markov_logits(seed, tokenizer.vocab_size)
    tags = tokenizer.encode(liked, special=True)

    def next_logits(tokens: Sequence[int]) -> F32:
        row = law(tokens).copy()
        row[tags] += 3.0
        return row

    return next_logits


PROMPT = (40, 41, 42)
NEW = 60


@cache
def grammars(kind: str) -> Grammars:
    return Grammars(TOKENIZERS[kind](), ends(kind))


def ends(kind: str) -> tuple[int, ...]:
    return tuple(TOKENIZERS[kind]().encode("<|im_end|>", special=True))


def write(
    kind: str,
    place: Place,
    budget: int | None,
    wanted: ResponseFormat | None,
    *,
    seed: int = 0,
    params: SamplingParams = GREEDY,
    source_of: Callable[[Constraint], Source] = lambda constraint: Silent(),
) -> tuple[list[int], list[Step]]:
    tokenizer = TOKENIZERS[kind]()
    grammar = None if wanted is None else grammars(kind).constraint(wanted)
    constraint = ThoughtsFirst(place, tokenizer, ends(kind), budget=budget, grammar=grammar)
    target = ToySession(noisy(kind, seed), tokenizer.vocab_size)
    tokens, steps, source = [*PROMPT], list[Step](), source_of(constraint)
    rounds = decode(
        target, source, Verifier(params, [constraint]), tokens, max_new_tokens=NEW, max_draft=6,
        stop=ends(kind),
    )  # fmt: skip
    for step in rounds:
        steps.append(step)
        if constraint.ends(tokens):
            break
    source.close()
    assert target.cache == tokens[:-1]
    return tokens[len(PROMPT) :], steps


def drafters(kind: str, seed: int) -> dict[str, Callable[[Constraint], Source]]:
    law, vocab = noisy(kind, seed), TOKENIZERS[kind]().vocab_size
    ngrams = partial(NgramDrafter, stop_below=0.0)
    return {
        "forced": lambda c: policy_of(Silent(), constraint=c),
        "ngrams": lambda c: policy_of(ngrams(), constraint=c),
        "target": lambda c: policy_of(ngrams(), model_of(ToySession(law, vocab)), constraint=c),
        "random": lambda c: policy_of(RandomDrafter(seed, vocab, law), constraint=c),
    }


WANTED = [None, Choice(["the target", "the drafter"]), JsonSchema({"enum": [12, "lazy dog"]})]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["added", "control", "spelled"]),
    st.sampled_from(["opened", "before"]),
    st.sampled_from([None, 0, 1, 7]),
    st.sampled_from(WANTED),
    st.sampled_from(["forced", "ngrams", "target", "random"]),
    st.integers(0, 99),
    st.booleans(),
)
def test_output_with_drafts_is_plain_decodings(
    kind: str, stage: Any, budget: int | None, wanted: Any, name: str, seed: int, greedy: bool
) -> None:
    """And within its budget, and of its form."""
    params = GREEDY if greedy else SamplingParams(temperature=1.5, top_p=0.95, seed=seed)
    place, tokenizer = Place(THINK, stage), TOKENIZERS[kind]()
    asked = partial(write, kind, place, budget, wanted, seed=seed, params=params)
    expected, _ = asked()
    answer, _ = asked(source_of=drafters(kind, seed)[name])
    assert answer == expected
    piece = AnswerReader(tokenizer, place).push(answer)
    # a tag may show the character that it cut off
    assert budget is None or len([*filter(None, piece.thoughts)]) <= budget + 1
    if wanted is not None and len(answer) < NEW:
        assert accepts(wanted, piece.text)


@kinds
def test_the_closing_tag_is_forced_at_the_budget_and_drafted(kind: str) -> None:
    closing = TOKENIZERS[kind]().encode("</think>", special=True)
    answer, _ = write(kind, Place(THINK, "opened"), 5, None)
    assert answer[5 : 5 + len(closing)] == closing
    constraint = ThoughtsFirst(Place(THINK, "opened"), TOKENIZERS[kind](), (), budget=5)
    constraint.begin(PROMPT)
    draft = policy_of(Silent(), constraint=constraint, opening=NO_DRAFT).propose([*PROMPT, *answer[:5]], 20)
    assert [*draft.tokens] == closing and set(draft.sources) == {"grammar"}


def test_no_token_both_closes_thoughts_and_begins_a_grammars_text() -> None:
    """``>{`` would; space behind the tag is no text."""
    tokenizer = TOKENIZERS["spelled"]()
    grammar = grammars("spelled").constraint(Choice(["{}"]))
    constraint = ThoughtsFirst(Place(THINK, "opened"), tokenizer, ends("spelled"), grammar=grammar)
    constraint.begin([1, 2])
    before = tokenizer.encode("hm </think")
    allowed = constraint.allowed(before)
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    beyond = [token for data, token in by_bytes.items() if data.startswith(b">") and data[1:].strip()]
    assert by_bytes[b">"] in allowed and not any(token in allowed for token in beyond)
    assert ends("spelled")[0] not in constraint.allowed(())
    assert constraint.allowed([*before, by_bytes[b">"]]).tokens == grammar.allowed(()).tokens


# ---- models ----------------------------------------------------------------------------------------------

ANSWER = "<think>\nOne and two. One and two.\n</think>\n\nThree."


class Scripted(ToySession):
    """Writes ``script`` behind the head of the assistant's turn, and then its end.

    Where thoughts were closed early it goes on behind the script's own tag.
    """

    def __init__(self, tokenizer: Tokenizer, script: str) -> None:
        (end,) = tokenizer.encode("<|im_end|>", special=True)

        def next_logits(tokens: Sequence[int]) -> F32:
            said = tokenizer.decode(tokens, skip_special=False).rpartition(HEAD)[2]
            said = said if script.startswith("<think>") else said.removeprefix("<think>\n")
            thoughts, tag, behind = said.partition("</think>")
            if tag and not script.startswith(thoughts + tag):
                said = script.partition(tag)[0] + tag + behind
            rest = script[len(said) :]
            row = np.zeros(tokenizer.vocab_size, np.float32)
            row[tokenizer.encode(rest, special=True)[0] if rest else end] = 9.0
            return row

        super().__init__(next_logits, tokenizer.vocab_size)


def scripted(source: str, script: str = ANSWER, kind: str = "added") -> Model:
    """A model with this template that says ``script`` to everything."""
    tokenizer = TOKENIZERS[kind]()
    special = SpecialTokens(None, ends(kind), add_bos=False, pad=None)

    def bundle(name: str, context: int) -> Bundle:
        manifest = SimpleNamespace(name=name, special_tokens=special)
        config = SimpleNamespace(context_length=context, vocab_size=tokenizer.vocab_size)
        chat = ChatTemplate(source)
        facts = {"manifest": manifest, "config": config, "tokenizer": tokenizer, "chat_template": chat}
        return cast(Bundle, SimpleNamespace(**facts, head_tokens=None, digest="toy"))

    return toy_model(Scripted(tokenizer, script), bundle=bundle)


@kinds
def test_an_answer_has_its_thoughts_beside_its_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pricing, "pass_seconds", lambda self, rows: 1e-3 + rows * 1e-9)
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
    for source, kind in ((R1, "added"), (MAGISTRAL, "spelled")):
        script = ANSWER if source == MAGISTRAL else ANSWER.removeprefix("<think>\n")
        script = (
            script if source == R1 else script.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
        )
        with scripted(source, script, kind) as model:
            assert model.chat(ASK, thinking=True).text == "Three."
            answer = model.chat(ASK, thinking=False)
            assert answer.reasoning == ""
    with scripted(GRANITE, kind="spelled") as model:
        assert model.count_tokens(ASK, thinking=True) > model.count_tokens(ASK)


def test_a_budget_ends_thoughts_and_max_tokens_ends_answers() -> None:
    with scripted(R1, ANSWER.removeprefix("<think>\n")) as model:
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
    for source, script in ((QWEN3, ANSWER), (R1, ANSWER.removeprefix("<think>\n"))):
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


@pytest.mark.parametrize("thoughts", ["", "[THINK]Add them.[/THINK]", "[THINK]Add them.[/THINK]\n"])
def test_a_call_that_a_control_token_begins_may_follow_thoughts_at_once(thoughts: str) -> None:
    source = "{% if tools %}{{ tools }}{% endif %}{# [TOOL_CALLS] [ARGS] #}" + MAGISTRAL
    script = f'{thoughts}[TOOL_CALLS]add[ARGS]{{"a": 1}}'
    with scripted(source, script, "mistral") as model:
        stream = model.stream_chat(ASK, tools=TOOLS)
        records = list(stream.records())
        assert [(call.name, call.arguments) for call in stream.result.tool_calls] == [("add", {"a": 1})]
        assert "".join(part.arguments for record in records for part in record.calls) == '{"a": 1}'
        assert stream.result.reasoning == ("Add them." if thoughts else "")
        assert "".join(record.content for record in records) == ""


def test_what_contradicts_itself_is_refused() -> None:
    with scripted(NONE, "Hi", "spelled") as model:
        assert model.chat(ASK, thinking=False).text == "Hi"
        for thinking in (True, 5):
            with pytest.raises(RequestError, match=f"thinking is {thinking}, and toy does not think"):
                model.chat(ASK, thinking=thinking)
    with scripted(QWEN3) as model:
        with pytest.raises(RequestError, match="thinking is 5, template_args say enable_thinking=False"):
            model.chat(ASK, thinking=5, template_args={"enable_thinking": False})
        assert model.chat(ASK, thinking=5, template_args={"enable_thinking": True}).text == "Three."
        with pytest.raises(RequestError, match="template_args and thinking are for a model's chat template"):
            model.generate("a", thinking=True)
        with pytest.raises(RequestError, match="thinking is -1; allowed: True or False or a whole number"):
            model.chat(ASK, thinking=-1)


def test_conversations_keep_thoughts_by_the_templates_rules() -> None:
    """Messages carry them; this template shows them in the last message alone."""
    with scripted(QWEN3) as model:
        talk = model.conversation()
        first = talk.ask("1 + 2?")
        assert (
            talk.messages[-1]
            == first.message
            == {
                "role": "assistant",
                "content": "Three.",
                "reasoning_content": "One and two. One and two.",
            }
        )
        second = talk.ask("Sure?")
        assert second.stats.cached_tokens >= first.stats.prompt_tokens  # all before what the template drops
        assert second.tokens == model.chat([*talk.messages[:2], {"role": "user", "content": "Sure?"}]).tokens
        assert model.count_tokens(talk.messages[:2]) > model.count_tokens([*talk.messages[:2], *ASK])


# ---- the server ------------------------------------------------------------------------------------------


@pytest.fixture
def url() -> Iterator[str]:
    with scripted(QWEN3) as model, serving(model) as url:
        yield url


def test_openais_client_reads_thoughts_beside_the_content(url: str) -> None:
    asked: Any = {"model": "toy", "messages": ASK, "logprobs": True}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**asked)
        chunks = list(
            client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        off = client.chat.completions.create(**asked, reasoning_effort="none")
        few = client.chat.completions.create(**asked, extra_body={"thinking_budget": 3})
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("One and two. One and two.", "Three.")
    deltas: Any = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert (
        "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        == message.reasoning_content
    )
    assert "".join(delta.content or "" for delta in deltas) == message.content
    for usage in (whole.usage, chunks[-1].usage):
        count = usage.completion_tokens_details.reasoning_tokens
        assert 0 < count < usage.completion_tokens
        assert len(whole.choices[0].logprobs.content) == usage.completion_tokens - count
    assert not hasattr(off.choices[0].message, "reasoning_content")
    assert off.usage.completion_tokens_details.reasoning_tokens == 0
    assert few.usage.completion_tokens_details.reasoning_tokens == 5


def test_thoughts_are_reasoning_items_and_thinking_blocks(url: str) -> None:
    """Which go back, and are bounded in each one's words."""
    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with client:
        asked: Any = {"model": "toy", "input": "1 + 2?"}
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            pieces = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
            streamed = stream.get_final_response()
        assert "".join(pieces) == "One and two. One and two." and len(pieces) > 1
        for answer in (whole, streamed):
            item = answer.output[0]
            assert (item.type, item.content[0].text) == ("reasoning", "One and two. One and two.")
            assert answer.output_text == "Three." and len(answer.output) == 2
        off = client.responses.create(**asked, reasoning={"effort": "none", "summary": "auto"})
        assert off.usage.output_tokens_details.reasoning_tokens == 0 and len(off.output) == 1
        sure = {"role": "user", "content": "Sure?"}
        again = client.responses.create(model="toy", input=[*ASK, *whole.output, sure])
        behind = client.responses.create(model="toy", input="Sure?", previous_response_id=whole.id)
        assert again.usage.input_tokens == behind.usage.input_tokens > whole.usage.input_tokens
    other: Any = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    with other:
        wanted: Any = {"model": "toy", "messages": ASK, "max_tokens": 100}
        with other.messages.stream(**wanted) as events_of:
            kinds = [event.type for event in events_of]
            final = events_of.get_final_message()
        assert kinds.count("thinking") > 1
        for message in (other.messages.create(**wanted), final):
            thought, text = message.content
            assert thought.type == "thinking" and thought.thinking == "One and two. One and two."
            assert text.type == "text" and text.text == "Three."
        few = other.messages.create(**wanted, thinking={"type": "enabled", "budget_tokens": 3})
        assert few.usage.output_tokens_details.thinking_tokens == 5
        (text,) = other.messages.create(**wanted, thinking={"type": "disabled"}).content
        assert text.type == "text"


def test_tokens_of_thoughts_are_marked_and_go_back_and_forth(url: str) -> None:
    path = "/v1/chat/completions"
    body = {"model": "toy", "messages": ASK}
    choice = ask(url, path, body).json["choices"][0]
    chunks = events(ask(url, path, {**body, "stream": True}))[1:-2]
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["edgespec"]["tokens"]]
    for tokens in (choice["edgespec"]["tokens"], streamed):
        thought = "".join(token["text"] for token in tokens if token.get("reasoning"))
        assert thought == "One and two. One and two."
        assert "".join(token["text"] for token in tokens if "reasoning" not in token) == "Three."
    again = [*ASK, choice["message"], *ASK]
    assert ask(url, path, {**body, "messages": again}).status == 200
    held = ask(url, path, {**body, "tools": TOOLS, "stream": True})
    assert held.status == 400  # this template shows no tools


@pytest.mark.parametrize(
    ("more", "thinking"),
    [
        ({"reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high", "thinking_budget_tokens": 0}, 0),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
    ],
)
def test_clients_bound_thoughts_in_their_own_words(more: dict[str, Any], thinking: Any) -> None:
    given = parse(ChatBody, {"model": "toy", "messages": ASK, **more}).options()
    assert given.get("thinking") == thinking and isinstance(given.get("thinking"), type(thinking))


# ---- the command line ------------------------------------------------------------------------------------


def test_the_terminal_shows_thoughts_beside_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(QWEN3) as model:
        answer = stream_to_terminal(model.stream_chat(ASK))
        written = capsys.readouterr()
        assert written.out == "Three.\n" and written.err == f"{answer.reasoning}\n\n"
        stream_as_markdown(model.stream_chat(ASK, max_tokens=5), model.target.tokenizer)
        assert capsys.readouterr().err == "One\n"
        assert answer_json(answer)["reasoning"] == answer.reasoning


@pytest.mark.parametrize(("given", "thinking"), [(None, None), ("on", True), ("off", False), ("300", 300)])
def test_the_command_line_says_how_much_is_thought(given: str | None, thinking: Any) -> None:
    assert options.thinking(given) is thinking or options.thinking(given) == thinking == 300
    with pytest.raises(typer.BadParameter, match="'much' is none of on, off and a number of tokens"):
        options.thinking("much")
