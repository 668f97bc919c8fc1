"""pydantic-ai: an agent with a tool, its history sent back. The argument: chat, responses or messages."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models import Model
from task import FIRST, INSTRUCTIONS, MODEL, SECOND, URL, report, stock_level


def model_of(api: str) -> Model:
    if api == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api]
    return kind(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))


agent = Agent(model_of(sys.argv[1]), instructions=INSTRUCTIONS, tools=[stock_level])
first = agent.run_sync(FIRST)
second = agent.run_sync(SECOND, message_history=first.all_messages())
report(first.output, second.output)
