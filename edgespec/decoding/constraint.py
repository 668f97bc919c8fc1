"""One request's grammar: which tokens may come next, behind what is committed and behind proposals."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgespec_models.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Allowed", "Constraint"]


class Allowed:
    """The tokens that may come next; at least one.

    Args:
        mask: a bit for each token of the vocabulary, the lowest first, in words of 32.
    """

    def __init__(self, mask: bytes) -> None:
        self._words = np.frombuffer(mask, "<u4")

    def __contains__(self, token: int) -> bool:
        return bool(self._words[token >> 5] >> (token & 31) & 1)

    @property
    def tokens(self) -> list[int]:
        """All of them, the lowest first."""
        return [int(token) for token in np.flatnonzero(self._bits())]

    @property
    def only(self) -> int | None:
        """The token that has to come; None where there is a choice."""
        (at,) = np.nonzero(self._words)
        if len(at) != 1 or int(self._words[at[0]]).bit_count() != 1:
            return None
        return 32 * int(at[0]) + int(self._words[at[0]]).bit_length() - 1

    def forbid_others(self, row: npt.NDArray[np.float32]) -> None:
        """Set the logits of all other tokens, float32 ``(vocab,)``, to minus infinity."""
        bits = self._bits()[: len(row)]
        np.copyto(row[: len(bits)], -np.inf, where=bits == 0)
        row[len(bits) :] = -np.inf

    def _bits(self) -> npt.NDArray[np.uint8]:
        return np.unpackbits(self._words.view(np.uint8), bitorder="little")


class Constraint:
    """What one request's grammar allows: a :class:`RowStep` that may be asked for more.

    It follows the committed tokens and reads proposals behind them; what was found out about a proposal is
    kept for verification. One thread at a time.

    Allowed is what the text can go on with, written as the tokenizer would write it: text that the grammar
    forces comes in the tokens that a model expects for it, so that of several ways to spell it one is left.

    Args:
        matcher: llguidance's, behind the empty text.
        ends: tokens that end a text.
    """

    def __init__(self, matcher: "LLMatcher", ends: Collection[int]) -> None:
        self._matcher, self._ends = matcher, ends
        self._prompt_length: int | None = None
        self._committed: list[int] = []
        self._ended = False
        self._read: list[int] = []  # by the matcher: what is committed and proposals
        # Behind so many of those: what is allowed, where anybody has asked; whether the text is over.
        self._allowed: list[Allowed | None] = [None]
        self._complete = [False]

    def try_out(self) -> None:
        """See that the grammar compiled, can begin, and can be rolled back.

        Raises:
            RequestError: it cannot; with llguidance's message.
        """
        first = next((token for token in self.allowed(()).tokens if token not in self._ends), None)
        if first is not None:
            self._move([first])
            self._move([])
            self._check()

    def begin(self, tokens: Sequence[int]) -> None:
        """A round begins behind ``tokens``, all that are committed; the first round's are the prompt.

        Raises:
            RequestError: what follows the prompt is not what the grammar allows.
        """
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        answer = list(tokens[self._prompt_length :])
        self._ended = bool(answer) and answer[-1] in self._ends
        self._committed = answer[:-1] if self._ended else answer
        # What was read behind them already stays: verification asks for it again.
        if self._read[: len(self._committed)] != self._committed:
            self._move(self._committed)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether nothing can follow ``tokens``, all that are committed, but a token that ends the text."""
        self.begin(tokens)
        return self._ended or self._complete[len(self._committed)]

    def completes(self, drafted: Sequence[int]) -> bool:
        """The same of the committed tokens and ``drafted``, which are allowed."""
        if drafted and drafted[-1] in self._ends:
            return True
        self._move([*self._committed, *drafted])
        return self._complete[len(self._read)]

    def allowed(self, drafted: Sequence[int]) -> Allowed:
        """What may follow the committed tokens and ``drafted``, which are allowed and end nothing.

        Raises:
            RequestError: the grammar takes too long from here, or leaves no token.
        """
        wanted = [*self._committed, *drafted]
        known = self._allowed[len(wanted)] if self._read[: len(wanted)] == wanted else None
        if known is None:
            self._move(wanted)
            known = Allowed(self._matcher.compute_bitmask())
            self._check()
            self._allowed[len(wanted)] = known
        return known

    def apply(self, row: npt.NDArray[np.float32], drafted: Sequence[int]) -> None:
        """Forbid what may not follow ``drafted``; see :class:`~edgespec.decoding.rows.RowStep`."""
        if not (drafted and drafted[-1] in self._ends):  # what follows an end is dropped
            self.allowed(drafted).forbid_others(row)

    def _move(self, wanted: list[int]) -> None:
        """Have the matcher read exactly ``wanted``."""
        shared = _shared_length(self._read, wanted)
        if shared < len(self._read):
            self._matcher.rollback(len(self._read) - shared)
            del self._read[shared:], self._allowed[shared + 1 :], self._complete[shared + 1 :]
        for token in wanted[shared:]:
            self._matcher.consume_token(token)
            self._check()
            self._read.append(token)
            self._allowed.append(None)
            self._complete.append(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            said = self._matcher.get_error().removesuffix("<non-verbose/>").strip()
            said = said.replace("NoExtensionBias", "no text of this vocabulary fits it")
            raise RequestError(f"the response_format cannot be followed: {said[:1000]}")


def _shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
