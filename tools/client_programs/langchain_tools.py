"""langchain: a model with a tool, streamed. The argument is the API: chat, responses, messages or ollama."""

import sys
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from task import FIRST, INSTRUCTIONS, MODEL, SECOND, URL, report, stock_level

lookup = tool(stock_level)


def model_of(api: str) -> BaseChatModel:
    if api == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_retries=0, max_tokens=300)
    if api == "ollama":
        from langchain_ollama import ChatOllama

        return ChatOllama(model=MODEL, base_url=URL, num_predict=300)
    from langchain_openai import ChatOpenAI

    responses = api == "responses"
    return ChatOpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, use_responses_api=responses
    )


model = model_of(sys.argv[1]).bind_tools([lookup])
messages: list[Any] = [SystemMessage(INSTRUCTIONS)]


def answer(question: str) -> str:
    messages.append(HumanMessage(question))
    while True:
        chunks = list(model.stream(messages))
        message = sum(chunks[1:], chunks[0])
        messages.append(message)
        if not message.tool_calls:
            return message.text
        messages.extend(lookup.invoke(call) for call in message.tool_calls)


report(answer(FIRST), answer(SECOND))
