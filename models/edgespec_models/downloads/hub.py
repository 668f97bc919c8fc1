"""Models on the Hugging Face hub: ``hf:OWNER/REPO`` to a directory, ``hf:OWNER/REPO/FILE.gguf`` to a file, or
to one of the parts that a model is split into, which are all fetched. Other names are read as these.

A pull fetches the files that an export reads, by their names: configuration, tokenizer, chat template,
safetensors. It never fetches code, and a pickle only for an EAGLE-3 head in no other form, from which torch
reads nothing but tensors. With a GGUF file of a model that edgespec lets see comes the ``mmproj`` file beside
it: that in Q8_0, which takes least and has what exports keep, else BF16, F16 or another; of several models'
the one with the name most like the model's.

Every file has the digest in the hub's listing: SHA-256 for large files, git's SHA-1 for small ones. A
snapshot lies under ``EDGESPEC_HOME`` in ``hub/models--OWNER--REPO/snapshots/COMMIT``; ``pulled/`` beside it
records complete pulls, which need no network any more.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

from edgespec_models.downloads.catalog import REPOSITORY, HubFile, hub_names
from edgespec_models.downloads.hub_http import fetch_hub, read_hub
from edgespec_models.downloads.job import Job, file_errors, length, require_space
from edgespec_models.errors import DownloadError, ModelFileError, RequestError
from edgespec_models.files.facts import Facts
from edgespec_models.files.gguf_parts import part_names
from edgespec_models.progress import ProgressCallback, ignore_progress
from edgespec_models.storage import home, read_text, replacing
from edgespec_models.text.template_files import AS_JSON, BESIDE

PREFIX = "hf:"
"""The beginning of names of models on the hub."""

_CONFIG, _SINGLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_PICKLE = "pytorch_model.bin"
_TEXTS = (
    *(_CONFIG, _INDEX, "generation_config.json", "tokenizer.json", "tokenizer.model"),
    *(AS_JSON, *BESIDE.values()),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("modules.json", "1_Pooling/config.json"),
)
"""Files besides the weights that are fetched if the repository has them."""

_COMMIT = re.compile("[0-9a-f]{40,64}")
_NAME = r"[\w(\[](?:[\w .,()+=&!'\[\]-]*[\w)\]])?"
_PATH = re.compile(rf"(?:{_NAME}/)*{_NAME}")  # leads nowhere but down
_MODEL = re.compile(r"(?!.*(mmproj|imatrix)).*\.gguf", re.IGNORECASE)  # no additions to models
_TOWER = re.compile(r"(?:.*/)?[^/]*mmproj[^/]*\.gguf", re.IGNORECASE)
_TOWER_FORMATS = ("q8_0", "bf16", "f16")  # the best is the first; BF16 also has the other's name in its own
_REVISION = r"[A-Za-z0-9][A-Za-z0-9._/-]*"
_REFERENCE = re.compile(
    rf"{PREFIX}(?P<repository>{REPOSITORY})"
    rf"(?:/(?P<filename>{_PATH.pattern}\.(?i:gguf))|:(?P<weights>[A-Za-z0-9_-]+))?(?:@(?P<revision>{_REVISION}))?"
)
_ADDRESS = re.compile(r"(https?://)?(www\.)?(hf\.co|huggingface\.co)/(?=[^/]+/)")
_PAGE = re.compile(
    r"(?P<repository>[^/]+/[^/]+)/(?:blob|resolve|tree)/(?P<revision>[^/?@]+)(?P<file>/[^?@]+)?(\?.*)?"
)


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository's safetensors checkpoint, or one GGUF file of it, at a branch, tag or commit.

    ``weights``, such as ``Q8_0``, stands for the file that has this weight format in its name.
    """

    repository: str
    revision: str = "main"
    filename: str | None = None
    weights: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``hf:OWNER/REPO[/FILE.gguf|:FORMAT][@REVISION]`` or an address; RequestError for others."""
        plain = unquote(_ADDRESS.sub(PREFIX, text, count=1))
        page = _PAGE.fullmatch(plain.removeprefix(PREFIX))
        if page is not None:
            plain = f"{PREFIX}{page['repository']}{page['file'] or ''}@{page['revision']}"
        match = _REFERENCE.fullmatch(plain)
        if match is None or ".." in plain or "--" in match["repository"]:
            raise RequestError(
                f"{text!r} names no model on the hub; write {PREFIX}OWNER/REPO, {PREFIX}OWNER/REPO/FILE.gguf "
                f"or {PREFIX}OWNER/REPO:FORMAT, such as :Q8_0, each with @REVISION behind it or without"
            )
        return cls(match["repository"], match["revision"] or "main", match["filename"], match["weights"])

    def __str__(self) -> str:
        file = f":{self.weights}" if self.weights else "" if self.filename is None else f"/{self.filename}"
        return f"{PREFIX}{self.repository}{file}@{self.revision}"

    @property
    def folder(self) -> Path:
        """The folder of the repository's files; it need not exist yet."""
        return home() / "hub" / f"models--{self.repository.replace('/', '--')}"

    @property
    def record(self) -> Path:
        """The record of a complete pull of this reference."""
        return self.folder / "pulled" / f"{quote(str(self).removeprefix(PREFIX), safe='')}.json"

    def path(self, commit: str) -> Path:
        """The directory, or the GGUF file, of a commit."""
        snapshot = self.folder / "snapshots" / commit
        return snapshot if self.filename is None else snapshot / self.filename


