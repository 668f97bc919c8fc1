"""What drafters learn from a history's texts: changes of their weights, in a private folder beside the
history.

``NAME.history.drafters`` has a folder for every target, namespace and checkpoint of a drafter: the change
(an alignment file), the drafter's bundle with it, and a training run that was stopped. Whoever deletes texts
deletes the folders trained on them; a run creates its folder before it reads the texts and never later, so it
cannot bring back what was forgotten meanwhile.
"""

import hashlib
import json
import logging
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from edgespec.history.passages import Turn
from edgespec.history.store import Learned, Scope, Store, StoredTurn
from edgespec.loading.first_use import checkpoint_of, open_changed
from edgespec.loading.opening import Reference
from edgespec_models.bundles.bundle import Bundle
from edgespec_models.bundles.static_graphs import ExportDevice
from edgespec_models.downloads.catalog import entries
from edgespec_models.errors import EdgespecError, RequestError, StorageError
from edgespec_models.progress import ProgressCallback
from edgespec_models.schema import parse, read
from edgespec_models.storage import move, read_text, replacing, writing

FEWEST: Final = 50
"""The fewest new texts that a drafter is trained on, those that measure included."""
_CHANGE, _RUN = "alignment.safetensors", "run.json"
_NEWER: Final = 10  # of so many texts one has to be newer
_LOG = logging.getLogger("edgespec")


@dataclass(frozen=True, slots=True)
class Adaptation:
    """What training a drafter on a history's texts gave.

    Attributes:
        improved: whether the change is better, and so is merged at the next load of the history.
        texts: the number of texts that were trained on; ``held_out`` later ones measured.
        tokens: the number of answer tokens that were trained on, in the drafter's vocabulary.
        right_before: the share of right first guesses on held-out texts; ``right_after`` is the one after it.
        speed_before: times plain decoding on held-out texts, replayed with drafts of the best constant
            length; ``speed_after`` is the one after it.
    """

    improved: bool
    texts: int
    held_out: int
    tokens: int
    right_before: float
    right_after: float
    speed_before: float
    speed_after: float


@dataclass(frozen=True, slots=True)
class Run:
    """The progress of training in a folder.

    Attributes:
        through: the date of the latest text that the change was trained on, in seconds since 1970.
        until: the date of the latest text of the run that goes on; 0 without one.
        tried: the date of the latest text of the last run, if that gave nothing.
    """

    through: float = 0.0
    until: float = 0.0
    tried: float = 0.0


@dataclass(frozen=True, slots=True)
class Learner:
    """A drafter that learns from the texts of one scope of a history.

    ``bundle`` is the drafter's directory, ``source`` the checkpoint it was made from, ``shipped`` the
    alignment in it or None. ``folder`` is where its change is.
    """

    history: Path
    scope: Scope
    bundle: Path
    source: Path
    shipped: Path | None
    folder: Path

    @property
    def change(self) -> Path:
        """The file of the change, which need not exist."""
        return self.folder / _CHANGE

    @property
    def run(self) -> Run:
        """The progress of training; at its beginning if there is none."""
        try:
            value = parse(read_text(self.folder / _RUN), _RUN, RequestError, "")
            return read(Run, value, _RUN, RequestError, "")
        except (OSError, UnicodeDecodeError, RequestError):
            return Run()

    def note(self, run: Run) -> None:
        """Write the progress. Raises StorageError if the folder is gone, because its texts were forgotten."""
        with writing(self.folder), replacing(self.folder / _RUN, 0o600) as file:
            file.write(json.dumps(asdict(run)).encode())

    def begin(self) -> None:
        """Make the folder, before texts are read."""
        with writing(self.folder):
            self.folder.parent.mkdir(mode=0o700, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)

    def texts(self) -> list[StoredTurn]:
        """The turns that the change was not trained on, the oldest first; without any turns, the passages.

        While a run goes on, later texts wait for the next one.

        Raises:
            StorageError: the history cannot be read.
        """
        run = self.run
        if not self.history.is_file():  # it was deleted
            return []
        try:
            with closing(Store.open(self.history)) as store:
                turns = [turn for turn in store.turns() if turn.scope == self.scope]
                if not turns:
                    turns = [_as_turn(text) for text in store.learned() if text.scope == self.scope]
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"the history {self.history} cannot be read: {error}") from error
        turns.sort(key=lambda turn: turn.written_on)
        return [turn for turn in turns if run.through < turn.written_on <= (run.until or turn.written_on)]

    def is_due(self) -> bool:
        """Whether a run goes on, or there are enough new texts, a tenth of them newer than a run in vain."""
        run, texts = self.run, self.texts()
        newer = sum(text.written_on > run.tried for text in texts)
        return run.until > 0 or (len(texts) >= FEWEST and newer * _NEWER >= len(texts))

    def changed(
        self, weights: str | None, device: ExportDevice | None, progress: ProgressCallback
    ) -> Bundle | None:
        """The drafter's bundle with its change, made if it does not exist; None without a usable change."""
        if not self.change.is_file() or device not in (None, "cuda"):
            return None
        try:
            bundle = open_changed(self.source, self.change, weights, device, progress)
            if self.change.is_file():
                return bundle
            delete_changes(self.history, [self.scope])  # its texts were forgotten meanwhile
        except EdgespecError as error:
            _LOG.warning("what the drafter has learned is not used: %s", error)
        return None


def learner_of(history: Path, scope: Scope, drafter: Bundle, reference: Reference) -> Learner | None:
    """The drafter that ``reference`` names, as one that learns; None if it has no checkpoint to train."""
    source, digest = checkpoint_of(reference), drafter.manifest.provenance.get("sha256")
    if source is None or not isinstance(digest, str) or drafter.config.is_head:
        return None
    entry = entries().get(str(reference))
    shipped = None if entry is None or entry.alignment is None else entry.alignment.path
    folder = _root(history) / f"{_key(scope)}-{digest[:16]}"
    return Learner(history, scope, drafter.path, source, shipped, folder)


def delete_changes(history: Path, scopes: Iterable[Scope] | None = None) -> None:
    """Delete what drafters have learned from these scopes of a history, or from all.

    Raises:
        StorageError: a file cannot be deleted, such as one that a program uses on Windows.
    """
    root, keys = _root(history), None if scopes is None else tuple(map(_key, scopes))
    with writing(root):
        for folder in [*root.iterdir()] if root.is_dir() else []:
            if folder.suffix == ".lock":  # it keeps others out of a folder that a running training still has
                continue
            if keys is None or folder.name.startswith((*keys, ".deleted-")):
                gone = root / f".deleted-{secrets.token_hex(8)}"
                move(folder, gone)  # at once, so that a running training finds it gone
                shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with suppress(OSError):
        root.rmdir()


def _as_turn(text: Learned) -> StoredTurn:
    """A passage as the answer to what stood before it."""
    prompt = json.dumps(text.before.decode(errors="ignore")).encode()
    return StoredTurn(text.scope, Turn(prompt, text.text, False), text.learned_on)


def _root(history: Path) -> Path:
    real = Path(os.path.realpath(history))
    return real.with_name(real.name + ".drafters")


def _key(scope: Scope) -> str:
    parts: list[Any] = [scope.target, scope.tokenizer, scope.namespace]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
