"""What a history gains, what its bound costs: `python tools/history_replay.py TOKENIZER.json TEXTS.jsonl`.

Replays texts (the key `text`, or the first of `turns`) as if a target wrote them, one request after the
other, and counts target passes: with n-grams of the text alone, with a history of everything, and with
histories of half and a quarter of the tokens, by worth (frequency and recency) and by recency
alone. No model runs. Prints a table, and the processor time of a lookup.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Final

from edgespec.drafting.draft import Source, Step
from edgespec.drafting.ngram import NgramDrafter
from edgespec.history.drafter import BestOf, HistoryDrafter
from edgespec.history.entries import Entry
from edgespec.history.memory import Memory, Snapshot
from edgespec_models.tokenizer import Tokenizer

_LIMIT: Final = 8
_EVERYTHING: Final = 1 << 30


def passes(tokens: Sequence[int], source: Source) -> tuple[int, int, int]:
    """Target passes over ``tokens`` behind the first, drafted and accepted tokens."""
    rounds = drafted = accepted = 0
    source.observe(Step(tuple(tokens[:1])))
    done = 1
    while done < len(tokens):
        draft = source.propose(tokens[:done], min(_LIMIT, len(tokens) - done - 1))
        kept = 0
        for proposal, token in zip(draft.tokens, tokens[done:], strict=False):
            if proposal != token:
                break
            kept += 1
        rounds, drafted, accepted = rounds + 1, drafted + len(draft.tokens), accepted + kept
        source.observe(Step(tuple(tokens[done : done + kept + 1]), draft, kept))
        done += kept + 1
    source.close()
    return rounds, drafted, accepted


def replay(texts: Sequence[Sequence[int]], memory: Memory | None, *, alone: bool = False) -> str:
    """Replay all texts; a line of what they took."""
    rounds = drafted = accepted = 0
    for tokens in texts:
        source: Source = NgramDrafter()
        if memory is not None:
            history = HistoryDrafter(memory)
            source = history if alone else BestOf(NgramDrafter(), history)
        counts = passes(tokens, source)
        rounds, drafted, accepted = rounds + counts[0], drafted + counts[1], accepted + counts[2]
    total = sum(len(tokens) - 1 for tokens in texts)
    kept = 0 if memory is None else len(memory)
    return f"{total / rounds:7.3f} {accepted / max(drafted, 1):8.1%} {drafted / rounds:8.2f} {kept:9,}"


def by_recency(entry: Entry, now: int) -> float:
    """What an LRU cache would keep."""
    return float(entry.at)


def lookup_seconds(memory: Memory, texts: Sequence[Sequence[int]]) -> float:
    """Mean processor seconds of one lookup."""
    contexts = [tokens[:end] for tokens in texts[-50:] for end in range(8, len(tokens), 5)]
    started = process_time()
    for context in contexts:
        memory.find(context)
    return (process_time() - started) / len(contexts)


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--repeat", type=int, default=1, help="replay the list so many times in a row")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="replay them in a random order")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(options.tokenizer)
    rows = [json.loads(line) for file in options.texts for line in file.read_text("utf-8").splitlines()]
    texts = [tokenizer.encode(row["text"] if "text" in row else row["turns"][0]) for row in rows]
    texts = [text for text in texts if len(text) > 1] * options.repeat
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(texts)
    print(f"{len(texts)} texts, {sum(map(len, texts)):,} tokens")
    print(f"{'':24}{'t/pass':>7} {'accepted':>8} {'drafted':>8} {'tokens':>9}")
    print(f"{'text alone':24}{replay(texts, None)}")
    full = Memory(Snapshot(), max_tokens=_EVERYTHING)
    print(f"{'history alone':24}{replay(texts, Memory(Snapshot(), max_tokens=_EVERYTHING), alone=True)}")
    print(f"{'both':24}{replay(texts, full)}")
    for share in (2, 4):
        for name, rule in (("worth", Entry.worth), ("recency", by_recency)):
            memory = Memory(Snapshot(), max_tokens=len(full) // share, worth=rule)
            print(f"{f'both, 1/{share} by {name}':24}{replay(texts, memory)}")
    print(f"a lookup: {lookup_seconds(full, texts) * 1e6:.0f} microseconds")


if __name__ == "__main__":
    main()
