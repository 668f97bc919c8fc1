"""A target that answers prompts: many at once, or with drafts if its graph cannot do that.

Both write the same answers: each is the one that :meth:`edgespec.Model.chat` gives.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import edgespec
from edgespec.align.answers import Answer, Answering, number_of
from edgespec.asking.request import Request, RequestOptions
from edgespec.loading.opening import check_target, open_model
from edgespec.measuring.prompts import Prompt, ask
from edgespec.running.stream import Stream
from edgespec_models.errors import RequestError, TokenizerError
from edgespec_models.progress import ProgressCallback, ignore_progress

_AT_ONCE = 8  # where a pass costs little more than one over a single row; beyond, rows cost alike


@contextmanager
def answering(
    names: tuple[str, str],
    request: RequestOptions,
    *,
    threads: int = 0,
    progress: ProgressCallback = ignore_progress,
) -> Iterator[Answering]:
    """Load the target ``names[0]`` for this context, with the drafter ``names[1]`` if that helps.

    Raises:
        EdgespecError: a model cannot be found, made or loaded.
    """
    bundle = open_model(names[0], "target", progress=progress)
    check_target(bundle)
    manifest = bundle.manifest
    several = manifest.graph_kind == "dynamic" and manifest.operators == "edgespec"
    options = edgespec.LoadOptions(threads=threads, parallel=_AT_ONCE, prompt_cache_bytes=0)
    with edgespec.load(names[0], None if several else names[1], options=options, progress=progress) as model:
        yield lambda prompts: answers(model, prompts, request)


def answers(
    model: edgespec.Model, prompts: Sequence[Prompt], request: RequestOptions
) -> Iterator[Answer | None]:
    """Answers of ``model`` to the first turns of ``prompts``; None for a prompt that it cannot read.

    Every prompt has the options of ``request`` and a seed of its own, which its text decides.
    """
    running, temperature = deque[tuple[Prompt, Stream]](), request.get("temperature", 0.0)
    for prompt in prompts:
        options: RequestOptions = {**request, "seed": number_of(prompt.turns[0])}
        Request.of(options)  # raises for wrong options, which are no prompt's fault
        try:
            running.append((prompt, ask(model, prompt, options)))
        except (RequestError, TokenizerError):
            yield None
            continue
        running[-1][1].start()
        # At least one prompt always waits.
        while running and (running[0][1].ended or len(running) > 2 * _AT_ONCE):
            yield _answer(*running.popleft(), temperature)
    while running:
        yield _answer(*running.popleft(), temperature)


def _answer(prompt: Prompt, stream: Stream, temperature: float) -> Answer:
    result = stream.run()
    return Answer(prompt.turns[0], result.text, result.finish_reason == "stop", prompt.category, temperature)
