"""Aligning a drafter with what its user was answered: from where it is now, kept only if it guesses better.

As a program (:func:`main`) it is the process of :class:`edgespec.history.adapting.Adapting`.
"""

import hashlib
import json
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import psutil

from edgespec.align.answers import locked
from edgespec.align.run import share, torch_device, trained, turn_text
from edgespec.history.adapting import PassTimes
from edgespec.history.changes import FEWEST, Adaptation, Learner
from edgespec.history.store import Scope, StoredTurn
from edgespec_export.align.alignment import Alignment, read_alignment
from edgespec_export.align.settings import Text, TrainingOptions
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.errors import Cancelled, EdgespecError, ModelFileError, RequestError
from edgespec_models.progress import Progress, ProgressCallback
from edgespec_models.storage import writing

_HELD_OUT: Final = 10  # the latest of so many texts measure
_LONGEST: Final = 8  # tokens of a draft
_ROW: Final = 0.05  # of a one-row pass, which each further row adds
_BATCH_TOKENS: Final = 512  # a step's rows take memory, too
_OPTIONS: Final = TrainingOptions(batch_tokens=_BATCH_TOKENS)


def adapt(
    learner: Learner,
    prices: PassTimes,
    *,
    device: str = "cpu",
    options: TrainingOptions = _OPTIONS,
    progress: ProgressCallback,
) -> Adaptation:
    """Train a drafter on the texts that its change was not trained on, but for the latest tenth.

    These measure it. The new change is kept if more first guesses are right and a replay is faster.

    Raises:
        RequestError: there are too few texts, or another run trains this drafter.
        EdgespecError: the drafter or the history cannot be read, or the change cannot be written, perhaps
            because its texts were forgotten meanwhile.
    """
    with writing(learner.folder):
        learner.folder.parent.mkdir(mode=0o700, exist_ok=True)
    with locked(learner.folder, f"another run trains the drafter {learner.source.name} already"):
        # Not before: in a folder that is made anew, another run could write what was forgotten meanwhile.
        learner.begin()
        return _adapt(learner, prices, device, options, progress)


def _adapt(
    learner: Learner,
    prices: PassTimes,
    device: str,
    options: TrainingOptions,
    progress: ProgressCallback,
) -> Adaptation:
    run, stored, drafter = learner.run, learner.texts(), Bundle(learner.bundle)
    dated = [(turn.written_on, text) for turn in stored if (text := _text(turn, drafter)) is not None]
    if len(dated) < FEWEST:
        if run.until:  # the history has dropped texts of the run that was stopped
            learner.note(replace(run, until=0.0))
            return _adapt(learner, prices, device, options, progress)
        learner.note(replace(run, tried=stored[-1].written_on if stored else 0.0))
        raise RequestError(
            f"the history has {len(dated)} new texts for {learner.source.name}, and training takes {FEWEST}; "
            "answer more with it, best with kept prompts (keep_prompts=True, --keep-prompts)"
        )
    learner.note(replace(run, until=stored[-1].written_on))
    end = len(dated) - len(dated) // _HELD_OUT
    taught, held = ([text for _, text in part] for part in (dated[:end], dated[end:]))
    start = _start(learner)
    key = hashlib.sha256(repr((taught, options, start and start.digest)).encode()).hexdigest()[:16]
    file = learner.folder / f"training-{key}.pt"
    _delete(learner.folder, "training-*.pt", file)
    training = trained(
        learner.source,
        (taught, held),
        options,
        file,
        device=device,
        progress=progress,
        start=start,
        sparing=True,
    )
    facts = {"model": learner.source.name[:200], "target": learner.scope.target[:200], "licence": ""}
    change = training.alignment(facts, taught, options)
    speeds = speed(training.before, prices), speed(training.after, prices)
    shares = share(training.before), share(training.after)
    better = shares[1] > shares[0] and speeds[1] > speeds[0]
    if better:
        change.write(learner.change)
        learner.note(replace(run, through=dated[end - 1][0], until=0.0, tried=0.0))
        _delete(learner.folder, "bundle-*")
    else:
        learner.note(replace(run, until=0.0, tried=stored[-1].written_on))
    _delete(learner.folder, "training-*.pt")
    return Adaptation(better, len(taught), len(held), change.origin.tokens, *shares, *speeds)


