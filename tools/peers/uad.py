"""Transformers' assisted generation with two tokenizers (UAD), a reference for cross-vocabulary drafting.

Universal assisted decoding lets any model draft for any other by way of the text (string-level matching, as
in Timor et al., arXiv 2502.05202). Both models come from their GGUF files, dequantized to float32.
Speeds count tokens made after the first round, as edgespec's own do. Drafted tokens are counted where the
target verifies them, as rows of its passes.

Runs in the venv with torch and transformers (see install.py), from the repository's root, and takes about
7 GB for a target of 1.5 billion parameters::

    DIR/ref/bin/python -m tools.peers.uad --target FILE --assistant FILE --prompts FILE --json OUT
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation. ``rounds`` are the target's passes, prefill included."""

    prompt: str
    category: str
    tokens_per_s: float
    new_tokens: int
    rounds: int
    drafted: int
    accepted: int
    text: str


@dataclass(frozen=True, slots=True)
class Model:
    """A model with its tokenizer."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, gguf: Path) -> "Model":
        """Dequantize a GGUF file."""
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        return cls(model.eval(), transformers.AutoTokenizer.from_pretrained(**source))


class Watch(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
    """Counts the target's passes and their rows; notes when tokens came."""

    def __init__(self, model: Any) -> None:
        self.rows: list[int] = []
        self.arrivals: list[tuple[float, int]] = []
        self._hook = model.register_forward_pre_hook(self._before, with_kwargs=True)

    def put(self, value: torch.Tensor) -> None:
        """Tokens of a round; the prompt comes first."""
        self.arrivals.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """The generation is over."""
        self._hook.remove()

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        del module, args
        self.rows.append(kwargs["input_ids"].shape[1])


def answer(prompt: dict[str, Any], target: Model, assistant: Model | None, tokens: int) -> Answer:
    """Answer a conversation greedily, with an assistant or without; end-of-text tokens are ignored."""
    message = {"role": "user", "content": prompt["turns"][0]}
    inputs = target.tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    options: dict[str, Any] = {}
    if assistant is not None:
        options["assistant_model"] = assistant.model
        options["tokenizer"], options["assistant_tokenizer"] = target.tokenizer, assistant.tokenizer
    watch = Watch(target.model)
    with torch.inference_mode():
        output = target.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            streamer=watch,
            **options,
        )
    length = inputs["input_ids"].shape[1]
    new = output[0, length:]
    (start, first), (end, _) = watch.arrivals[1], watch.arrivals[-1]
    rounds = len(watch.rows)
    return Answer(
        prompt=prompt["id"],
        category=prompt["category"],
        tokens_per_s=(len(new) - first) / (end - start),
        new_tokens=len(new),
        rounds=rounds,
        drafted=sum(watch.rows) - length - (rounds - 1),
        accepted=len(new) - rounds,
        text=target.tokenizer.decode(new),
    )


def report(pairs: list[tuple[Answer, Answer]]) -> dict[str, Any]:
    """Acceptance, block efficiency, and the ratio to plain: of all seconds, and the median."""
    drafted = sum(fast.drafted for _, fast in pairs)
    seconds = [sum(a.new_tokens / a.tokens_per_s for a in side) for side in zip(*pairs, strict=True)]
    return {
        "prompts": len(pairs),
        "acceptance_rate": sum(fast.accepted for _, fast in pairs) / drafted if drafted else None,
        "block_efficiency": sum(f.new_tokens for _, f in pairs) / sum(f.rounds for _, f in pairs),
        "plain_tokens_per_s": sum(p.new_tokens for p, _ in pairs) / seconds[0],
        "ratio": seconds[0] / seconds[1],
        "ratio_median": statistics.median(f.tokens_per_s / p.tokens_per_s for p, f in pairs),
        "same_text": sum(p.text == f.text for p, f in pairs),
    }


def every_category(path: Path, limit: int) -> list[dict[str, Any]]:
    """At most ``limit`` prompts of a JSON Lines file, the first of each category before the second."""
    prompts = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    seen: dict[str, int] = {}
    ranks = []
    for index, prompt in enumerate(prompts):
        seen[prompt["category"]] = rank = seen.get(prompt["category"], -1) + 1
        ranks.append((rank, index))
    return [prompts[index] for _, index in sorted(ranks)[:limit]]


def main() -> None:
    """Answer every prompt plainly and with the assistant, in turn; report."""
    parser = argparse.ArgumentParser(description="Measure universal assisted decoding.")
    parser.add_argument("--target", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--assistant", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON Lines: id, category, turns")
    parser.add_argument("--limit", type=int, default=13)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft", type=int, help="fixed draft length; default: transformers' own schedule")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, assistant = Model.load(args.target), Model.load(args.assistant)
    if args.draft is not None:
        own = assistant.model.generation_config
        own.num_assistant_tokens, own.num_assistant_tokens_schedule = args.draft, "constant"
        own.assistant_confidence_threshold = 0.0
    pairs = []
    for prompt in every_category(args.prompts, args.limit):
        plain, fast = (answer(prompt, target, other, args.tokens) for other in (None, assistant))
        pairs.append((plain, fast))
        share = f"{fast.accepted} of {fast.drafted}"
        print(
            f"{prompt['id']:16} {plain.tokens_per_s:.2f}, {fast.tokens_per_s:.2f} tokens/s, {share} accepted"
        )
    summary = report(pairs)
    print(json.dumps(summary, indent=1))
    if args.json:
        answers = [[asdict(answer) for answer in pair] for pair in pairs]
        args.json.write_text(json.dumps({"summary": summary, "answers": answers}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
