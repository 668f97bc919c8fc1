"""Two conversations with one model in an event loop: python two_chats_asyncio.py [MODEL].

The model answers both at once. While it writes, the loop is free for other tasks; a task that is cancelled,
here because its time is up, ends its answer.
"""

import asyncio
import sys
from collections.abc import Sequence

import edgespec


async def talk(name: str, conversation: edgespec.Conversation, questions: Sequence[str]) -> None:
    """Ask one question after another, and print each answer as a whole."""
    for question in questions:
        answer = await conversation.ask_async(question)
        stats = answer.stats
        print(f"{name} is asked: {question}\n{answer.text}")
        print(f"({stats.queued_s:.1f} s in the queue, {stats.tokens_per_s:.1f} tokens/s)\n")


async def write(conversation: edgespec.Conversation, question: str, seconds: float) -> None:
    """Print an answer piece by piece, and no longer than so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            async for piece in conversation.stream(question):
                print(piece, end="", flush=True)
    except TimeoutError:
        print(" ... time is up", end="")
    print()


async def main() -> None:
    """Talk with a cook and a gardener at once."""
    name = [*sys.argv[1:], "qwen2.5-coder-1.5b-instruct"][0]
    with await asyncio.to_thread(edgespec.load, name) as model:
        cook = model.conversation("You are a cook. Answer in one sentence.", max_new_tokens=100)
        gardener = model.conversation("You are a gardener. Answer in one sentence.", max_new_tokens=100)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(talk("The cook", cook, ["What goes with tomatoes?", "And what does not?"]))
            tasks.create_task(talk("The gardener", gardener, ["When are tomatoes sown?", "How deep?"]))
        await write(cook, "Write a recipe with what you named.", seconds=10)


if __name__ == "__main__":
    asyncio.run(main())
