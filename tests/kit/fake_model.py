"""A stand-in for a loaded model: answers, statistics and faults made to order, without weights."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace, TracebackType
from typing import Any, Self, cast

from edgespec.answering.results import Generation, GenerationStats, Record, SourceStats
from edgespec.asking.request import RequestOptions
from edgespec.engine import Model
from edgespec.running.conversation import Conversation
from edgespec.running.stream import Stream
from edgespec_models.errors import RequestError
from edgespec_runtimes.cost import CostCurve

PLAIN_STEP_S = 0.1


@dataclass
class FakeModel:
    """Counts up from the prompt's length; sampled, draws tokens by the seed.

    Attributes:
        speed: how many times as fast speculation is, by a word of the prompt ("" is any prompt).
        flips: words of prompts whose third token is another one with speculation.
        biased: sampled tokens with speculation follow another distribution.
        drafts: whether speculation drafts at all.
        rolled_back: what its answers say was put back.
        calls: the prompt and options of every request.
        forgotten: how often it was told to forget its caches.
    """

    speed: Mapping[str, float] = field(default_factory=lambda: {"": 2.0})
    flips: tuple[str, ...] = ()
    biased: bool = False
    drafts: bool = True
    rolled_back: tuple[str, ...] = ()
    template: bool = True
    new_tokens: int = 8
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    on_call: Callable[[int], None] = lambda count: None
    name: str = "fake-target"
    drafter_name: str | None = "fake-drafter"
    drafter_step_s: float | None = 0.02
    row_exact: bool = True
    forgotten: int = 0

    def __post_init__(self) -> None:
        self.target = _bundle("fake-target", 1000, 800, self.template)
        self.drafter = _bundle("fake-drafter", 100, 200, self.template) if self.drafter_name else None
        self.cost_curve = CostCurve({1: 0.1, 2: 0.11, 4: 0.13, 8: 0.2})

    def as_model(self) -> Model:
        return cast(Model, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.closed = True

    def generate(self, prompt: str, **options: Any) -> Generation:
        return self.stream(prompt, **options).run()

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Generation:
        return self.stream_chat(messages, **options).run()

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> "FakeStream":
        if not self.template:
            raise RequestError("fake-target has no chat template")
        return self.stream("|".join(_shown(message["content"]) for message in messages), **options)

    def conversation(self, system: str | None = None, **options: Any) -> Conversation:
        return Conversation(self._start, system, **cast(RequestOptions, options))

    def _start(self, messages: Any, options: Any, ended: Callable[[Generation], None], talk: Any) -> Stream:
        stream = self.stream_chat(messages(), **options)
        ended(stream.result)
        return cast(Stream, stream)

    def forget(self, *, on_disk: bool = True) -> None:
        self.forgotten += 1

    def stream(self, prompt: str, **options: Any) -> "FakeStream":
        self.calls.append((prompt, options))
        self.on_call(len(self.calls))
        speculate = options.get("speculate", True)
        count = min(options.get("max_new_tokens", 256), self.new_tokens)
        tokens = self._tokens(prompt, count, options, speculate)
        text, stats = f"re: {prompt}", self._stats(prompt, count, speculate)
        return FakeStream(Generation(text, tokens, "stop", stats, content=text))

    def _tokens(
        self, prompt: str, count: int, options: Mapping[str, Any], speculate: bool
    ) -> tuple[int, ...]:
        if options.get("temperature", 0.0) > 0:
            draws = random.Random(f"{options['seed']} {prompt}")
            weights = (1, 1, 6) if speculate and self.biased else (1, 1, 1)
            return tuple(draws.choices((0, 1, 2), weights)[0] for _ in range(count))
        tokens = [len(prompt) + index for index in range(count)]
        if speculate and count > 2 and any(word in prompt for word in self.flips):
            tokens[2] = 0
        return tuple(tokens)

    def _stats(self, prompt: str, count: int, speculate: bool) -> GenerationStats:
        step = PLAIN_STEP_S
        rounds, drafted, accepted = count, 0, 0
        if speculate and self.drafts:
            step /= next(value for word, value in self.speed.items() if word in prompt)
            rounds, drafted, accepted = count // 2, count, count // 2
        source = {"model": SourceStats(drafted, accepted)} if drafted else {}
        return GenerationStats(
            prompt_tokens=len(prompt),
            new_tokens=count,
            ttft_s=0.5,
            decode_s=step * (count - 1),
            decode_tokens=count - 1,
            rounds=rounds,
            drafted=drafted,
            accepted=accepted,
            by_source=source,
            drafted_by_position=(drafted // 2, drafted // 2) if drafted else (),
            accepted_by_position=(accepted, 0) if drafted else (),
            target_s=0.1 * (rounds - 1),
            drafter_s=0.25 * step * (count - 1) if drafted else 0.0,
            speculation_off_reason=None if speculate and self.drafts else "too <slow>",
            rolled_back=self.rolled_back if speculate else (),
        )


@dataclass
class FakeStream:
    """A finished answer, handed out in two pieces."""

    result: Generation
    ended = True

    def __iter__(self) -> Iterator[str]:
        text = self.result.text
        yield text[:4]
        yield text[4:]

    def records(self) -> Iterator[Record]:
        for piece in self:
            yield Record(piece, ())

    def start(self) -> None:
        pass

    def run(self) -> Generation:
        return self.result

    def cancel(self) -> None:
        self.result = replace(self.result, finish_reason="cancelled")


def _shown(content: str | Sequence[Mapping[str, Any]]) -> str:
    """A content in which ``<FILE>`` stands for a picture."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['image']}>" for part in content)


def _bundle(name: str, size: int, parameters: int, template: bool) -> SimpleNamespace:
    return SimpleNamespace(
        manifest=SimpleNamespace(
            sampling=None,
            name=name,
            weights="exact",
            bytes_per_pass=size,
            parameters_per_pass=parameters,
            kv_bytes_per_token=16,
        ),
        chat_template="template" if template else None,
        tokenizer=None,
    )
