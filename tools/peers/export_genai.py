"""Turn a GGUF file into a directory that onnxruntime-genai loads, with mobius: the peer's own way.

Runs in the venv with mobius-onnx, transformers and torch (see install.py). mobius's command line writes no
``genai_config.json`` for a GGUF file, so its Python functions are called instead; the tokenizer files, which
mobius copies from a checkpoint folder, are written by transformers from the GGUF.

Quantized weights stay as 4-bit blocks of 32, but mobius re-quantizes Q6_K tensors to 4 bits: the peer reads
slightly fewer bytes a token than the GGUF holds.

Usage: ``python -m tools.peers.export_genai --gguf FILE --out DIRECTORY``
"""

import tempfile
from pathlib import Path

import transformers
from mobius.integrations.gguf import build_from_gguf
from mobius.integrations.ort_genai import export_package

from tools.arguments import arguments


def export(gguf: Path, out: Path) -> None:
    """Write model, genai_config.json and tokenizer files into ``out``."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    package = build_from_gguf(str(gguf), keep_quantized=True, execution_provider="cpu")
    package.config.bos_token_id = tokenizer.bos_token_id
    package.config.eos_token_id = tokenizer.eos_token_id
    package.config.pad_token_id = tokenizer.pad_token_id
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        export_package(package, str(out), ep="cpu", local_config_dir=folder, progress_bar=False)


def main() -> None:
    """Read the arguments and export."""
    args = arguments(__doc__, gguf=Path, out=Path)
    export(args.gguf, args.out)


if __name__ == "__main__":
    main()
