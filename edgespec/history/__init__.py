"""Histories: an n-gram cache of a user's answers that outlives requests and restarts, in the user's own file.

:class:`History` shows and changes a history from outside; ``edgespec.load(..., history=NAME)`` uses one. This
room imports drafting, loading and decoding, and no requests.
"""

from edgespec.history.changes import Adaptation
from edgespec.history.manage import History, LearnedText, LearnedTurn, histories

__all__ = ["Adaptation", "History", "LearnedText", "LearnedTurn", "histories"]
