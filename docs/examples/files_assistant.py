"""A command-line assistant over a folder of text files: python files_assistant.py FOLDER [MODEL].

A question is answered from the paragraphs that share the rarest words with it. Ctrl-C stops an answer.
"""

import math
import re
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import edgespec

SUFFIXES = {".md", ".py", ".rst", ".toml", ".txt"}
LARGEST = 1_000_000  # bytes of a file that is read
ROOM = 1500  # tokens of paragraphs that a question is asked with
SYSTEM = (
    "Answer from the excerpts alone, in a few sentences, and name the files. If they do not tell, say so."
)


def paragraphs(folder: Path) -> list[str]:
    """The paragraphs of all text files in ``folder``, each below its file's name."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size <= LARGEST:
            text = path.read_text(encoding="utf-8", errors="replace")
            name = path.relative_to(folder).as_posix()
            found += [f"[{name}]\n{part.strip()}" for part in re.split(r"\n\s*\n", text) if part.strip()]
    return found


def words(text: str) -> set[str]:
    """What a text is found by."""
    return set(re.findall(r"\w{3,}", text.lower()))


def excerpts(question: str, known: list[str], model: edgespec.Model) -> str:
    """The paragraphs that tell most about ``question``, as many as there is room for."""
    in_how_many = Counter(word for paragraph in known for word in words(paragraph))

    def weight(paragraph: str) -> float:
        return sum(math.log(len(known) / in_how_many[word]) for word in words(question) & words(paragraph))

    chosen, room = [], ROOM
    for paragraph in sorted(known, key=weight, reverse=True):
        room -= model.count_tokens(paragraph)
        if room < 0 or weight(paragraph) <= 0:
            break
        chosen.append(paragraph)
    return "\n\n".join(chosen)


def answer(question: str, known: list[str], model: edgespec.Model) -> None:
    """Print the answer as it comes."""
    asked = f"{excerpts(question, known, model)}\n\nQuestion: {question}"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
    with model.stream_chat(messages, max_new_tokens=400) as stream:
        try:
            for piece in stream:
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" ... stopped", end="")  # leaving the block ends the answer
    print()


def main() -> None:
    """Answer questions, a line each, until the input ends."""
    folder, name = Path(sys.argv[1]), [*sys.argv[2:], "qwen2.5-coder-1.5b-instruct"][0]
    known = paragraphs(folder)
    print(f"{len(known)} paragraphs in {folder}. Ask something; an empty line ends it.")
    with edgespec.load(name) as model, suppress(EOFError):  # raised where the input ends
        while question := input("> ").strip():
            answer(question, known, model)


if __name__ == "__main__":
    main()
