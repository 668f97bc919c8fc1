"""The llama.cpp rows of compare.py: llama-server on the loopback interface, and its own timings.

Usage: ``python -m tools.peers.llama_worker MODEL.gguf --server PATH --threads 2``. Options it does not know
go to llama-server as they are, for rows with other modes.
"""

import argparse
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.peers.protocol import Reply, Request, reporting, serve

HOST = "127.0.0.1"
START_LIMIT_S = 180.0
OPTIONS = ["-c", "4096", "-np", "1", "--cache-ram", "0", "--no-ui", "--no-slots", "--offline", "-lv", "1"]


def free_port() -> int:
    """A port nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """One HTTP exchange: status and JSON answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=600)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Return when the model is loaded; TimeoutError or ChildProcessError if that does not happen."""
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise ChildProcessError(f"llama-server ended with {server.returncode} before it was ready")
        try:
            if ask(port, "GET", "/health")[0] == 200:
                return
        except ConnectionError:
            pass  # not listening yet
        time.sleep(0.2)
    raise TimeoutError(f"llama-server was not ready after {START_LIMIT_S:.0f} s")


def complete(port: int, request: Request) -> Reply:
    """Run one request; the speed is llama.cpp's own measure, without the token that prefill gives."""
    body = {
        "prompt": request.prompt,
        "n_predict": request.max_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    status, answer = ask(port, "POST", "/completion", body)
    if status != 200:
        raise RuntimeError(f"llama-server answered {status}: {answer}")
    timings = answer["timings"]
    return Reply(
        prompt_tokens=answer["tokens_evaluated"],
        tokens=answer["tokens"],
        text=answer["content"],
        tokens_per_s=(timings["predicted_n"] - 1) / timings["predicted_ms"] * 1e3,
        drafted=timings.get("draft_n", 0),
        accepted=timings.get("draft_n_accepted", 0),
    )


def main() -> None:
    """Start the server, answer requests, stop the server."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server below is stopped too
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args, extra = parser.parse_known_args()
    port = free_port()
    command = [args.server, "-m", args.gguf, "--host", HOST, "--port", str(port), *OPTIONS, *extra]
    command += ["-t", str(args.threads), "-tb", str(args.threads)]
    with reporting() as channel:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        try:
            wait_until_ready(server, port)
            serve(channel, {}, lambda request: complete(port, request))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
