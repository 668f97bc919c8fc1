"""What a user's answers teach: an n-gram cache that outlives requests and restarts, in a file of the user's.

:class:`History` looks at a history from outside; ``edgespec.load(..., history=NAME)`` uses one. This room
imports drafting, learning, loading and decoding, and no requests.
"""

from edgespec.history.manage import History, LearnedText, histories

__all__ = ["LearnedText", "History", "histories"]
