"""A model behind HTTP, for OpenAI's and Anthropic's clients: extra ``[server]``, ``edgespec serve``."""
