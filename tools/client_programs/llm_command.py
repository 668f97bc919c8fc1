"""llm's command, its models in extra-openai-models.yaml. The argument is the API: chat or responses."""

import os
import sys
from pathlib import Path

from task import FIRST, INSTRUCTIONS, MODEL, PIECES, SECOND, URL, report_commands

home = Path("llm").absolute()
home.mkdir()
os.environ["LLM_USER_PATH"] = str(home)
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: local\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  api_key_name: local\n"
    f"  supports_tools: true\n  responses: {'true' if sys.argv[1] == 'responses' else 'false'}\n"
)
(home / "keys.json").write_text('{"local": "none"}')
Path("tools.py").write_text(
    "def stock_level(article: str) -> str:\n"
    '    "Look up how many pieces of an article are in stock."\n'
    "    assert 'teapot' in article.lower(), article\n"
    f"    return f'{PIECES} pieces of {{article}} are in stock'\n"
)
report_commands(
    ("llm", "-m", "local", "--functions", "tools.py", "-s", INSTRUCTIONS, FIRST),
    ("llm", "-c", "--functions", "tools.py", SECOND),
)
