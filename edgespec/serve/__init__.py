"""A model behind HTTP, as OpenAI's clients speak it: extra ``[server]``, command ``edgespec serve``."""
