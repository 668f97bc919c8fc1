"""Make the golden token ids that tokenizers read from GGUF files are tested against.

What: for each GGUF file, the ids of some awkward texts, as plain text: no BOS is added, and the text of a
special token does not become that token.
Why: a GGUF file describes its tokenizer in a few words ("pre = qwen2"); what these words mean is defined only
by llama.cpp's code. Its ``llama-tokenize`` is the authority here; transformers' own reading of the same file
is compared with it, and every difference is printed for a person to look at.

Usage (needs transformers, gguf, sentencepiece, and a built llama.cpp)::

    python -m tools.make_tokenizer_golden NAME=FILE.gguf [NAME=FILE.gguf ...] --llama-tokenize PATH \
        --out tests/golden/tokenizers.json

The file maps each catalogue name to a list of ``{"text": ..., "ids": [...]}``; where transformers differs,
its ids stand beside llama.cpp's as ``"transformers"``. The texts are those of the file as it is: to add one,
write ``{"text": ..., "ids": []}`` into its first list.
"""

import json
import subprocess
from pathlib import Path

import transformers

from tools.arguments import arguments


def llama_cpp_ids(program: Path, gguf: Path, text: str) -> list[int]:
    """Ask llama.cpp."""
    options = ["--stdin", "--ids", "--no-bos", "--no-escape", "--no-parse-special", "--log-disable"]
    run = subprocess.run(
        [program, "-m", gguf, *options], input=text.encode(), stdout=subprocess.PIPE, check=True, timeout=120
    )
    ids: list[int] = json.loads(run.stdout)
    return ids


def golden_of(program: Path, name: str, gguf: Path, texts: list[str]) -> list[dict[str, object]]:
    """Llama.cpp's ids of every text; print where transformers disagrees."""
    reference = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    cases: list[dict[str, object]] = []
    differ = 0
    for text in texts:
        ids = llama_cpp_ids(program, gguf, text)
        other = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
        if ids != other:
            differ += 1
            print(f"{name}: {text!r}\n  llama.cpp    {ids}\n  transformers {other}")
        cases.append({"text": text, "ids": ids} | ({"transformers": other} if ids != other else {}))
    print(f"{name}: {len(cases)} texts, transformers differs in {differ}")
    return cases


def to_json(golden: dict[str, list[dict[str, object]]]) -> str:
    """One case a line, so that a changed case is a changed line."""
    parts = []
    for name, cases in golden.items():
        lines = ",\n".join(f"  {json.dumps(case, ensure_ascii=True)}" for case in cases)
        parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Read the arguments, ask llama.cpp, write the file."""
    args = arguments(__doc__, "models...", llama_tokenize=Path, out=Path)
    before = json.loads(args.out.read_text(encoding="utf-8"))
    texts = [case["text"] for case in next(iter(before.values()))]
    golden = {}
    for pair in args.models:
        name, _, file = pair.partition("=")
        golden[name] = golden_of(args.llama_tokenize, name, Path(file), texts)
    args.out.write_text(to_json(golden), encoding="utf-8")


if __name__ == "__main__":
    main()
