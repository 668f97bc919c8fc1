"""aider writes a function into a file, then renames it.

The argument is the provider: openai, anthropic or ollama_chat.
"""

import os
import sys
from pathlib import Path

from task import MODEL, PIECES, URL, report_commands

file = Path("stock.py")
file.write_text("")
provider = sys.argv[1]
os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    OPENAI_API_BASE=f"{URL}/v1",
    OPENAI_API_KEY="none",
    ANTHROPIC_API_BASE=URL,
    OLLAMA_API_BASE=URL,
    ANTHROPIC_API_KEY="none",
)
ask = (
    "aider",
    "--model",
    f"{provider}/{MODEL}",
    "--edit-format",
    "whole",
    "--yes-always",
    "--no-git",
    "--no-analytics",
    "--no-check-update",
    "--no-show-model-warnings",
    "--no-pretty",
    "--restore-chat-history",
    "--message",
)
report_commands(
    (*ask, f"Write a function pieces() that returns {PIECES}.", str(file)),
    (*ask, "Rename the function that you wrote to teapots.", str(file)),
    file=file,
)
