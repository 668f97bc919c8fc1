"""Coverage-guided fuzzing of all that reads what strangers wrote: ``python -m tools.fuzz [TARGET...]``.

Usage, from the repository's root, with the extra ``fuzz``: ``python -m tools.fuzz gguf onnx --seconds 60``,
or ``--runs N`` inputs for each target; all targets if none is named, ``--jobs N`` of them at a time. Each has
a process of its own (:mod:`tools.fuzz.one`), in which one input has 2 GiB and a minute. What is worth
keeping stays in ``build/fuzz/TARGET/corpus``, where the next run goes on; the first begins with what the
tests' writers make and with ``tests/fuzz/TARGET``.

A find is an input over which a target raises anything but the documented error, whose error does not name the
file or cannot be printed, that changes files, crashes, or takes too much time or memory. Finds are in
``build/fuzz/TARGET/finds``, each with the reason beside it, and any makes the program fail. The targets and
their rules are in :mod:`tools.fuzz.targets`; ``--input FILE`` holds one target to its rule over one input.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final

from tools.arguments import arguments
from tools.fuzz.targets import TARGETS, target_of

ROOT: Final = Path(__file__).resolve().parent.parent.parent
_LIMITS: Final = (
    "-timeout=60",
    "-report_slow_units=60",
    "-rss_limit_mb=2048",
    "-max_len=32768",
    "-len_control=0",
    "-print_final_stats=1",
)
_MOST_ENDS: Final = 20  # times that a target's process is started again
_STATUS: Final = re.compile(r"^#\d+\s.*cov: (\d+) ft: (\d+)", re.MULTILINE)
_UNITS: Final = re.compile(r"^stat::number_of_executed_units: (\d+)", re.MULTILINE)


@dataclass(slots=True)
class Report:
    """What came of one target."""

    name: str
    inputs: int = 0
    edges: int = 0
    features: int = 0
    seconds: float = 0.0
    finds: list[str] = field(default_factory=list)

    def line(self) -> str:
        """As the table has it."""
        rate = self.inputs / max(self.seconds, 0.1)
        columns = f"{self.inputs:>11,}{self.edges:>8,}{self.features:>10,}{rate:>10,.0f}"
        return f"{self.name:14}{columns}{len(self.finds):>7}"


def fuzz(name: str, seconds: int | None, runs: int | None) -> Report:
    """Run a target for its time, or its inputs; a process that ended before is started again."""
    folder = ROOT / "build" / "fuzz" / name
    for part in ("corpus", "finds"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for find in (folder / "finds").iterdir():  # of the run before: tried again
        find.unlink() if find.suffix == ".why" else find.replace(folder / "corpus" / find.name)
    report, begun = Report(name), monotonic()
    for _ in range(_MOST_ENDS):
        left = None if seconds is None else round(seconds - (monotonic() - begun))
        more = None if runs is None else runs - report.inputs
        if (left is not None and left < 1) or (more is not None and more < 1):
            break
        options = [f"-max_total_time={left}"] * (left is not None) + [f"-runs={more}"] * (more is not None)
        if not _run(report, folder, options):
            break
    report.seconds = monotonic() - begun
    whys = sorted((folder / "finds").glob("*.why"))
    report.finds += [why.read_text(encoding="utf-8").splitlines()[0] for why in whys]
    return report


def _run(report: Report, folder: Path, options: Sequence[str]) -> bool:
    """One process; whether something ended it."""
    memory = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    (scratch / "seeds").mkdir()
    (scratch / "finds").symlink_to(folder / "finds")
    known = [ROOT / "tests" / "fuzz" / report.name]
    corpora = [folder / "corpus", scratch / "seeds", *(each for each in known if each.is_dir())]
    command = [sys.executable, "-m", "tools.fuzz.one", report.name, str(scratch), *_LIMITS, *options]
    command += [f"-artifact_prefix={folder / 'finds'}/", *map(str, corpora)]
    try:
        with (folder / "log").open("w+", encoding="utf-8", errors="replace") as log:
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode
            log.seek(0)
            said = log.read()
    finally:
        shutil.rmtree(scratch)
    units, status = _UNITS.findall(said), _STATUS.findall(said)
    report.inputs += int(units[-1]) if units else 0
    if status:
        report.edges, report.features = (
            max(pair) for pair in zip((report.edges, report.features), map(int, status[-1]), strict=True)
        )
    if code:
        last = next((line for line in said.splitlines() if "ERROR" in line or "Error" in line), "no message")
        report.finds.append(f"its process left with {code}: {last.strip()[:200]} ({folder.name}/log)")
    return code != 0 and bool(units)


def try_one(name: str, file: Path) -> None:
    """Hold a target to its rule over the input in ``file``."""
    with tempfile.TemporaryDirectory() as folder:
        target_of(name).rule(Path(folder))(file.read_bytes())


def main() -> None:
    """Read the command line, run, and print the table."""
    given = arguments(__doc__, "targets*", seconds=(int,), runs=(int,), jobs=1, input=(Path,))
    names = given.targets or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        sys.exit(f"there is no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    if given.input:
        try_one(names[0], given.input)
        return
    seconds = 60 if given.seconds is None and given.runs is None else given.seconds
    with ThreadPoolExecutor(given.jobs) as pool:
        reports = list(pool.map(partial(fuzz, seconds=seconds, runs=given.runs), names))
    print(f"{'target':14}{'inputs':>11}{'edges':>8}{'features':>10}{'a second':>10}{'finds':>7}")
    for report in reports:
        print(report.line())
    print(f"{'all':14}{sum(report.inputs for report in reports):>11,}")
    for report in reports:
        for find in report.finds:
            print(f"{report.name}: {find}")
    if any(report.finds for report in reports):
        sys.exit("the inputs are in build/fuzz/TARGET/finds")


if __name__ == "__main__":
    main()
