"""Requests that a model answers at once, a pass at a time: each pass is taken by the test."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from edgespec import Drafter, LoadOptions, Model
from edgespec.answering.results import Generation
from edgespec.running.stream import Stream
from tests.kit.models import VOCAB, printable, queue_of, runner_of, toy_model
from tests.kit.toy import F32, ToySession, markov_logits

LONG = "a document of many words, " * 5
PROMPTS = ("the quick brown fox", "the quick brown dog", "x", LONG, LONG + "and a question")
NEW = 16

LAW = printable(markov_logits(0, VOCAB, scale=4.0))
OTHER = printable(markov_logits(1, VOCAB, scale=4.0))


def session(law: Callable[[Sequence[int]], F32] = LAW, *, chunk: int = 8, several: bool = True) -> ToySession:
    return ToySession(law, VOCAB, chunk=chunk, several=several)


def several(
    parallel: int = 4, *, drafter: ToySession | None = None, chunk: int = 8, **more: Any
) -> tuple[Model, ToySession]:
    """A model over a toy, whose passes move the clock: a second each, and a hundredth a row."""
    target = session(chunk=chunk)
    options = LoadOptions(parallel=parallel, **more)
    return toy_model(
        target, drafter, options=options, clock=lambda: len(target.passes) + 0.01 * sum(target.passes)
    ), target


class Driven:
    """A model whose thread is the test, which takes the passes one by one."""

    def __init__(self, model: Model) -> None:
        self.model, self._queue = model, queue_of(model)

    def queue(self, stream: Stream) -> Stream:
        self._queue.thread = cast(Any, _NO_THREAD)
        stream.start()
        return stream

    @contextmanager
    def within(self) -> Iterator[None]:
        """As if what follows were done by a request that runs."""
        thread, self._queue.thread = self._queue.thread, threading.current_thread()
        yield
        self._queue.thread = thread

    def turn(self) -> int:
        """Take those that run a pass further; how many these were."""
        return len(self._queue.step())

    def run(self) -> None:
        while self.turn():
            pass

    @property
    def taken(self) -> list[bool]:
        """Of the seats that there are."""
        return [seat.taken for seat in runner_of(self.model).seats]

    def close(self) -> None:
        self.run()
        assert not any(self.taken)
        self.model.close()


_NO_THREAD = threading.Thread()


@dataclass(eq=False)
class Own(Drafter):
    """Proposes what a law says, some of it wrong, and may raise."""

    law: Callable[[Sequence[int]], F32] = LAW
    raises_at: str = ""
    rounds: int = 0
    closed: int = 0

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        self._may_raise("propose")
        drafted = list[int]()
        for _ in range(min(limit, len(tokens) % 7)):
            drafted.append(int(self.law([*tokens, *drafted]).argmax()))
        return drafted

    def observe(self, round_: object) -> None:
        self.rounds += 1
        self._may_raise("observe")

    def close(self) -> None:
        self.closed += 1
        self._may_raise("close")

    def _may_raise(self, at: str) -> None:
        if self.raises_at == at:
            raise ZeroDivisionError(at)


def facts(answer: Generation) -> tuple[object, ...]:
    """All that no other request may change."""
    told = [(token.id, token.logprob, token.top_logprobs) for token in answer.records]
    return answer.text, answer.tokens, answer.finish_reason, answer.stop, told


_ALONE = dict[str, Generation]()


def alone(prompt: Any, **options: Any) -> Generation:
    """What a model of its own answers to a text or a conversation, without drafts."""
    key = repr((prompt, sorted(options.items())))
    if key not in _ALONE:
        with toy_model(session(several=False)) as model:
            ask = model.generate if isinstance(prompt, str) else model.chat
            _ALONE[key] = ask(prompt, **{**options, "speculate": False})
    return _ALONE[key]


@contextmanager
def driving(parallel: int = 4, **options: Any) -> Iterator[tuple[Driven, ToySession]]:
    model, target = several(parallel, **options)
    driven = Driven(model)
    yield driven, target
    driven.close()


def reads(stream: Stream) -> bool:
    """Whether it waits for its first token."""
    running = stream._queue.running.get(stream._ticket)
    return stream._ticket.result is None and (running is None or running.unread > 0)


def queued(driven: Driven, prompt: str, **options: Any) -> Stream:
    """The stream of a request that is queued."""
    return driven.queue(driven.model.stream(prompt, **options))
