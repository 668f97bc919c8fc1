"""Make the golden next-token distributions that exports are checked against.

What: for one GGUF file, the 32 most probable next tokens, with log probabilities, at every position of a few
short texts in several languages: those of another model's golden file (``--texts``).
Why: an exported graph can run, look well-formed and still be wrong. The only proof is agreement with an
independent implementation that read the same quantized file. That reference is transformers, which
dequantizes a GGUF to float32; it is far too heavy to need at export time, so its answers are stored here.

Usage, once for each catalogue model (needs torch, transformers, gguf, accelerate, sentencepiece)::

    python -m tools.make_golden --gguf FILE --texts models/edgespec_models/golden/gemma-3-270m.npz \
        --out models/edgespec_models/golden/CATALOGUE_NAME.npz

Arrays in ``NAME.npz``, n being the number of positions in all texts:

- ``tokens`` int32 (n,): the texts' token ids, one after another, each with BOS where the model wants one;
- ``starts`` int32 (texts + 1,): text i is ``tokens[starts[i]:starts[i + 1]]``, a sequence of its own;
- ``labels``, ``texts``: unicode (texts,): a short name, and the text;
- ``top_ids`` int32, ``top_logprobs`` float32 (n, 32): what may follow each position, most probable first;
- ``source_sha256``, ``made_with``: of the GGUF file; versions of the reference.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

from tools.arguments import arguments

TOP = 32
MIN_TOP1_MATCH = 0.30
MAX_MEAN_NLL = 4.0


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


def make_golden(gguf: Path, texts: dict[str, str]) -> tuple[dict[str, np.ndarray], str]:
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
    for label, text in texts.items():
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
        "labels": np.array(list(texts)),
        "texts": np.array(list(texts.values())),
        "top_ids": np.concatenate([ids for ids, _ in tops]),
        "top_logprobs": np.concatenate([logprobs for _, logprobs in tops]),
        "source_sha256": np.array(hashlib.sha256(gguf.read_bytes()).hexdigest()),
        "made_with": np.array(f"transformers {transformers.__version__}, torch {torch.__version__}"),
    }
    return arrays, f"{len(tokens)} positions, top-1 {match:.1%}, mean NLL {loss:.3f}"


def main() -> None:
    """Read the arguments, run the reference, write the file."""
    args = arguments(__doc__, gguf=Path, texts=Path, out=Path)
    with np.load(args.texts) as known:
        texts = dict(zip(known["labels"].tolist(), known["texts"].tolist(), strict=True))
    try:
        arrays, summary = make_golden(args.gguf, texts)
    except ValueError as error:
        sys.exit(f"{args.out.stem}: {error}")
    np.savez_compressed(args.out, **arrays)  # type: ignore[arg-type]  # numpy types the keywords as its own flags
    print(f"{args.out.name}: {summary}, {args.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
