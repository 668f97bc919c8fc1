"""Answers on the terminal: streamed text, then a line of what they cost."""

import sys
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import typer

from edgespec.cli.console import errors, output, progress_bars
from edgespec.cli.markdown import MarkdownStream
from edgespec_models.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.text import Text

    from edgespec.requests.results import Generation, GenerationStats, Record
    from edgespec.requests.stream import Stream
    from edgespec_models.text.tokenizer import Tokenizer


_MARKS: Final = {
    "model": "underline blue",
    "ngram": "italic underline yellow",
    "history": "bold underline magenta",
    "grammar": "reverse green",
}
"""How text of each source looks, also where there are no colours; the target's own is plain."""
_PATIENCE_S: Final = 0.5


def stream_to_terminal(stream: "Stream") -> "Generation":
    """Print the text as it comes, ending the line."""
    text_ends_line = True
    try:
        for record in _records(stream):
            if record.text:
                typer.echo(record.text, nl=False)
                sys.stdout.flush()
                text_ends_line = record.text.endswith("\n")
    finally:
        if not text_ends_line:
            typer.echo()
    return stream.result


def stream_as_markdown(stream: "Stream", marked: "Tokenizer | None" = None) -> "Generation":
    """Print the text as it comes and as it should look; tokens that were drafted are marked, if at all.

    Away from a terminal the text is printed as it is.
    """
    if not output().is_terminal:
        return stream_to_terminal(stream)
    from edgespec.requests.attribution import Attribution

    attribution = None if marked is None else Attribution(marked)
    markdown, ends_line = MarkdownStream(), True
    try:
        for record in _records(stream):
            ends_line = record.text.endswith("\n") if record.text else ends_line
            if attribution is None:
                _print_pieces(markdown.push(record.text), "")
                continue
            for token in attribution.push(record):
                if "reasoning" not in token:
                    _print_pieces(markdown.push(token["text"]), _MARKS.get(token["source"], ""))
    finally:
        _print_pieces(markdown.finish(), "")
        if not ends_line:
            output().print()
    return stream.result


def _records(stream: "Stream") -> "Iterator[Record]":
    """What each round added; thoughts are shown dimmed, and beside the output, which is the answer."""
    from rich.text import Text

    thinks = False
    try:
        for record in _behind_prompt(stream):
            if record.reasoning:
                thinks = True
                errors().print(Text(record.reasoning, "dim italic"), end="", soft_wrap=True)
            if thinks and record.text:
                thinks = False
                errors().print("\n")
            yield record
    finally:
        if thinks:
            errors().print()


def _behind_prompt(stream: "Stream") -> "Iterator[Record]":
    """What each round added; until the first, a bar shows how far the prompt is read."""
    with ExitStack() as shown:
        draw = None
        for record in stream.records():
            progress = record.progress
            if progress is None:
                shown.close()
                yield record
            elif progress.seconds > _PATIENCE_S and errors().is_terminal:
                draw = draw or shown.enter_context(progress_bars(leave=False))
                draw(Progress("Reading the prompt", progress.read, progress.total, "tokens"))


def _print_pieces(pieces: list[tuple[str, str]], mark: str) -> None:
    from rich.text import Text

    for text, style in pieces:
        output().print(Text(text, f"{style} {mark}".strip()), end="", soft_wrap=True)


def sources_line(answer: "Generation") -> "Text":
    """How many tokens came from where, each source as it is marked."""
    from rich.text import Text

    counts = Counter(token.source for token in answer.records)
    parts = [Text(f"{count} {name}", _MARKS.get(name, "")) for name, count in counts.most_common()]
    return Text(", ").join(parts)


def answer_json(answer: "Generation") -> dict[str, Any]:
    """An answer as JSON values: ``text``, ``reasoning``, ``finish_reason``, ``tokens``, ``stats``."""
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "tokens": list(answer.tokens),
        "stats": answer.stats.to_json(),
    }


def stats_line(stats: "GenerationStats") -> str:
    """What an answer cost, in one line."""
    parts = [
        f"{stats.new_tokens} tokens",
        f"{stats.tokens_per_s:.1f} tokens/s",
        f"first after {stats.ttft_s * 1e3:.0f} ms",
        f"{stats.block_efficiency:.2f} tokens a pass",
    ]
    if stats.drafted:
        parts.append(f"{stats.accepted} of {stats.drafted} drafted tokens accepted")
    if stats.speculation_off_reason:
        parts.append(f"speculation off: {stats.speculation_off_reason}")
    parts += [f"rolled back: {part}" for part in stats.rolled_back]
    return ", ".join(parts)
