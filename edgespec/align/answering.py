"""Who answers prompts: a target that writes many answers at once, or, where its graph cannot, with drafts.

Both write the same answers: each is the one that :meth:`edgespec.Model.chat` gives.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import edgespec
from edgespec.align.answers import Answer, Answering, Asking, number_of
from edgespec.decoding.draft import NO_DRAFT
from edgespec.decoding.loop import Verifier
from edgespec.loading.footprint import room_for
from edgespec.loading.opening import check_target, open_model
from edgespec.measuring.prompts import Prompt, ask, said_by
from edgespec.requests.request import Request, RequestOptions, prompt_tokens
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_runtimes.cpu import CpuOptions
from edgespec_runtimes.memory import machine_memory
from edgespec_runtimes.session import Predictions
from edgespec_runtimes.side_by_side import SideBySide, can_run_side_by_side

_AT_ONCE = 8  # where a pass costs little more than one over a single row; beyond, rows cost alike
_SHORTEST = 4096  # tokens of a KV cache; longer texts have twice as many, or four times, and so on
_SHARE = 4  # of the available memory, what KV caches may take
_ENCODED = 512  # prompts at a time


@contextmanager
def answering(
    names: tuple[str, str], asking: Asking, *, threads: int = 0, progress: ProgressCallback = ignore_progress
) -> Iterator[Answering]:
    """The target ``names[0]``, loaded as long as the context; with the drafter ``names[1]`` if that helps.

    Raises:
        EdgespecError: a model cannot be found, made or loaded.
    """
    bundle = open_model(names[0], "target", progress=progress)
    check_target(bundle)
    if can_run_side_by_side(bundle):
        options = room_for(bundle, None, CpuOptions(threads=threads))
        with closing(SideBySide(bundle, options)) as session:
            yield lambda prompts: answer_side_by_side(bundle, session, prompts, asking)
        return
    load_options = edgespec.LoadOptions(threads=threads, prompt_cache_bytes=0)
    with edgespec.load(*names, options=load_options, progress=progress) as model:
        yield lambda prompts: (answer(model, prompt, asking) for prompt in prompts)


def answer(model: edgespec.Model, prompt: Prompt, asking: Asking) -> Answer | None:
    """The answer of ``model`` to the first turn of ``prompt``; None where it cannot read that."""
    options = _options(prompt, asking)
    Request.of(options)  # what is wrong with these is no prompt's fault
    try:
        given = ask(model, prompt, options)
    except (RequestError, TokenizerError):
        return None
    return _answer(prompt, given.text, asking, complete=given.finish_reason == "stop")


def answer_side_by_side(
    bundle: Bundle, session: SideBySide, prompts: Sequence[Prompt], asking: Asking
) -> Iterator[Answer | None]:
    """Answers of many prompts at once, each when it is there; None for those that the model cannot read.

    Raises:
        EdgespecError: a pass fails.
    """
    eos = frozenset(bundle.manifest.special_tokens.eos)
    token_bytes = bundle.manifest.kv_bytes_per_token
    for first in range(0, len(prompts), _ENCODED):
        by_capacity: dict[int, list[_Writing]] = {}
        for prompt in prompts[first : first + _ENCODED]:
            writing = _begun(prompt, asking, bundle)
            if writing is None:
                yield None
            else:
                by_capacity.setdefault(_capacity(writing.most), []).append(writing)
        for capacity, some in sorted(by_capacity.items()):
            session.reserve(min(len(some), _at_once(capacity * token_bytes)), capacity)
            for written in _written(session, some, eos):
                tokens = written.tokens[written.start :]
                text, complete = bundle.tokenizer.decode(tokens), tokens[-1] in eos
                yield _answer(written.prompt, text, asking, complete=complete)


def _options(prompt: Prompt, asking: Asking) -> RequestOptions:
    seed, temperature = number_of(prompt.turns[0]), _temperature(prompt, asking)
    return RequestOptions(max_new_tokens=asking.max_new_tokens, temperature=temperature, seed=seed)


def _temperature(prompt: Prompt, asking: Asking) -> float:
    # Not of the last digit, which says whether a prompt is held out.
    return asking.temperatures[(number_of(prompt.turns[0]) >> 8) % len(asking.temperatures)]


def _answer(prompt: Prompt, text: str, asking: Asking, *, complete: bool) -> Answer:
    temperature = _temperature(prompt, asking)
    return Answer(prompt.turns[0], text, complete, prompt.category, temperature, asking.target)


@dataclass(slots=True)
class _Writing:
    """An answer that is being written: ``tokens``, the prompt's first, grow until there are ``most``."""

    prompt: Prompt
    tokens: list[int]
    start: int
    most: int
    verify: Verifier

    def take(self, said: Predictions, eos: Collection[int]) -> bool:
        """Append the token that follows; whether it is the last."""
        self.tokens.append(self.verify(said, NO_DRAFT, self.tokens)[1])
        return self.tokens[-1] in eos or len(self.tokens) == self.most


def _begun(prompt: Prompt, asking: Asking, bundle: Bundle) -> _Writing | None:
    """Nothing of the answer yet; None where the model cannot read the prompt, or has no room behind it."""
    request = Request.of(_options(prompt, asking))
    try:
        tokens = prompt_tokens(bundle, said_by(prompt, bundle), request)
    except (RequestError, TokenizerError):
        return None
    most = min(len(tokens) + asking.max_new_tokens, bundle.config.context_length)
    if len(tokens) >= most:
        return None
    return _Writing(prompt, tokens, len(tokens), most, Verifier(request.sampling))


def _capacity(tokens: int) -> int:
    capacity = _SHORTEST
    while capacity < tokens:
        capacity *= 2
    return capacity


def _at_once(cache_bytes: int) -> int:
    """How many answers are written at once, of so many bytes of KV cache each."""
    return max(1, min(_AT_ONCE, machine_memory().available // _SHARE // cache_bytes))


def _written(session: SideBySide, some: Iterable[_Writing], eos: Collection[int]) -> Iterator[_Writing]:
    """All of them, each when it is there; as many at once as the session has room for."""
    waiting = deque(some)
    seats: list[_Writing | None] = [None] * session.sequences
    while True:
        for at in range(len(seats)):
            while seats[at] is None and waiting:
                writing = waiting.popleft()
                if writing.take(session.begin(at, writing.tokens), eos):
                    yield writing
                else:
                    seats[at] = writing
        if not any(seats):
            return
        said = session.extend([None if seat is None else seat.tokens[-1] for seat in seats])
        for at, seat in enumerate(seats):
            if seat is not None and seat.take(said[at], eos):
                yield seat
                seats[at] = None
