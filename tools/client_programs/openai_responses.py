"""The openai package by Responses, streamed; each request goes on behind the last."""

import json
from typing import Any

from openai import OpenAI, omit
from task import DESCRIPTION, FIRST, INSTRUCTIONS, MODEL, PARAMETERS, SECOND, URL, report, stock_level

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
tool: Any = {
    "type": "function",
    "name": "stock_level",
    "description": DESCRIPTION,
    "parameters": PARAMETERS,
    "strict": True,
}
last = None


def answer(question: str) -> str:
    global last
    items: Any = question
    while True:
        with client.responses.stream(
            model=MODEL,
            instructions=INSTRUCTIONS,
            input=items,
            tools=[tool],
            previous_response_id=last or omit,
        ) as stream:
            response = stream.get_final_response()
        last = response.id
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": stock_level(**json.loads(call.arguments)),
            }
            for call in calls
        ]


report(answer(FIRST), answer(SECOND))
