"""Thoughts: told from text however tokens cut them, bounded, and before a grammar."""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgespec import Choice, JsonSchema
from edgespec.answering.answer_reading import AnswerReader
from edgespec.answering.attribution import Attribution
from edgespec.answering.results import FinishReason, Record, TokenRecord
from edgespec.decoding.draft import NO_DRAFT, Round
from edgespec.decoding.grammar import Constraint, Grammars, ResponseFormat
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.copies import CopyDrafter
from edgespec.drafting.ngram import ContextTree
from edgespec.drafting.policy import Policy
from edgespec.drafting.source import Source
from edgespec.running.thinking import ThoughtsFirst
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.thoughts import Tags, ThoughtState, state_behind, tags_of
from edgespec_models.text.tokenizer import Tokenizer
from tests.kit.drafters import GREEDY, draft_of, model_of, policy_of
from tests.kit.formats import NEW, PROMPT, accepts, written
from tests.kit.thoughts import (
    GRANITE,
    MAGISTRAL,
    NONE,
    QWEN3,
    QWEN38,
    R1,
    SMOLLM3,
    THINK,
    TOKENIZERS,
    ends,
    kinds,
    template,
)
from tests.kit.toy import F32, RandomDrafter, Silent, ToySession, markov_logits

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
    opened = template("{{ m.content }}", "{{ '<think>' }}")  # OLMo 3 Think's, which never writes the end
    assert found(opened) == THINK


ANY_EFFORT = template("{{ m.content }}", "", "{{ 'Reasoning: ' + (reasoning_effort or 'medium') }}")
LOUDER = template(
    "{{ m.content }}",
    "",
    "{% if thinking and reasoning_effort in ('high', 'max') %}{{ 'Effort: ' + reasoning_effort }}{% endif %}",
)
OR_NONE = template("{{ m.content }}", "{{ '<think></think>' if reasoning_effort|default('none') == 'none' }}")
ONLY_NONE = template(
    "{{ m.content }}",
    "{{ '<think></think>' if reasoning_effort == 'none' }}"
    "{{ raise_exception('no such effort') if reasoning_effort not in (none, 'none') and reasoning_effort }}",
)
EMPTIED = template("{{ m.content }}", "{{ '<think></think>' if reasoning_effort in ('low', 'minimal') }}")
NEAREST: dict[str, tuple[str, dict[bool | int | str, str | None]]] = {
    "any text": (ANY_EFFORT, {"minimal": "low", "high": "high", "max": "high", False: "low"}),
    "refuses others": (QWEN38, {"minimal": "low", "high": "xhigh", "medium": "medium", False: None}),
    "two words": (LOUDER, {"minimal": "low", "low": "low", "max": "max", False: None}),
    "two low words": (EMPTIED, {False: "minimal", "high": "high", "max": "max"}),
    "a word for off": (OR_NONE, {False: "none", "high": "high"}),
    "only a word for off": (ONLY_NONE, {False: "none", "high": None}),
    "none": (QWEN3, {"high": None}),
}


@pytest.mark.parametrize(("source", "words"), NEAREST.values(), ids=NEAREST)
def test_efforts_are_the_nearest_that_a_template_takes(
    source: str, words: dict[bool | int | str, str | None]
) -> None:
    made = ChatTemplate(source)
    tags = tags_of(made, TOKENIZERS["added"]())
    assert tags is not None
    for thinking, word in {**words, True: None, 9: None, 9000: None}.items():
        variables = tags.variables(thinking)
        assert variables.get("reasoning_effort") == word
        made.render([{"role": "user", "content": "a"}], variables)


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
        assert state_behind(prompt, tags, tokenizer).stage == stage


def pieces(
    tokenizer: Tokenizer, text: str, sizes: Sequence[int], state: ThoughtState | None, stop: str
) -> Any:
    """What a reader shows of ``text``, cut into such records, and what attribution shows of these."""
    ids = tokenizer.encode(text, special=True)
    reader, attribution = AnswerReader(tokenizer, state, stop=[stop] if stop else []), Attribution(tokenizer)
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
        assert "".join(token["text"] for token in cut) == "".join(thought) + piece
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
    state = ThoughtState(THINK, "opened" if is_open else "before")
    text = text if end else ""
    whole = f"{space}{'' if is_open else '<think>'}{space}{thoughts}{end}{text}"
    reasoning, said, shown = pieces(TOKENIZERS[kind](), whole, sizes, state, "")
    if not end:  # it may have begun
        thoughts = re.sub(r"\s*(<|</)\Z", "", thoughts)
    assert (reasoning, said) == (thoughts.strip(" \n"), text.lstrip(" \n"))
    assert all(token["source"] == "model" for token in shown)
    assert "".join(token["text"] for token in shown if "reasoning" in token) == reasoning


