"""Audits of losslessness: equality of answers, and a test of the distribution of tokens.

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
Results are JSON values; docs/json.md lists the keys.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from edgespec.measuring.chi_square import ChiSquare, pool_rare, two_samples
from edgespec.measuring.prompts import Prompt, ask
from edgespec_models.errors import RequestError
from edgespec_models.progress import Progress, ProgressCallback, ignore_progress

if TYPE_CHECKING:
    from edgespec.answering.results import Generation
    from edgespec.asking.request import RequestOptions
    from edgespec.engine import Model


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


def audit_answers(
    model: "Model",
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    sampling: "RequestOptions | None" = None,
    progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Answer every prompt plain and speculatively, and compare the tokens, up to first differences.

    ``sampling`` says how tokens are chosen, greedily by default; every prompt has a seed of its own.
    """
    differences: list[dict[str, Any]] = []
    tokens = drafted = accepted = 0
    progress(Progress("Answers", 0, len(prompts), "prompts"))
    for done, prompt in enumerate(prompts, start=1):
        options: RequestOptions = {**(sampling or {}), "max_new_tokens": max_new_tokens, "seed": done}
        plain = ask(model, prompt, {**options, "speculate": False}).run()
        speculative = ask(model, prompt, options).run()
        difference = first_difference(prompt.id, plain.tokens, speculative.tokens)
        tokens += len(plain.tokens) if difference is None else difference["position"] + 1
        differences += [difference] if difference is not None else []
        drafted += speculative.stats.drafted
        accepted += speculative.stats.accepted
        progress(Progress("Answers", done, len(prompts), "prompts"))
    return {
        "prompts": len(prompts),
        "identical": len(prompts) - len(differences),
        "tokens": tokens,
        "drafted": drafted,
        "accepted": accepted,
        "first_differences": differences,
        "flip_rate": len(differences) / tokens if tokens else 0.0,
    }


def audit_sampling(
    model: "Model",
    *,
    samples: int = 100,
    texts: Sequence[str] = _OPEN_TEXTS,
    sampling: "RequestOptions | None" = None,
    progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Draw ``samples`` short answers to every text, plain and speculatively, and compare their distributions.

    ``sampling`` says how tokens are chosen; without a temperature above 0 it is 1. The ``p_value`` is None
    with nothing to compare.

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
    return {
        "samples": samples * len(texts),
        "p_value": chi_square.p_value,
        "chi_square": chi_square.statistic,
        "degrees_of_freedom": chi_square.degrees,
        "equal_seeds": {"pairs": same * len(texts), "identical": identical},
        "drafted": sum(answer.stats.drafted for answer in answers),
        "accepted": sum(answer.stats.accepted for answer in answers),
    }


def verdict(model: "Model", answers: Mapping[str, Any], sampling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Both audits of a model, and whether they pass; ``sampling`` is None where it was left out.

    Where the target's passes are not ``row_exact``, a near-tie may flip, and a greedy answer with it.
    """
    problems = list(_problems_of_answers(answers))
    if sampling is not None:
        problems += _problems_of_sampling(sampling)
    return {
        "passed": not problems,
        "problems": problems,
        "target": model.name,
        "drafter": model.drafter_name,
        "row_exact": model.row_exact,
        "answers": answers,
        "sampling": sampling,
    }


def _problems_of_answers(answers: Mapping[str, Any]) -> Iterator[str]:
    differ = answers["prompts"] - answers["identical"]
    if differ:
        yield f"{differ} of {answers['prompts']} answers differ"
    if not answers["prompts"]:
        yield "no answer was compared"
    elif not answers["drafted"]:
        yield "nothing was drafted in the answers, so nothing was tested"


def _problems_of_sampling(sampling: Mapping[str, Any]) -> Iterator[str]:
    p_value, pairs = sampling["p_value"], sampling["equal_seeds"]["pairs"]
    if p_value is None:
        yield "too few samples fell into different bins for a chi-square test; draw more"
    elif p_value < ALPHA:
        yield f"sampled tokens follow another distribution (p = {p_value:.2g}, below {ALPHA})"
    differ = pairs - sampling["equal_seeds"]["identical"]
    if differ:
        yield f"{differ} of {pairs} sampled answers with equal seeds differ"
    if not sampling["drafted"]:
        yield "nothing was drafted in sampling, so nothing was tested"


def first_difference(prompt: str, plain: Sequence[int], speculative: Sequence[int]) -> dict[str, Any] | None:
    """The first difference between two answers; a token is None if its answer had ended."""
    for at, (a, b) in enumerate(zip_longest(plain, speculative)):
        if a != b:
            return {"prompt": prompt, "position": at, "plain": a, "speculative": b}
    return None
