"""What a user's answers teach: an n-gram cache that outlives requests and restarts, in a file of the user's.

:class:`Profile` looks at a profile from outside. ``edgespec.load(..., profile=NAME)`` uses one.
"""

from edgespec.profile.manage import LearnedText, Profile, profiles

__all__ = ["LearnedText", "Profile", "profiles"]
