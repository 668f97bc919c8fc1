"""Claude Code reads a file, and is asked on."""

import os
from pathlib import Path

from task import MODEL, PIECES, SECOND, URL, report_commands

Path("stock.txt").write_text(f"blue teapots: {PIECES} pieces\n")
os.environ.update(
    ANTHROPIC_BASE_URL=URL,
    ANTHROPIC_AUTH_TOKEN="none",
    ANTHROPIC_MODEL=MODEL,
    ANTHROPIC_SMALL_FAST_MODEL=MODEL,
    API_TIMEOUT_MS="3000000",
    CLAUDE_STREAM_IDLE_TIMEOUT_MS="3000000",  # else it leaves after five minutes
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    CLAUDE_CONFIG_DIR=str(Path("claude").absolute()),
)
first = (
    f"Read the file {Path('stock.txt').absolute()} with the tool Read, once. When it has answered, say in "
    "one sentence how many blue teapots are in stock, and call nothing more."
)
ask = ("claude", "--tools", "Read", "--allowedTools", "Read", "-p")
report_commands((*ask, first), (*ask, SECOND, "--continue"))
