"""Codex reads a file with a command, and is asked on."""

import os
from pathlib import Path

from task import MODEL, PIECES, SECOND, URL, report_commands

Path("stock.txt").write_text(f"blue teapots: {PIECES} pieces\n")
home = Path("codex").absolute()
home.mkdir()
(home / "config.toml").write_text(
    f'model = "{MODEL}"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
    f'base_url = "{URL}/v1"\nwire_api = "responses"\n'
    "stream_idle_timeout_ms = 1800000\nrequest_max_retries = 0\n"
)
os.environ["CODEX_HOME"] = str(home)
first = (
    'Run the command "cat stock.txt" with the tool exec_command, once. When it has answered, say in one '
    "sentence how many blue teapots are in stock, and call nothing more."
)
rest = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
report_commands(("codex", "exec", *rest, first), ("codex", "exec", "resume", "--last", *rest, SECOND))
