"""The edgespec rows of compare.py: decoding through the public API.

Usage: ``python -m tools.peers.edgespec_worker TARGET [--drafter DRAFTER] --threads 2``. Both are a catalogue
name, a GGUF file or a bundle's directory; DRAFTER may be ``ngram``; without it, plain decoding.
"""

from importlib.metadata import version

import edgespec
from tools.arguments import arguments
from tools.peers.protocol import Reply, Request, reporting, serve


def answer(model: edgespec.Model, request: Request) -> Reply:
    """Run one request. A conversation goes through ``chat``, so that a drafter sees its own template."""
    limits = edgespec.RequestOptions(max_new_tokens=request.max_new_tokens, stop_at_eos=False)
    if request.chat is None:
        result = model.generate(request.prompt, **limits)
    else:
        result = model.chat([{"role": "user", "content": request.chat}], **limits)
    stats = result.stats
    return Reply(
        prompt_tokens=stats.prompt_tokens,
        tokens=list(result.tokens),
        text=result.text,
        tokens_per_s=stats.tokens_per_s,
        drafted=stats.drafted,
        accepted=stats.accepted,
    )


def main() -> None:
    """Load the models and answer requests."""
    args = arguments(__doc__, "target", drafter=(str,), threads=int)
    options = edgespec.LoadOptions(threads=args.threads, prompt_cache_bytes=0)
    with reporting() as channel, edgespec.load(args.target, args.drafter, options=options) as model:
        parity = model.target.report().get("parity") or {}
        facts = {"version": version("edgespec"), "kl": parity.get("kl")}
        serve(channel, facts, lambda request: answer(model, request))


if __name__ == "__main__":
    main()
