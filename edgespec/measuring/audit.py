"""Is the output the same with speculation? Equality of answers, and a test of the distribution of tokens.

Answers: every prompt is answered plain and speculatively, greedily or sampled with equal seeds; the token
lists must be equal. Behind a first difference two answers are different texts, so it counts once: the flip
rate is first differences per token compared.

Sampling, from short prompts whose next tokens are open, by two tests:

* equal seeds: randomness is a function of seed and position (:mod:`sampling`), and proposals
  are a function of the text, so answers with equal seeds must be equal token by token;
* different seeds: tokens 2 to 4 of many answers, counted with and without speculation, must come from
  one distribution: a two-sample chi-square test. (The first token is never drafted.) One answer is one
  observation, so observations are independent. Seeds are fixed: a rerun gives the same p-value.

An audit in which nothing was drafted or nothing could be compared has shown nothing, and does not pass.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from edgespec.measuring.chi_square import ChiSquare, pool_rare, two_samples
from edgespec.measuring.prompts import Prompt, ask
from edgespec_models.errors import RequestError
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress

if TYPE_CHECKING:
    from edgespec.engine import Model
    from edgespec.requests.request import RequestOptions
    from edgespec.requests.results import Generation


ALPHA: Final = 0.001
"""A p-value below this fails: a lossless model does so once in a thousand audits."""

# A list without order, so that the next item is open; items repeat, so that n-grams have proposals.
_OPEN_TEXTS: Final = (
    "Coin tosses: heads, tails, tails, heads, heads, tails, heads, tails, tails, tails, heads,",
    "Dice: 3 1 6 2 2 5 4 1 3 6 5 4 2 1 1 6 3 5",
    "red blue green blue red green green red blue red blue green red red green blue",
)
_SAMPLED_TOKENS: Final = 4
_BIN_MINIMUM: Final = 10
_SAME_SEED_SHARE: Final = 4


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where a speculative answer left the plain one; a token is None where an answer had ended."""

    prompt: str
    position: int
    plain: int | None
    speculative: int | None


@dataclass(frozen=True, slots=True)
class AnswersAudit:
    """Answers to prompts compared.

    ``tokens`` are those compared, up to and including first differences. ``drafted`` and ``accepted`` are of
    the speculative answers.
    """

    prompts: int
    identical: int
    tokens: int
    drafted: int
    accepted: int
    first_differences: tuple[FirstDifference, ...]

    @property
    def flip_rate(self) -> float:
        """First differences per token compared."""
        return len(self.first_differences) / self.tokens if self.tokens else 0.0

    def problems(self) -> list[str]:
        """Why the audit does not pass; empty if it does."""
        found = []
        if self.identical < self.prompts:
            found.append(f"{self.prompts - self.identical} of {self.prompts} answers differ")
        if not self.prompts:
            found.append("no answer was compared")
        elif not self.drafted:
            found.append("nothing was drafted in the answers, so nothing was tested")
        return found

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "flip_rate": self.flip_rate}


@dataclass(frozen=True, slots=True)
class SamplingAudit:
    """Sampled answers compared.

    ``samples`` are drawn each way with different seeds; ``equal_seeds`` are pairs with equal ones, of which
    some are identical token by token.
    """

    samples: int
    chi_square: ChiSquare
    equal_seeds: int
    equal_seeds_identical: int
    drafted: int
    accepted: int

    def problems(self) -> list[str]:
        """Why the audit does not pass; empty if it does."""
        found, p_value = [], self.chi_square.p_value
        if p_value is None:
            found.append("too few samples fell into different bins for a chi-square test; draw more")
        elif p_value < ALPHA:
            found.append(f"sampled tokens follow another distribution (p = {p_value:.2g}, below {ALPHA})")
        if self.equal_seeds_identical < self.equal_seeds:
            differ = self.equal_seeds - self.equal_seeds_identical
            found.append(f"{differ} of {self.equal_seeds} sampled answers with equal seeds differ")
        if not self.drafted:
            found.append("nothing was drafted in sampling, so nothing was tested")
        return found

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; ``p_value`` is null with nothing to compare."""
        return {
            "samples": self.samples,
            "p_value": self.chi_square.p_value,
            "chi_square": self.chi_square.statistic,
            "degrees_of_freedom": self.chi_square.degrees,
            "equal_seeds": {"pairs": self.equal_seeds, "identical": self.equal_seeds_identical},
            "drafted": self.drafted,
            "accepted": self.accepted,
        }


@dataclass(frozen=True, slots=True)
class Audit:
    """Both audits of a model; ``sampling`` is None where it was left out.

    Where the target's passes are not ``row_exact``, a near-tie may flip, and a greedy answer with it.
    """

    target: str
    drafter: str | None
    row_exact: bool
    answers: AnswersAudit
    sampling: SamplingAudit | None

    def problems(self) -> list[str]:
        """Why the audit does not pass; empty if it does."""
        return self.answers.problems() + (self.sampling.problems() if self.sampling else [])

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values: ``passed``, ``problems``, ``row_exact``, ``answers.*``, ``sampling.*``."""
        problems = self.problems()
        return {
            "passed": not problems,
            "problems": problems,
            "target": self.target,
            "drafter": self.drafter,
            "row_exact": self.row_exact,
            "answers": self.answers.to_json(),
            "sampling": self.sampling.to_json() if self.sampling else None,
        }


