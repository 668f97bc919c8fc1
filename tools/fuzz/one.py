"""One target in a process of its own, with atheris: ``python -m tools.fuzz.one TARGET FOLDER OPTION...``.

``tools.fuzz`` starts it; options are libFuzzer's. What a rule raises is written down and the search goes on;
what ends the process (a crash of native code, too much time or memory for one input) libFuzzer writes down.
"""

import hashlib
import logging
import re
import resource
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import atheris

from tools.fuzz.targets import target_of
from tools.fuzz.trees import Changer

__all__ = ["Finds", "main"]

PACKAGES: Final = ("edgespec", "edgespec_models", "edgespec_runtimes", "edgespec_export")
_ROOT: Final = Path(__file__).resolve().parent.parent.parent
_MOST_MEMORY: Final = 8 << 30  # of addresses; libFuzzer watches what is in use
_SHARE: Final = 0.8  # of mutations that know the input's form


class Finds:
    """What rules raised: of every place it was raised at, the smallest input, and the reason beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}

    def add(self, data: bytes, error: BaseException) -> None:
        """One more."""
        place = where(error)
        size = self._sizes.get(place)
        if size is not None and size <= len(data):
            return
        self._sizes[place] = len(data)
        file = self._folder / f"raised-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
        file.write_bytes(data)
        lines = [line[:400] for line in "".join(traceback.format_exception(error)).splitlines()]
        why = "\n".join((place, *lines, ""))
        file.with_suffix(".why").write_text(why, encoding="utf-8", errors="backslashreplace")


def where(error: BaseException) -> str:
    """The error's kind, and the last line of ours that it passed; of a wrong error, where that began."""
    cause = error.__context__ if isinstance(error, AssertionError) else None
    frames = traceback.extract_tb((cause or error).__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_ROOT)]
    at = f"{Path(own[-1].filename).relative_to(_ROOT)}:{own[-1].lineno}" if own else "?"
    said = re.sub(r"[^a-z ]+", "", str(error)[:60]) if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__} at {at} {said}".strip()


def mutator(changer: Changer, form: Any) -> Callable[[bytes, int, int], bytes]:
    """Changes an input by its form, now and then by its bytes alone."""

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < _SHARE:
            try:
                plain = lambda text: atheris.Mutate(text, len(text) + 32)  # noqa: E731
                changed: bytes = form.write(changer.changed(form.read(data), random, plain))
            except (ValueError, RecursionError):
                pass
            else:
                if len(changed) <= most:
                    return changed
        mutated: bytes = atheris.Mutate(data, most)
        return mutated

    return mutate


def main(name: str, folder: Path, options: Sequence[str]) -> None:
    """Run until libFuzzer ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    logging.disable()
    with atheris.instrument_imports(include=list(PACKAGES)):
        target = target_of(name)
        seeds = target.seeds()
        for number, seed in enumerate(seeds):
            (folder / "seeds" / f"seed-{number}").write_bytes(seed)
        (folder / "scratch").mkdir(exist_ok=True)
        rule, finds = target.rule(folder / "scratch"), Finds(folder / "finds")

        def try_one(data: bytes) -> None:
            try:
                rule(data)
            except BaseException as error:  # noqa: BLE001 - a panic of Rust's is no Exception
                finds.add(data, error)

        changer = Changer([target.form.read(seed) for seed in seeds], target.words)
        arguments = [sys.argv[0], *options]
        atheris.Setup(
            arguments, try_one, custom_mutator=mutator(changer, target.form), internal_libfuzzer=True
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
