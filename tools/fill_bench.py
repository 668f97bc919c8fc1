"""Time fills of holes in the standard files: `python -m tools.fill_bench TARGET --results FILE`.

Holes are the rest of a line, a part of a line and a block of 3 to 8 lines, in turn, in windows of 80 lines.
A fill is asked for before the last line above the cursor is typed, then with it and what stands before the
cursor: that is timed, plain and with drafts in turn, with nothing but the earlier one in the KV cache.
`--first` and `--count` choose some of 64 holes; figures of all that FILE has are printed. The first token is
the first that adds to the text.
"""

import json
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, process_time
from typing import Any

import edgespec
from tools.arguments import arguments

_WINDOW, _KINDS = 80, ("line", "span", "block")


@dataclass(frozen=True)
class Hole:
    """A place in a file, and what was there; ``earlier`` is the prefix before its last line was typed."""

    name: str
    kind: str
    earlier: str
    prefix: str
    suffix: str
    gone: str


def holes(count: int = 64) -> list[Hole]:
    """The same ones at each call."""
    random, holes = Random(34), list[Hole]()
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = {path.name: path.read_text(encoding="utf-8").splitlines(keepends=True) for path in paths}
    names = [name for name, lines in texts.items() if len(lines) >= 2 * _WINDOW]
    while len(holes) < count:
        kind, name = _KINDS[len(holes) % 3], random.choice(names)
        start = random.randrange(len(texts[name]) - _WINDOW)
        lines = texts[name][start : start + _WINDOW]
        at = random.randrange(_WINDOW // 2, _WINDOW - 20)
        size = random.randrange(3, 9) if kind == "block" else 1
        held, left, right = "".join(lines[at : at + size]), 0, 0
        text = held.strip()
        if len(text) < 20 or text[0] in "#\"'" or not lines[at - 1].strip():
            continue
        indent = len(held) - len(held.lstrip())
        if kind != "block":
            left = indent + random.randrange(4, len(text) // 2)
        end = left + random.randrange(5, len(text) // 2) if kind == "span" else len(held) - 1
        left, right = (left or indent), len(held) - end
        before, behind = "".join(lines[: at - 1]), "".join(lines[at + size :])
        prefix = f"{before}{lines[at - 1]}{held[:left]}"
        holes.append(Hole(name, kind, before, prefix, held[len(held) - right :] + behind, held[left:end]))
    return holes


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, "target", drafter="auto", results=Path, first=0, count=64)
    chosen = holes()[options.first : options.first + options.count]
    with (
        edgespec.load(
            options.target, options.drafter, options=edgespec.LoadOptions(parallel=1, cache_bytes=0)
        ) as model,
        options.results.open("a", encoding="utf-8") as file,
    ):
        for at, hole in enumerate(chosen, options.first):
            row: dict[str, object] = {"at": at, **asdict(hole)}
            for way in ("plain", "drafts") if at % 2 else ("drafts", "plain"):
                _timed(model, hole.earlier, hole.suffix, way)
                row[way] = _timed(model, hole.prefix, hole.suffix, way)
            file.write(json.dumps(row) + "\n")
            file.flush()
    rows = [json.loads(line) for line in options.results.read_text(encoding="utf-8").splitlines()]
    for kind in (*_KINDS, ""):
        some = [row for row in rows if kind in row["kind"]]
        if some:
            print(kind or "all", _figures(some))


def _timed(model: edgespec.Model, prefix: str, suffix: str, way: str) -> dict[str, Any]:
    """What a fill is, and what it took."""
    began, cpu, first = perf_counter(), process_time(), 0.0
    stream = model.stream_fill(prefix, suffix, max_tokens=64, speculate=way == "drafts", prompt_cache=False)
    for piece in stream:
        first = first or (perf_counter() - began if piece else 0.0)
    whole, cpu = perf_counter() - began, process_time() - cpu
    done = stream.result
    by_source = {name: [source.drafted, source.accepted] for name, source in done.stats.by_source.items()}
    return {
        "first": first or whole,
        "whole": whole,
        "cpu": cpu,
        "text": done.text,
        "finish": done.finish_reason,
        "read": done.stats.prompt_tokens - done.stats.cached_tokens,
        "written": done.stats.new_tokens,
        "rounds": done.stats.rounds,
        "ttft": done.stats.ttft_s,
        "sources": by_source,
    }


def _figures(rows: list[dict[str, Any]]) -> str:
    """Times and ratios of some holes."""
    parts = [f"{len(rows)} holes"]
    for way in ("plain", "drafts"):
        first = sorted(row[way]["first"] for row in rows)
        whole = sum(row[way]["whole"] for row in rows) / len(rows)
        late, most = sum(seconds > 0.2 for seconds in first), first[len(first) * 9 // 10]
        parts.append(
            f"{way}: first token median {median(first) * 1e3:.0f} ms, 9 of 10 in {most * 1e3:.0f}, "
            f"{late} over 200; whole {whole:.3f} s"
        )
    total, decode = (
        sum(row["plain"]["whole"] - less * row["plain"]["first"] for row in rows)
        / sum(row["drafts"]["whole"] - less * row["drafts"]["first"] for row in rows)
        for less in (0, 1)
    )
    passes, cpu = (
        sum(r["plain"][it] for r in rows) / sum(r["drafts"][it] for r in rows) for it in ("rounds", "cpu")
    )
    same = sum(row["plain"]["text"] == row["drafts"]["text"] for row in rows)
    exact = sum(row["plain"]["text"].strip() == row["gone"].strip() for row in rows)
    parts += [
        f"times plain {total:.2f}, behind the first {decode:.2f}, CPU time {cpu:.2f}, passes {passes:.2f}"
    ]
    return "; ".join([*parts, f"same {same}, as it was {exact}"])


if __name__ == "__main__":
    main()
