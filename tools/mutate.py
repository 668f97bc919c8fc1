"""Do the tests notice faults? Makes small ones, one at a time, and lists those that no test fails for.

    python -m tools.mutate edgespec/decoding/rows.py edgespec/drafting/guard.py --seed 1

Needs `pip install mutmut` and a system that forks. A mutant is tried with tests that execute its line, first
those of files that know most of the module for their time, for up to --seconds, until one fails. --tests says
which files of tests are asked at all. --results gets a line of JSON for each mutant, and --again tries the
survivors in such a file once more. It works in a copy of the checkout in build/mutate, which remembers the
lines of each test. Mutants that change nothing that can be seen are named in tools/mutate_equivalent.toml.
"""

import hashlib
import json
import marshal
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tools.arguments import arguments
from tools.mutants import Mutant, changed_functions, mutants

__all__ = ["Checkout", "main", "sample", "verdicts"]

_PYTEST = ["-m", "not models", "-o", "addopts=", "-o", "timeout=90", "-p", "no:cacheprovider"]
_EQUIVALENT = Path(__file__).with_name("mutate_equivalent.toml")


@dataclass(frozen=True)
class Checkout:
    """A copy of a checkout, in which files may be mutated."""

    source: Path
    work: Path

    @property
    def tree(self) -> Path:
        """The copy."""
        return self.work / "tree"

    def update(self) -> None:
        """Make the copy equal to the checkout: its tracked and new files, and what was compiled."""
        listed = subprocess.check_output(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=self.source, text=True
        )
        compiled = (path.relative_to(self.source).as_posix() for path in self.source.glob("runtimes/*/*.so"))
        wanted = {name for name in (*listed.splitlines(), *compiled) if (self.source / name).is_file()}
        for name in wanted:
            source, copy = self.source / name, self.tree / name
            if not copy.exists() or copy.read_bytes() != source.read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy)
        for path in self.tree.rglob("*"):
            if (
                path.is_file()
                and path.suffix != ".pyc"
                and path.relative_to(self.tree).as_posix() not in wanted
            ):
                path.unlink()

    def run(self, what: str, **job: Any) -> Iterator[Any]:
        """Have tests run in the copy; each line of JSON that the worker writes."""
        with tempfile.TemporaryDirectory() as folder:
            results, file = Path(folder) / "results", Path(folder) / "job"
            results.touch()
            file.write_text(json.dumps({**job, "pytest": _PYTEST, "results": str(results)}), "utf-8")
            worker = str(Path(__file__).with_name("mutant_worker.py").resolve())
            with subprocess.Popen(
                [sys.executable, "-P", worker, what, str(file)],
                cwd=self.tree,
                env=self._environment(what),
                stdout=sys.stderr if what == "lines" else subprocess.DEVNULL,
            ) as process:
                yield from map(json.loads, _followed(results, process))

    def _environment(self, what: str) -> dict[str, str]:
        settings = tomllib.loads(self.text("pyproject.toml"))["tool"]["pytest"]["ini_options"]
        paths = os.pathsep.join(str(self.tree / path) for path in settings.get("pythonpath", ["."]))
        unwritten = "1" if what == "trials" else ""  # a file that is mutated leaves no compiled one
        return {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": unwritten}

    def text(self, name: str) -> str:
        """Of a file."""
        return (self.tree / name).read_text("utf-8")

    def digest(self, name: str) -> str:
        """Of a file's content."""
        return hashlib.sha256((self.tree / name).read_bytes()).hexdigest()


def _followed(file: Path, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Lines of a file as a process writes them."""
    with file.open(encoding="utf-8") as lines:
        begun = ""
        while True:
            ended = process.poll() is not None
            while part := lines.readline():
                begun += part
                if begun.endswith("\n"):
                    yield begun
                    begun = ""
            if ended:
                return
            time.sleep(0.1)


def executed(checkout: Checkout, files: Sequence[str], tests: Sequence[str]) -> list[dict[str, Any]]:
    """For each file of tests, its tests' seconds and lines; runs those of which text or ``files`` changed."""
    folder = checkout.work / "lines"
    folder.mkdir(parents=True, exist_ok=True)
    known = {
        name: json.loads(path.read_text("utf-8"))
        for name in tests
        if (path := folder / Path(name).name).exists()
    }
    stale = [
        name
        for name in tests
        if name not in known
        or any(
            known[name]["digests"].get(each, checkout.digest(each)) != checkout.digest(each)
            for each in (name, *files)
        )
    ]
    if stale:
        for name, each in next(checkout.run("lines", tests=stale), {}).items():
            each["digests"] = {file: checkout.digest(file) for file in (name, *each["lines"])}
            (folder / Path(name).name).write_text(json.dumps(each), "utf-8")
            known[name] = each
    return [known[name] for name in tests if name in known]


def sample(file: str, text: str, seed: int, size: int) -> list[Mutant]:
    """Some of a file's mutants; one for eight of its lines, 12 to 25, unless ``size`` says how many."""
    size = size or min(max(text.count("\n") // 8, 12), 25)
    named, shuffled = _equivalent(), random.Random(f"{seed} {file}")
    others = (mutant for mutant in mutants(file, text, shuffled) if mutant.key not in named)
    return sorted(islice(others, size), key=lambda mutant: mutant.line)


def _tests_of(
    mutant: Mutant, at_import: bool, known: Iterable[dict[str, Any]], budget: float
) -> dict[str, float]:
    """The tests to try a mutant with, in order, and their seconds."""
    groups, named = [], f"tests/test_{Path(mutant.file).stem}"
    for home in known:
        executed = home["lines"].get(mutant.file, {})
        covering = [
            test
            for test, lines in executed.items()
            if at_import or not set(lines).isdisjoint(mutant.statement)
        ]
        if covering:
            seconds = {
                test: home["seconds"][test] for test in sorted(covering, key=home["seconds"].__getitem__)
            }
            breadth = len({line for test in covering for line in executed[test]})
            of_others = not next(iter(seconds)).startswith(named)
            groups.append((of_others, sum(seconds.values()) / breadth, seconds))
    chosen = dict[str, float]()
    left = budget
    for *_, seconds in sorted(groups, key=lambda group: group[:2]):
        share = max(left / 2, 0.0)
        for test, cost in seconds.items():
            if cost <= share or not chosen:
                chosen[test] = cost
                share, left = share - cost, left - cost
    return chosen


def verdicts(
    checkout: Checkout, chosen: Sequence[Mutant], known: Sequence[dict[str, Any]], budget: float
) -> Iterator[tuple[Mutant, str, str]]:
    """Each mutant with what became of it, and the test that has noticed; ``known`` as in :func:`executed`."""
    forked, imported = list[tuple[Mutant, dict[str, Any]]](), list[tuple[Mutant, dict[str, Any]]]()
    for mutant in chosen:
        codes = changed_functions(checkout.text(mutant.file), mutant.text)
        wanted = _tests_of(mutant, codes is None, known, budget)
        pairs = [[marshal.dumps(code).hex() for code in pair] for pair in (codes or {}).items()]
        job = {"tests": list(wanted), "seconds": 10 + 3 * sum(wanted.values()), "codes": pairs}
        if not wanted:
            yield mutant, "survived", "no test executes it"
        else:
            (imported if codes is None else forked).append((mutant, job))
    if forked:
        jobs = [job for _, job in forked]
        said = checkout.run("trials", tests=_files(jobs), mutants=jobs)
        for (mutant, _), (verdict, test) in zip(forked, said, strict=True):
            yield mutant, verdict, test
    for mutant, job in imported:
        yield mutant, *_imported(checkout, mutant, job)


def _files(jobs: Iterable[dict[str, Any]]) -> list[str]:
    return sorted({test.partition("::")[0] for job in jobs for test in job["tests"]})


def _imported(checkout: Checkout, mutant: Mutant, job: dict[str, Any]) -> tuple[str, str]:
    """The verdict on a mutant of what runs at import, which takes a process of its own."""
    file = checkout.tree / mutant.file
    before = file.stat()
    original = file.read_bytes()
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()
    try:
        file.write_text(mutant.text, "utf-8")
        verdict, test = next(checkout.run("trials", tests=_files([job]), mutants=[job]), ("killed", "import"))
    finally:
        file.write_bytes(original)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return verdict, test


def _again(made: Iterable[Mutant], results: Path) -> list[Mutant]:
    read = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
    survivors = {
        (each["file"], each["before"], each["after"]) for each in read if each["verdict"] == "survived"
    }
    return [mutant for mutant in made if mutant.key in survivors - _equivalent()]


def _equivalent() -> set[tuple[str, str, str]]:
    named = tomllib.loads(_EQUIVALENT.read_text("utf-8"))["mutant"]
    return {(each["file"], each["before"], each["after"]) for each in named}


def main(given: Sequence[str] | None = None) -> None:
    """Try mutants of files; print what became of them, file by file."""
    options = arguments(
        __doc__,
        "file...",
        given=given,
        seed=1,
        sample=0,
        seconds=15.0,
        tests="test_*.py",
        results=(Path,),
        again=(Path,),
    )
    checkout = Checkout(Path.cwd(), Path.cwd() / "build" / "mutate")
    checkout.update()
    found = (path for name in options.tests.split(",") for path in (checkout.tree / "tests").glob(name))
    known = executed(checkout, options.file, sorted({f"tests/{path.name}" for path in found}))
    chosen = list[Mutant]()
    for file in options.file:
        text = checkout.text(file)
        again = _again(mutants(file, text), options.again) if options.again else None
        chosen += sample(file, text, options.seed, options.sample) if again is None else again
    counts = {file: Counter[str]() for file in options.file}
    for mutant, verdict, test in verdicts(checkout, chosen, known, options.seconds):
        counts[mutant.file][verdict] += 1
        if verdict == "survived":
            print(f"{mutant.file}:{mutant.line}: {test}\n  - {mutant.before}\n  + {mutant.after}", flush=True)
        if options.results:
            line = dict(zip(("file", "before", "after"), mutant.key, strict=True), verdict=verdict, test=test)
            with options.results.open("a", encoding="utf-8") as results:
                print(json.dumps({**line, "line": mutant.line, "seed": options.seed}), file=results)
    print(f"{'file':40} made killed timed out survived")
    for file, count in counts.items():
        numbers = (count.total(), count["killed"], count["timed out"], count["survived"])
        print("{:40} {:4} {:6} {:9} {:8}".format(file, *numbers))


if __name__ == "__main__":
    main()
