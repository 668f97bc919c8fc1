"""The OpenVINO GenAI rows of compare.py, straight from the GGUF; runs with the Python of its own venv.

Usage: ``python -m tools.peers.openvino_worker MODEL.gguf [--prompt-lookup] --threads 2``. With prompt lookup
a request's ``options`` say how much (``num_assistant_tokens``, ``max_ngram_size``).
"""

import openvino_genai

from tools.arguments import arguments
from tools.peers.protocol import Reply, Request, reporting, serve


def answer(pipeline: openvino_genai.LLMPipeline, request: Request) -> Reply:
    """Run one request; the times are OpenVINO's own, of every step's end."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request.max_new_tokens
    config.do_sample = False
    config.ignore_eos = True
    for name, value in request.options.items():
        setattr(config, name, value)
    tokenizer = pipeline.get_tokenizer()
    inputs = tokenizer.encode(request.prompt, add_special_tokens=False)
    result = pipeline.generate(inputs, config)
    new = [int(token) for token in result.tokens[0]]
    raw = result.perf_metrics.raw_metrics
    ends_ms = raw.m_new_token_times
    seconds = (ends_ms[-1] - ends_ms[0]) / 1e3
    later = len(new) - raw.m_batch_sizes[0]
    return Reply(
        prompt_tokens=int(inputs.input_ids.shape[1]),
        tokens=new,
        text=tokenizer.decode(new),
        tokens_per_s=later / seconds,
    )


def main() -> None:
    """Load the model and answer requests."""
    args = arguments(__doc__, "gguf", prompt_lookup=False, threads=int)
    properties = {"INFERENCE_NUM_THREADS": args.threads}
    if args.prompt_lookup:
        properties["prompt_lookup"] = True
    with reporting() as channel:
        pipeline = openvino_genai.LLMPipeline(args.gguf, "CPU", **properties)
        facts = {"version": openvino_genai.get_version()}
        serve(channel, facts, lambda request: answer(pipeline, request))


if __name__ == "__main__":
    main()
