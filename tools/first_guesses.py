"""How often is a drafter's first guess right, the text given? By category.

Usage: ``python -m tools.first_guesses BUNDLE... --answers FILE.jsonl``

``edgespec align DRAFTER --target TARGET --prompts FILE.jsonl --answers-only -o DIR`` writes the answers, of
prompts that nothing was trained on. Guesses are counted in the drafter's own tokens of the answers, in its
bundle as it is: formats, trimmed LM head and all. No target runs.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from edgespec.align.answers import Answer, read_answers
from edgespec.align.run import text_of
from edgespec.drafting.model import context_tokens
from edgespec_export.align.settings import Guesses, Text
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.foreign import open_bundle
from edgespec_runtimes.cpu import CpuOptions, open_cpu
from edgespec_runtimes.session import Session
from tools.arguments import arguments

_ROWS = 32


def count(session: Session, bundle: Bundle, text: Text) -> int:
    """Right first guesses among the tokens of an answer."""
    ids, right = text.tokens, 0
    if bundle.head_tokens is not None:
        session.model.offer(context_tokens(ids[: text.start], bundle.tokenizer, bundle.head_tokens))
    session.prefill(ids[: text.start - 1])
    for at in range(text.start - 1, len(ids) - 1, _ROWS):
        rows = ids[at : min(at + _ROWS, len(ids) - 1)]
        predictions, head = session.predict(rows), session.model.head_tokens
        best = [predictions.best(row) for row in range(len(rows))]
        tokens = best if head is None else [int(head[row]) for row in best]
        right += sum(a == b for a, b in zip(tokens, ids[at + 1 :], strict=False))
    return right


def measured(bundle: Bundle, written: Sequence[Answer]) -> Guesses:
    """Right ones, and of how many, by category."""
    guesses: Guesses = {}
    with closing(open_cpu(bundle, CpuOptions(exact_rows=False))) as session:
        for text in filter(None, (text_of(answer, bundle) for answer in written)):
            right, of = guesses.get(text.category, (0, 0))
            guesses[text.category] = right + count(session, bundle, text), of + len(text.tokens) - text.start
    return guesses | {
        "all": (sum(right for right, _ in guesses.values()), sum(of for _, of in guesses.values()))
    }


def main() -> None:
    """A line a category: tokens of the first bundle, and the share of each bundle's guesses."""
    args = arguments(__doc__, "bundle...", answers=Path)
    written = [answer for answer in read_answers(args.answers) if answer.text]
    columns = [measured(open_bundle(Path(path)), written) for path in args.bundle]
    for name, (_, of) in columns[0].items():
        shares = (right / whole for right, whole in (column[name] for column in columns))
        print(f"{name:20s} {of:7d}{''.join(f'{share:8.3f}' for share in shares)}")


if __name__ == "__main__":
    main()
