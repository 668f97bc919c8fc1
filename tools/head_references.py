"""Reference drafts of tiny EAGLE-3 heads (arXiv 2503.01840): `python -m tools.head_references`.

Needs torch and transformers. Writes the models of ``tests/kit/golden_heads.py`` into a temporary
folder and stores in ``tests/golden_heads/NAME.npz`` what two others make of them: the paper as this file has
it in float32, over transformers' hidden states, and llama.cpp of the files in Q8_0, by a program that
``--llama-drafts EXE`` names. That runs ``common_speculative`` of the type ``draft-eagle3`` with p_min 0 and
without sampling in the backend; its KV cache is float16. ``EXE TARGET HEAD LENGTH COUNT`` reads prompts as
tokens, one in a line, and prints for each a line of JSON: ``tokens`` and ``token_margins``, COUNT that the
target writes one by one; ``drafts``, LENGTH tokens before each of them; ``probabilities`` and ``margins`` of
the last one of each draft. ``--llama-cpp DIR``, llama.cpp's sources, has their converter make the files in
F32 and compares them with the tests' instead.

Arrays, for P prompts, COUNT tokens behind each and drafts of LENGTH:

- ``prompts`` [P, 40], filled up with -1; ``tokens`` [P, COUNT], the target's greedy continuation, which is
  the same in both; ``token_margins`` and ``llama_token_margins`` [P, COUNT].
- ``drafts``, ``probabilities``, ``margins``, and llama.cpp's with ``llama_`` before the name,
  [P, COUNT, LENGTH]. Draft k stands behind the prompt and k tokens of the continuation, and guesses tokens k,
  k + 1, ... of it. The head has read all of that text: the last row before the draft has the features of the
  last token but one and the embedding of the last. Probabilities are over the draft vocabulary.
- ``features`` [n, 3, hidden] of the first n tokens of the first prompt and its continuation.
- ``digests``: SHA-256 of the tensors in Q8_0 of target and head.

A margin is how far the best logit is above the second, in standard deviations of the logits of its row.
Where both margins are from 0.01, and all tokens before in the draft are the same, llama.cpp b11434 drafts
what this file does: of the files in F32 1,677 of 1,677 tokens, of those in Q8_0, with which it rounds
activations to 8 bits, 1,546 of 1,575; from 0.02 on 1,510 of 1,525, from 0.05 on 1,398 of 1,398.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.kit import golden_heads as heads
from tests.kit.hf import VOCAB
from tests.kit.tokenizers import CORPUS
from tools.make_hf_golden import convert, differences

LENGTHS = (8, 12, 17, 24, 31, 40)
COUNT, LENGTH = 24, 4
CLEAR = 0.1
"""The least margin in a continuation, so that rounding does not change it."""
LEAST = (0, 0.01, 0.02, 0.05)
"""Margins from which agreement is counted."""
Stored = dict[str, npt.NDArray[Any]]


def margins(logits: Any) -> Any:
    """How far the best of each row is above the second, in the row's standard deviations."""
    best = logits.topk(2).values
    return (best[..., 0] - best[..., 1]) / logits.std(-1, correction=0)


