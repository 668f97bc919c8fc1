"""How often something is right: counts that forget."""

from dataclasses import dataclass


@dataclass(slots=True)
class Rate:
    """The share of right ones among judged ones, each of which fades those before it.

    Attributes:
        right: the right ones, faded.
        judged: all, faded.
        memory: the number of verdicts after which one has lost 1 - 1/e of its weight.
    """

    right: float = 0.0
    judged: float = 0.0
    memory: float = 256.0

    @classmethod
    def usual(cls, share: float, memory: float) -> "Rate":
        """A rate that begins at ``share``, as if it had been judged for long."""
        return cls(share * memory, memory, memory)

    def add(self, right: float, judged: float = 1.0) -> None:
        """Add ``judged`` verdicts; ``right`` of them are in favour."""
        keep = (1.0 - 1.0 / self.memory) ** judged
        self.right = keep * self.right + right
        self.judged = keep * self.judged + judged

    def fade(self, amount: float, share: float, weight: float | None = None) -> None:
        """Drift by ``amount`` towards a ``share`` with a weight in verdicts, because nothing is judged."""
        weight = self.memory if weight is None else weight
        self.right += amount * (weight * share - self.right)
        self.judged += amount * (weight - self.judged)

    def share(self, prior: float = 0.0, weight: float = 0.0) -> float:
        """The share, with a prior that weighs as much as ``weight`` verdicts."""
        return (self.right + weight * prior) / (self.judged + weight)