def audit_answers(
    model: "Model",
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    sampling: "RequestOptions | None" = None,
    progress: ProgressCallback = ignore_progress,
) -> AnswersAudit:
    """Answer every prompt plain and speculatively, and compare the tokens.

    ``sampling`` says how tokens are chosen, greedily by default; every prompt has a seed of its own.
    """
    differences: list[FirstDifference] = []
    tokens = drafted = accepted = 0
    progress(Progress("Answers", 0, len(prompts), "prompts"))
    for done, prompt in enumerate(prompts, start=1):
        options: RequestOptions = {**(sampling or {}), "max_new_tokens": max_new_tokens, "seed": done}
        plain = ask(model, prompt, {**options, "speculate": False})
        speculative = ask(model, prompt, options)
        difference = _first_difference(prompt.id, plain.tokens, speculative.tokens)
        tokens += len(plain.tokens) if difference is None else difference.position + 1
        differences += [difference] if difference is not None else []
        drafted += speculative.stats.drafted
        accepted += speculative.stats.accepted
        progress(Progress("Answers", done, len(prompts), "prompts"))
    identical = len(prompts) - len(differences)
    return AnswersAudit(len(prompts), identical, tokens, drafted, accepted, tuple(differences))


def audit_sampling(
    model: "Model",
    *,
    samples: int = 100,
    texts: Sequence[str] = _OPEN_TEXTS,
    sampling: "RequestOptions | None" = None,
    progress: ProgressCallback = ignore_progress,
) -> SamplingAudit:
    """Draw ``samples`` short answers to every text, plain and speculatively, and compare their distributions.

    ``sampling`` says how tokens are chosen; without a temperature above 0 it is 1.

    Raises:
        RequestError: ``samples`` is below 1, or there are no texts.
    """
    if samples < 1 or not texts:
        raise RequestError(f"samples is {samples} for {len(texts)} texts; allowed: 1 or more of both")
    same = max(1, samples // _SAME_SEED_SHARE)
    options: RequestOptions = {**(sampling or {}), "max_new_tokens": _SAMPLED_TOKENS, "stop_at_eos": False}
    options["temperature"] = options.get("temperature") or 1.0
    total = len(texts) * (2 * samples + same)
    answers: list[Generation] = []

    def draw(text: str, seeds: range, *, speculate: bool) -> list[tuple[int, ...]]:
        for seed in seeds:
            chosen: RequestOptions = {**options, "seed": seed, "speculate": speculate}
            answers.append(model.generate(text, **chosen))
            progress(Progress("Sampling", len(answers), total, "samples"))
        return [answer.tokens for answer in answers[-len(seeds) :]]

    chi_square, identical = ChiSquare(), 0
    for text in texts:
        plain = draw(text, range(samples), speculate=False)
        again = draw(text, range(same), speculate=True)
        speculative = draw(text, range(samples, 2 * samples), speculate=True)
        identical += sum(a == b for a, b in zip(plain, again, strict=False))
        behind_first = [[tokens[1:] for tokens in side] for side in (plain, speculative)]
        chi_square += two_samples(*pool_rare(*behind_first, minimum=_BIN_MINIMUM))
    return SamplingAudit(
        samples=samples * len(texts),
        chi_square=chi_square,
        equal_seeds=same * len(texts),
        equal_seeds_identical=identical,
        drafted=sum(answer.stats.drafted for answer in answers),
        accepted=sum(answer.stats.accepted for answer in answers),
    )


def _first_difference(
    prompt: str, plain: Sequence[int], speculative: Sequence[int]
) -> FirstDifference | None:
    pairs = enumerate(zip_longest(plain, speculative))
    return next((FirstDifference(prompt, at, a, b) for at, (a, b) in pairs if a != b), None)