def prompts(target: Any, folder: Path) -> Iterator[list[int]]:
    """Prompts made of the corpus' words whose continuation has no near-ties, few repetitions and no end."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    words, ends = " ".join(CORPUS[:3]).split(), {0, 1, 2, VOCAB - 1}
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        clear: list[list[int]] = []
        while not clear:
            texts = [tokenizer.encode(" ".join(rng.choice(words, length)))[:length] for _ in range(500)]
            texts = [tokens for tokens in texts if tokenizer.encode(tokenizer.decode(tokens)) == tokens]
            written, least = greedy(target, texts)
            clear = [
                tokens
                for tokens, new, margin in zip(texts, written, least, strict=True)
                if margin > CLEAR and len(set(new)) > COUNT // 2 and not ends & set(new)
            ]
        yield clear[0]


def greedy(target: Any, texts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[float]]:
    """The continuations of texts of one length, and the least margin in each."""
    with torch.no_grad():
        written = target.generate(
            torch.tensor(texts),
            max_new_tokens=COUNT,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    least = margins(torch.stack(written.logits, 1)).min(-1).values
    return written.sequences[:, len(texts[0]) :].tolist(), least.tolist()


def continued(target: Any, prompt: Sequence[int]) -> tuple[list[int], Any, Any]:
    """The prompt with its greedy continuation, and its logits and features, [n, 3 * hidden]."""
    text = [*prompt, *greedy(target, [prompt])[0][0]]
    with torch.no_grad():
        result = target(torch.tensor([text]), output_hidden_states=True)
    entering = [result.hidden_states[layer][0] for layer in heads.TARGET_LAYERS]
    return text, result.logits[0], torch.cat(entering, -1)


class Head:
    """A case's head in float32, as the paper's section 3.1 has it."""

    def __init__(self, case: str, embedding: Any) -> None:
        self.config = transformers.LlamaConfig(**heads.head_config(case))
        named = {name: torch.from_numpy(x) for name, x in heads.head_weights().items()}
        self.weights = {n.removeprefix("midlayer.").removesuffix(".weight"): x for n, x in named.items()}
        self.embedding, self.rotary = embedding, LlamaRotaryEmbedding(self.config)
        self.tokens, self.is_normed = heads.head_tokens().tolist(), heads.CASES[case][1]

    def norm(self, x: Any, name: str) -> Any:
        """RMSNorm with the weights of that name."""
        return functional.rms_norm(x, x.shape[-1:], self.weights[name], self.config.rms_norm_eps)

    def linear(self, x: Any, name: str) -> Any:
        """The product with the matrix of that name."""
        return functional.linear(x, self.weights[name])

    def states(self, x: Any, tokens: Sequence[int]) -> Any:
        """The decoder layer over rows of what is known and the token behind, [n, hidden]."""
        known = self.norm(x, "hidden_norm")
        both = torch.cat([self.norm(self.embedding[tokens], "input_layernorm"), known], -1)
        qkv = [self.linear(both, f"self_attn.{p}_proj") for p in "qkv"]
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)[None] for part in qkv)
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(q, torch.arange(len(x))[None]))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended = self.linear(mixed[0].transpose(0, 1).flatten(1), "self_attn.o_proj")
        y = attended + (known if self.is_normed else x)
        z = self.norm(y, "post_attention_layernorm")
        gated = functional.silu(self.linear(z, "mlp.gate_proj")) * self.linear(z, "mlp.up_proj")
        return y + self.linear(gated, "mlp.down_proj")

    def draft(self, features: Any, text: Sequence[int]) -> list[tuple[int, float, float]]:
        """Tokens behind ``text`` with probability and margin, from the features of all its tokens but one."""
        drafted: list[tuple[int, float, float]] = []
        x = self.linear(features, "fc")
        while len(drafted) < LENGTH:
            state = self.states(x, [*text[1:], *(token for token, _, _ in drafted)])[-1:]
            logits = self.linear(self.norm(state, "norm"), "lm_head")
            best = float(logits.softmax(-1).max()), float(margins(logits))
            drafted.append((self.tokens[int(logits.argmax())], *best))
            x = torch.cat([x, state])
        return drafted


def from_paper(case: str, folder: Path) -> Stored:
    """What this file computes."""
    target = transformers.AutoModelForCausalLM.from_pretrained(
        heads.write_target(folder / case, case), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    head = Head(case, target.get_input_embeddings().weight.detach())
    token_rows = list(prompts(target, folder / case))
    stored: Stored = {"prompts": np.full((len(token_rows), max(LENGTHS)), -1, np.int16)}
    tokens, token_margins, drafts = [], [], []
    for row, prompt in enumerate(token_rows):
        stored["prompts"][row, : len(prompt)] = prompt
        text, logits, features = continued(target, prompt)
        tokens.append(text[len(prompt) :])
        token_margins.append(margins(logits[len(prompt) - 1 : -1]).numpy())
        ends = range(len(prompt), len(text))
        with torch.no_grad():
            drafts.append([head.draft(features[: end - 1], text[:end]) for end in ends])
        if row == 0:
            first = features[: len(prompt) + LENGTH].unflatten(-1, (3, -1))
            stored["features"] = first.numpy()
    every = np.array(drafts)
    stored |= {"tokens": np.array(tokens), "token_margins": np.array(token_margins), "drafts": every[..., 0]}
    return stored | {"probabilities": every[..., 1], "margins": every[..., 2]}


def from_llama(executable: Path, files: Sequence[Path], prompts: npt.NDArray[Any]) -> Stored:
    """What llama.cpp computes of the files of target and head."""
    lines = "".join(" ".join(str(token) for token in row if token >= 0) + "\n" for row in prompts)
    runs = []
    for length in range(1, LENGTH + 1):
        command = [str(part) for part in (executable, *files, length, COUNT)]
        done = subprocess.run(command, input=lines, text=True, capture_output=True, check=True)
        runs.append([json.loads(line) for line in done.stdout.splitlines()])
    whole = {name: np.array([line[name] for line in runs[-1]]) for name in runs[-1][0]}
    steps = ("probabilities", "margins")
    return whole | {name: np.stack([[line[name] for line in run] for run in runs], -1) for name in steps}


def agreement(stored: Stored, other: Stored) -> str:
    """How often drafted tokens are the same."""
    clearer, pair = np.minimum(stored["margins"], other["margins"]), (stored["drafts"], other["drafts"])
    sentences = ["{} of {} from {}".format(*heads.compared(*pair, clearer, least), least) for least in LEAST]
    alike = np.cumprod(stored["drafts"] == other["drafts"], -1).astype(bool)
    off = np.abs(stored["probabilities"] - other["probabilities"])[alike].max()
    return f"{', '.join(sentences)}; probabilities differ by up to {off:.3f}"


def store(case: str, executable: Path, folder: Path) -> None:
    """Write the file of a case.

    Raises:
        SystemExit: the two targets write different texts.
    """
    paper = from_paper(case, folder)
    for kind in ("F32", "Q8_0"):  # the last is stored
        models = heads.target_gguf(case, kind), heads.head_gguf(case, kind)
        files = [model.write(folder / f"{case}-{n}.gguf") for n, model in enumerate(models)]
        llama = from_llama(executable, files, paper["prompts"])
        if (llama["tokens"] != paper["tokens"]).any():
            raise SystemExit(f"{case}: llama.cpp's target in {kind} writes other texts than transformers'")
        print(f"{case}, llama.cpp {kind}: {agreement(paper, llama)}")
    stored = paper | {f"llama_{name}": values for name, values in llama.items() if name != "tokens"}
    whole = ("prompts", "tokens", "drafts", "llama_drafts")
    small = {name: x.astype(np.int16 if name in whole else np.float16) for name, x in stored.items()}
    digests = np.array([heads.digest(model) for model in models])
    heads.GOLDEN.mkdir(exist_ok=True)
    np.savez_compressed(heads.GOLDEN / f"{case}.npz", allow_pickle=False, digests=digests, **small)


def compare(case: str, llama_cpp: Path, folder: Path) -> None:
    """Say where the files of llama.cpp's converter differ from the tests'."""
    target, head = heads.write_target(folder / case, case), heads.write_head(folder / f"{case}-head", case)
    for source, ours, more in (
        (target, heads.target_gguf(case, "F32"), ()),
        (head, heads.head_gguf(case, "F32"), ("--target-model-dir", str(target))),
    ):
        made = folder / f"{source.name}.gguf"
        convert(llama_cpp, source, made, *more)
        print(f"{source.name}: {'; '.join(differences(ours, made)) or 'as the converter writes it'}")


def main() -> None:
    """Store the references of every case, or compare what llama.cpp's converter makes."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--llama-drafts", type=Path)
    source.add_argument("--llama-cpp", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for case in heads.CASES:
            if args.llama_cpp is None:
                store(case, args.llama_drafts, Path(folder))
            else:
                compare(case, args.llama_cpp, Path(folder))


if __name__ == "__main__":
    main()
