"""A model behind HTTP, for OpenAI's, Anthropic's and Ollama's clients: extra ``[server]``, ``edgespec serve``."""
