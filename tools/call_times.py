"""The time of a token in a call: `python -m tools.call_times TARGET [--rounds 3]`.

The target is asked for a file by a tool, in turn with the grammar that holds from a call's mark on and
without it, each plainly and with n-grams. Prints medians of milliseconds a token, from the first on, and of
the answer's seconds, in which the grammar is compiled; its passes, and the tokens that the grammar drafted.
"""

from contextlib import nullcontext
from statistics import median
from unittest.mock import patch

import edgespec
from edgespec import Generation, LoadOptions, Model
from tools.arguments import arguments

PROPERTIES = {name: {"type": "string"} for name in ("path", "content")}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES]}
WRITE = {"name": "write_file", "description": "Write a file of the project", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WRITE}]
MESSAGES = [
    {"role": "system", "content": "You are an agent. Use the tools for everything, never answer in text."},
    {"role": "user", "content": "Write hello.py, which prints Hello and the number of its arguments."},
]


def ask(model: Model, *, is_held: bool, speculate: bool) -> Generation:
    """One greedy answer, without what earlier ones left in memory."""
    model.forget(on_disk=False)
    free = patch("edgespec.running.runner.begun_form", return_value=None)
    with nullcontext() if is_held else free:
        return model.chat(MESSAGES, tools=TOOLS, max_new_tokens=300, speculate=speculate)


def main() -> None:
    """Measure and print."""
    args, answers = arguments(__doc__, "target", rounds=3), dict[tuple[bool, bool], list[Generation]]()
    with edgespec.load(args.target, "ngram", options=LoadOptions(prompt_cache_bytes=0)) as model:
        for _ in range(args.rounds):
            for speculate in (False, True):
                for is_held in (False, True):
                    answer = ask(model, is_held=is_held, speculate=speculate)
                    answers.setdefault((speculate, is_held), []).append(answer)
    print(
        "| drafts | grammar | tokens | calls | ms a token | seconds | passes | forced |\n" + "|---" * 8 + "|"
    )
    for (speculate, is_held), same in answers.items():
        stats, last = [answer.stats for answer in same], same[-1]
        forced = last.stats.by_source.get("grammar")
        row = [
            "n-grams" if speculate else "none",
            "yes" if is_held else "no",
            len(last.tokens),
            len(last.tool_calls),
            f"{1e3 * median(each.tpot_s for each in stats):.1f}",
            f"{median(each.ttft_s + each.decode_s for each in stats):.2f}",
            last.stats.rounds,
            0 if forced is None else forced.accepted,
        ]
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
