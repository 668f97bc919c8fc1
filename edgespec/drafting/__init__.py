"""Drafters: where proposals come from."""

from edgespec.drafting.draft import NO_DRAFT, Draft, Drafter

__all__ = ["Draft", "Drafter", "NO_DRAFT"]
