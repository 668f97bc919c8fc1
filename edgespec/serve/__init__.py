"""Models behind HTTP for clients of OpenAI, Anthropic and Ollama: extra ``[server]``, ``edgespec serve``."""
