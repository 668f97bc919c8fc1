"""Have targets write the text that vocabulary trimming counts.

Usage: ``python -m tools.make_calibration_text TARGET.gguf [TARGET.gguf ...] --server PATH -o OUT.jsonl.gz``

PATH is llama.cpp's llama-server (``python -m tools.peers.install`` builds it): it answers eight prompts at
a time, which is two to three times as fast as one after another. Every target answers every prompt of
``tools/calibration_prompts.py``; each line of OUT holds the target's name and a text, and its prompt
where that stands by itself.
"""

import argparse
import gzip
import json
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from tools.calibration_prompts import first_round, second_round
from tools.peers.llama_worker import HOST, ask, free_port, wait_until_ready

PARALLEL = 8
CONTEXT = 1024  # of each of them
SHORTEST = 80  # characters; a text to work on


def answer(port: int, prompt: str, tokens: int) -> str:
    """One greedy answer."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        # Other samplers sort the whole vocabulary, which takes longer than the pass.
        "samplers": ["top_k"],
        "top_k": 1,
    }
    status, reply = ask(port, "POST", "/v1/chat/completions", body)
    if status != 200:
        raise RuntimeError(f"llama-server answered {status}: {reply}")
    text: str = reply["choices"][0]["message"]["content"]
    return text


def write_texts(port: int, prompts: int, tokens: int) -> Iterable[dict[str, str]]:
    """Answers to ``prompts`` prompts: two thirds stand by themselves, one third work on those answers."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        first = list(islice(first_round(), prompts * 2 // 3))
        texts = []
        for prompt, text in zip(first, pool.map(lambda p: answer(port, p, tokens), first), strict=True):
            texts.append(text)
            yield {"prompt": prompt, "text": text}
        long = [text for text in texts if len(text) >= SHORTEST][::2]
        for text in pool.map(lambda p: answer(port, p, tokens), second_round(long)):
            yield {"text": text}


def records_of(gguf: Path, args: argparse.Namespace) -> list[dict[str, str]]:
    """All texts of one target."""
    port = free_port()
    command = [args.server, "-m", gguf, "--host", HOST, "--port", str(port), "-np", str(PARALLEL)]
    command += ["-c", str(PARALLEL * CONTEXT), "--no-ui", "--offline", "-lv", "1", "-t", str(args.threads)]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(server, port)
        records = []
        for record in write_texts(port, args.prompts, args.tokens):
            records.append({"target": gguf.stem, **record})
            print(f"\r{gguf.stem}: {len(records)} texts", end="", flush=True)
        print()
        return records
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Read the arguments, ask every target, write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path, nargs="+")
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=360)
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--keep", type=Path, help="an earlier OUT; its texts stay, but for prompts asked again"
    )
    args = parser.parse_args()
    records = [record for gguf in args.gguf for record in records_of(gguf, args)]
    if args.keep is not None:
        records += [json.loads(line) for line in gzip.decompress(args.keep.read_bytes()).splitlines()]
    first = {(record["target"], record.get("prompt", record["text"])): record for record in reversed(records)}
    lines = [json.dumps(record, ensure_ascii=False) for record in reversed(first.values())]
    # No time stamp, so that the same text gives the same file.
    args.out.write_bytes(gzip.compress("\n".join(lines).encode("utf-8"), compresslevel=9, mtime=0))
    print(f"{len(lines)} texts, {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