def on_hub(text: str) -> HubReference | None:
    """The model that ``text`` names on the hub, by ``hf:`` or by a name of the catalogue; None for others.

    Raises:
        RequestError: it begins like a reference but is none.
    """
    named = hub_names().get(text)
    text = text if named is None else named.reference
    return HubReference.parse(text) if text.startswith(PREFIX) or _ADDRESS.match(text) else None


def pulled_hub(reference: HubReference) -> Path | None:
    """The path of the model if an earlier pull completed it and its files exist. Uses no network.

    A commit may have been pulled under the name of a branch.
    """
    other = replace(reference, revision="*").record
    for path in (reference.record, *other.parent.glob(other.name.replace("%2A", "*"))):
        try:
            record = json.loads(read_text(path))
            snapshot, sizes = reference.folder / "snapshots" / record["commit"], dict(record["sizes"])
            complete = bool(sizes) and all(length(snapshot / name) == size for name, size in sizes.items())
            if complete and (path == reference.record or record["commit"] == reference.revision):
                return snapshot / next(iter(sizes)) if reference.weights else reference.path(record["commit"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # never pulled, or the record is damaged: pulled again
    return None


def pull_hub(
    reference: HubReference,
    *,
    check: Callable[[Path], object] | None = None,
    progress: ProgressCallback = ignore_progress,
    notify: Callable[[str], None] = lambda message: None,
) -> Path:
    """Ask the hub for the newest files of that revision, check the files here and fetch the others.

    ``check`` is called with the directory when all files but the weights are there. ``progress`` receives
    bytes done of the weights, first of the download, then of the check. An error in either stops the pull,
    which keeps the bytes so far. Returns the directory, or the GGUF file.

    Raises:
        DownloadError: the hub cannot be reached and the model is not here, or it has no such model; the
            disk is too full, or the folder cannot be written.
        ModelFileError: the repository holds no checkpoint in safetensors.
    """
    job = Job(str(reference), reference.folder / "pull", 0, "", progress, notify)
    with file_errors(reference.folder):
        reference.record.parent.mkdir(parents=True, exist_ok=True)
        listing = _read_listing(reference, job)
        if reference.weights:
            reference = replace(reference, filename=listing.in_format(reference.weights))
        with job.alone():
            sizes = {name: listing.files[name].size_bytes for name in _fetch_all(reference, listing, check)}
            record = {"commit": listing.commit, "sizes": sizes}
            with replacing(reference.record) as file:
                file.write(json.dumps(record, indent=1).encode())
    return reference.path(listing.commit)


@dataclass(frozen=True, slots=True)
class _Listing:
    """A repository at one commit: its files by name; ``where`` names it in messages.

    ``architecture`` is that of its GGUF files, if the hub knows it.
    """

    where: str
    commit: str
    files: Mapping[str, Job]
    architecture: object = None

    @property
    def hint(self) -> str:
        """The end of a message: files of the repository that may help."""
        gguf = sorted(name for name in self.files if _MODEL.fullmatch(name))
        if gguf:
            first = part_names(gguf[0])[0]
            return f". It has GGUF files: name one, such as {first}, behind the repository"
        return ". Look for another repository of the same model"

    def in_format(self, weights: str) -> str:
        """The GGUF file whose name says the weight format; ModelFileError if there is none."""
        named = re.compile(rf"(?<![A-Za-z0-9]){re.escape(weights)}[./-]", re.IGNORECASE)
        files = [name for name in self.files if _MODEL.fullmatch(name) and named.search(name)]
        if not files:
            raise ModelFileError(f"{self.where} has no GGUF file named by {weights}{self.hint}")
        return min(files, key=lambda name: (len(name), name))

    def tower_beside(self, name: str) -> tuple[str, ...]:
        """The file of the tower for the GGUF file ``name``; none without, or if edgespec runs no such."""
        from edgespec_models.families import has_tower_in_gguf

        folder, _, file = name.rpartition("/")
        if not has_tower_in_gguf(self.architecture):
            return ()

        def rank(tower: str) -> tuple[int, int, str]:
            own = tower.rpartition("/")[2].lower()
            letters = zip(own.removeprefix("mmproj-"), file.lower(), strict=False)
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], letters))
            known = [at for at, form in enumerate(_TOWER_FORMATS) if form in own]
            return -alike, min(known, default=len(_TOWER_FORMATS)), tower

        towers = (other for other in self.files if _TOWER.fullmatch(other))
        beside = [other for other in towers if other.rpartition("/")[0] == folder]
        return tuple(sorted(beside, key=rank)[:1])

    def require(self, *names: str) -> tuple[str, ...]:
        """The names themselves. Raises ModelFileError if there is no such file."""
        for name in names:
            if name not in self.files:
                raise ModelFileError(f"{self.where} has no {name}{self.hint}")
        return names


