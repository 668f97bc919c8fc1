"""Targets: exchange files of histories, and the history's own file, damaged."""

import base64
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Final
from unittest.mock import patch

from edgespec.history.exchange import parse
from edgespec.history.manage import History
from edgespec.history.schema import connect
from edgespec.history.store import Scope
from edgespec.history.use import open_use
from edgespec_models.errors import RequestError, StorageError
from edgespec_models.text.tokenizer import Tokenizer
from tools.fuzz.forms import JSON, as_bytes
from tools.fuzz.rules import Rule, Target, only, table, untouched
from tools.fuzz.trees import Tree

__all__ = ["TARGETS"]

_SCOPE: Final = Scope("target", "digest", "mail")
_NAME: Final = "fuzzed.history"


def _exchange(folder: Path) -> Rule:
    path, given = folder / _NAME, folder / "given"
    given.mkdir()
    file, again = given / "exported.json", folder / "again.json"

    def rule(data: bytes) -> None:
        file.write_bytes(_packed(data))
        with untouched(given), only(RequestError, names=file.name):
            passages, corrections = parse(file)
            if len(data) % 4:  # to import takes far longer
                return
            history = History(path)
            try:
                added = history.load(file)
                assert added.passages <= len(passages)
                assert added.corrections <= len(corrections)
                assert history.export(again) == (len(history.show()), len(history.corrections()))
                assert len(parse(again)[0]) == added.passages, "what it exports it cannot import"
                with only(RequestError):
                    history.forget("the")
            finally:
                for each in (path, *path.parent.glob(f"{_NAME}-*")):
                    each.unlink(missing_ok=True)

    return rule


def _packed(data: bytes) -> bytes:
    """The input with tables that are given unpacked as an export has them."""
    if b'"unpacked"' not in data or not isinstance(table(data).get("corrections"), list):
        return data
    tree = table(data)
    for each in tree["corrections"]:
        if isinstance(each, dict) and isinstance(each.get("unpacked"), str):
            raw = zlib.compress(as_bytes(each.pop("unpacked")), 1)
            each["table"] = base64.b64encode(raw).decode()
    return JSON.write(tree)


def _write_sound(path: Path) -> None:
    """A history with passages and a correction."""
    import numpy as np

    from edgespec.history.corrections import DrafterKey
    from edgespec.history.memory import Delta
    from edgespec.history.store import Store
    from edgespec.learning.lesson import ROWS, Lesson
    from tests.histories_for_tests import OTHERS, delta_of, passage_of, text_of

    store = Store.open(path)
    for scope in (_SCOPE, OTHERS[0]):
        store.merge(scope, delta_of(*(passage_of(number) for number in range(12))), text_of)
    delta = Delta()
    delta.learned(DrafterKey("d", "small"), Lesson(np.ones((ROWS, 4), np.float32), anew=False, tokens=100))
    store.merge(_SCOPE, delta, text_of)
    store.close()


def _exchange_seeds() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder, _same_time():
        path = Path(folder) / _NAME
        _write_sound(path)
        History(path).export(path.with_suffix(".json"))
        tree = JSON.read(path.with_suffix(".json").read_bytes())
    tree["passages"] = tree["passages"][:3]
    unpacked = [
        {key: each[key] for key in each if key != "table"}
        | {"unpacked": zlib.decompress(base64.b64decode(each["table"])).decode("latin-1")}
        for each in tree["corrections"]
    ]
    return [JSON.write(tree | {"corrections": each}) for each in (tree["corrections"], unpacked, [])]


def _same_time() -> AbstractContextManager[object]:
    """So that a history made again has the same bytes."""
    return patch("time.time", return_value=1_790_000_000.0)


