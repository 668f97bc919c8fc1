"""Several drafters of one target, measured in turn: which one is fastest here?

Usage: ``python -m tools.drafters TARGET DRAFTER [DRAFTER ...] --prompts FILE.jsonl --limit 26
--max-new-tokens 64``. The target is loaded once. Every prompt is answered plainly and then with each drafter,
whose place in the order moves on from prompt to prompt. The first answer reads the prompt into the target's
KV cache and the others find it there: decoding is what is compared. Every drafter learns by itself.
"""

import argparse
import json
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edgespec.bench_json import mbsu
from edgespec.engine import LoadOptions, Model
from edgespec.prompts import Prompt, load_prompts, select
from edgespec.results import Generation, GenerationStats
from edgespec.sessions import DRAFTER_READING_ROWS, Loaded, Running, open_one
from edgespec.trial import ask
from edgespec_models.bundle import Bundle
from edgespec_models.foreign import open_bundle
from edgespec_runtimes.cost import DEFAULT_ROWS
from edgespec_runtimes.cpu import CpuOptions

_COLUMNS = (
    *(
        "speedup",
        "tokens a pass",
        "accepted of drafted",
        "drafted",
        "accepted",
        "MBSU by bytes",
        "by weights",
    ),
    *("bytes a step", "ms a step", "answers the same"),
)
_ROWS = (1, 2, DRAFTER_READING_ROWS)


def beside(target: Running, path: Path) -> Model:
    """The target with another drafter; it learns by itself."""
    bundle = open_bundle(path)
    drafter = open_one(bundle, CpuOptions(exact_rows=False), _ROWS)
    same = bundle.tokenizer.matches(target.bundle.tokenizer)
    return Model(Loaded(target, drafter, same), options=LoadOptions())


def answers(
    models: Mapping[str, Model], prompt: Prompt, names: deque[str], tokens: int
) -> dict[str, Generation]:
    """One prompt, plainly and with every drafter."""
    plain = ask(models[names[0]], prompt, {"max_new_tokens": tokens, "speculate": False})
    found = {"plain": plain} | {name: ask(models[name], prompt, {"max_new_tokens": tokens}) for name in names}
    names.rotate(-1)
    return found


def figures(target: Bundle, drafter: Bundle, stats: list[GenerationStats], plain_s: float) -> dict[str, Any]:
    """What a drafter came to over all prompts."""
    rounds, tokens = sum(s.rounds for s in stats), sum(s.new_tokens for s in stats)
    by_model = [s.by_source["model"] for s in stats if "model" in s.by_source]
    drafted, accepted = sum(s.drafted for s in by_model), sum(s.accepted for s in by_model)
    tau, gamma = tokens / rounds, drafted / rounds
    small, large = drafter.manifest, target.manifest
    return {
        "speedup": plain_s / sum(s.decode_s for s in stats),
        "block_efficiency": tau,
        "acceptance_rate": accepted / max(drafted, 1),
        "drafted": drafted,
        "accepted": accepted,
        "mbsu_bytes": mbsu(tau, gamma, small.bytes_per_pass / large.bytes_per_pass),
        "mbsu_parameters": mbsu(tau, gamma, small.parameters_per_pass / large.parameters_per_pass),
        "bytes_per_step": small.bytes_per_pass,
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path, nargs="+")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = select(load_prompts(args.prompts), args.limit)
    target = open_one(open_bundle(args.target), CpuOptions(), DEFAULT_ROWS)
    with ExitStack() as stack:
        models = {path.name: stack.enter_context(beside(target, path)) for path in args.drafter}
        names, rows = deque(models), list[dict[str, Generation]]()
        for number, prompt in enumerate(prompts, start=1):
            rows.append(answers(models, prompt, names, args.max_new_tokens))
            print(f"\r{number} of {len(prompts)}", end="", flush=True)
    plain_s = sum(row["plain"].stats.decode_s for row in rows)
    print("\rdrafter", *_COLUMNS, sep=" | ")
    table = {}
    for name, model in models.items():
        assert model.drafter is not None and model.drafter_step_s is not None
        found = figures(target.bundle, model.drafter, [row[name].stats for row in rows], plain_s)
        found["step_ms"] = model.drafter_step_s * 1e3
        found["same"] = sum(row[name].tokens == row["plain"].tokens for row in rows)
        table[name] = found
        print(name, *(f"{value:.4g}" for value in found.values()), sep=" | ")
    if args.json is not None:
        curve = {n: t * 1e3 for n, t in target.curve.seconds_by_rows.items()}
        args.json.write_text(json.dumps({"target_ms": curve, "drafters": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
