"""What ``tools.faults`` kills: an export, a download, histories being written; and what has to be left."""

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from pathlib import Path
from typing import Final

from edgespec.history.exchange import FORMAT, parse
from edgespec.history.manage import History
from edgespec.history.schema import SUFFIX
from edgespec.history.store import Learned, Store
from edgespec.loading.names import open_model
from edgespec_export.export import ExportOptions, export_model
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.downloads.catalog import CatalogueEntry
from edgespec_models.downloads.download import is_pulled, model_path, pull
from edgespec_models.downloads.hub import HubReference, pull_hub, pulled_hub
from edgespec_models.progress import Progress
from tests.downloads_for_tests import CONTENT, FROM_HUB, REPOSITORY, WHOLE, entry_of, running_hub, write_wheel
from tests.gguf_for_tests import tiny_gguf
from tests.hf_for_tests import config_of, write_checkpoint
from tests.kills_for_tests import promised, write_until_killed
from tests.tokenizers_for_tests import byte_level_json
from tools.fault_processes import say

HUB_BYTES: Final = CONTENT * 40
HUB: Final = replace(FROM_HUB, size_bytes=len(HUB_BYTES), sha256=hashlib.sha256(HUB_BYTES).hexdigest())
INDEX: Final = entry_of(WHOLE)
PASSAGES: Final = 20  # of an import
WRITERS: Final = 3


@dataclass(frozen=True)
class Killed:
    """A process that was to be killed: what it said, when it ended, and whether by the kill."""

    number: int
    said: list[str]
    at: float
    by_us: bool


@dataclass(frozen=True)
class Kind:
    """Work, and what has to be there when it was killed.

    Attributes:
        run: does the work in a folder, for a number; says what it is at.
        check: what is found after processes were killed, in a word; raises what should not be. Does the work
            again, to its end.
        stage: what a process was at when it was killed.
        variants: numbers that stand for different work, from 0; 0 where the work has no end.
        at_once: processes that work at the same time.
        seconds: that work without end is given.
        served: what the work needs besides, in a scratch folder.
    """

    run: Callable[[Path, int], None]
    check: Callable[[Path, Sequence[Killed]], str]
    stage: Callable[[Killed], str]
    variants: int = 0
    at_once: int = 1
    seconds: float = 0.0
    served: Callable[[Path], AbstractContextManager[None]] = lambda folder: nullcontext()


def _report(progress: Progress) -> None:
    say(progress.stage)


def _last(killed: Killed) -> str:
    return killed.said[-1].partition(":")[0] if killed.said else "begins"


def _only(folder: Path, *allowed: str) -> None:
    """Complain of files that should not be there."""
    left = {file.name for file in folder.iterdir()} - set(allowed)
    assert not left, f"left over in {folder}: {sorted(left)}"


# ---- exports -----------------------------------------------------------------------------------------------

EXPORTS: Final = ("native", "portable", "checkpoint", "first use")


def _export(folder: Path, number: int) -> None:
    what = EXPORTS[number % len(EXPORTS)]
    place, gguf = folder / what, folder.parent / "m.gguf"
    place.mkdir(exist_ok=True)
    if what == "first use":
        os.environ["EDGESPEC_HOME"] = str(place)
        open_model(gguf, "target", progress=_report)
    else:
        source = folder.parent / "checkpoint" if what == "checkpoint" else gguf
        weights = "portable" if what == "portable" else None
        options = ExportOptions(weights=weights, overwrite=True)
        export_model(source, place / "out", options=options, progress=_report)
    say("done")


def _exported(folder: Path, killed: Sequence[Killed]) -> str:
    number = killed[-1].number
    found = _bundle(folder, number, "absent")
    _export(folder, number)
    assert _bundle(folder, number, "") == "sound"
    if len(killed) % 2:  # the next one replaces nothing
        shutil.rmtree(folder / EXPORTS[number % len(EXPORTS)])
    return f"the bundle is {found}, then exported again"


