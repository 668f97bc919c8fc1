"""A trainer that does not wait for idle time."""

from edgespec.learning.trainer import Trainer
from edgespec_export.align.settings import Text


class AtOnce(Trainer):
    """Learns from a text when it is offered, as if the user then took all the time that this takes."""

    def offer(self, example: Text) -> None:
        """Learn."""
        tuning = self._started()
        if tuning is None:
            raise AssertionError(self.problem)
        self._learn(tuning, example)
