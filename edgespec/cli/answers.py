"""Answers on the terminal: streamed text, then a line of what they cost."""

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from edgespec.results import Generation, GenerationStats
    from edgespec.stream import Stream

__all__ = ["allow_any_text", "answer_json", "json_text", "print_json", "stats_line", "stream_to_terminal"]


def allow_any_text() -> None:
    """Characters that standard output cannot encode become question marks instead of errors."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def stream_to_terminal(stream: "Stream") -> "Generation":
    """Print the text as it comes, ending the line."""
    text_ends_line = True
    try:
        for piece in stream:
            typer.echo(piece, nl=False)
            sys.stdout.flush()
            text_ends_line = piece.endswith("\n")
    finally:
        if not text_ends_line:
            typer.echo()
    return stream.result


def json_text(value: Any, indent: int | None = None) -> str:
    """``value`` as JSON; characters are escaped where standard output could not hold them all."""
    encoding = getattr(sys.stdout, "encoding", None) or ""
    return json.dumps(value, indent=indent, ensure_ascii=not encoding.lower().startswith("utf"))


def print_json(value: Any) -> None:
    """Print ``value`` as JSON, indented."""
    typer.echo(json_text(value, indent=2))


def answer_json(answer: "Generation") -> dict[str, Any]:
    """An answer as JSON values: ``text``, ``finish_reason``, ``tokens``, ``stats``."""
    return {
        "text": answer.text,
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
    parts += [f"rolled back: {each}" for each in stats.rolled_back]
    return ", ".join(parts)