def _bundle(folder: Path, number: int, otherwise: str) -> str:
    """``sound`` where there is a bundle, whose digests are right."""
    what = EXPORTS[number % len(EXPORTS)]
    inside = folder / what / "bundles" if what == "first use" else folder / what
    made = [path for path in inside.glob("*") if not path.name.startswith(".")]
    for path in made:
        Bundle(path, verify_digests=True)
    if not otherwise:  # it was made again
        locks = [path.name for path in inside.glob(".*.lock")]
        _only(inside, *locks, made[0].name)
    return "sound" if made else otherwise


@contextmanager
def _sources(folder: Path) -> Iterator[None]:
    tiny_gguf("llama", "Q4_K").write(folder / "m.gguf")
    write_checkpoint(folder / "checkpoint", config_of("llama"), dtype="BF16", shards=2)
    (folder / "checkpoint" / "tokenizer.json").write_text(byte_level_json(size=300), encoding="utf-8")
    yield


# ---- downloads ---------------------------------------------------------------------------------------------

DOWNLOADS: Final = ("hub", "repository")


def _download(folder: Path, number: int) -> None:
    _download_from(folder, DOWNLOADS[number % len(DOWNLOADS)])


def _download_from(folder: Path, what: str) -> None:
    os.environ |= addresses(folder.parent, what) | {"EDGESPEC_HOME": str(folder / what)}
    if what == "repository":
        pull_hub(HubReference(REPOSITORY), progress=_report)
    else:
        pull(entry_from(what), progress=_report)
    say("done")


def entry_from(what: str) -> CatalogueEntry:
    """The catalogue's entry of what the hub, or the index, has."""
    return HUB if what == "hub" else INDEX


def addresses(folder: Path, what: str) -> dict[str, str]:
    """Variables that name the stand-ins."""
    address = (folder / f"{what}.address").read_text() if what != "index" else "http://127.0.0.1:9"
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "wheels")}
    patient = {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}  # however busy the machine
    return {"HF_ENDPOINT": address, **pip, **patient}


def _downloaded(folder: Path, killed: Sequence[Killed]) -> str:
    return _downloaded_from(folder, DOWNLOADS[killed[-1].number % len(DOWNLOADS)])


def _downloaded_from(folder: Path, what: str) -> str:
    os.environ["EDGESPEC_HOME"] = str(folder / what)
    (folder / what).mkdir(exist_ok=True)
    found = _pulled(folder, what)
    _download_from(folder, what)
    assert _pulled(folder, what) == "whole"
    if what == "repository":
        snapshots = folder / what / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
        _only(snapshots, "pull.lock", "pulled", "snapshots")
        partial = [file for file in snapshots.rglob("*") if ".part" in file.name or ".new" in file.name]
        assert not partial, partial
    else:
        name = model_path(entry_from(what)).name
        _only(folder / what / "models", name, f"{name}.sha256", f"{name}.lock")
    shutil.rmtree(folder / what)
    return f"{what}: {found}, then pulled"


def _pulled(folder: Path, what: str) -> str:
    """What lies there: ``whole``, ``some bytes`` or ``nothing``."""
    parts = [file for file in (folder / what).rglob("*") if ".part" in file.name]
    if what == "repository":
        place = pulled_hub(HubReference(REPOSITORY))
        if place is not None:
            served = json.loads((folder.parent / "repository.digests").read_text())
            mine = {file.name: _digest(file) for file in place.iterdir() if not file.name.endswith(".part")}
            assert mine == served, f"taken for pulled: {mine.keys() ^ served.keys()}"
        return "whole" if place is not None else "some bytes" if parts else "nothing"
    entry = entry_from(what)
    path = model_path(entry)
    if path.exists():
        assert _digest(path) == entry.sha256, f"{path} is not whole"
        return "whole" if is_pulled(entry) else "whole, not recorded"
    return "some bytes" if parts else "nothing"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def hubs(folder: Path) -> Iterator[None]:
    """Stand-ins for hub and index; the hubs in a process of their own, since a fork has one thread only."""
    (folder / "wheels").mkdir()
    write_wheel(folder / "wheels", "toy-whole", {"toy/whole.bin": CONTENT})
    with _sources(folder):
        files = {file.name: file.read_bytes() for file in (folder / "checkpoint").iterdir()}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    (folder / "repository.digests").write_text(json.dumps(digests))
    out, into = os.pipe()
    server = os.fork()
    if server == 0:
        _serve(folder, files, into)
    os.close(into)
    os.read(out, 1)
    try:
        yield
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _serve(folder: Path, files: Mapping[str, bytes], into: int) -> None:
    with running_hub() as hub, running_hub() as repository:
        hub.content, repository.files = HUB_BYTES, dict(files)
        (folder / "hub.address").write_text(hub.address)
        (folder / "repository.address").write_text(repository.address)
        os.write(into, b"!")
        signal.pause()


