"""Write the requests of a user, a line each, for tools/record_answers.py and tools/user_gains.py.

Usage: ``python -m tools.user_streams mails|functions|notes --out PROMPTS.jsonl --count 300``. Their sources
    are packages of the index, in the order that a seed gives:

- ``mails``: to the support of a program, a question about an option of yt-dlp (Unlicense);
- ``functions``: a programmer's, about the functions of networkx (BSD-3-Clause);
- ``notes``: in German, about the messages of a web application, from Django's translation (BSD-3-Clause).
"""

import ast
import json
import random
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tools.arguments import arguments

_GREETINGS = ("Hello,", "Hi there,", "Dear support team,", "Good morning,")
_MAILS = (
    'I use yt-dlp and have read about {flag}. The manual says: "{help}" When should I use it? '
    "Please answer in a few sentences.",
    "a colleague told me to run yt-dlp with {flag} ({help}). What does it do? Please give me an example.",
    "does yt-dlp have an option for this: {help} Please write the command for me.",
)
_TASKS = (
    "Write a docstring for this function of networkx:",
    "Explain in three sentences what this function of networkx does:",
    "Write a short test for this function of networkx:",
)
_NOTES = (
    "Schreibe eine kurze Notiz für unsere Anwender zu dieser Meldung der Web-Anwendung: „{text}“",
    "Formuliere diese Meldung der Web-Anwendung freundlicher und erkläre sie in zwei Sätzen: „{text}“",
)
_MESSAGE = re.compile(r'^msgstr (".*"(?:\n".*")*)', re.MULTILINE)
_LEAST, _MOST = 5, 25  # lines of a function


def mails(rng: random.Random) -> Iterator[str]:
    """Two mails for each option."""
    from yt_dlp.options import create_parser  # type: ignore[import-not-found,import-untyped,unused-ignore]

    parser = create_parser()
    for option in [option for group in parser.option_groups for option in group.option_list]:
        words = " ".join((option.help or "").split())
        if len(words) > 40 and option.help != "SUPPRESSHELP":
            for mail in rng.sample(_MAILS, 2):
                text = mail.format(flag=str(option), help=words[:300])
                yield f"{rng.choice(_GREETINGS)}\n\n{text}\n\nKind regards"


def functions(rng: random.Random) -> Iterator[str]:
    """A task for each function of a moderate length."""
    for path in sorted(_folder("networkx").glob("algorithms/**/*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and "tests" not in path.parts:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                node.body, node.decorator_list = body or [ast.Pass()], []
                code = ast.unparse(node)
                if _LEAST <= code.count("\n") < _MOST:
                    yield f"{rng.choice(_TASKS)}\n```python\n{code}\n```"


def notes(rng: random.Random) -> Iterator[str]:
    """Two tasks for each message that is a sentence."""
    for path in sorted(_folder("django").glob("**/locale/de/LC_MESSAGES/django.po")):
        for entry in _MESSAGE.finditer(path.read_text(encoding="utf-8")):
            text = "".join(json.loads(line) for line in entry[1].splitlines() if "\\" not in line)
            if 15 < len(text) < 300 and " " in text and not {"\n", "%"} & {*text}:
                yield from (note.format(text=text) for note in _NOTES)


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: pip install {package}")
    return Path(spec.origin).parent


def main() -> None:
    """Write the prompts."""
    args = arguments(__doc__, "kind", out=Path, count=300, seed=0)
    rng = random.Random(args.seed)
    texts = list(dict.fromkeys({"mails": mails, "functions": functions, "notes": notes}[args.kind](rng)))
    rng.shuffle(texts)
    with args.out.open("w", encoding="utf-8") as out:
        for number, text in enumerate(texts[: args.count]):
            line = {"id": f"{args.kind}-{number:03}", "category": args.kind, "turns": [text]}
            print(json.dumps(line, ensure_ascii=False), file=out)
    print(f"{min(args.count, len(texts))} of {len(texts)} prompts: {args.out}")


if __name__ == "__main__":
    main()
