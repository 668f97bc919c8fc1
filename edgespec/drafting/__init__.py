"""Where proposals come from, and which of them are made."""

from edgespec.drafting.draft import NO_DRAFT, Draft, Source

__all__ = ["Draft", "NO_DRAFT", "Source"]