def _bases(folder: Path) -> dict[str, dict[str, bytes]]:
    """Files, by their endings: a history; one whose writer was killed; another program's database; none."""
    path = folder / "base.history"
    with _same_time():
        _write_sound(path)
        bases = {"plain": {"": path.read_bytes()}, "empty": {"": b""}}
        connection = connect(path)
        connection.execute("UPDATE scope SET clock = clock + 1")
        bases["killed"] = {end: path.with_name(path.name + end).read_bytes() for end in ("", "-wal")}
        connection.close()
    for file in folder.iterdir():
        file.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE notes (text)")
    bases["theirs"] = {"": path.read_bytes()}
    path.unlink()
    return bases


def _damaged(data: bytes, patches: Tree, cut: Tree) -> bytes:
    """``patches`` are places and what is written there; ``cut`` is how many bytes go at the end."""
    damaged = bytearray(data)
    for each in patches if isinstance(patches, list) else []:
        if isinstance(each, list) and len(each) == 2 and isinstance(each[0], int) and data:
            new, at = as_bytes(each[1])[:64], each[0] % len(data)
            damaged[at : at + len(new)] = new
    return bytes(damaged[: len(damaged) - cut if isinstance(cut, int) and 0 < cut < len(damaged) else None])


def _history(folder: Path) -> Rule:
    from tests.models_for_tests import toy_tokenizer

    bases, tokenizer = _bases(folder), toy_tokenizer()
    path = folder / "mine" / _NAME

    def rule(data: bytes) -> None:
        tree = table(data)
        path.parent.mkdir()
        try:
            for end, content in bases.get(str(tree.get("base")), bases["plain"]).items():
                damaged = _damaged(content, tree.get(f"patches{end}"), tree.get("cut") if not end else None)
                path.with_name(_NAME + end).write_bytes(damaged)
            with ExitStack() as stack:
                if _is_refused(path):
                    stack.enter_context(untouched(path.parent))
                if tree.get("way") == "use":
                    _use(path, tokenizer)
                else:
                    _manage(path, str(tree.get("way")))
        finally:
            shutil.rmtree(path.parent)

    return rule


def _is_refused(path: Path) -> bool:
    try:
        History(path).check()
    except StorageError:
        return True
    return False


def _manage(path: Path, way: str) -> None:
    """One of the commands; what cannot be done is an error."""
    history, out = History(path), path.parent.parent / "out.json"
    ways: dict[str, Callable[[], object]] = {
        "show": history.show,
        "corrections": history.corrections,
        "export": partial(history.export, out),
        "forget": partial(history.forget, "xxx"),
        "delete": partial(history.delete, "mail"),
        "delete all": history.delete,
    }
    assert history.size_bytes >= 0
    with only(StorageError, RequestError, names="fuzzed"):
        ways.get(way, history.namespaces)()
    if out.exists():
        with only(StorageError, RequestError):  # the file that was exported, or the history
            history.load(out)
        out.unlink()


def _use(path: Path, tokenizer: Tokenizer) -> None:
    """A model with this history: opening, learning and closing never fail."""
    from tests.histories_for_tests import learn

    use = open_use(path, _SCOPE, tokenizer)
    try:
        learn(use, [*range(3, 40)])
        learn(use, [*range(3, 30)])
    finally:
        use.close()


def _history_seeds() -> list[bytes]:
    """A patch in each part of the file, and none."""
    places = [0, 18, 68, 100, 105, 4096, 4100, 8200, 12300, 16390, 20500, 24580, 28700]
    ways = ("use", "show", "corrections", "export", "forget", "delete", "delete all", "namespaces")
    bases = ("plain", "killed", "theirs", "empty")
    trees: list[Tree] = [{"base": base, "way": way} for base in bases for way in ways]
    trees += [
        {"base": "plain", "way": ways[at % 8], "patches": [[place, "\x07"]], "cut": 0}
        for at, place in enumerate(places * 3)
    ]
    trees += [{"base": "killed", "way": "use", "patches-wal": [[at, "\xff"]]} for at in (8, 24, 40, 56, 500)]
    return [JSON.write(tree) for tree in trees]


TARGETS: Final = {
    "exchange": Target(form=JSON, seeds=_exchange_seeds, rule=_exchange),
    "history": Target(form=JSON, seeds=_history_seeds, rule=_history),
}
