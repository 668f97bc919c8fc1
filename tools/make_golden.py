"""Make the golden next-token distributions that exports are checked against.

What: for one GGUF file, the 32 most probable next tokens, with log probabilities, at every position of a few
short texts in several languages.
Why: an exported graph can run, look well-formed and still be wrong. The only proof is agreement with an
independent implementation that read the same quantized file. That reference is transformers, which
dequantizes a GGUF to float32; it is far too heavy to need at export time, so its answers are stored here.

Usage, once for each catalogue model (needs torch, transformers, gguf, accelerate, sentencepiece)::

    python tools/make_golden.py --gguf FILE --name CATALOGUE_NAME --out models/edgespec_models/golden

Arrays in ``NAME.npz``, n being the number of positions in all texts:

- ``tokens`` int32 (n,): the texts' token ids, one after another, each with BOS where the model wants one;
- ``starts`` int32 (texts + 1,): text i is ``tokens[starts[i]:starts[i + 1]]``, a sequence of its own;
- ``labels``, ``texts``: unicode (texts,): a short name, and the text;
- ``top_ids`` int32, ``top_logprobs`` float32 (n, 32): what may follow each position, most probable first;
- ``source_sha256``, ``made_with``: of the GGUF file; versions of the reference.
"""

import argparse
import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

TOP = 32
MIN_TOP1_MATCH = 0.30
MAX_MEAN_NLL = 4.0

TEXTS = {
    "en": (
        "The lighthouse keeper had not missed a single evening in thirty years. Every day, an hour before "
        "sunset, he climbed the narrow stairs, cleaned the glass, and lit the lamp. When the storm finally "
        "came, the fishermen could still see the light from the other side of the bay, and one after "
        "another the boats found their way home."
    ),
    "de": (
        "Am nächsten Morgen war die Stadt vollständig eingeschneit. Die Straßenbahnen fuhren nicht mehr, "
        "und vor der Bäckerei standen die Leute in einer langen Schlange. Niemand schien sich zu beeilen. "
        "Die Kinder bauten auf dem Marktplatz einen großen Schneemann, während die Erwachsenen über das "
        "Wetter sprachen."
    ),
    "zh": (
        "每天早上，我都会先喝一杯热茶，然后打开窗户看看外面的天气。"
        "如果天气很好，我就骑自行车去公司；如果下雨，我就坐地铁。"
    ),
    "code": (
        "def moving_average(values: list[float], window: int) -> list[float]:\n"
        '    """Return the mean of each run of `window` neighbouring values."""\n'
        "    if window <= 0:\n"
        '        raise ValueError("window must be positive")\n'
        "    result = []\n"
        "    for i in range(len(values) - window + 1):\n"
        "        result.append(sum(values[i : i + window]) / window)\n"
        "    return result\n"
    ),
    "chat": (
        "User: Can you explain in two sentences why the sky is blue?\n"
        "Assistant: Sunlight contains all colours, and the molecules of the air scatter blue light much more "
        "strongly than red light. That is why blue light reaches our eyes from every direction of the sky.\n"
        "User: And why is the sunset red?\n"
        "Assistant:"
    ),
}


def sha256_of(path: Path) -> str:
    """Digest a file as hexadecimal text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def next_token_logprobs(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """Log probabilities of the next token after each position, shape (len(ids), vocabulary)."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    result: np.ndarray = torch.log_softmax(logits.double(), dim=-1).numpy()
    return result


def best(logprobs: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log probabilities of the ``count`` most probable tokens of each row, most probable first."""
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :count]
    return ids.astype(np.int32), np.take_along_axis(logprobs, ids, axis=-1).astype(np.float32)


def make_golden(gguf: Path) -> tuple[dict[str, np.ndarray], str]:
    """Run the reference on every text; return the arrays and a one-line summary.

    Raises ValueError where the reference itself predicts the texts so badly that it must be broken.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens: list[int] = []
    starts = [0]
    tops: list[tuple[np.ndarray, np.ndarray]] = []
    hits: list[bool] = []
    losses: list[float] = []
    for label, text in TEXTS.items():
        ids: list[int] = tokenizer(text).input_ids
        logprobs = next_token_logprobs(model, ids)
        tops.append(best(logprobs, TOP))
        matched = tops[-1][0][:-1, 0] == ids[1:]
        nll = -logprobs[np.arange(len(ids) - 1), ids[1:]]
        print(f"  {label}: {len(ids)} tokens, top-1 {matched.mean():.1%}, mean NLL {nll.mean():.3f}")
        hits += matched.tolist()
        losses += nll.tolist()
        tokens += ids
        starts.append(len(tokens))
    match, loss = float(np.mean(hits)), float(np.mean(losses))
    if match < MIN_TOP1_MATCH or loss > MAX_MEAN_NLL:
        raise ValueError(f"the reference looks broken: top-1 {match:.1%}, mean NLL {loss:.3f} on plain text")
    arrays = {
        "tokens": np.array(tokens, np.int32),
        "starts": np.array(starts, np.int32),
        "labels": np.array(list(TEXTS)),
        "texts": np.array(list(TEXTS.values())),
        "top_ids": np.concatenate([ids for ids, _ in tops]),
        "top_logprobs": np.concatenate([logprobs for _, logprobs in tops]),
        "source_sha256": np.array(sha256_of(gguf)),
        "made_with": np.array(f"transformers {transformers.__version__}, torch {torch.__version__}"),
    }
    return arrays, f"{len(tokens)} positions, top-1 {match:.1%}, mean NLL {loss:.3f}"


def main() -> None:
    """Read the arguments, run the reference, write the file."""
    parser = argparse.ArgumentParser(description="Make the golden next-token distributions of one GGUF file.")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--name", required=True, help="catalogue name: the file is called NAME.npz")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    args = parser.parse_args()
    try:
        arrays, summary = make_golden(args.gguf)
    except ValueError as error:
        sys.exit(f"{args.name}: {error}")
    path = args.out / f"{args.name}.npz"
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]  # numpy types the keywords as its own flags
    print(f"{path.name}: {summary}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
