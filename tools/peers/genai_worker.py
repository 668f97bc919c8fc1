"""The onnxruntime-genai rows of compare.py; runs with the Python of its own venv.

A request's ``options`` are its speculative options (``ngram_size``, ``max_draft_tokens``, ...). ``--draft``
adds a draft model, which then drafts in every request.

Usage: ``python -m tools.peers.genai_worker MODEL_DIRECTORY [--draft MODEL_DIRECTORY] --threads 2``
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import onnxruntime_genai as og

from tools.arguments import arguments
from tools.peers.protocol import Reply, Request, reporting, serve


def load(folder: Path, draft: Path | None, threads: int) -> og.Model:
    """Load the model with as many threads as the other rows use."""
    og.disable_telemetry_events()
    session = {"intra_op_num_threads": threads}
    model: dict[str, Any] = {"decoder": {"session_options": session}}
    if draft is not None:
        block = json.loads((draft / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
        block["filename"] = Path(os.path.relpath(draft / block["filename"], folder)).as_posix()
        block["session_options"] |= session
        model["draft"] = block
    config = og.Config(str(folder))
    config.overlay(json.dumps({"model": model}))
    return og.Model(config)


def answer(model: og.Model, tokenizer: og.Tokenizer, request: Request) -> Reply:
    """Run one request.

    Prefill gives the first token's logits, so the clock starts behind it: a first round that makes several
    tokens must not be free.
    """
    ids = tokenizer.encode(request.prompt)
    length = len(ids) + request.max_new_tokens
    params = og.GeneratorParams(model)
    # A minimum length keeps end-of-text tokens from being chosen before it.
    params.set_search_options(max_length=length, min_length=length, do_sample=False)
    if request.options:
        params.set_speculative_options(**request.options)
    generator = og.Generator(model, params)
    generator.append_tokens(ids)
    start = time.perf_counter()
    while not generator.is_done():
        generator.generate_next_token()
    seconds = time.perf_counter() - start
    new = generator.get_sequence(0)[len(ids) :]
    stats = generator.get_speculative_stats()
    return Reply(
        prompt_tokens=len(ids),
        tokens=[int(token) for token in new],
        text=tokenizer.decode(new),
        tokens_per_s=(len(new) - 1) / seconds,
        drafted=stats["draft_tokens_proposed"],
        accepted=stats["draft_tokens_accepted"],
    )


def main() -> None:
    """Load the model and answer requests."""
    args = arguments(__doc__, "folder", draft=(Path,), threads=int)
    with reporting() as channel:
        model = load(Path(args.folder), args.draft, args.threads)
        tokenizer = og.Tokenizer(model)
        serve(channel, {}, lambda request: answer(model, tokenizer, request))


if __name__ == "__main__":
    main()
