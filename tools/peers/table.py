"""What compare.py's samples say: speeds, ratios, equal texts, warnings; and the tables for people.

A ratio compares two rows over the prompts and turns that both ran. ``total`` is of the seconds for all of
them together, ``median`` is the middle of the ratios one by one.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from tools.peers.rows import EDGESPEC, Row


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: a reply, and where it belongs.

    ``busy`` is the share of the processors others used just before it.
    """

    row: str
    prompt: str
    category: str
    turn: int
    tokens_per_s: float
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    busy: float
    drafted: int | None = None
    accepted: int | None = None
    request_s: float = 0.0

    @property
    def seconds(self) -> float:
        """What all its tokens would take at its speed."""
        return len(self.tokens) / self.tokens_per_s


class Table:
    """Samples of the rows that gave any, compared.

    Args:
        rows: all rows, in the table's order.
        samples: of any of them.
    """

    def __init__(self, rows: Sequence[Row], samples: Sequence[Sample]) -> None:
        self._samples = {row.name: [s for s in samples if s.row == row.name] for row in rows}
        self.rows = [row for row in rows if self._samples[row.name]]
        self.categories = list(dict.fromkeys(s.category for s in samples))
        self.groups = list(dict.fromkeys(row.group for row in self.rows))

    def speed(self, name: str, category: str | None = None) -> float | None:
        """Tokens of all samples over their seconds."""
        own = [s for s in self._samples[name] if category in (None, s.category)]
        return sum(len(s.tokens) for s in own) / sum(s.seconds for s in own) if own else None

    def ratios(self, fast: str, slow: str, category: str | None = None) -> dict[str, float] | None:
        """How many times as fast one row is as another; None where they have no sample in common."""
        base = {_key(s): s.tokens_per_s for s in self._samples.get(slow, [])}
        own = [s for s in self._samples[fast] if category in (None, s.category)]
        pairs = [(s.tokens_per_s, base[_key(s)]) for s in own if _key(s) in base]
        if not pairs:
            return None
        total = sum(1 / b for _, b in pairs) / sum(1 / a for a, _ in pairs)
        return {"total": total, "median": statistics.median(a / b for a, b in pairs)}

    def best(self, groups: Iterable[str]) -> str | None:
        """The fastest row of these groups."""
        chosen = set(groups)
        names = [row.name for row in self.rows if row.group in chosen]
        return max(names, key=lambda name: self.speed(name) or 0.0, default=None)

    def headlines(self) -> list[dict[str, Any]]:
        """Every edgespec target's best mode against the fastest peer's best mode."""
        own = [group for group in self.groups if group.startswith(EDGESPEC)]
        peer = self.best(group for group in self.groups if group not in own)
        best = [self.best([group]) for group in own]
        if peer is None:
            return []
        return [{"ours": name, "peer": peer, "ratio": self.ratios(name, peer)} for name in best if name]

    def same(self, name: str, reference: str) -> float | None:
        """Mean share of leading tokens that are the reference row's."""
        texts = {_key(s): s.tokens for s in self._samples.get(reference, [])}
        shares = [_same(s.tokens, texts[_key(s)]) for s in self._samples[name] if _key(s) in texts]
        return statistics.fmean(shares) if shares else None

    def summary(self) -> dict[str, dict[str, Any]]:
        """Everything about every row, by name."""
        ours = self.best(self.groups[:1])
        first = self.rows[0].plain if self.rows else ""
        return {row.name: self._row(row, ours or row.name, first) for row in self.rows}

    def warnings(self, tokens: int) -> list[str]:
        """Where the rows did not do the same work."""
        rows = []
        every = [s for samples in self._samples.values() for s in samples]
        for prompt in dict.fromkeys(s.prompt for s in every):
            lengths = {s.row: s.prompt_tokens for s in every if s.prompt == prompt}
            if len(set(lengths.values())) > 1:
                rows.append(f"{prompt}: the rows read prompts of different lengths: {lengths}")
        for name, samples in self._samples.items():
            other = {len(s.tokens) for s in samples} - {tokens}
            if other:
                rows.append(f"{name} made {sorted(other)} tokens, not {tokens}")
        return rows

    def _request_speed(self, name: str) -> float | None:
        own = self._samples[name]
        seconds = sum(s.request_s for s in own)
        return sum(len(s.tokens) for s in own) / seconds if seconds else None

    def _row(self, row: Row, ours: str, first: str) -> dict[str, Any]:
        samples = self._samples[row.name]
        speeds = [s.tokens_per_s for s in samples]
        drafted = sum(s.drafted or 0 for s in samples)
        return {
            "median": statistics.median(speeds),
            "min": min(speeds),
            "max": max(speeds),
            "total": self.speed(row.name),
            "request": self._request_speed(row.name),
            "gain": self.ratios(row.name, row.plain),
            "ours": self.ratios(ours, row.name),
            "acceptance_rate": sum(s.accepted or 0 for s in samples) / drafted if drafted else None,
            "same_as_plain": self.same(row.name, row.plain),
            "same_as_first": self.same(row.name, first),
            "by_category": {
                category: {
                    "total": self.speed(row.name, category),
                    "gain": self.ratios(row.name, row.plain, category),
                }
                for category in self.categories
            },
        }


def tables(summary: Mapping[str, Mapping[str, Any]], kl: Mapping[str, float | None]) -> str:
    """Two tables in Markdown: the rows, and their speeds by category where there are several."""
    head = ["", "tokens/s, median (min - max)", "over all", "with prefill", "x plain", "(median)"]
    head += ["best edgespec / row", "(median)", "accepted", "as plain", "as the first", "KL"]
    body = []
    for name, row in summary.items():
        spread = f"{row['median']:.1f} ({row['min']:.1f} - {row['max']:.1f})"
        cells = [name, spread, _number(row["total"], 1), _number(row["request"], 1)]
        cells += [_number(row[key] and row[key][kind]) for key in ("gain", "ours") for kind in _KINDS]
        shares = (row["acceptance_rate"], row["same_as_plain"], row["same_as_first"])
        body.append([*cells, *(_number(share) for share in shares), _number(kl.get(name), 4)])
    text = _markdown(head, body)
    categories = list(next(iter(summary.values()))["by_category"]) if summary else []
    if len(categories) > 1:
        text += "\n\n" + _markdown(["tokens/s (x plain)", *categories], _by_category(summary, categories))
    return text


_KINDS = ("total", "median")


def _by_category(summary: Mapping[str, Mapping[str, Any]], categories: Sequence[str]) -> list[list[str]]:
    body = []
    for name, row in summary.items():
        cells = [row["by_category"][category] for category in categories]
        speeds = [f"{_number(c['total'], 1)} ({_number(c['gain'] and c['gain']['total'])})" for c in cells]
        body.append([name, *speeds])
    return body


def _markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _key(sample: Sample) -> tuple[str, int]:
    return sample.prompt, sample.turn


def _same(tokens: Sequence[int], others: Sequence[int]) -> float:
    longest = max(len(tokens), len(others))
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))
    return equal / longest if longest else 1.0
