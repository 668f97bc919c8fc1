"""Loading: a model's name or path becomes an open session whose passes have measured costs.

It imports the packages below edgespec, and nothing of edgespec. Drafting, requests and commands import it.
"""
