"""The prompts whose answers taught the drafter that ships with the catalogue (docs/align.md, "What ships").

Usage: ``python -m tools.alignment_prompts SOURCES --without FILE --out PROMPTS.jsonl [--answers OUT.jsonl]``

SOURCES is a folder with checkouts of openai/grade-school-math (MIT), google-research-datasets/
natural-questions (questions under CC BY-SA 3.0), UniversalDependencies/UD_German-GSD (CC BY-SA 4.0),
yizhongw/self-instruct (Apache-2.0) and teknium1/GPTeacher (MIT). The other prompts are made of the words in
``workloads/alignment.json``, and of the sources and docs of the Python that runs this. What measures does
not teach: left out is what shares eight words in a row with Spec-Bench (hemingkx/Spec-Bench), GSM8K's test or
HumanEval (openai/human-eval), which are in SOURCES too, or with a turn of a file that ``--without`` names.
``--answers`` also writes what the target answered to the first of them, which
``workloads/alignment_answers.jsonl.xz`` keeps without the prompts: an hour's work.
"""

import ast
import gzip
import hashlib
import json
import lzma
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from edgespec.align.answers import Answer
from edgespec.measuring.prompts import load_prompts
from tools.arguments import arguments

_WORDS_FILE: Final = Path(__file__).with_name("workloads") / "alignment.json"
_ANSWERS_FILE: Final = _WORDS_FILE.with_name("alignment_answers.jsonl.xz")
_TARGET: Final = "qwen2.5-coder-1.5b-instruct"
_SHARED: Final = 8  # words in a row
_SHORTEST, _LONGEST = 12, 1600  # characters
_KINDS: Final = {
    "gsm": (700, _LONGEST),
    "qa": (560, _LONGEST),
    "translation": (600, _LONGEST),
    "summarization": (260, 2200),
    "rag": (220, 1900),
    "roleplay": (300, _LONGEST),
    "coding": (420, _LONGEST),
    "knowledge": (520, _LONGEST),
    "writing": (300, _LONGEST),
    "roleplay2": (140, _LONGEST),
    "reasoning": (240, _LONGEST),
    "extraction": (200, _LONGEST),
    "coding2": (180, _LONGEST),
    "tasks": (240, _LONGEST),
    "python": (700, 2400),
}
"""How many prompts of a kind, and of how many characters at most."""
_SLOW: Final = ("summarization", "rag")  # to read
_SLOW_MOST: Final = 75  # of each before all others
_MATH: Final = "grade-school-math/grade_school_math/data"

Rows = list[dict[str, Any]]


def main() -> None:
    """Write the prompts, in an order by their digests."""
    args = arguments(__doc__, "sources", without=[Path], out=Path, answers=(Path,))
    sources = Path(args.sources)
    held_out = [turn for file in args.without for prompt in load_prompts(file) for turn in prompt.turns]
    prompts = ordered(chosen(candidates(sources), _Filter([*held_out, *measuring(sources)])))
    with args.out.open("w", encoding="utf-8") as file:
        for number, (kind, text) in enumerate(prompts):
            row = {"id": f"{kind}-{number}", "category": kind, "turns": [text]}
            print(json.dumps(row, ensure_ascii=False), file=file)
    if args.answers is not None:
        with args.answers.open("w", encoding="utf-8") as file:
            for answer in answered(prompts):
                print(json.dumps(asdict(answer), ensure_ascii=False), file=file)


