"""Templates and vocabularies of models that think, and a model that thinks to order."""

import json
from collections.abc import Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from edgespec import Model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_models.text.thoughts import Tags
from edgespec_models.text.tokenizer import SpecialTokens, Tokenizer
from tests.kit.models import toy_model
from tests.kit.tokenizers import byte_level_json
from tests.kit.toy import F32, ToySession

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
QWEN38 = template(
    "{{ m.content }}",
    "{{ '<think></think>' if enable_thinking is false else '<think>' }}",
    "{% if enable_thinking is not false and reasoning_effort|default('xhigh') not in "
    "('xhigh', 'medium', 'low') %}{{ raise_exception('Unexpected reasoning effort') }}{% endif %}",
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


def ends(kind: str) -> tuple[int, ...]:
    return tuple(TOKENIZERS[kind]().encode("<|im_end|>", special=True))


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
    return speaking(source, Scripted(TOKENIZERS[kind](), script), TOKENIZERS[kind](), ends(kind))


def speaking(source: str, session: ToySession, tokenizer: Tokenizer, eos: tuple[int, ...]) -> Model:
    """A model with this template."""
    special = SpecialTokens(None, eos, add_bos=False)

    def bundle(name: str, context: int) -> Bundle:
        manifest = SimpleNamespace(name=name, special_tokens=special, sampling=None)
        config = SimpleNamespace(context_length=context, vocab_size=tokenizer.vocab_size)
        chat = ChatTemplate(source)
        facts = {"manifest": manifest, "config": config, "tokenizer": tokenizer, "chat_template": chat}
        return cast(Bundle, SimpleNamespace(**facts, head_tokens=None, digest="toy", reads_images=False))

    return toy_model(session, bundle=bundle, clock=lambda: 0.0)  # drafts whatever this machine measures
