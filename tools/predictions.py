"""How much a predicted answer brings: `python -m tools.predictions TARGET [--tokens 300] [--rounds 3]`.

The target answers a question plainly. Then it answers again with that text as the prediction, with one line
in ten of it changed, with each name changed, and with the answer to another question. Each is measured in
turn with plain decoding and with the default drafter; speeds count from the first token. Prints medians of
times plain decoding.
"""

import re
from statistics import median
from typing import cast

import edgespec
from edgespec import Generation, LoadOptions, Model, RequestOptions
from tools.arguments import arguments

QUESTION = "Write a Python class for a bank account with deposits, withdrawals, a history, and an example."
OTHER = "Explain in a few paragraphs how bread is made, and what can go wrong."


def ask(model: Model, question: str, tokens: int, **options: object) -> Generation:
    """One greedy answer, without what earlier ones left in memory."""
    model.forget(on_disk=False)
    request = cast(RequestOptions, {"max_new_tokens": tokens, **options})
    return model.chat([{"role": "user", "content": question}], **request)


def with_lines_changed(text: str) -> str:
    """The text with another tenth line each time."""
    lines = text.split("\n")
    return "\n".join("    pass  # another line" if at % 10 == 5 else line for at, line in enumerate(lines))


def with_names_changed(text: str) -> str:
    """The text with a letter more at each word of four letters or more."""
    return re.sub(r"\b[A-Za-z]{4,}\b", lambda word: f"{word[0]}x", text)


def main() -> None:
    """Measure and print."""
    args = arguments(__doc__, "target", tokens=300, rounds=3)
    with edgespec.load(args.target, options=LoadOptions(prompt_cache_bytes=0)) as model:
        answer = ask(model, QUESTION, args.tokens, speculate=False)
        other = ask(model, OTHER, args.tokens, speculate=False).text
        ways: dict[str, dict[str, object]] = {
            "plain": {"speculate": False},
            "default": {},
            "the same text": {"prediction": answer.text},
            "one line in ten changed": {"prediction": with_lines_changed(answer.text)},
            "each name changed": {"prediction": with_names_changed(answer.text)},
            "another answer": {"prediction": other},
        }
        seconds = dict[str, list[float]]()
        for _ in range(args.rounds):
            for name, options in ways.items():
                again = ask(model, QUESTION, args.tokens, **options)
                assert again.tokens == answer.tokens, f"{name} changed the answer"
                seconds.setdefault(name, []).append(again.stats.tpot_s)
    print(f"{len(answer.tokens)} tokens, all answers the same; times plain decoding:")
    for name, times in seconds.items():
        print(f"{name:24} {median(seconds['plain']) / median(times):.2f}  ({1 / median(times):.1f} tokens/s)")


if __name__ == "__main__":
    main()
