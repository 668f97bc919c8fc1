"""Programs of :mod:`tools.try_clients`: each has a client answer a question that a tool alone can answer.

They run in environments of their own. The argument is a function's name.
"""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

URL, MODEL, PIECES = (os.environ[f"TASK_{name}"] for name in ("URL", "MODEL", "PIECES"))
SYSTEM = (
    "You answer questions about the stock of a shop. Only the tool stock_level knows how many pieces there "
    "are. When it has answered, answer in one sentence and call nothing more."
)
QUESTION = "How many blue teapots are in stock?"
ASKED = {"role": "user", "content": QUESTION}
MESSAGES = [{"role": "system", "content": SYSTEM}, ASKED]
DESCRIPTION = "Look up how many pieces of an article are in stock."
PARAMETERS = {"type": "object", "properties": {"article": {"type": "string"}}, "required": ["article"]}
FUNCTION = {"name": "stock_level", "description": DESCRIPTION, "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALLS: list[str] = []
AT = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}


def stock_level(article: str) -> str:
    """Look up how many pieces of an article are in stock."""
    CALLS.append(article)
    if len(CALLS) > 5:  # small models do
        report("the tool was called again and again")
        os._exit(0)
    return f"{PIECES} pieces of {article} are in stock"


def report(answer: object) -> None:
    print(json.dumps({"calls": CALLS, "answer": str(answer)}), flush=True)


def openai_chat() -> str:
    from openai import OpenAI

    while True:
        with OpenAI(**AT).chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
            message = stream.get_final_completion().choices[0].message
        MESSAGES.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            level = stock_level(**json.loads(call.function.arguments))
            MESSAGES.append({"role": "tool", "tool_call_id": call.id, "content": level})


def openai_responses() -> str:
    from openai import OpenAI

    tools = [{"type": "function", **FUNCTION}]
    while True:
        with OpenAI(**AT).responses.stream(model=MODEL, input=MESSAGES, tools=tools) as stream:
            response = stream.get_final_response()
        MESSAGES.extend(item.model_dump(exclude_none=True) for item in response.output)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            level = stock_level(**json.loads(call.arguments))
            MESSAGES.append({"type": "function_call_output", "call_id": call.call_id, "output": level})


def anthropic_messages() -> str:
    from anthropic import Anthropic

    tool = {"name": "stock_level", "description": DESCRIPTION, "input_schema": PARAMETERS}
    ask = {"model": MODEL, "max_tokens": 300, "system": SYSTEM, "tools": [tool]}
    messages = [ASKED]
    while True:
        with Anthropic(base_url=URL, api_key="none").messages.stream(**ask, messages=messages) as stream:
            content = stream.get_final_message().content
        messages.append({"role": "assistant", "content": content})
        if not (calls := [block for block in content if block.type == "tool_use"]):
            return "".join(block.text for block in content if block.type == "text")
        results = [{"tool_use_id": call.id, "content": stock_level(**call.input)} for call in calls]
        messages.append({"role": "user", "content": [{"type": "tool_result", **one} for one in results]})


def ollama_chat() -> str:
    import ollama

    client = ollama.Client(host=URL)
    (name,) = (listed.model for listed in client.list().models if listed.model.startswith(MODEL))
    while True:
        pieces = list(client.chat(name, MESSAGES, tools=[stock_level], stream=True))
        text = "".join(piece.message.content or "" for piece in pieces)
        calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
        MESSAGES.append({"role": "assistant", "content": text, "tool_calls": calls})
        if not calls:
            return text
        for call in calls:
            level = stock_level(**call.function.arguments)
            MESSAGES.append({"role": "tool", "tool_name": call.function.name, "content": level})


def llama_index():
    from llama_index.llms.openai_like import OpenAILike

    able = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
    return OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", max_retries=0, **able)


def llama_index_agent() -> object:
    from llama_index.core.agent.workflow import FunctionAgent

    async def run() -> object:
        asked = FunctionAgent(tools=[stock_level], llm=llama_index(), system_prompt=SYSTEM).run(QUESTION)
        async for _ in asked.stream_events():
            pass
        return await asked

    return asyncio.run(run())


def llama_index_structure() -> object:
    from llama_index.core.llms import ChatMessage
    from pydantic import create_model

    stock = create_model("Stock", article=(str, ...), pieces=(int, ...))
    text = ChatMessage(f"We have {PIECES} blue teapots. Write that down.")
    *_, last = llama_index().as_structured_llm(stock).stream_chat([text])
    CALLS.append(last.raw.article)
    return last.raw.pieces


def langgraph() -> object:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model=MODEL, streaming=True, **AT), [stock_level], prompt=SYSTEM)
    return agent.invoke({"messages": [ASKED]})["messages"][-1].content


def haystack() -> object:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    model = OpenAIChatGenerator(Secret.from_token("none"), MODEL, api_base_url=f"{URL}/v1")
    tools = [create_tool_from_function(stock_level)]
    agent = Agent(chat_generator=model, tools=tools, system_prompt=SYSTEM, streaming_callback=lambda _: None)
    return agent.run(messages=[ChatMessage.from_user(QUESTION)])["messages"][-1].text


