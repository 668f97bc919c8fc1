"""The openai package by Chat Completions, streamed."""

import json
from typing import Any

from openai import OpenAI
from task import DESCRIPTION, FIRST, INSTRUCTIONS, MODEL, PARAMETERS, SECOND, URL, report, stock_level

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
function = {"name": "stock_level", "description": DESCRIPTION, "parameters": PARAMETERS}
messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]


def answer(question: str) -> str:
    messages.append({"role": "user", "content": question})
    while True:
        with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=[{"type": "function", "function": function}]
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            level = stock_level(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": level})


report(answer(FIRST), answer(SECOND))
