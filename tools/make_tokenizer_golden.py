"""Make the golden token ids that tokenizers read from GGUF files are tested against.

What: for each GGUF file, the ids of some awkward texts, as plain text: no BOS is added, and the text of a
special token does not become that token.
Why: a GGUF file describes its tokenizer in a few words ("pre = qwen2"); what these words mean is defined only
by llama.cpp's code. Its ``llama-tokenize`` is the authority here; transformers' own reading of the same file
is compared with it, and every difference is printed for a person to look at.

Usage (needs transformers, gguf, sentencepiece, and a built llama.cpp)::

    python tools/make_tokenizer_golden.py --llama-tokenize PATH --out tests/golden/tokenizers.json \
        NAME=FILE.gguf [NAME=FILE.gguf ...]

The file written maps each catalogue name to a list of ``{"text": ..., "ids": [...]}``; where transformers
differs, its ids stand beside llama.cpp's as ``"transformers"``.
"""

import argparse
import json
import subprocess
from pathlib import Path

import transformers

TEXTS = [
    "",
    " ",
    "Hello, world!",
    " Leading space",
    "   three leading spaces",
    "two  inside,   three inside,    four inside",
    "trailing spaces   ",
    "line one\nline two\n\nline four\n\n\n\nline eight",
    "Windows\r\nline ends\r\n\r\nhere\r",
    "\ttab first\t\ttwo tabs \t mixed",
    "\n\n  \n \t \n   x",
    "7 42 365 1234 98765 1000000 3.14159 1,234,567.89",
    "in 2026 the 3rd of 12 had 0x1F4A9 and 1e-10, or 50%",
    "I'm sure they've said it'll do, we'd hope; she's IT'S DON'T o'clock",
    "It\u2019s a \u201ccurly\u201d quote \u2014 with an em dash\u2026",
    "ALLCAPS camelCase snake_case kebab-case HTTPServer2Go iPhone15",
    "def f(x):\n    if x > 0:\n        return x ** 2\n\n    return -x\n",
    "\tfor (int i = 0; i < n; ++i) {\n\t\tsum += a[i] & 0xFF;\n\t}\n",
    'if (a!=b&&c||!d) { s = "\\n\\t\\"quoted\\""; } // done',
    '<div class="a b"><p>x &amp; y</p></div><!-- end -->',
    "SELECT * FROM t WHERE a >= 10 AND b <> 'x';--",
    "https://www.example.org/a/path_1?query=x%20y&z=1#part and me@mail.example.org",
    "C:\\Users\\me\\file.txt /usr/local/bin/x ~/.config",
    "...!!!???,,,;;;:::---___***###$$$@@@^^^~~~```|||",
    "((([[[{{{<<<>>>}}}]]]))) -> => <= >= == != += ::",
    "\U0001f600 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "no\U0001f642space\U0001f642between",
    "今天天气很好，我们去公园散步吧。",
    "日本語のテキストとカタカナ、漢字が混ざっています。",
    "안녕하세요, 반갑습니다. 오늘은 날씨가 좋네요!",
    "مرحبا بالعالم، كيف حالك اليوم؟ ١٢٣",
    "שלום עולם, מה שלומך?",
    "Привет, мир! Как у тебя дела сегодня?",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "caf\u00e9 na\u00efve Stra\u00dfe \u00c5ngstr\u00f6m \u0141\u00f3d\u017a",
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m q\u0307\u0323",
    "x\u00b2 + y\u2083 = \u00bd \u2211 \u222b \u221e \u2260 \u2160\u2167 \u2460",
    "non\u00a0breaking\u2003em\u2009thin\u3000wide\u200bzero\ufeffbom",
    "control \x01\x02\x07\x08\x0b\x0c\x1b[31m\x7f end",
    "\ufffd replacement \ue000 private \U0010ffff last",
    "<|im_start|>user\nHi<|im_end|>\n<bos><eos><|endoftext|><start_of_turn>",
    "<unk> <s> [INST] <0x0A> <|user|>",
    "closing </s> tag",
    "\u2581under\u2581score",
    "space then \u2581sign",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaft",
    "Mixed 中文 and English，punctuation、and 123数字456.",
]


def llama_cpp_ids(program: Path, gguf: Path, text: str) -> list[int]:
    """Ask llama.cpp."""
    options = ["--stdin", "--ids", "--no-bos", "--no-escape", "--no-parse-special", "--log-disable"]
    run = subprocess.run(
        [program, "-m", gguf, *options], input=text.encode(), stdout=subprocess.PIPE, check=True, timeout=120
    )
    ids: list[int] = json.loads(run.stdout)
    return ids


def golden_of(program: Path, name: str, gguf: Path) -> list[dict[str, object]]:
    """Llama.cpp's ids of every text; print where transformers disagrees."""
    reference = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    cases: list[dict[str, object]] = []
    differ = 0
    for text in TEXTS:
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
    parser = argparse.ArgumentParser(description="Make the golden token ids of some GGUF files.")
    parser.add_argument("--llama-tokenize", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("models", nargs="+", metavar="NAME=FILE.gguf")
    args = parser.parse_args()
    golden = {}
    for pair in args.models:
        name, _, file = pair.partition("=")
        golden[name] = golden_of(args.llama_tokenize, name, Path(file))
    args.out.write_text(to_json(golden), encoding="utf-8")


if __name__ == "__main__":
    main()
