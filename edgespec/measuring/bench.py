"""How much faster is it on this machine? Prompts, answered plain and speculatively in turn.

The bench is an ordinary user of :class:`edgespec.engine.Model`. Plain decoding is the same loop of the
same model without drafts. The two take turns prompt by prompt, and which goes first alternates, so a
disturbance of the machine meets both. :func:`summarize` turns pairs into figures.

Terms:

* decode time: of the rounds behind the first, which is never drafted and commits one token both ways. The
  drafter's reading of the prompt lies in it.
* speedup of a set of prompts: plain decode seconds per token over speculative decode seconds per token,
  both summed over the set. With equal token counts, as in greedy decoding, this is the ratio of the
  total times. Below 1, speculation is slower.
* request speedup: the same ratio over whole requests, prefill included.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from edgespec.measuring.prompts import Prompt
from edgespec.measuring.trial import ask, forget
from edgespec.requests.results import Generation
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress
from edgespec_models.schema import check_fields, within

if TYPE_CHECKING:
    from edgespec.engine import Model

__all__ = ["BenchOptions", "Pair", "Speed", "measure", "speedup"]

_WARM_UP = Prompt("warm-up", "warm-up", ("Count from one to ten, then count from one to ten again.",))
_WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How prompts are answered.

    Attributes:
        max_new_tokens: of each answer.
        temperature: 0 is greedy.
        seed: of both runs of a prompt; with equal seeds sampled answers can be compared too.
        stop_at_eos: False makes every answer ``max_new_tokens`` long.

    Raises:
        RequestError: ``max_new_tokens`` is below 2: one token is no decoding.
    """

    max_new_tokens: Annotated[int, within(2, 2**31 - 1)] = 128
    temperature: Annotated[float, within(0, 100)] = 0.0
    seed: Annotated[int, within(0, 2**64 - 1)] = 0
    stop_at_eos: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, answered both ways."""

    prompt: Prompt
    plain: Generation
    speculative: Generation

    @property
    def identical(self) -> bool:
        """Whether both answers have the same tokens."""
        return self.plain.tokens == self.speculative.tokens


@dataclass(frozen=True, slots=True)
class Speed:
    """Times in seconds and tokens of some requests, summed."""

    decode_s: float
    decode_tokens: int
    request_s: float
    new_tokens: int

    @classmethod
    def of(cls, answers: Iterable[Generation]) -> "Speed":
        """Sum the requests."""
        stats = [answer.stats for answer in answers]
        decode_s = sum(s.decode_s for s in stats)
        return cls(
            decode_s=decode_s,
            decode_tokens=sum(s.decode_tokens for s in stats),
            request_s=decode_s + sum(s.ttft_s for s in stats),
            new_tokens=sum(s.new_tokens for s in stats),
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed; None if nothing was decoded."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else None

    @property
    def request_tokens_per_s(self) -> float | None:
        """Speed of whole requests; None if there were none."""
        return self.new_tokens / self.request_s if self.request_s > 0 else None


def speedup(pairs: Sequence[Pair]) -> float | None:
    """Speedup of decoding over ``pairs`` (the module's docstring defines it); None without any."""
    plain = Speed.of(pair.plain for pair in pairs).tokens_per_s
    speculative = Speed.of(pair.speculative for pair in pairs).tokens_per_s
    return speculative / plain if plain and speculative else None


def measure(
    model: "Model",
    prompts: Sequence[Prompt],
    options: BenchOptions,
    *,
    progress: ProgressCallback = ignore_progress,
) -> Iterator[Pair]:
    """Answer every prompt both ways, after a warm-up; a pair is yielded when it is complete."""
    _pair(model, _WARM_UP, replace(options, max_new_tokens=_WARM_UP_TOKENS), plain_first=True)
    progress(Progress("Measuring", 0, len(prompts), "prompts"))
    for index, prompt in enumerate(prompts):
        yield _pair(model, prompt, options, plain_first=index % 2 == 0)
        progress(Progress("Measuring", index + 1, len(prompts), "prompts"))


def _pair(model: "Model", prompt: Prompt, options: BenchOptions, *, plain_first: bool) -> Pair:
    answers: dict[bool, Generation] = {}
    for speculate in (False, True) if plain_first else (True, False):
        forget(model)
        answers[speculate] = ask(
            model,
            prompt,
            {
                "max_new_tokens": options.max_new_tokens,
                "temperature": options.temperature,
                "seed": options.seed,
                "stop_at_eos": options.stop_at_eos,
                "speculate": speculate,
            },
        )
    return Pair(prompt, answers[False], answers[True])
