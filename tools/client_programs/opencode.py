"""opencode reads a file, and is asked on; its provider is the AI SDK's for OpenAI's likes.

Its own prompt of 9,000 tokens is too much for a model of this size.
"""

import json
import os
from pathlib import Path

from task import MODEL, PIECES, SECOND, URL, report_commands

Path("stock.txt").write_text(f"blue teapots: {PIECES} pieces\n")
provider = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "local",
    "options": {"baseURL": f"{URL}/v1", "apiKey": "none"},
    "models": {MODEL: {"name": MODEL, "limit": {"context": 32768, "output": 1024}}},
}
agent = {
    "prompt": "You answer questions about files. The tool read shows a file. When it has answered, "
    "answer the user in one sentence, and call nothing more.",
    "tools": {"*": False, "read": True},
}
Path("opencode.json").write_text(
    json.dumps(
        {
            "provider": {"local": provider},
            "small_model": f"local/{MODEL}",
            "agent": {"build": agent},
            "permission": "allow",
            "autoupdate": False,
            "share": "disabled",
        }
    )
)
os.environ["OPENCODE_DISABLE_MODELS_FETCH"] = os.environ["OPENCODE_DISABLE_AUTOUPDATE"] = "1"
first = (
    f"Read the file {Path('stock.txt').absolute()} with the tool read, once. When it has answered, say in "
    "one sentence how many blue teapots are in stock, and call nothing more."
)
ask = ("opencode", "run", "--model", f"local/{MODEL}")
report_commands((*ask, first), (*ask, "--continue", SECOND))
