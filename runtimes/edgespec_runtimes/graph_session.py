"""Where :mod:`edgespec_runtimes.session` was, for who still imports its step from here."""

from edgespec_runtimes.session import KV_STEP

__all__ = ["KV_STEP"]
