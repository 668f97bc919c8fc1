"""The onnxruntime-genai row of compare.py; runs with the Python of its own venv.

Usage: ``python -m tools.peers.genai_worker MODEL_DIRECTORY --threads 2``
"""

import argparse
import json
import time
from pathlib import Path

import onnxruntime_genai as og

from tools.peers.protocol import Reply, Request, reserve_stdout, serve


def load(folder: Path, threads: int) -> og.Model:
    """Load the model with as many threads as the other rows use."""
    og.disable_telemetry_events()
    config = og.Config(str(folder))
    options = {"intra_op_num_threads": threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    return og.Model(config)


def main() -> None:
    """Load the model and answer requests."""
    channel = reserve_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    model = load(args.folder, args.threads)
    tokenizer = og.Tokenizer(model)

    def generate(request: Request) -> Reply:
        ids = tokenizer.encode(request.prompt)
        length = len(ids) + request.max_new_tokens
        params = og.GeneratorParams(model)
        # A minimum length keeps end-of-text tokens from being chosen before it.
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = og.Generator(model, params)
        generator.append_tokens(ids)
        generator.generate_next_token()
        start = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        new = generator.get_sequence(0)[len(ids) :]
        return Reply(len(ids), len(new), (len(new) - 1) / seconds, tokenizer.decode(new))

    serve("onnxruntime-genai", channel, generate)


if __name__ == "__main__":
    main()
