"""litellm.

The argument is the provider before the model's name: openai, hosted_vllm, anthropic or ollama_chat.
"""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks another server for prices first

import litellm
from task import DESCRIPTION, FIRST, INSTRUCTIONS, MODEL, PARAMETERS, SECOND, URL, report, stock_level

litellm.suppress_debug_info = True
provider = sys.argv[1]
base = URL if provider in ("anthropic", "ollama_chat") else f"{URL}/v1"
function = {"name": "stock_level", "description": DESCRIPTION, "parameters": PARAMETERS}
messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]


def answer(question: str) -> str:
    messages.append({"role": "user", "content": question})
    while True:
        chunks = litellm.completion(
            model=f"{provider}/{MODEL}",
            api_base=base,
            api_key="none",
            messages=messages,
            stream=True,
            tools=[{"type": "function", "function": function}],
            max_tokens=300,
            num_retries=0,
        )
        message = litellm.stream_chunk_builder(list(chunks), messages=messages).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            level = stock_level(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": level})


report(answer(FIRST), answer(SECOND))