def prices_of(target: Bundle, drafter: Bundle) -> PassTimes:
    """PassTimes by bytes, for models that are not loaded: bytes are what passes on a CPU cost."""
    step = drafter.manifest.size_bytes / target.manifest.size_bytes
    return PassTimes({n: 1.0 + _ROW * (n - 1) for n in range(1, _LONGEST + 2)}, step)


def speed(guesses: Sequence[Sequence[bool]], prices: PassTimes) -> float:
    """Times plain decoding of drafts of the best constant length, of which these guesses are right."""

    def seconds(length: int) -> float:
        rounds = 0
        for right in guesses:
            at = 0
            while at < len(right):
                draft = right[at : at + length]
                at += 1 + (draft.index(False) if False in draft else len(draft))
                rounds += 1
        return rounds * (prices.target_s[length + 1] + length * prices.drafter_s)

    tokens = sum(map(len, guesses))
    return max(tokens * prices.target_s[1] / seconds(length) for length in range(1, _LONGEST + 1))


def _text(stored: StoredTurn, drafter: Bundle) -> Text | None:
    prompt, answer = json.loads(stored.turn.prompt), stored.turn.answer
    return turn_text(prompt, answer, drafter, ended=stored.turn.ended)


def _start(learner: Learner) -> Alignment | None:
    """The drafter's present change: its own, the shipped one, or none."""
    for path in (learner.change, learner.shipped):
        if path is not None and path.is_file():
            try:
                return read_alignment(path)
            except ModelFileError:  # of another version: it is trained anew
                continue
    return None


def _delete(folder: Path, pattern: str, but: Path | None = None) -> None:
    for path in folder.glob(pattern):
        if path != but:  # a bundle that a program uses stays, on Windows
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


class _Orders(threading.Thread):
    """Reads what the other process wants: to pause, to go on, or by the end of the input, to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.going, self.stopped = threading.Event(), False
        self.going.set()

    def run(self) -> None:
        for line in sys.stdin:
            self.going.clear() if line.strip() == "pause" else self.going.set()
        self.stopped = True
        self.going.set()


def _tell(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Train as the first line of the input says."""
    psutil.Process().nice(getattr(psutil, "IDLE_PRIORITY_CLASS", 19))  # before PyTorch takes its seconds
    from torch.utils._python_dispatch import TorchDispatchMode

    task = json.loads(sys.stdin.readline())
    orders = _Orders()
    orders.start()

    class Waiting(TorchDispatchMode):  # type: ignore[misc,unused-ignore]  # PyTorch may be missing
        """Waits before each of PyTorch's operations, which take some hundredths of a second."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            orders.going.wait()
            return func(*args, **(kwargs or {}))

    def progress(report: Progress) -> None:
        if orders.stopped:
            raise Cancelled("the other process wants no more")
        _tell(progress=[report.stage, report.done, report.total, report.unit])

    try:
        torch_device("cpu", threads=1)
        rows_s, drafter_s = task["prices"]["target_s"], task["prices"]["drafter_s"]
        prices = PassTimes({int(rows): seconds for rows, seconds in rows_s.items()}, drafter_s)
        with Waiting():
            result = adapt(_learner(task["learner"]), prices, progress=progress)
        _tell(result=asdict(result))
    except Cancelled:
        pass
    except (EdgespecError, MemoryError, OSError) as error:
        _tell(error=str(error) or type(error).__name__)


def _learner(value: dict[str, Any]) -> Learner:
    paths = {name: value[name] and Path(value[name]) for name in value if name != "scope"}
    return Learner(scope=Scope(**value["scope"]), **paths)


if __name__ == "__main__":
    main()
