"""What a trimmed drafter should be able to write in this request: the words of its prompt.

Answers take up words of their prompts, and those are the words a list made for all prompts lacks. (An
in-context vocabulary as in NanoSpec, arXiv 2605.26444, here besides the trimmed rows instead of them.)
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from edgespec_models.text.tokenizer import Tokenizer

__all__ = ["context_tokens"]

_MOST = 192


def context_tokens(prompt: Sequence[int], tokenizer: Tokenizer, kept: npt.NDArray[np.int32]) -> list[int]:
    """Tokens of ``prompt``, and other spellings of them, that are not ``kept``; the latest, at most 192."""
    known = set(kept.tolist())
    found: dict[int, None] = {}
    for token in dict.fromkeys(reversed(prompt)):
        if not tokenizer.is_special(token):
            found |= dict.fromkeys(other for other in _spellings(token, tokenizer) if other not in known)
        if len(found) >= _MOST:
            break
    return list(found)[:_MOST]


def _spellings(token: int, tokenizer: Tokenizer) -> Iterator[int]:
    """The token itself; with and without a space before it, its first letter small or large."""
    yield token
    word = tokenizer.token_bytes(token).lstrip(b" ")
    for first in dict.fromkeys((word[:1].lower(), word[:1].upper())):
        for spelling in (first + word[1:], b" " + first + word[1:]):
            other = tokenizer.id_of_bytes(spelling)
            if other is not None:
                yield other