@given(TEXTS, st.lists(st.integers(1, 5), max_size=30))
@example("<thin", [1])
@example(" <thought> a", [3, 2])
def test_an_answer_without_the_tag_is_text_to_the_letter(text: str, sizes: list[int]) -> None:
    """Also where the prompt has closed the thoughts; tags that come later are text."""
    for state in (None, ThoughtState(THINK), ThoughtState(THINK, "text")):
        assert pieces(TOKENIZERS["spelled"](), text, sizes, state, "")[:2] == ("", text)
    later = f"x{text}<think>a</think>"
    assert pieces(TOKENIZERS["added"](), later, sizes, ThoughtState(THINK), "")[:2] == ("", later)


@given(st.lists(st.integers(1, 5), max_size=30))
def test_stop_strings_end_text_and_not_thoughts(sizes: list[int]) -> None:
    read = pieces(
        TOKENIZERS["added"](), "<think>a STOP b</think>c STOP d", sizes, ThoughtState(THINK), "STOP"
    )
    assert read[:2] == ("a STOP b", "c ")


@given(st.lists(st.integers(1, 5), max_size=30), st.sampled_from(["Hi", "", "a <b", "1 < 2"]))
def test_granites_tags_around_the_text_are_no_text(sizes: list[int], text: str) -> None:
    state = ThoughtState(Tags("<think>", "</think>", "<response>"))
    for begin, end in (("\n<response>\n", "</response>\n"), ("<response>", ""), ("\n", "")):
        whole = f"<think>Hm.</think>{begin}{text}{end}"
        assert pieces(TOKENIZERS["spelled"](), whole, sizes, state, "")[:2] == ("Hm.", text)


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


@cache
def grammars(kind: str) -> Grammars:
    return Grammars(TOKENIZERS[kind](), ends(kind))


def write(
    kind: str,
    state: ThoughtState,
    budget: int | None,
    wanted: ResponseFormat | None,
    *,
    seed: int = 0,
    params: SamplingParams = GREEDY,
    source_of: Callable[[Constraint], Source | Policy] = lambda constraint: Silent(),
) -> tuple[list[int], list[Round]]:
    tokenizer = TOKENIZERS[kind]()
    grammar = None if wanted is None else grammars(kind).constraint(wanted)
    constraint = ThoughtsFirst(state, tokenizer, ends(kind), budget=budget, grammar=grammar)
    target = ToySession(noisy(kind, seed), tokenizer.vocab_size)
    return written(target, source_of(constraint), constraint, params, ends(kind))


def drafters(kind: str, seed: int) -> dict[str, Callable[[Constraint], Source | Policy]]:
    law, vocab = noisy(kind, seed), TOKENIZERS[kind]().vocab_size
    return {
        "forced": lambda c: policy_of(Silent(), constraint=c),
        "ngrams": lambda c: policy_of(CopyDrafter(ContextTree(), stop_below=0.0), constraint=c),
        "target": lambda c: policy_of(
            CopyDrafter(ContextTree(), stop_below=0.0), model_of(ToySession(law, vocab)), constraint=c
        ),
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
    state, tokenizer = ThoughtState(THINK, stage), TOKENIZERS[kind]()
    asked = partial(write, kind, state, budget, wanted, seed=seed, params=params)
    expected, _ = asked()
    answer, _ = asked(source_of=drafters(kind, seed)[name])
    assert answer == expected
    piece = AnswerReader(tokenizer, state).push(answer)
    # a tag may show the character that it cut off
    assert budget is None or len([*filter(None, piece.thoughts)]) <= budget + 1
    if wanted is not None and len(answer) < NEW:
        assert accepts(wanted, piece.text)


@kinds
def test_the_closing_tag_is_forced_at_the_budget_and_drafted(kind: str) -> None:
    closing = TOKENIZERS[kind]().encode("</think>", special=True)
    answer, _ = write(kind, ThoughtState(THINK, "opened"), 5, None)
    assert answer[5 : 5 + len(closing)] == closing
    constraint = ThoughtsFirst(ThoughtState(THINK, "opened"), TOKENIZERS[kind](), (), budget=5)
    constraint.begin(PROMPT)
    policy = policy_of(Silent(), constraint=constraint, opening=NO_DRAFT)
    draft = draft_of(policy, [*PROMPT, *answer[:5]], 20)
    assert [*draft.tokens] == closing and set(draft.sources) == {"grammar"}


def test_no_token_both_closes_thoughts_and_begins_a_grammars_text() -> None:
    """``>{`` would; space behind the tag is no text."""
    tokenizer = TOKENIZERS["spelled"]()
    grammar = grammars("spelled").constraint(Choice(["{}"]))
    constraint = ThoughtsFirst(ThoughtState(THINK, "opened"), tokenizer, ends("spelled"), grammar=grammar)
    constraint.begin([1, 2])
    before = tokenizer.encode("hm </think")
    allowed = constraint.allowed(before)
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    beyond = [token for data, token in by_bytes.items() if data.startswith(b">") and data[1:].strip()]
    assert by_bytes[b">"] in allowed and not any(token in allowed for token in beyond)
    assert ends("spelled")[0] not in constraint.allowed(())
    assert constraint.allowed([*before, by_bytes[b">"]]).tokens == grammar.allowed(()).tokens
