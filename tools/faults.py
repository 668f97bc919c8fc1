"""What is left when edgespec is killed, and whether the same command mends it.

    python -m tools.faults export download history --kills 500
    python -m tools.faults full readonly clock memory flips

Each kind does its work again and again, in processes that are killed (SIGKILL): once before each call of
Python's that changes a file, then at random moments. After each kill everything has to open or to be made
again by the same call, within minutes: nothing half-written is taken for whole, what was acknowledged is
there, no lock is left, and no more files than there should be. ``index`` is a download by pip, which takes
seconds, so give it few kills. The other kinds are conditions under which all of that is tried
(``tools/fault_conditions.py``). Needs fork, no network and no models: what is exported, pulled and learned is
made on the spot.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from tools.arguments import arguments
from tools.fault_conditions import CONDITIONS, prepare
from tools.fault_kinds import KINDS, Killed, Kind, hubs
from tools.fault_processes import Child, import_all, say

LIMIT_S = 300.0  # however busy the machine
ROUNDS_A_FOLDER = 20  # so that what piles up shows
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {f"os.{name}" for name in ("rename", "remove", "mkdir", "rmdir", "truncate", "chmod", "link")}


def at_call(number: int, work: Callable[[], None]) -> Callable[[], None]:
    """``work`` that is killed before its call with this number that changes files."""
    left = number

    def hook(event: str, given: tuple[object, ...]) -> None:
        nonlocal left
        writes = event in CHANGES or (event == "open" and int(str(given[2] or 0)) & WRITES)
        left -= bool(writes)
        if writes and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def killed() -> None:
        sys.addaudithook(hook)
        work()

    return killed


@dataclass
class Tally:
    """What a campaign saw."""

    stages: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    early: int = 0  # ended before they were killed

    @property
    def kills(self) -> int:
        """Processes that were killed at their work."""
        return self.stages.total()

    def add(self, killed: Sequence[Killed], stage: Callable[[Killed], str]) -> None:
        """Count what was killed."""
        for each in killed:
            self.early += not each.by_us
            if each.by_us:
                self.stages[stage(each)] += 1

    def show(self, name: str) -> None:
        """Print all of it."""
        print(f"{name}: {self.kills} kills, {self.early} ended before; faults: {len(self.faults)}")
        for what, counts in (("killed while", self.stages), ("then", self.outcomes)):
            print("".join(f"  {what} {each}: {count}\n" for each, count in counts.most_common()), end="")
        print(*self.faults[:10], sep="\n", flush=True)


def kill_all(kind: Kind, folder: Path, numbers: Sequence[int], moments: Sequence[float]) -> list[Killed]:
    """Begin a process for each number, and kill each after its moment."""
    begun, killed = time.monotonic(), []
    children = [Child.of(partial(kind.run, folder, number)) for number in numbers]
    for moment, number, child in sorted(
        zip(moments, numbers, children, strict=True), key=lambda each: each[0]
    ):
        time.sleep(max(0.0, begun + moment - time.monotonic()))
        child.kill()
        killed.append(_ended(number, child))
    return killed


def _ended(number: int, child: Child) -> Killed:
    at = time.time()
    status, said = child.end()
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("the work failed by itself:\n" + "\n".join(said))
    return Killed(number, said, at, os.WIFSIGNALED(status))


def checked(kind: Kind, folder: Path, killed: Sequence[Killed]) -> tuple[bool, str]:
    """What a process of its own finds; whether it is as it should be."""
    child = Child.of(lambda: say(kind.check(folder, killed)))
    signal.signal(signal.SIGALRM, lambda *_: child.kill())
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    status, said = child.end()
    signal.setitimer(signal.ITIMER_REAL, 0)
    if os.WIFSIGNALED(status):
        return False, f"no end within {LIMIT_S:.0f} s: {said[-1:]}"
    return not status, "\n".join(said) if status else said[-1]


class Campaign:
    """Kills of one kind, each followed by a check.

    Args:
        kind: what is killed.
        scratch: where.
    """

    def __init__(self, kind: Kind, scratch: Path) -> None:
        self._kind, self._scratch, self.tally = kind, scratch, Tally()
        self._rounds, self._folder, self._killed = 0, scratch, list[Killed]()
        self._longest = max((self._whole(n) for n in range(kind.variants)), default=kind.seconds)

    def at_every_call(self) -> None:
        """Kill each variant once before each of its calls that change files."""
        for number in range(self._kind.variants):
            for call in range(1, 10_000):
                self._begin(call == 1)
                run = at_call(call, partial(self._kind.run, self._folder, number))
                killed = _ended(number, Child.of(run))
                self._check([killed])
                if not killed.by_us:
                    break

    def at_random(self, kills: int, rng: Random) -> None:
        """Kill ``kills`` processes that had not done their work yet."""
        kind, number = self._kind, 0
        end = self.tally.kills + kills
        while self.tally.kills < end:
            self._begin(self._rounds % ROUNDS_A_FOLDER == 0)
            numbers = range(number, number + kind.at_once)
            number += kind.at_once
            self._check(
                kill_all(kind, self._folder, numbers, [rng.uniform(0.0, self._longest) for _ in numbers])
            )

    def _begin(self, anew: bool) -> None:
        self._rounds += 1
        if anew or self._folder == self._scratch:
            self._folder, self._killed = self._scratch / f"{self._rounds}", []
            self._folder.mkdir()

    def _check(self, killed: Sequence[Killed]) -> None:
        self._killed += killed
        self.tally.add(killed, self._kind.stage)
        sound, found = checked(self._kind, self._folder, self._killed)
        self.tally.outcomes[found if sound else "FAULT"] += 1
        if not sound:
            self.tally.faults.append(f"after {[(k.number, k.said[-2:]) for k in killed]}: {found}")
            self._folder = self._scratch  # begin anew

    def _whole(self, number: int) -> float:
        """Seconds that the work takes when nobody ends it, once all modules are imported."""
        folder = self._scratch / f"whole-{number}"
        for _ in range(1 if number else 2):  # the first time it imports
            folder.mkdir(exist_ok=True)
            begun = time.monotonic()
            status, said = Child.of(lambda: self._run_and_tell(folder, number)).end()
            assert not status, said
            taken = time.monotonic() - begun
            import_all(said[-1])
            shutil.rmtree(folder)
        return taken

    def _run_and_tell(self, folder: Path, number: int) -> None:
        self._kind.run(folder, number)
        say(" ".join(sys.modules))


def main(given: Sequence[str] | None = None) -> int:
    """Run the campaigns that are named; 1 if one found a fault."""
    args = arguments(__doc__, "kind...", given=given, kills=500, seed=0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # it shows what it saw
    faults = 0
    for name in args.kind:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            show = _condition if name in CONDITIONS else _kills
            faults += show(name, Path(folder), args.kills, Random(args.seed))
    return 1 if faults else 0


def _kills(name: str, folder: Path, kills: int, rng: Random) -> int:
    with KINDS[name].served(folder):
        campaign = Campaign(KINDS[name], folder)
        try:
            campaign.at_every_call()
            campaign.at_random(kills, rng)
        finally:  # Ctrl-C ends it early
            campaign.tally.show(name)
    return len(campaign.tally.faults)


def _condition(name: str, folder: Path, *_: object) -> int:
    found = Counter[tuple[str, str]]()
    with hubs(folder):
        prepare(folder)
        try:
            found.update(CONDITIONS[name](folder))
        finally:
            print(f"{name}: {found.total()} cases")
            for (case, outcome), count in sorted(found.items()):
                print(f"  {case}: {outcome}: {count}", flush=True)
    return sum(count for (_, outcome), count in found.items() if "FAULT" in outcome)


if __name__ == "__main__":
    sys.exit(main())
