"""Who answers prompts: a target that writes many answers at once, or, where its graph cannot, with drafts.

Both write the same answers: each is the one that :meth:`edgespec.Model.chat` gives.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import edgespec
from edgespec.align.answers import Answer, Answering, Asking, number_of
from edgespec.drafting.draft import NO_DRAFT
from edgespec.encoding import Asked
from edgespec.loading import open_model
from edgespec.planning import room_for
from edgespec.prompts import Prompt
from edgespec.request import Request, RequestOptions
from edgespec.trial import ask
from edgespec.verification import Verifier
from edgespec_models.bundle import Bundle
from edgespec_models.errors import DoesNotFit
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.predictions import Predictions
from edgespec_runtimes.side_by_side import SideBySide, can_run_side_by_side

__all__ = ["answer", "answer_at_once", "answering"]

_AT_ONCE = 8  # where a pass costs little more than one over a single row; beyond, rows cost alike
_ROOM = 32_768  # tokens of all KV caches together: a gigabyte for a model of 1.5 billion weights
_SHORTEST = _ROOM // _AT_ONCE
"""Tokens of a KV cache; longer texts have caches of twice as many, and half as many of these."""


@contextmanager
def answering(
    names: tuple[str, str], asking: Asking, *, threads: int = 0, progress: ProgressCallback = ignore_progress
) -> Iterator[Answering]:
    """The target ``names[0]``, loaded as long as the context; with the drafter ``names[1]`` if that helps.

    Raises:
        EdgespecError: a model cannot be found, made or loaded.
    """
    bundle = open_model(names[0], "target", progress=progress)
    if can_run_side_by_side(bundle):
        session = SideBySide(bundle, room_for(bundle, None, CpuOptions(threads=threads)))
        with closing(session):
            yield lambda prompts: answer_at_once(bundle, session, prompts, asking)
        return
    options = edgespec.LoadOptions(threads=threads)
    with edgespec.load(*names, options=options, progress=progress) as model:
        yield lambda prompts: (answer(model, prompt, asking) for prompt in prompts)


def _options(prompt: Prompt, asking: Asking) -> RequestOptions:
    seed = number_of(prompt.turns[0])
    # Not of the last digit, which says whether a prompt is held out.
    temperature = asking.temperatures[(seed >> 8) % len(asking.temperatures)]
    return RequestOptions(max_new_tokens=asking.max_new_tokens, temperature=temperature, seed=seed)


def answer(model: edgespec.Model, prompt: Prompt, asking: Asking) -> Answer | None:
    """The answer of ``model`` to the first turn of ``prompt``; None where it does not fit."""
    options = _options(prompt, asking)
    try:
        given = ask(model, prompt, options)
    except DoesNotFit:
        return None
    return _written(prompt, given.text, options, asking, complete=given.finish_reason == "stop")


def _written(prompt: Prompt, text: str, options: RequestOptions, asking: Asking, *, complete: bool) -> Answer:
    return Answer(prompt.turns[0], text, complete, prompt.category, options["temperature"], asking.target)


@dataclass(slots=True)
class _Asked:
    """A prompt that is being answered: ``tokens`` grows behind the prompt's until it has ``most``."""

    prompt: Prompt
    options: RequestOptions
    tokens: list[int]
    start: int
    most: int
    verify: Verifier

    @classmethod
    def of(cls, prompt: Prompt, asking: Asking, bundle: Bundle) -> "_Asked":
        options, said = _options(prompt, asking), prompt.turns[0]
        request = Request.of(options)
        asked = said if bundle.chat_template is None else [{"role": "user", "content": said}]
        tokens = Asked.of(asked, request).tokens(bundle)
        most = min(len(tokens) + asking.max_new_tokens, bundle.config.context_length)
        return cls(prompt, options, tokens, len(tokens), most, request.verifier())

    def take(self, said: Predictions, eos: Collection[int]) -> bool:
        """Append the token that follows; whether it is the last."""
        self.tokens.append(self.verify(said, NO_DRAFT, self.tokens).token)
        return self.tokens[-1] in eos or len(self.tokens) == self.most


def answer_at_once(
    bundle: Bundle, session: SideBySide, prompts: Sequence[Prompt], asking: Asking
) -> Iterator[Answer | None]:
    """Answers of many prompts at once, each when it is there; None for those that do not fit.

    Raises:
        EdgespecError: a prompt is empty, or a pass fails.
    """
    eos = frozenset(bundle.manifest.special_tokens.eos)
    by_room: dict[int, list[_Asked]] = {}
    for prompt in prompts:
        asked = _Asked.of(prompt, asking, bundle)
        if asked.start < asked.most:
            by_room.setdefault(_room_for(asked.most), []).append(asked)
        else:
            yield None
    for room, some in sorted(by_room.items()):
        session.reserve(min(len(some), max(1, _ROOM // room)), room)
        for asked in _finished(session, some, eos):
            answer = asked.tokens[asked.start :]
            text, complete = bundle.tokenizer.decode(answer), answer[-1] in eos
            yield _written(asked.prompt, text, asked.options, asking, complete=complete)


def _room_for(tokens: int) -> int:
    room = _SHORTEST
    while room < tokens:
        room *= 2
    return room


def _finished(session: SideBySide, some: Sequence[_Asked], eos: Collection[int]) -> Iterator[_Asked]:
    """All of them, each when it is answered; as many at once as the session has room for."""
    waiting = deque(some)
    writing: list[_Asked | None] = [None] * session.sequences
    while True:
        for at in range(len(writing)):
            while writing[at] is None and waiting:
                next_one = waiting.popleft()
                if next_one.take(session.begin(at, next_one.tokens), eos):
                    yield next_one
                else:
                    writing[at] = next_one
        if not any(writing):
            return
        said = session.extend([None if one is None else one.tokens[-1] for one in writing])
        for at, one in enumerate(writing):
            if one is not None and one.take(said[at], eos):
                yield one
                writing[at] = None
