"""Would rows of a trimmed LM head that follow the user help? Counts the answers' tokens it has no row for.

Usage: ``python -m tools.vocabulary_coverage TARGET --drafter DRAFTER --prompts P.jsonl --answers A.jsonl``,
with answers as ``tools.record_answers`` writes them. A token that the prompt holds has a row already
(``context_tokens``); one that an earlier answer held could have one if rows were swapped in by use.
"""

import argparse
import json
from pathlib import Path

from edgespec.encoding import encode_chat
from edgespec.prompts import load_prompts
from edgespec_models.bundle import Bundle


def main() -> None:
    """Count and print a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    args = parser.parse_args()
    target, drafter = Bundle(args.target), Bundle(args.drafter)
    if drafter.head_tokens is None:
        parser.error(f"{args.drafter} has a row for every token; give a drafter exported with --trim-vocab")
    head = set(drafter.head_tokens.tolist())
    answers = {r["id"]: r["tokens"] for r in map(json.loads, args.answers.read_text("utf-8").splitlines())}
    total = missing = seen_before = 0
    seen: set[int] = set()
    for prompt in load_prompts(args.prompts):
        if prompt.id not in answers:
            continue
        tokens = drafter.tokenizer.encode(target.tokenizer.decode(answers[prompt.id]))
        known = head | set(encode_chat(drafter, [{"role": "user", "content": prompt.turns[0]}]))
        lacking = [token for token in tokens if token not in known]
        total, missing = total + len(tokens), missing + len(lacking)
        seen_before += sum(token in seen for token in lacking)
        seen.update(lacking)
    print(
        f"{len(head):,} rows; of {total:,} tokens {missing:,} ({missing / total:.2%}) have none; "
        f"{seen_before:,} of them ({seen_before / total:.2%} of all) stood in an earlier answer"
    )


if __name__ == "__main__":
    main()
