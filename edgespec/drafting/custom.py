"""An app's own drafter as a source of proposals like any other.

An app may know what its model is about to write: names from a glossary, the file that is being edited,
yesterday's answer. Whatever it proposes, the answer is the target's own, token for token.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, cast

from edgespec.decoding.draft import Draft, Drafter, Round
from edgespec.drafting.model import Calibration, Guess
from edgespec.drafting.pricing import Prices
from edgespec.drafting.source import Source
from edgespec_models.errors import RequestError
from edgespec_models.schema import shown

_UNSAID = 0.75  # confidence of proposals that come without one, until rounds have shown it


class Custom(Source):
    """A :class:`Drafter` as a :class:`~edgespec.drafting.source.Source`; its proposals are checked."""

    is_needed = True  # the app has to see its errors

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.name = type(drafter).__name__
        self._drafter, self._vocab_size = drafter, vocab_size
        self._calibration = Calibration()
        self._proposed: list[Guess] = []  # this round

    def begin(self, tokens: Sequence[int], limit: int, prices: Prices) -> Draft:
        """Ask the app's drafter. RequestError if it returns anything but proposals."""
        proposed = self._drafter.propose(tokens, limit)
        draft = proposed if isinstance(proposed, Draft) else Draft(self._ids(proposed))
        ids = self._ids(draft.tokens)[:limit]
        confidence = self._stated(draft.confidence, ids)
        self._proposed = [Guess(*proposal, open=False) for proposal in zip(ids, confidence, strict=True)]
        expected = tuple(self._calibration.probability(guess) for guess in self._proposed)
        return Draft(ids, (self.name,) * len(ids), expected)

    def observe(self, round_: Round) -> None:
        """Judge all proposals, even if they were not verified."""
        self._calibration.judge(self._proposed, round_.judged)
        self._proposed = []
        self._drafter.observe(round_)

    def close(self) -> None:
        self._drafter.close()

    def _ids(self, tokens: object) -> tuple[int, ...]:
        allowed = f"token ids, whole numbers from 0 to {self._vocab_size - 1}"
        try:
            ids = tuple(cast(Iterable[Any], tokens))
        except TypeError:
            raise RequestError(
                f"{self.name}.propose returned {shown(tokens)}; allowed: a Draft, or a list of {allowed}"
            ) from None
        for at, id_ in enumerate(ids):
            whole = isinstance(id_, Integral) and not isinstance(id_, bool)
            if not whole or not 0 <= id_ < self._vocab_size:
                raise RequestError(f"{self.name}.propose returned [{at}] = {shown(id_)}; allowed: {allowed}")
        return tuple(map(int, ids))

    def _stated(self, stated: Sequence[float], ids: Sequence[int]) -> Sequence[float]:
        """The confidence that the drafter states for each proposal."""
        if not stated:
            return (_UNSAID,) * len(ids)
        if len(stated) < len(ids) or not all(0.0 <= confidence <= 1.0 for confidence in stated):
            raise RequestError(
                f"{self.name}.propose returned the confidence {shown(stated)}; allowed: a number from 0 to 1 "
                f"for each of its {len(ids)} proposals"
            )
        return stated[: len(ids)]
