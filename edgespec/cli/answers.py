"""Answers on the terminal: streamed text, then a line with their cost."""

import sys
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import typer

from edgespec.cli.console import errors, output, progress_bars
from edgespec_models.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text

    from edgespec.answering.results import Generation, GenerationStats, Record
    from edgespec.running.stream import Stream
    from edgespec_models.text.tokenizer import Tokenizer


_MARKS: Final = {
    "model": "underline blue",
    "ngram": "italic underline yellow",
    "history": "bold underline magenta",
    "grammar": "reverse green",
    "prediction": "italic underline cyan",
}
"""The style of each source's text, visible also without colours; the target's own text is plain."""
_PATIENCE_S: Final = 0.5


def content_of(text: str, images: "Sequence[Path]") -> "str | list[dict[str, object]]":
    """The content of a question about ``images``."""
    parts: list[dict[str, object]] = [{"type": "image", "image": image} for image in images]
    return [*parts, {"type": "text", "text": text}] if parts else text


def stream_to_terminal(stream: "Stream", marked: "Tokenizer | None" = None) -> "Generation":
    """Print the text as it comes, ending the line. With ``marked``, a terminal shows each token's source."""
    attribution = None
    if marked is not None and output().is_terminal:
        from edgespec.answering.attribution import Attribution

        attribution = Attribution(marked)
    ends_line = True
    try:
        for record in _records(stream):
            ends_line = record.text.endswith("\n") if record.text else ends_line
            if attribution is not None:
                for token in attribution.push(record):
                    if "reasoning" not in token:
                        _print(output(), token["text"], _MARKS.get(token["source"], ""))
            elif record.text:
                typer.echo(record.text, nl=False)
                sys.stdout.flush()
    finally:
        if not ends_line:
            typer.echo()
    return stream.result


def _records(stream: "Stream") -> "Iterator[Record]":
    """The stream's records. Thoughts are printed dimmed on standard error: the output is the answer alone."""
    thinks = False
    try:
        for record in _behind_prompt(stream):
            if record.reasoning:
                thinks = True
                _print(errors(), record.reasoning, "dim italic")
            if thinks and record.text:
                thinks = False
                _print(errors(), "\n\n")
            yield record
    finally:
        if thinks:
            _print(errors(), "\n")


def _behind_prompt(stream: "Stream") -> "Iterator[Record]":
    """The stream's records. While a long prompt is read, a bar shows the progress."""
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


def _print(console: "Console", text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(text, style), end="", soft_wrap=True)


def sources_line(answer: "Generation") -> "Text":
    """The number of tokens from each source, in the style of its mark."""
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
    """The cost of an answer, in one line."""
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