def smolagents() -> object:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    stock_level.__doc__ = f"{DESCRIPTION}\n\nArgs:\n    article: the name of the article"
    model = OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key="none")
    agent = ToolCallingAgent([tool(stock_level)], model, max_steps=4, stream_outputs=True)
    return agent.run(f"{QUESTION} Call stock_level, then final_answer.")


def dspy() -> object:
    import dspy

    dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", cache=False))
    return dspy.ReAct("question -> answer", tools=[stock_level], max_iters=4)(question=QUESTION).answer


def openai_agents() -> object:
    from agents import Agent, MaxTurnsExceeded, OpenAIResponsesModel, Runner, set_tracing_disabled
    from agents.mcp import MCPServerStdio
    from openai import AsyncOpenAI

    async def run() -> object:
        program = {"command": sys.executable, "args": [__file__, "mcp_server"], "env": dict(os.environ)}
        model = OpenAIResponsesModel(MODEL, AsyncOpenAI(**AT))
        async with MCPServerStdio(program, client_session_timeout_seconds=60) as server:
            agent = Agent(name="shop", instructions=SYSTEM, mcp_servers=[server], model=model)
            result = Runner.run_streamed(agent, QUESTION, max_turns=5)
            with suppress(MaxTurnsExceeded):  # small models call again and again
                async for event in result.stream_events():
                    if getattr(event, "name", "") == "tool_called":
                        CALLS.append(event.item.raw_item.arguments)
        return result.final_output

    set_tracing_disabled(True)
    return asyncio.run(run())


def mcp_server() -> None:
    from mcp.server import MCPServer

    shop = MCPServer("shop")
    shop.tool(description=DESCRIPTION)(stock_level)
    shop.run()


def ask(path: str, body: object = None) -> list[str]:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(URL + path, data, {"Content-Type": "application/json"}), timeout=300) as answer:
        return answer.read().decode().splitlines()


def read(**body: object) -> str:
    """The answer to a streamed chat; of a delta one field is read, and one entry."""
    while True:
        text, calls = "", {}
        lines = ask("/v1/chat/completions", {"stream": True, "tools": TOOLS, "messages": MESSAGES, **body})
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        for delta in [choice["delta"] for chunk in chunks for choice in chunk["choices"]]:
            if delta.get("content"):
                text += delta["content"]
            elif delta.get("tool_calls"):
                (part,) = delta["tool_calls"]
                call = calls.setdefault(part["index"], part)
                if call is not part:
                    call["function"]["arguments"] += part["function"]["arguments"]
        if not calls:
            return text
        MESSAGES.append({"role": "assistant", "content": text, "tool_calls": [*calls.values()]})
        for call in calls.values():
            level = stock_level(**json.loads(call["function"]["arguments"]))
            MESSAGES.append({"role": "tool", "tool_call_id": call["id"], "content": level})


def copilot() -> str:
    """With the provider Ollama."""
    assert "version" in json.loads(ask("/api/version")[0])
    name = json.loads(ask("/api/tags")[0])["models"][0]["model"]
    shown = json.loads(ask("/api/show", {"model": name})[0])
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"]
    assert name == f"{MODEL}:latest" and "tools" in shown["capabilities"]
    options = {"temperature": 0.1, "top_p": 1, "n": 1, "stream_options": {"include_usage": True}}
    return read(model=name, max_tokens=4096, **options)


def continue_editor() -> str:
    fill = {"model": MODEL, "prompt": "def add(a, b):\n    return", "suffix": "\n", "max_tokens": 8}
    assert any(
        '"text":"' in line for line in ask("/v1/completions", {**fill, "stream": True, "stop": ["\n\n"]})
    )
    return read(model=MODEL, max_tokens=2048, parallel_tool_calls=False)


def command(*words: str) -> str:
    """What a command of an agent prints that reads a file."""
    Path("stock.txt").write_text(f"blue teapots: {PIECES} pieces\n")
    ask = (
        f"Read the file {Path('stock.txt').absolute()} with your tool, once. {QUESTION} Answer in a sentence."
    )
    done = subprocess.run((*words, "-p", ask), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"it ended with {done.returncode}: {(done.stderr or done.stdout)[-300:]}")
    CALLS.append("teapot")  # its tool is its own
    return done.stdout


def qwen() -> str:
    os.environ.update(OPENAI_API_KEY="none", OPENAI_BASE_URL=f"{URL}/v1", OPENAI_MODEL=MODEL)
    os.environ["QWEN_CODE_API_TIMEOUT_MS"] = "1200000"  # by itself it gives up while a slow machine reads
    return command("qwen", "--auth-type", "openai", "--yolo", "--core-tools", "read_file")


def pi() -> str:
    provider = {
        "baseUrl": f"{URL}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [{"id": MODEL}],
    }
    folder = Path.home() / ".pi" / "agent"
    folder.mkdir(parents=True)
    (folder / "models.json").write_text(json.dumps({"providers": {"local": provider}}))
    return command("pi", "--provider", "local", "--model", MODEL, "--tools", "read", "--no-session")


if sys.argv[1] == "mcp_server":
    mcp_server()
else:
    report(globals()[sys.argv[1]]())
