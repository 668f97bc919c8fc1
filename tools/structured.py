"""Does speculation gain where answers must fit a JSON schema, and how much of them does the schema force?

Usage: ``python -m tools.structured TARGET [DRAFTER] [--spaces]``. From ten short texts, facts are taken into
one schema. Forced are tokens that were the only ones allowed; overhead is the time to find that out.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from time import perf_counter, process_time
from typing import Any

import numpy as np

import edgespec
from edgespec.decoding.grammar import Constraint, Grammars, JsonSchema
from edgespec.decoding.sampling import Row
from edgespec.requests.results import Generation

TEXTS = (
    "Maria Santos, 34, of 12 Rua das Flores in Porto, ordered two teapots and paid 58.40 euros by card.",
    "On 3 May, Tom Becker (tom.becker@example.org, Berlin) bought a desk lamp for 39 euros. He is 51.",
    "Invoice 2231: Aiko Tanaka, Osaka. Three notebooks, 4.50 each. Cash. The customer is 28 years old.",
    "Ben, who turned 19 last week and lives in Leeds, sent back the headphones and got 120 pounds.",
    "The parcel for Dr. Elena Petrova, aged 62, Sofia, holds one microscope, 899 leva, paid in advance.",
    "Order of Lucas Moreau, Lyon: four chairs at 75 euros, one table at 310 euros. Age given: 45.",
    "Fatima Zahra Alaoui from Rabat, 23, would like the blue scarf; she pays 250 dirham on delivery.",
    "Sold to John O'Neill (Cork, 70): a fishing rod, 85 euros, and a tin of flies, 12 euros, cash.",
    "Customer number 8812, Ingrid Larsen of Bergen, 38, bought a rain jacket for 1,200 kroner, by card.",
    "Paid by card, 15.99 dollars, one paperback: Samuel Adeyemi, 31, Chicago, samuel@example.com.",
)
FIELDS: dict[str, Any] = {
    "customer_name": {"type": "string", "maxLength": 60},
    "customer_age": {"type": "integer", "minimum": 0, "maximum": 120},
    "city": {"type": "string", "maxLength": 40},
    "articles": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 4},
    "total_price": {"type": "number"},
    "payment_method": {"enum": ["cash", "card", "in advance", "on delivery", "unknown"]},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}


def ask(model: edgespec.Model, text: str, wanted: JsonSchema, **options: Any) -> Generation:
    """The facts of one text; the answer must be JSON of the schema's fields."""
    prompt = f"Take the facts from this text into JSON with the fields {', '.join(FIELDS)}.\n\n{text}"
    answer = model.chat([{"role": "user", "content": prompt}], response_format=wanted, **options)
    assert answer.finish_reason == "stop" and json.loads(answer.text).keys() == FIELDS.keys(), answer.text
    return answer


def forced(constraint: Constraint, row: Row, answer: Generation) -> Iterator[tuple[bool, float]]:
    """Of every token, whether it was the only one allowed, and the seconds that finding out took."""
    constraint.begin(())
    for at in range(len(answer.tokens)):
        started = perf_counter()
        constraint.begin(answer.tokens[:at])
        constraint.apply(row, ())
        yield constraint.allowed(()).only is not None, perf_counter() - started


def report(name: str, answers: Sequence[Generation]) -> None:
    """Tokens a pass, and what became of drafts."""
    new, rounds = sum(a.stats.new_tokens for a in answers), sum(a.stats.rounds for a in answers)
    print(f"  {name}: {new} tokens in {rounds} passes, {new / rounds:.2f} a pass")
    for source in sorted({source for answer in answers for source in answer.stats.by_source}):
        of = [a.stats.by_source[source] for a in answers if source in a.stats.by_source]
        print(f"  {source}: {sum(s.accepted for s in of)} of {sum(s.drafted for s in of)} accepted")


def main() -> None:
    """Answer, check and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter", nargs="?", default="auto")
    parser.add_argument("--spaces", action="store_true", help="let the model space its JSON as it likes")
    args = parser.parse_args()
    wanted = JsonSchema(SCHEMA | ({"x-guidance": {"whitespace_flexible": True}} if args.spaces else {}))
    cold = edgespec.LoadOptions(prompt_cache_bytes=0)
    with edgespec.load(args.target, args.drafter, options=cold) as model:
        grammars = Grammars(model.target.tokenizer, model.target.manifest.special_tokens.eos)
        row = np.zeros(model.target.tokenizer.vocab_size, np.float32)
        for what in ("first", "next"):
            started = process_time()
            grammars.constraint(wanted)
            print(f"the {what} format takes {(process_time() - started) * 1e3:.0f} ms of the processor")
        for kind, options in ("greedy", {}), ("temperature 0.8", {"temperature": 0.8, "seed": 1}):
            plain = [ask(model, text, wanted, speculate=False, **options) for text in TEXTS]
            fast = [ask(model, text, wanted, **options) for text in TEXTS]
            same = sum(a.tokens == b.tokens for a, b in zip(plain, fast, strict=True))
            print(f"{kind}: {same} of {len(TEXTS)} answers are the same tokens")
            report("plain", plain)
            report("speculative", fast)
            counts = [count for answer in plain for count in forced(grammars.constraint(wanted), row, answer)]
            print(f"  forced: {sum(only for only, _ in counts) / len(counts):.0%} of the tokens")
            print(f"  overhead: {sum(s for _, s in counts) / len(counts) * 1e3:.3f} ms a token")


if __name__ == "__main__":
    main()