def answered(prompts: Iterable[tuple[str, str]]) -> Iterator[Answer]:
    """The answers that are kept, in the order in which they were written."""
    known = {hashlib.sha256(text.encode()).hexdigest()[:16]: (kind, text) for kind, text in prompts}
    with lzma.open(_ANSWERS_FILE, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            kind, text = known[row["prompt_sha256"]]
            yield Answer(text, row["text"], row["complete"], kind, row["temperature"], _TARGET)


class _Filter:
    """Knows what shares words in a row with texts that measure."""

    def __init__(self, texts: Iterable[str]) -> None:
        words = [_words(text) for text in texts]
        self._whole = {tuple(prompt_words) for prompt_words in words}
        self._parts = {part for prompt_words in words for part in _parts(prompt_words)}

    def passes(self, text: str) -> bool:
        words = _words(text)
        return tuple(words) not in self._whole and self._parts.isdisjoint(_parts(words))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _parts(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return (tuple(words[at : at + _SHARED]) for at in range(len(words) - _SHARED + 1))


def chosen(by_kind: Mapping[str, Iterable[str]], allowed: _Filter) -> dict[str, list[str]]:
    """So many of each kind, at random, always the same."""
    dice, kept = random.Random(7), {}
    for kind, (count, longest) in _KINDS.items():
        texts = [
            text for text in dict.fromkeys(map(str.strip, by_kind[kind])) if _SHORTEST < len(text) <= longest
        ]
        dice.shuffle(texts)
        fitting = filter(allowed.passes, texts)
        kept[kind] = [text for text, _ in zip(fitting, range(count), strict=False)]
    return kept


def ordered(kept: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """All kinds mixed, so that what is answered first is a fair sample; most of what is slow to read last."""
    every = [(kind, text) for kind, texts in kept.items() for text in texts]
    every.sort(key=lambda entry: hashlib.sha256(entry[1].encode()).hexdigest())
    first, last = list[tuple[str, str]](), list[tuple[str, str]]()
    seen = dict.fromkeys(_SLOW, 0)
    for kind, text in every:
        if kind in seen:
            seen[kind] += 1
        (last if seen.get(kind, 0) > _SLOW_MOST else first).append((kind, text))
    return first + last


def measuring(folder: Path) -> Iterator[str]:
    """What drafters and targets are measured with."""
    for row in _rows(folder / "Spec-Bench/data/spec_bench/question.jsonl"):
        yield from row["turns"]
    yield from (row["question"] for row in _rows(folder / f"{_MATH}/test.jsonl"))
    with gzip.open(folder / "human-eval/data/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        yield from (json.loads(line)["prompt"] for line in file)


def candidates(folder: Path) -> dict[str, list[str]]:
    """All prompts there are, by kind."""
    math = _rows(folder / f"{_MATH}/train.jsonl")
    questions = _rows(folder / "natural-questions/nq_open/NQ-open.efficientqa.dev.1.1.jsonl")
    german = [
        line.removeprefix("# text = ")
        for part in ("dev", "test")
        for line in (folder / f"UD_German-GSD/de_gsd-ud-{part}.conllu").read_text("utf-8").splitlines()
        if line.startswith("# text = ")
    ]
    tasks = folder / "self-instruct/data/finetuning/t0_train_50k/data_per_template"
    seeds = _rows(folder / "self-instruct/data/seed_tasks.jsonl")
    seeds += _rows(folder / "self-instruct/human_eval/user_oriented_instructions.jsonl")
    teacher = folder / "GPTeacher"
    return {
        "gsm": [row["question"] for row in math],
        "qa": [f"{row['question'][0].upper()}{row['question'][1:]}?" for row in questions],
        "translation": [f"Translate German to English: {text}" for text in german if len(text) > 50],
        "summarization": [*_articles(tasks)],
        "rag": [*_with_passages(tasks)],
        "roleplay": _instructions(teacher / "Roleplay/roleplay-simple-deduped-roleplay-instruct.json"),
        "coding": _instructions(teacher / "Codegen/codegen-instruct.json"),
        "tasks": [
            _instruction(row["instruction"], row["instances"][0]["input"])
            for row in seeds
            if row.get("instances")
        ],
        "python": [*_installed(json.loads(_WORDS_FILE.read_text("utf-8"))["forms"])],
        **made(json.loads(_WORDS_FILE.read_text("utf-8"))),
    }


def _rows(file: Path) -> Rows:
    return [json.loads(line) for line in file.read_text("utf-8").split("\n") if line.strip()]


def _instructions(file: Path) -> list[str]:
    return [_instruction(row["instruction"], row["input"]) for row in json.loads(file.read_text("utf-8"))]


def _instruction(text: str, text_read: str) -> str:
    return f"{text}\n{text_read}" if text_read else text


def _templates(folder: Path, kinds: Iterable[str]) -> Iterator[str]:
    for kind in kinds:
        for file in sorted(folder.glob(f"{kind}*.jsonl")):
            yield from (row["prompt"] for row in _rows(file))


def _articles(folder: Path) -> Iterator[str]:
    for text in _templates(folder, ("cnn_dailymail", "xsum_", "multi_news_summ", "multi_news_distill")):
        parts = [part for part in re.split(r"\n+", text) if len(part) > 300]
        if parts:
            yield "Summarize: " + re.sub("^(Article|Document|Text): ", "", max(parts, key=len))


def _with_passages(folder: Path) -> Iterator[str]:
    kinds = ("adversarial_qa", "duorc_SelfRC", "quoref", "ropes", "wiki_hop", "sciq")
    return (text for text in _templates(folder, kinds) if len(text) > 300)


def _installed(forms: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """About functions, and paragraphs of docs, of the standard library, each in one of the forms."""
    dice = random.Random(5)
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_text("utf-8")
        tree = ast.parse(source)
        named = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        for node in (tree, *named):
            doc = ast.get_docstring(node) or ""
            if len(doc) > 200:
                yield dice.choice(forms["docs"]).format(module=file.stem, text=doc)
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > 4:
                code = textwrap.dedent("\n".join(source.split("\n")[node.lineno - 1 : node.end_lineno]))
                lines = code.split("\n")
                begun = "\n".join(lines[: len(lines) // 2])
                yield dice.choice(forms["functions"]).format(name=node.name, code=code, begun=begun)


def made(words: dict[str, Any]) -> dict[str, list[str]]:
    """Prompts of forms and what is put into them."""
    topics, forms = words["topics"], words["forms"]
    every = {"knowledge": topics["stem"] + topics["humanities"], "writing": topics["life"]}
    every["roleplay2"] = topics["life"] + topics["stem"][:15] + topics["humanities"][:10]
    prompts = {kind: [form.format(topic) for form in forms[kind] for topic in every[kind]] for kind in every}
    dice = random.Random(3)
    pairs = [_puzzle(dice, words) for _ in range(260)]
    prompts["reasoning"], prompts["extraction"] = map(list, zip(*pairs, strict=True))
    prompts["coding2"] = [
        form.format(language=language, what=what)
        for form in forms["coding2"]
        for language in words["languages"]
        for what in words["programs"]
    ]
    return prompts


def _puzzle(dice: random.Random, words: dict[str, Any]) -> tuple[str, str]:
    """Something to reason about, and something to extract from."""
    a, b, c, d = dice.sample(words["people"], 4)
    n, m, k = dice.randint(3, 40), dice.randint(2, 15), dice.randint(2, 9)
    t, u = dice.sample(words["things"], 2)
    p, q, r = dice.sample(words["cities"], 3)
    values = {"a": a, "b": b, "c": c, "d": d, "n": n, "m": m, "k": k, "t": t, "u": u, "p": p, "q": q, "r": r}
    values |= {"x": dice.randint(1, 6), "minute": m + 10, "twice": 2 * n, "sum": m * k + n, "percent": 5 * k}
    values |= {"few": min(k, 4), "group": m + 3, "top": n + m, "number": n * m + k, "dearer": m + k}
    first = dice.choice(words["forms"]["reasoning"]).format(**values)
    y, e = dice.randint(1950, 2023), dice.randint(10, 990)
    values |= {"y": y, "e": e, "earlier": y - m, "before": y - k, "after": y + 2}
    return first, dice.choice(words["forms"]["extraction"]).format(**values)


if __name__ == "__main__":
    main()
