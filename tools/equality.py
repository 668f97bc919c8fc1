"""Is every answer plain decoding's, whatever drafts? Many prompts, three kinds of drafters, many drafts.

    python -m tools.equality TARGET --other DRAFTER --same DRAFTER --prompts FILE --out FILE.jsonl
    python -m tools.equality TARGET --other DRAFTER --same DRAFTER --samples 100

``--other`` has another vocabulary than the target, ``--same`` has the same; the third drafter is n-grams with
a history. All are bundles. Drafting is priced as if rows and drafters cost nothing, so that as much is
drafted, and as much refused, as can be. With ``--temperature`` answers are sampled, with equal seeds. A run
that was stopped goes on where it was. With ``--samples`` the distribution of sampled tokens is tested
instead, by chi-square on five settings. Exit code 1 if anything differs.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from edgespec.engine import LoadOptions, Model
from edgespec.loading.sessions import Loaded, Running
from edgespec.measuring.audit import ALPHA, audit_sampling
from edgespec.measuring.prompts import Prompt, ask, load_prompts
from edgespec.requests.request import RequestOptions
from edgespec.requests.runner import Runner
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.foreign import open_bundle
from edgespec_runtimes.cost import CostCurve
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from edgespec_runtimes.devices.placement import place
from edgespec_runtimes.predictions import Predictions
from tools.arguments import arguments

FLAT, NOTHING = CostCurve({1: 1.0, 64: 1.0}), CostCurve({1: 1e-6, 64: 1e-6})
SETTINGS: tuple[RequestOptions, ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3},
)


class Target(CpuSession):
    """A target each of whose passes takes a second on its own clock, however many rows it has."""

    now = 0.0

    def _run(self, tokens: Sequence[int], rows: int) -> Predictions:
        self.now += 1.0
        return super()._run(tokens, rows)


def drafting(target: Bundle, drafter: Bundle | None, options: CpuOptions) -> Model:
    """The target with a drafter, priced as if only passes of the target took time; None is n-grams."""
    session = Target(target, options)
    second = None
    if drafter is not None:
        second = Running(drafter, CpuSession(drafter, options), NOTHING, place(drafter))
    same = drafter is not None and drafter.tokenizer.matches(target.tokenizer)
    loaded = Loaded(Running(target, session, FLAT, place(target)), second, same)
    return Model(Runner(loaded, LoadOptions(max_draft=8, cache_bytes=0), clock=lambda: session.now))


def compare(
    models: Mapping[str, Model], prompts: Sequence[Prompt], options: RequestOptions
) -> Iterator[dict[str, Any]]:
    """For each prompt: tokens of the plain answer, and what each drafter's was."""
    for seed, prompt in enumerate(prompts):
        options = {**options, "seed": seed}
        plain = ask(next(iter(models.values())), prompt, {**options, "speculate": False})
        line: dict[str, Any] = {"id": prompt.id, "tokens": len(plain.tokens)}
        for name, model in models.items():
            answer = ask(model, prompt, options)
            equal = answer.tokens == plain.tokens
            line[name] = {"equal": equal, "drafted": answer.stats.drafted, "accepted": answer.stats.accepted}
        yield line


def answers(models: Mapping[str, Model], options: Any) -> bool:
    """Compare answers, on from where an earlier run was; print the sums; whether any differs."""
    options.out.touch()
    done = {json.loads(line)["id"] for line in options.out.read_text(encoding="utf-8").splitlines()}
    prompts = [prompt for prompt in load_prompts(options.prompts) if prompt.id not in done]
    chosen: RequestOptions = {"max_new_tokens": options.tokens, "temperature": options.temperature}
    with options.out.open("a", encoding="utf-8") as out:
        for number, line in zip(count(len(done) + 1), compare(models, prompts, chosen), strict=False):
            print(json.dumps(line), file=out, flush=True)
            print(f"\r{number} of {len(done) + len(prompts)}", end="", file=sys.stderr)
    lines = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
    for name in models:
        seen = [line[name] for line in lines]
        drafted, accepted = (sum(one[key] for one in seen) for key in ("drafted", "accepted"))
        print(
            f"{name}: {sum(one['equal'] for one in seen):,} of {len(seen):,} answers equal plain decoding's"
        )
        print(f"  {accepted:,} of {drafted:,} drafted tokens accepted")
    print(f"{sum(line['tokens'] for line in lines):,} tokens of plain decoding")
    return not all(line[name]["equal"] for line in lines for name in models)


def distributions(models: Mapping[str, Model], samples: int) -> bool:
    """Test every drafter on every setting; whether any fails."""
    failed = False
    for name, model in models.items():
        for setting in SETTINGS:
            audit = audit_sampling(model, samples=samples, sampling=setting)
            test, same = audit.chi_square, f"{audit.equal_seeds_identical} of {audit.equal_seeds}"
            print(f"{name}, {setting}: chi-square {test.statistic:.1f}, {test.degrees} degrees, ", end="")
            print(f"p = {test.p_value}; equal seeds {same}; {audit.accepted} of {audit.drafted} accepted")
            sys.stdout.flush()
            failed |= bool(audit.problems())
    print(f"a p-value below {ALPHA} fails")
    return failed


def main() -> None:
    """Load, compare."""
    options = arguments(
        __doc__, "target", other=Path, same=Path, prompts=(Path,), out=(Path,), tokens=32,
        temperature=0.0, samples=0, threads=0,
    )  # fmt: skip
    target = open_bundle(Path(options.target))
    cpu = CpuOptions(threads=options.threads, huge_pages=False)
    drafters = {"another vocabulary": options.other, "the same vocabulary": options.same}
    with ExitStack() as opened, tempfile.TemporaryDirectory() as folder:
        models = {
            name: opened.enter_context(drafting(target, open_bundle(path), cpu))
            for name, path in drafters.items()
        }
        models["n-grams and history"] = free = opened.enter_context(drafting(target, None, cpu))
        free.use_history(Path(folder, "history.db"))
        wrong = distributions(models, options.samples) if options.samples else answers(models, options)
        for model in models.values():
            model.close()
    sys.exit(wrong)


if __name__ == "__main__":
    main()
