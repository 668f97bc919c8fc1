"""What a KV cache written in place gains: `python -m tools.cache_in_place FOLDER --optimum-cli PROGRAM`.

Writes a Llama of SmolLM2-135M's shape with random weights to FOLDER, has Optimum export it, and rewrites a
copy to attention in place (:mod:`edgespec_export.cache_rewrite`). Milliseconds of a pass over 1, 4 and 8
tokens behind 256, 1,024 and 1,900 others: processor time of a single thread, which other programs disturb
least; least of several; passes as of a target, with exact rows, and as of a drafter, without.
"""

import argparse
import json
import os
import shutil
import subprocess
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
from safetensors.numpy import save_file

from edgespec_export.cache_rewrite import rewrite_cache
from edgespec_models.foreign import open_bundle
from edgespec_runtimes.cpu import CpuOptions, CpuSession
from tools.large_checkpoint import tokenizer_json

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ROWS = (1, 4, 8)
PAST = (256, 1024, 1900)


def write_checkpoint(folder: Path) -> None:
    """The whole directory, in float32."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    hidden, mlp, kv = 576, 1536, 192
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (49152, hidden), "model.norm": (hidden,)}
    for layer in range(30):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
        shapes |= {f"{at}self_attn.{name}_proj": (kv, hidden) for name in "kv"}
        shapes |= {f"{at}mlp.{name}_proj": (mlp, hidden) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj"] = (hidden, mlp)
    weights = {
        f"{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.normal(0, 0.04, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")


def export(folder: Path, program: str) -> None:
    """FOLDER/concatenated as Optimum writes it; FOLDER/in-place, rewritten."""
    write_checkpoint(folder / "checkpoint")
    command = [program, "export", "onnx", "--model", str(folder / "checkpoint")]
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command += ["--task", "text-generation-with-past", str(folder / "concatenated")]
    subprocess.run(command, env=environment | {"HF_HUB_OFFLINE": "1"}, check=True, stdout=subprocess.DEVNULL)
    shutil.copytree(folder / "concatenated", folder / "in-place")
    started = perf_counter()
    rewrite = rewrite_cache(folder / "in-place")
    if rewrite.reason:
        raise SystemExit(rewrite.reason)
    print(f"{rewrite.layers} layers rewritten in {perf_counter() - started:.0f} s")


def times(folder: Path, options: CpuOptions, repeats: int) -> dict[tuple[int, int], float]:
    """Milliseconds by past and new tokens, of the graph in ``folder``."""
    session = CpuSession(open_bundle(folder), options)
    tokens = [index * 7919 % session.vocab_size for index in range(max(PAST) + max(ROWS))]
    least: dict[tuple[int, int], float] = {}
    for past in PAST:
        session.prefill(tokens[:past])
        for rows in ROWS:
            for repeat in range(repeats + 1):
                started = process_time()
                session.forward(tokens[past : past + rows])
                spent = 1e3 * (process_time() - started)
                session.truncate(past)
                if repeat:  # the first binds and warms up
                    least[past, rows] = min(least.get((past, rows), spent), spent)
    session.close()
    return least


def main() -> None:
    """Export what is not there, then time it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--optimum-cli", default="optimum-cli", metavar="PROGRAM")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if not given.folder.exists():
        export(given.folder, given.optimum_cli)
    columns = [
        times(given.folder / name, CpuOptions(threads=1, exact_rows=exact), given.repeats)
        for name, exact in (("concatenated", False), ("in-place", True), ("in-place", False))
    ]
    print("| past | new | concatenated, ms | in place, target | in place, drafter |\n|---|---|---|---|---|")
    for past in PAST:
        for rows in ROWS:
            print(f"| {past:,} | {rows} | {' | '.join(f'{column[past, rows]:.1f}' for column in columns)} |")


if __name__ == "__main__":
    main()
