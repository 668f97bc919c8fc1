"""A trainer that does not wait for idle time."""

from edgespec.learning.gains import Example
from edgespec.learning.trainer import Trainer


class AtOnce(Trainer):
    """Learns from a text when it is offered, as if the user then took all the time that this takes."""

    def offer(self, example: Example) -> None:
        """Learn."""
        tuning = self._started()
        if tuning is None:
            raise AssertionError(self.problem)
        self._learn(tuning, example)
