"""Facts from texts into a table: python extract_to_csv.py FILE ... > invoices.csv.

Each answer is JSON that fits a schema, whatever the model is: what would not fit is never written.
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import edgespec

MODEL = "qwen2.5-coder-1.5b-instruct"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "vendor": {"type": "string", "maxLength": 60},  # without a limit a model may go on for long
        "date": {"type": "string", "format": "date"},
        "total": {"type": "number", "minimum": 0, "maximum": 1_000_000, "multipleOf": 0.01},
        "currency": {"enum": ["EUR", "USD", "GBP"]},
    },
    "required": ["vendor", "date", "total", "currency"],
    "additionalProperties": False,
}
SYSTEM = "You read invoices. Give the vendor, the date as YYYY-MM-DD, the total and the currency, in JSON."


def extract(model: edgespec.Model, text: str) -> dict[str, Any] | None:
    """The facts of ``text``; None if the answer did not come to its end."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    answer = model.chat(messages, response_format=edgespec.JsonSchema(SCHEMA), max_new_tokens=200)
    if answer.finish_reason != "stop":
        return None
    facts: dict[str, Any] = json.loads(answer.text)
    return facts


def main() -> None:
    """A row for each file, to standard output."""
    table = csv.DictWriter(sys.stdout, ["file", *SCHEMA["properties"]])
    table.writeheader()
    with edgespec.load(MODEL) as model:
        for name in sys.argv[1:]:
            facts = extract(model, Path(name).read_text(encoding="utf-8"))
            if facts is None:
                print(f"{name}: no whole answer; it is left out", file=sys.stderr)
            else:
                table.writerow({"file": name, **facts})


if __name__ == "__main__":
    main()
