"""How a drafter's vocabulary meets what a target writes: which tokens it can say, and in how many of its own.

Usage: ``python -m tools.vocabulary_coverage TARGET --drafter DRAFTER --prompts P.jsonl --answers A.jsonl``,
with answers as ``tools.record_answers`` writes them. A token that the prompt holds has a row already
(``context_tokens``); one that an earlier answer held could have one if rows were swapped in by use.

The first line is of the target's tokens: those that one token of the drafter spells, those that a run of its
tokens spells, which the bridge merges, and those whose ends fall within a token of the drafter.
"""

import argparse
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from edgespec.encoding import encode_chat
from edgespec.prompts import load_prompts
from edgespec_models.bundle import Bundle
from edgespec_models.tokenizer import Tokenizer


def ends(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[int]:
    """Where tokens end in their text's bytes, behind a 0 for its beginning."""
    return [0, *accumulate(len(tokenizer.bytes_of([token])) for token in tokens)]


def spelling(target: Tokenizer, drafter: Tokenizer, tokens: Sequence[int]) -> Counter[str]:
    """How many of the target's ``tokens`` the drafter's tokens of the same text spell, and how."""
    theirs = ends(drafter, drafter.encode(target.decode(tokens)))
    counts: Counter[str] = Counter()
    for start, end in pairwise(ends(target, tokens)):
        first, last = bisect_left(theirs, start), bisect_left(theirs, end)
        if end == start or last == len(theirs):
            continue  # a special token
        if (theirs[first], theirs[last]) != (start, end):
            counts["across"] += 1
        else:
            counts["one" if last == first + 1 else "merged"] += 1
    return counts


def main() -> None:
    """Count and print two lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    args = parser.parse_args()
    target, drafter = Bundle(args.target), Bundle(args.drafter)
    answers = {r["id"]: r["tokens"] for r in map(json.loads, args.answers.read_text("utf-8").splitlines())}
    spelled: Counter[str] = sum(
        (spelling(target.tokenizer, drafter.tokenizer, tokens) for tokens in answers.values()), Counter()
    )
    share = {how: spelled[how] / spelled.total() for how in ("one", "merged", "across")}
    print(
        f"of {spelled.total():,} target tokens {share['one']:.1%} are one drafter token, "
        f"{share['merged']:.1%} a run of them, {share['across']:.1%} end within one"
    )
    if drafter.head_tokens is None:
        return  # a row for every token
    head = set(drafter.head_tokens.tolist())
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
