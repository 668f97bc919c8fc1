"""The edgespec row of compare.py: plain decoding through the public API, no drafter.

Usage: ``python -m tools.peers.edgespec_worker TARGET --threads 2`` (a catalogue name, a GGUF file or a
bundle's directory).
"""

import argparse

import edgespec
from tools.peers.protocol import Reply, Request, reserve_stdout, serve


def main() -> None:
    """Load the target and answer requests."""
    channel = reserve_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    options = edgespec.LoadOptions(threads=args.threads)
    with edgespec.load(args.target, drafter=None, options=options) as model:

        def generate(request: Request) -> Reply:
            result = model.generate(request.prompt, max_new_tokens=request.max_new_tokens, stop_at_eos=False)
            speed = 1 / result.stats.tpot_s if result.stats.tpot_s else 0.0
            return Reply(result.stats.prompt_tokens, len(result.tokens), speed, result.text)

        serve("edgespec", channel, generate)


if __name__ == "__main__":
    main()
