"""Make the golden pieces that the pre-tokenizers of GGUF files are tested against.

What: how each of llama.cpp's pre-tokenizers cuts some awkward texts, and how published tokenizers do.
Why: a GGUF file gives a pre-tokenizer's name, and only llama.cpp's code says what the name means; some of its
expressions approximate the published ones.
How: ``llama-tokenize`` reads a vocabulary whose tokens are all stretches of the texts' bytes, and in which
all neighbours merge. So a token is a piece. A published ``tokenizer.json`` cuts by itself.

Usage (needs a built llama.cpp; ``python -m tools.peers.install`` builds one)::

    python -m tools.make_cuts_golden --llama-tokenize PATH --stated NAME=tokenizer.json ... \\
        --out tests/golden/cuts.json

The texts are those of the file as it is; add one behind them. Names that cut every text alike stand together.
"""

import json
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from tokenizers import decoders, pre_tokenizers  # noqa: TID251 - its alphabet of bytes

from edgespec_export.sources.gguf_tokenizer import byte_level_cuts
from edgespec_export.sources.pre_tokenizers import CUTS
from tests.kit.gguf import tiny_gguf
from tests.kit.tokenizers import CUT, cut_by
from tools.arguments import arguments

_BORDER = "<|border|>"


def spelled(text: str) -> str:
    """In GPT-2's alphabet of bytes."""
    return str(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0])


def vocabulary(texts: Sequence[str]) -> dict[str, object]:
    """Every stretch of bytes of a text is a token, and any two that make a third merge."""
    stretches = {
        text[slice(*ends)] for text in map(spelled, texts) for ends in combinations(range(len(text) + 1), 2)
    }
    tokens = sorted(stretches, key=lambda token: (len(token), token))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, _BORDER],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3],
        "tokenizer.ggml.merges": [f"{t[:cut]} {t[cut:]}" for t in tokens for cut in range(1, len(t))],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens),
    }


def cut_by_llama_cpp(program: Path, name: str, texts: Sequence[str], folder: Path) -> list[str]:
    """The texts with a mark at every cut; a special token between them keeps them apart."""
    model = tiny_gguf("llama")
    model.tensors = {}
    model.metadata |= vocabulary(texts) | {"tokenizer.ggml.pre": name}
    tokens = model.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    path = model.write(folder / "vocabulary.gguf")
    options = ["--stdin", "--ids", "--no-bos", "--no-escape", "--log-disable"]
    run = subprocess.run(
        [program, "-m", path, *options], input=_BORDER.join(texts).encode(), capture_output=True, check=True
    )
    pieces = [tokens[id_] for id_ in json.loads(run.stdout)]
    read = [piece if piece == _BORDER else decoders.ByteLevel().decode([piece]) for piece in pieces]
    return [part.strip(CUT) for part in CUT.join(read).split(_BORDER)]


def main() -> None:
    """Ask about every name; say where edgespec cuts otherwise."""
    args = arguments(__doc__, llama_tokenize=Path, stated=[str], out=Path)
    golden = json.loads(args.out.read_text(encoding="utf-8"))
    texts: list[str] = golden["texts"]
    alike = defaultdict(list)
    files = dict(pair.split("=", 1) for pair in args.stated)
    parts = {name: json.loads(Path(file).read_text(encoding="utf-8")) for name, file in files.items()}
    golden["stated"] = {name: cut_by(part["pre_tokenizer"], texts) for name, part in parts.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name in CUTS:
            theirs = cut_by_llama_cpp(args.llama_tokenize, name, texts, Path(folder))
            alike[tuple(theirs)].append(name)
            ours = cut_by(byte_level_cuts(name), texts)
            for who, cuts in (("llama.cpp", theirs), ("stated", golden["stated"].get(name, ours))):
                for cut, our in zip(cuts, ours, strict=True):
                    if cut != our:
                        print(f"{name}: {who} {cut!r}, edgespec {our!r}")
    golden["llama.cpp"] = {" ".join(names): list(cuts) for cuts, names in alike.items()}
    args.out.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