def _read_listing(reference: HubReference, job: Job) -> _Listing:
    repository, revision, filename = reference.repository, reference.revision, reference.filename
    where = f"{repository} (revision {revision})"
    address = f"/api/models/{repository}/revision/{quote(revision, safe='')}?blobs=true"
    try:
        answer = json.loads(read_hub(address, repository, where))
        commit, architecture = answer["sha"], (answer.get("gguf") or {}).get("architecture")
        if not _COMMIT.fullmatch(commit):
            raise ValueError(f"sha is {commit!r}")
        snapshot, files = reference.folder / "snapshots" / commit, {}
        for entry in answer["siblings"]:
            large = entry.get("lfs") or {}
            name, size = entry["rfilename"], large.get("size", entry.get("size"))
            digest = large.get("sha256") or entry.get("blobId")
            if isinstance(size, int) and digest and _PATH.fullmatch(name):
                path, digest = snapshot / name, str(digest)
                files[name] = replace(job, name=repository, path=path, size_bytes=size, digest=digest)
        if answer["siblings"] and not files:
            raise DownloadError(
                "the listing states no sizes and digests of files, which downloads are compared with (a "
                "proxy in HF_ENDPOINT may leave them out)"
            )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DownloadError(
            f"the Hugging Face hub's listing of {where} cannot be read ({error!r}); look whether HF_ENDPOINT "
            "is a hub"
        ) from error
    except DownloadError as error:
        file, what = ("", "the directory") if filename is None else (f" {filename}", "the file")
        raise DownloadError(
            f"{reference} cannot be pulled: {error}. Once pulled, a model needs no network; or download it "
            f"elsewhere (hf download {repository} --revision {revision}{file} --local-dir DIR), copy it here "
            f"and give {what} instead of the name"
        ) from error
    return _Listing(where, commit, files, architecture)


def _fetch_all(
    reference: HubReference, listing: _Listing, check: Callable[[Path], object] | None
) -> Sequence[str]:
    """Fetch missing files, and return the names of all files of the model."""
    snapshot = reference.folder / "snapshots" / listing.commit
    snapshot.mkdir(parents=True, exist_ok=True)
    texts: list[str] = []
    if reference.filename is not None:
        weights = listing.require(*part_names(reference.filename))
        weights += listing.tower_beside(reference.filename)
    else:
        listing.require(_CONFIG)
        texts = [name for name in _TEXTS if name in listing.files]
        for name in texts:
            _fetch(reference, listing, name, ignore_progress)
        if check is not None:
            check(snapshot)
        weights = _weights(snapshot, listing)
    jobs = [listing.files[name] for name in weights]
    absent = [job for job in jobs if length(job.path) != job.size_bytes]
    missing = sum(job.size_bytes - length(job.unfinished("hub")) for job in absent)
    require_space(snapshot, missing, str(reference))
    done, total = 0, sum(job.size_bytes for job in jobs)
    for name, job in zip(weights, jobs, strict=True):
        _fetch(reference, listing, name, _within(job.progress, done, total))
        done += job.size_bytes
    return [*texts, *weights]


def _weights(folder: Path, listing: _Listing) -> tuple[str, ...]:
    """``model.safetensors``, or the shards in the index; for heads perhaps a pickle."""
    if _SINGLE in listing.files:
        return (_SINGLE,)
    if _INDEX not in listing.files:
        if _PICKLE in listing.files and Facts.read(folder / _CONFIG).value("draft_vocab_size") is not None:
            return (_PICKLE,)
        raise ModelFileError(
            f"{listing.where} has neither {_SINGLE} nor {_INDEX}; edgespec exports {_CONFIG} with safetensors"
            f"{listing.hint}"
        )
    weight_map = Facts.read(folder / _INDEX).section("weight_map")
    return listing.require(*sorted({weight_map.text(key) for key in weight_map.keys}))


def _fetch(reference: HubReference, listing: _Listing, name: str, progress: ProgressCallback) -> None:
    """Put a file in place, unless it is there with the right digest."""
    job = replace(listing.files[name], progress=progress)
    if job.path.is_file() and job.is_right():
        return
    job.path.parent.mkdir(parents=True, exist_ok=True)
    gathered = fetch_hub(job, HubFile(reference.repository, name, listing.commit))
    job.put_in_place(gathered, f"{name} of {listing.where}")


def _within(progress: ProgressCallback, done: int, total: int) -> ProgressCallback:
    """A progress callable for a file, which counts the bytes of all files."""
    return lambda file: progress(replace(file, done=done + file.done, total=total))
