"""The anthropic package, streamed."""

from typing import Any

from anthropic import Anthropic
from task import DESCRIPTION, FIRST, INSTRUCTIONS, MODEL, PARAMETERS, SECOND, URL, report, stock_level

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
tool: Any = {"name": "stock_level", "description": DESCRIPTION, "input_schema": PARAMETERS}
messages: list[Any] = []


def answer(question: str) -> str:
    messages.append({"role": "user", "content": question})
    while True:
        with client.messages.stream(
            model=MODEL, max_tokens=300, system=INSTRUCTIONS, messages=messages, tools=[tool]
        ) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": stock_level(**call.input)}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})


report(answer(FIRST), answer(SECOND))
