"""Make what tokenizers read from GGUF files are tested against; llama.cpp's ``llama-tokenize`` decides.

A GGUF file describes its tokenizer in a few words ("pre = qwen2"), and only llama.cpp's code says what they
mean. With models it writes ``tests/golden/tokenizers.json``: the ids of some awkward texts as plain text,
without BOS, where the text of a special token does not become that token. Where transformers' reading of the
same file differs, its ids stand beside llama.cpp's. With ``--stated`` it writes ``tests/golden/cuts.json``:
how each pre-tokenizer of llama.cpp cuts some texts, and how published tokenizers do. For that it makes a
vocabulary of all stretches of the texts' bytes, in which all neighbours merge, so that a token is a piece.

Usage (needs a built llama.cpp, which ``python -m tools.peers.install`` makes, and transformers for models)::

    python -m tools.make_tokenizer_golden [NAME=FILE.gguf ...] --llama-tokenize PATH \\
        [--stated NAME=tokenizer.json ...]

Texts are those of the files as they are; to add one, write it into the first list of ``tokenizers.json`` as
``{"text": ..., "ids": []}``, or behind the texts of ``cuts.json``.
"""

import json
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from tokenizers import decoders, pre_tokenizers  # noqa: TID251 - its alphabet of bytes

from edgespec_export.sources.gguf_tokenizer import byte_level_cuts
from edgespec_export.sources.pre_tokenizers import CUTS
from tests.kit.gguf import tiny_gguf
from tests.kit.tokenizers import CUT, cut_by
from tools.arguments import arguments

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
_BORDER = "<|border|>"


def llama_cpp_ids(program: Path, gguf: Path, text: str, *options: str) -> list[int]:
    """Ask llama.cpp."""
    asked = ("-m", str(gguf), "--stdin", "--ids", "--no-bos", "--no-escape", "--log-disable", *options)
    run = subprocess.run(
        (str(program), *asked), input=text.encode(), stdout=subprocess.PIPE, check=True, timeout=120
    )
    ids: list[int] = json.loads(run.stdout)
    return ids


def ids_of(program: Path, name: str, gguf: Path, texts: Sequence[str]) -> list[dict[str, object]]:
    """llama.cpp's ids of every text; print where transformers disagrees."""
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    cases: list[dict[str, object]] = []
    for text in texts:
        ids = llama_cpp_ids(program, gguf, text, "--no-parse-special")
        other = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
        if ids != other:
            print(f"{name}: {text!r}\n  llama.cpp    {ids}\n  transformers {other}")
        cases.append({"text": text, "ids": ids} | ({"transformers": other} if ids != other else {}))
    return cases


def to_json(golden: Mapping[str, Sequence[object]]) -> str:
    """One case a line, so that a changed case is a changed line."""
    parts = []
    for name, cases in golden.items():
        lines = ",\n".join(f"  {json.dumps(case, ensure_ascii=True)}" for case in cases)
        parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def spelled(text: str) -> str:
    """In GPT-2's alphabet of bytes."""
    return str(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0])


def cuts_of(program: Path, name: str, texts: Sequence[str], folder: Path) -> list[str]:
    """The texts with a mark at every cut of a pre-tokenizer; a special token keeps them apart."""
    stretches = {
        text[slice(*ends)] for text in map(spelled, texts) for ends in combinations(range(len(text) + 1), 2)
    }
    tokens = sorted(stretches, key=lambda token: (len(token), token))
    model = tiny_gguf("llama")
    model.tensors = {}
    model.metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*tokens, _BORDER],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3],
        "tokenizer.ggml.merges": [f"{t[:cut]} {t[cut:]}" for t in tokens for cut in range(1, len(t))],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens),
    }
    ids = llama_cpp_ids(program, model.write(folder / "vocabulary.gguf"), _BORDER.join(texts))
    pieces = [[*tokens, _BORDER][id_] for id_ in ids]
    read = [piece if piece == _BORDER else decoders.ByteLevel().decode([piece]) for piece in pieces]
    return [part.strip(CUT) for part in CUT.join(read).split(_BORDER)]


def write_cuts(program: Path, stated: Sequence[str]) -> None:
    """Ask about every pre-tokenizer; say where edgespec cuts otherwise."""
    golden = json.loads((GOLDEN / "cuts.json").read_text(encoding="utf-8"))
    texts: list[str] = golden["texts"]
    alike = defaultdict(list)
    files = dict(pair.split("=", 1) for pair in stated)
    parts = {name: json.loads(Path(file).read_text(encoding="utf-8")) for name, file in files.items()}
    golden["stated"] = {name: cut_by(part["pre_tokenizer"], texts) for name, part in parts.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name in CUTS:
            theirs = cuts_of(program, name, texts, Path(folder))
            alike[tuple(theirs)].append(name)
            ours = cut_by(byte_level_cuts(name), texts)
            for who, cuts in (("llama.cpp", theirs), ("stated", golden["stated"].get(name, ours))):
                for cut, our in zip(cuts, ours, strict=True):
                    if cut != our:
                        print(f"{name}: {who} {cut!r}, edgespec {our!r}")
    golden["llama.cpp"] = {" ".join(names): list(cuts) for cuts, names in alike.items()}
    text = json.dumps(golden, ensure_ascii=False, indent=1)
    (GOLDEN / "cuts.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Read the arguments, ask llama.cpp, write the files."""
    args = arguments(__doc__, "models*", llama_tokenize=Path, stated=[str])
    if args.models:
        path = GOLDEN / "tokenizers.json"
        texts = [c["text"] for c in next(iter(json.loads(path.read_text(encoding="utf-8")).values()))]
        pairs = (pair.partition("=") for pair in args.models)
        golden = {name: ids_of(args.llama_tokenize, name, Path(file), texts) for name, _, file in pairs}
        path.write_text(to_json(golden), encoding="utf-8")
    if args.stated:
        write_cuts(args.llama_tokenize, args.stated)


if __name__ == "__main__":
    main()
