"""openai-agents: a session, and streamed runs. The argument is the API: chat or responses."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from task import FIRST, INSTRUCTIONS, MODEL, SECOND, URL, report, stock_level

KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


async def main() -> None:
    set_tracing_disabled(True)
    model = KINDS[sys.argv[1]](MODEL, AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))
    agent = Agent(name="shop", instructions=INSTRUCTIONS, tools=[function_tool(stock_level)], model=model)
    session, answers = SQLiteSession("shop"), []
    for question in (FIRST, SECOND):
        result = Runner.run_streamed(agent, question, session=session, max_turns=5)
        async for _ in result.stream_events():
            pass
        answers.append(result.final_output)
    report(*answers)


asyncio.run(main())
