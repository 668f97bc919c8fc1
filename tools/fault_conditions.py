"""What edgespec says and leaves where a disk is full or read-only, clocks jump, memory lacks or bytes flip.

Each condition yields a case and what came of it, in a word or two; ``FAULT`` where that is not as it should
be. Full and read-only disks are small tmpfs, which only root may mount.
"""

import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Final

import psutil

import edgespec
from edgespec.history.manage import History
from edgespec.loading.names import open_model
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.downloads.download import pull
from edgespec_models.downloads.hub import HubReference, pull_hub
from edgespec_models.errors import EdgespecError
from edgespec_models.files.replacing import write_text
from tests.downloads_for_tests import REPOSITORY
from tests.native_for_tests import tiny_native
from tests.toy import LLAMA
from tools.fault_kinds import addresses, entry_from, exported_history
from tools.fault_processes import Child, import_all, say

Condition = Callable[[Path], Iterator[tuple[str, str]]]

STEPS: Final = 8  # sizes of a disk
FLIPS: Final = 20  # of each file
YEARS: Final = 30 * 365.25 * 86_400
LARGE: Final = 1 << 30
LIMITS_MB: Final = (1, 4, 8, 16, 32, 64, 100, 256)
NOBODY: Final = 65534
GROUPS: Final = Path("/sys/fs/cgroup/memory")
GROUP_MB: Final = (4, 16, 32, 64, 256)


def _export(weights: str | None, source: str) -> Callable[[Path, Path], None]:
    def work(top: Path, disk: Path) -> None:
        options = ExportOptions(weights=weights, overwrite=True)
        export_model(top / source, disk / "out", options=options)

    return work


def _first_use(top: Path, disk: Path) -> None:
    os.environ["EDGESPEC_HOME"] = str(disk)
    open_model(top / "m.gguf", "target")


def _pull(what: str) -> Callable[[Path, Path], None]:
    def work(top: Path, disk: Path) -> None:
        os.environ |= addresses(top, what) | {"EDGESPEC_HOME": str(disk)}
        if what == "repository":
            pull_hub(HubReference(REPOSITORY))
        else:
            pull(entry_from(what))

    return work


def _generate(top: Path, disk: Path) -> None:
    os.environ["EDGESPEC_HOME"] = str(disk)
    with edgespec.load(top / "sound", "ngram", history="me") as model:
        model.generate("hello hello hello", max_new_tokens=40, timeout=120.0)


def _given(top: Path) -> Path:
    file = top / "in.json"
    return file if file.exists() else exported_history(file, "<x>")


def _import(top: Path, disk: Path) -> None:
    History(disk / "me.history").load(_given(top))


def _give_out(top: Path, disk: Path) -> None:
    history = History(top / "other.history")
    history.load(_given(top))
    history.export(disk / "out.json")


def _report(top: Path, disk: Path) -> None:
    write_text(disk / "report.html", "x" * 100_000)


WORK: Final = {
    "export": _export(None, "m.gguf"),
    "export, portable": _export("portable", "m.gguf"),
    "export of a checkpoint": _export(None, "checkpoint"),
    "load at first use": _first_use,
    "pull from the hub": _pull("hub"),
    "pull of a repository": _pull("repository"),
    "pull from the index": _pull("index"),
    "generate with a history": _generate,
    "history import": _import,
    "history export": _give_out,
    "report": _report,
}
"""What is tried on a disk, by what it is."""


def prepare(scratch: Path) -> None:
    """A bundle to load, and all modules imported."""

    def everything() -> None:
        export_model(scratch / "m.gguf", scratch / "sound")
        for name, work in WORK.items():
            disk = scratch / f"prepared {name}"
            disk.mkdir()
            work(scratch, disk)
            shutil.rmtree(disk)
        say(" ".join(sys.modules))

    status, said = Child.of(everything).end()
    assert not status, said
    import_all(said[-1])


class _Heard(logging.Handler):
    """Warnings of edgespec's."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages = list[str]()
        logging.getLogger("edgespec").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _try(work: Callable[[], None], *words: str) -> str:
    """``worked``, ``went on with N warnings``, ``refused``; a fault where no word of ``words`` is said."""
    heard = _Heard()
    try:
        work()
        said, came = " ".join(heard.messages), "went on, with a warning" if heard.messages else "worked"
    except EdgespecError as error:
        said, came = str(error), "refused"
    except BaseException as error:  # noqa: BLE001 - any is a fault
        return f"FAULT {type(error).__name__}: {error}"
    fits = came == "worked" or not words or any(word in said for word in words)
    return came if fits else f"FAULT says {said!r}"


def _in_child(work: Callable[[], str]) -> str:
    """What ``work`` returns in a process of its own."""
    status, said = Child.of(lambda: say(work())).end()
    if os.WIFSIGNALED(status):
        return f"ended by signal {os.WTERMSIG(status)}"
    return said[-1] if said and not status else f"FAULT {said}"


@contextmanager
def _tmpfs(disk: Path, size: int) -> Iterator[None]:
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "faults", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def _sound(disk: Path) -> str:
    """Empty where all that looks whole is."""
    for manifest in disk.rglob("edgespec.json"):
        if ".partial-" not in str(manifest):
            Bundle(manifest.parent, verify_digests=True)
    left = [
        path.name for path in disk.rglob("*") if ".partial-" in path.name or path.name[:10] == ".edgespec-"
    ]
    return f"FAULT left {left}" if left else ""


def full(scratch: Path) -> Iterator[tuple[str, str]]:
    """Disks that are too small by less and less; then there is room again, in the same process."""
    disk = scratch / "disk"
    for name, work in WORK.items():
        with _tmpfs(disk, LARGE):
            _in_child(partial(_try, partial(work, scratch, disk)))
            needed = shutil.disk_usage(disk).used
        for step in range(STEPS + 1):

            def twice(work: Callable[[Path, Path], None] = work) -> str:
                first = _try(lambda: work(scratch, disk), "full", "free", "No space")
                found = _sound(disk)
                _remount(disk, f"size={LARGE}")
                return found or f"{first}, then {_try(lambda: work(scratch, disk))}"

            with _tmpfs(disk, max(4096, needed * step // STEPS // 4096 * 4096)):
                yield name, _in_child(twice)


def readonly(scratch: Path) -> Iterator[tuple[str, str]]:
    """Disks that became read-only before anything was made there, and after; and another user's folder."""
    disk = scratch / "disk"
    scratch.chmod(0o755)
    for name, work in WORK.items():
        for state in ("nothing there", "made before", "another user's"):

            def once(work: Callable[[Path, Path], None] = work, state: str = state) -> str:
                if state == "made before":
                    work(scratch, disk)
                if state == "another user's":
                    disk.chmod(0o755)
                    os.setgroups([])
                    os.setresgid(NOBODY, NOBODY, NOBODY)
                    os.setresuid(NOBODY, NOBODY, NOBODY)
                else:
                    _remount(disk, "ro")
                words = ("ead-only", "readonly", "unable to open", "ermission denied")
                came = _try(lambda: work(scratch, disk), *words)
                return _sound(disk) or came

            with _tmpfs(disk, LARGE):
                yield f"{name}, {state}", _in_child(once)


