"""The ollama package, streamed, with a Python function as its tool; then an answer in a form."""

import json
from typing import Any

import ollama
from task import FIRST, INSTRUCTIONS, MODEL, SECOND, URL, report, stock_level

client = ollama.Client(host=URL)
messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]


def answer(question: str) -> str:
    messages.append({"role": "user", "content": question})
    while True:
        pieces = list(client.chat(MODEL, messages, tools=[stock_level], stream=True))
        text = "".join(piece.message.content or "" for piece in pieces)
        calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
        messages.append({"role": "assistant", "content": text, "tool_calls": calls})
        if not calls:
            return text
        for call in calls:
            level = stock_level(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": level})


assert MODEL in client.show(MODEL).modelinfo["general.basename"]
assert f"{MODEL}:latest" in [listed.model for listed in client.list().models]
form = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
formed = client.generate(MODEL, "Name a colour.", format=form, options={"num_predict": 50})
assert list(json.loads(formed.response)) == ["colour"], formed.response
report(answer(FIRST), answer(SECOND))