# ---- histories ---------------------------------------------------------------------------------------------


def _doing(killed: Killed) -> str:
    return "a program learns" if killed.number % (WRITERS + 1) else _last(killed)


def _learn(folder: Path, number: int) -> None:
    if number % (WRITERS + 1):
        write_until_killed(folder / f"me{SUFFIX}", number)
    history, marks = History(folder / f"me{SUFFIX}"), (f"<{number} {turn}>" for turn in count())
    for mark in marks:
        file = exported_history(folder / f"{number}.json", mark)
        say(f"import:{mark}")
        history.load(file)
        say(f"export:{mark}")
        history.export(folder / f"{number}.out.json")
        say(f"forget:{mark}")
        history.forget(mark)
        say(f"delete a namespace:{mark}")
        history.load(file)
        history.delete(mark)
        say(f"read:{mark}")
        history.show()


def exported_history(file: Path, mark: str) -> Path:
    """An export of passages that say ``mark``, in a namespace called so."""
    scope = {"target": "target", "tokenizer": "imported", "namespace": mark}
    plain = {"scope": scope, "before": "", "lead": [], "worth": 1.0, "right": [0], "wrong": [0]}
    passages = [plain | {"text": f"{mark} {n}", "body": [n], "learned_on": 0.0} for n in range(PASSAGES)]
    file.write_text(json.dumps({"format": FORMAT, "corrections": [], "passages": passages}))
    return file


def _learned(folder: Path, killed: Sequence[Killed]) -> str:
    path = folder / f"me{SUFFIX}"
    history = History(path)
    if not path.exists():
        return "there is no history yet"
    store = Store.open(path)
    there = list(store.learned())
    store.close()
    digests = {each.entry.passage.digest for each in there}
    for each in killed:
        if each.number % (WRITERS + 1):
            # However busy the machine: what was reported as written, not what should have been by now.
            lost = promised(each.number, each.said, each.at, slack_s=inf) - digests
            assert not lost, f"{len(lost)} passages of {each.number} are lost"
        elif each.said:
            _managed(there, each)
    for file in folder.glob("*.out.json"):
        parse(file)
    temporary = [file for file in folder.iterdir() if file.name.startswith(".edgespec-")]
    assert len(temporary) <= 1, f"left over: {temporary}"
    history.load(exported_history(folder / "after.json", "<after>"))
    assert history.forget("<after>").passages == PASSAGES
    assert len(history.show()) == len(there)
    return "all that was acknowledged is there"


def _managed(there: Sequence[Learned], killed: Killed) -> None:
    """Imports, and what was forgotten, are there whole or not at all."""
    doing, _, mark = killed.said[-1].partition(":")
    found = sum(each.scope.namespace == mark for each in there)
    allowed = {"export": {PASSAGES}, "read": {0}}.get(doing, {0, PASSAGES})
    assert found in allowed, f"{found} passages of an import when killed at {doing}"


KINDS: Final[Mapping[str, Kind]] = {
    "export": Kind(_export, _exported, _last, len(EXPORTS), served=_sources),
    "download": Kind(_download, _downloaded, _last, len(DOWNLOADS), served=hubs),
    "index": Kind(
        lambda folder, _: _download_from(folder, "index"),
        lambda folder, _: _downloaded_from(folder, "index"),
        _last,
        variants=1,
        served=hubs,
    ),
    "history": Kind(_learn, _learned, _doing, at_once=WRITERS + 1, seconds=0.5),
}
