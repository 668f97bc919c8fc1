"""Fills for an editor's plug-in: a JSON object a line comes in, and one goes out.

In comes {"id": ANY, "prefix": TEXT, "suffix": TEXT}, perhaps with "max_lines". Out goes {"id": ANY, "text":
TEXT}, or "error" instead of it. The model keeps what it has read: a request costs what was typed since.
"""

import json
import sys
from typing import Any

import edgespec


def answer(model: edgespec.Model, asked: dict[str, Any]) -> dict[str, Any]:
    """What fills a hole, or what is wrong."""
    try:
        lines = asked.get("max_lines", 8)
        fill = model.fill(asked["prefix"], asked["suffix"], max_lines=lines, max_tokens=128)
    except edgespec.EdgespecError as error:
        return {"error": str(error)}
    return {"text": fill.text}


def main() -> None:
    """Answer until the editor closes the pipe."""
    with edgespec.load("qwen2.5-coder-1.5b-instruct") as model:
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps({"id": asked["id"], **answer(model, asked)}), flush=True)


if __name__ == "__main__":
    main()
