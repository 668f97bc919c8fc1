"""The seats of running requests: the sessions of target and drafter, with their KV caches."""

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec_runtimes.kv_store import KvStore
from edgespec_runtimes.session import Session


@dataclass(slots=True, eq=False)
class Seat:
    """A request's sessions; ``drafter`` is None without a drafter, or if it reads one text at a time.

    ``caches`` keep texts that sessions drop.
    """

    target: Session
    drafter: Session | None
    caches: KvStore
    taken: bool = False

    def free(self) -> None:
        """Release the seat for another request."""
        self.taken = False


class Seats:
    """At most ``most`` seats, made when they are first needed; ``caches`` keep texts that their sessions
    drop.

    ``readers`` are the target's sessions for texts that become vectors.
    """

    def __init__(self, target: Session, drafter: Session | None, caches: KvStore, most: int) -> None:
        self.all, self._caches = [Seat(target, drafter, caches)], caches
        self.readers = list[Session]()
        self.most = most if target.model.takes_several else 1

    @property
    def sessions(self) -> list[Session]:
        """The sessions of all seats, and readers."""
        drafters = [seat.drafter for seat in self.all if seat.drafter is not None]
        return [*(seat.target for seat in self.all), *drafters, *self.readers]

    @property
    def any_taken(self) -> bool:
        """Whether a request is being answered."""
        return any(seat.taken for seat in self.all)

    def take(
        self, tokens: Sequence[int], starts: Sequence[int], *, on_disk: bool
    ) -> tuple[Seat, Sequence[int]]:
        """A free seat, whose target holds the longest known beginning of ``tokens``, and checkpoints.

        See :meth:`KvStore.fetch` for these and for ``starts``.
        """
        free = [seat for seat in self.all if not seat.taken]
        if not free:
            free.append(self._another())
        seat = max(free, key=lambda seat: seat.target.shared_prefix(tokens))
        others = [other.target for other in self.all if other.taken]
        checkpoints = self._caches.fetch(seat.target, tokens, others, starts, on_disk=on_disk)
        seat.taken = True
        return seat, checkpoints

    def drafters(self, seat: Seat) -> list[Session]:
        """The drafter's sessions of the other requests."""
        others = (other for other in self.all if other.taken and other is not seat)
        return [other.drafter for other in others if other.drafter is not None]

    def _another(self) -> Seat:
        target, drafter = self.all[0].target.model, self.all[0].drafter
        several = drafter is not None and drafter.model.takes_several
        second = drafter.model.session() if drafter is not None and several else None
        self.all.append(Seat(target.session(), second, self._caches))
        return self.all[-1]
