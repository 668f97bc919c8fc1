"""Does an export's memory depend on the model's size? `python tools/large_checkpoint.py FOLDER --export OUT`.

Writes a Hugging Face checkpoint of the shape of a 7-billion-parameter model in bfloat16 to FOLDER: sharded,
sparse files (14.5 GB to a reader, some 40 MB on disks that know holes) with few distinct values. With
``--export`` it is exported to OUT, about 4.9 GB, and the peak memory compared with the cap.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: TID251 - makes one

from edgespec_export.export import ExportOptions, export_model

CONFIG = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
VALUES = np.array([-0.0625, -0.03125, 0.03125, 0.0625], np.float32)
ROWS = 16
"""First rows of every matrix that are not a hole; the check's tokens lie among them."""
LAYERS_A_SHARD = 4


def shapes(layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer."""
    hidden, mlp, kv = 4096, 14336, 1024
    parts = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}


def shards(layers: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Tensors by shard."""
    ends = {"model.embed_tokens.weight": (32000, 4096), "lm_head.weight": (32000, 4096)}
    yield {**ends, "model.norm.weight": (4096,)}
    for start in range(0, layers, LAYERS_A_SHARD):
        group = range(start, min(start + LAYERS_A_SHARD, layers))
        yield {name: shape for layer in group for name, shape in shapes(layer).items()}


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    """A safetensors file whose matrices are holes but for their first rows; norms are 1."""
    header, starts, at = {}, {}, 0
    for name, shape in tensors.items():
        starts[name], end = at, at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors.items():
            values = np.ones(shape, np.float32) if len(shape) == 1 else rng.choice(VALUES, (ROWS, shape[1]))
            file.seek(8 + len(text) + starts[name])
            file.write((values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes())
        file.truncate(8 + len(text) + at)


def tokenizer_json() -> str:
    """A vocabulary of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={text: id_ for id_, text in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return str(core.to_str())


def write_checkpoint(folder: Path, layers: int) -> None:
    """The whole directory."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards(layers)):
        file = f"model-{number:05}.safetensors"
        write_shard(folder / file, tensors, rng)
        weight_map |= dict.fromkeys(tensors, file)
    config = {**CONFIG, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")


def main() -> None:
    """Write the checkpoint; export it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--export", type=Path, metavar="OUT", help="export to this directory")
    parser.add_argument("--weights", help="policy of the export")
    parser.add_argument("--cap-gib", type=float, default=2.0, help="most memory the export may take")
    options = parser.parse_args()
    if not options.folder.exists():
        write_checkpoint(options.folder, options.layers)
    if options.export is None:
        return
    report = export_model(options.folder, options.export, options=ExportOptions(weights=options.weights))
    peak, converting = report.peak_memory_bytes / 2**30, report.conversion_peak_memory_bytes / 2**30
    sizes = f"{report.source_bytes / 1e9:.1f} GB to {report.bundle_bytes / 1e9:.1f} GB"
    print(f"{sizes} in {report.seconds:.0f} s; peak {peak:.2f} GiB, {converting:.2f} GiB before the check")
    if peak > options.cap_gib:
        raise SystemExit(f"more than {options.cap_gib} GiB")


if __name__ == "__main__":
    main()