def clock(scratch: Path) -> Iterator[tuple[str, str]]:
    """Everything, done and done again, while the wall clock jumps by decades at each look."""
    true = time.time
    for name, work in WORK.items():
        for jumps in ((YEARS, 0.0), (-YEARS, 0.0), (YEARS, -YEARS)):
            disk = scratch / f"{name} {jumps}"
            disk.mkdir()

            def jumping(
                work: Callable[[Path, Path], None] = work, jumps: tuple[float, ...] = jumps, disk: Path = disk
            ) -> str:
                looks = 0

                def look() -> float:
                    nonlocal looks
                    looks += 1
                    return true() + jumps[looks % len(jumps)]

                time.time = look
                first = _try(lambda: work(scratch, disk))
                for file in disk.rglob("*"):
                    os.utime(file, (true() + YEARS, true() + YEARS))
                return _sound(disk) or f"{first}, then {_try(lambda: work(scratch, disk))}"

            yield name, _in_child(jumping)


def memory(scratch: Path) -> Iterator[tuple[str, str]]:
    """Less address space than a load takes, then enough; and control groups, which end a process."""
    large = replace(LLAMA, hidden_size=768, intermediate_size=2048, num_layers=6, num_heads=24)
    bundle = scratch / "large"  # of 40 MB, made elsewhere: what this process has had counts as its own
    Child.of(lambda: say(str(tiny_native(bundle, large, "Q8_0").path))).end()

    def load() -> None:
        os.environ["EDGESPEC_HOME"] = str(scratch)
        with edgespec.load(bundle, "ngram") as model:
            model.generate("hello", max_new_tokens=4)

    for extra in LIMITS_MB:

        def limited(extra: int = extra) -> str:
            resource.setrlimit(
                resource.RLIMIT_AS,
                (psutil.Process().memory_info().vms + (extra << 20), resource.RLIM_INFINITY),
            )
            first = _try(load, "memory")
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            return f"{first}, then {_try(load)}"

        yield "address space", _in_child(limited)
    for most in GROUP_MB if os.access(GROUPS, os.W_OK) else ():
        group = GROUPS / f"faults-{os.getpid()}"
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(most << 20))

        def grouped(group: Path = group) -> str:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return _try(load, "memory")

        first = _in_child(grouped)
        time.sleep(0.1)
        group.rmdir()
        yield "control group", f"{first}, then {_in_child(lambda: _try(load))}"


def flips(scratch: Path) -> Iterator[tuple[str, str]]:
    """Single bits of a bundle's files and of a GGUF file with its digest beside it."""
    rng, bundle = Random(0), scratch / "trimmed"
    tiny_native(bundle, role="drafter", head_tokens=tuple(range(0, 404, 2)))
    for file in sorted(bundle.iterdir()):
        whole = file.read_bytes()
        for _ in range(FLIPS):
            file.write_bytes(_flipped(whole, rng))
            found = _in_child(partial(_try, partial(_verify, bundle), file.name))
            loaded = _in_child(partial(_try, partial(_run, bundle), file.name, "model.onnx"))
            yield file.name, f"verify: {found}; load: {loaded}"
        file.write_bytes(whole)
    gguf = scratch / "m.gguf"
    whole = gguf.read_bytes()
    (scratch / "m.gguf.sha256").write_text(f"{sha256(whole).hexdigest()}  m.gguf\n")
    for _ in range(FLIPS):
        gguf.write_bytes(_flipped(whole, rng))
        yield "GGUF", f"export: {_in_child(lambda: _try(lambda: WORK['export'](scratch, scratch), 'm.gguf'))}"


def _flipped(whole: bytes, rng: Random) -> bytes:
    damaged = bytearray(whole)
    damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _verify(bundle: Path) -> None:
    Bundle(bundle, verify_digests=True)


def _run(bundle: Path) -> None:
    from edgespec_runtimes.cpu import CpuSession

    opened = Bundle(bundle)
    assert opened.tokenizer and opened.head_tokens is not None
    CpuSession(opened).predict([1, 2, 3])


CONDITIONS: Final[dict[str, Condition]] = {
    "full": full,
    "readonly": readonly,
    "clock": clock,
    "memory": memory,
    "flips": flips,
}
