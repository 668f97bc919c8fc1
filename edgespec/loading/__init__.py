"""From what a user names to open sessions whose passes have a price.

Imports the packages below edgespec, and of edgespec nothing; drafting, requests and commands import it.
"""
