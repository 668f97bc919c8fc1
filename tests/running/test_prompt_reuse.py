"""What templates repeat is read once: of prompts no more is read than what differs, wherever it was kept."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from edgespec import Choice, Generation, Model
from edgespec_models.decoders.kept import BLOCK
from edgespec_models.text.chat_template import ChatTemplate
from edgespec_runtimes.kv_cache import shared_length
from tests.kit.models import runner_of, toy_model
from tests.kit.prompts import keyed
from tests.kit.templates import HERMES, TOOLS
from tests.kit.thoughts import QWEN3
from tests.kit.toy import settle

SYSTEM = {"role": "system", "content": "You answer in as few words as you can, and never in verse. " * 6}
Ask = Callable[..., Generation]


def said(text: str, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


class Asking:
    """Asks a model, on disk a new one each time; what was found is what earlier texts begin with."""

    def __init__(self, template: str, on_disk: bool) -> None:
        self._template, self._on_disk = template, on_disk
        self._model: Model | None = None
        self._read: list[list[int]] = []

    def __call__(self, messages: list[dict[str, Any]], **options: Any) -> Generation:
        model = self._loaded()
        prompt = runner_of(model).prompt(messages, _request(options)).target
        answer = model.chat(messages, max_new_tokens=70, **options)
        settle()
        shared = max((shared_length(text, prompt[:-1]) for text in self._read), default=0)
        found = shared // BLOCK * BLOCK if self._on_disk else shared
        assert answer.stats.cached_tokens == found if self._on_disk else answer.stats.cached_tokens >= found
        self._read += [[*prompt, *choice.tokens[:-1]] for choice in answer.choices]
        return answer

    def _loaded(self) -> Model:
        if self._model is None or self._on_disk:
            self.close()
            self._model = toy_model(keyed())
            cast(Any, self._model.target).chat_template = ChatTemplate(self._template)
        return self._model

    def close(self) -> None:
        if self._model is not None:
            self._model.close()


def _request(options: dict[str, Any]) -> Any:
    from edgespec.asking.request import Request

    return Request.of(cast(Any, options))


@pytest.fixture(params=["in memory", "on disk"])
def asking(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Asking]]:
    made = list[Asking]()

    def asking(template: str) -> Asking:
        made.append(Asking(template, request.param == "on disk"))
        return made[-1]

    yield asking
    for each in made:
        each.close()


def test_a_conversation_is_gone_on_with(asking: Callable[[str], Asking]) -> None:
    ask, messages = asking(HERMES), [SYSTEM]
    for turn in range(3):
        messages = [*messages, said(f"Question {turn}, " * 9)]
        messages.append(ask(messages).message)
    assert ask([SYSTEM, said("Something else")]).stats.cached_tokens >= 256


def test_several_answers_read_the_prompt_once(asking: Callable[[str], Asking]) -> None:
    answer = asking(HERMES)([SYSTEM, said("Who?")], n=3, temperature=1.0, seed=5)
    for other in answer.others:
        assert other.stats.cached_tokens == other.stats.prompt_tokens - 1


def test_tools_and_their_results(asking: Callable[[str], Asking]) -> None:
    ask, question = asking(HERMES), said("What is 1 + 2?")
    with_tools = ask([SYSTEM, question], tools=TOOLS)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    called = [SYSTEM, question, said("", "assistant", tool_calls=[call]), said("3", "tool")]
    assert (
        ask(called, tools=TOOLS).stats.cached_tokens
        >= with_tools.stats.prompt_tokens // BLOCK * BLOCK - BLOCK
    )
    assert ask([SYSTEM, said("And now?")], tools=TOOLS).stats.cached_tokens > 300
    ask([SYSTEM, question])  # without tools another beginning


def test_structured_output(asking: Callable[[str], Asking]) -> None:
    ask, form = asking(HERMES), Choice(["the fox", "the dog"])
    for question in ("Who jumps over the dog?", "Who is lazy?", "Who is quick?"):
        stats = ask([SYSTEM, said(question)], response_format=form).stats
    assert stats.cached_tokens >= 256


def test_of_thoughts_that_the_template_drops_the_text_before_stays(asking: Callable[[str], Asking]) -> None:
    ask, first = asking(QWEN3), [SYSTEM, said("Who?")]
    before = ask(first).stats.prompt_tokens
    answered = [*first, said("The fox.", "assistant", reasoning_content="It may be the fox. " * 9)]
    kept = ask(answered).stats.cached_tokens  # the template shows the last thoughts
    assert kept >= before // BLOCK * BLOCK
    assert ask([*answered, said("And then?")]).stats.cached_tokens >= before // BLOCK * BLOCK


def test_of_a_conversation_that_is_cut_the_beginning_stays(asking: Callable[[str], Asking]) -> None:
    ask, messages = asking(HERMES), [SYSTEM]
    for turn in range(3):
        messages = [*messages, said(f"Question {turn}, " * 9), said(f"Answer {turn}. " * 9, "assistant")]
    messages.append(said("And?"))
    whole = ask(messages).stats.prompt_tokens
    del messages[3:5]
    cut = ask(messages).stats
    assert cut.prompt_tokens < whole and cut.cached_tokens > 400
    del messages[0]
    assert ask(messages).stats.cached_tokens < 32
