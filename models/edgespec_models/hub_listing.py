"""What a repository of the Hugging Face hub holds: names, sizes and digests of its files at one commit."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from edgespec_models.download_job import CHUNK_BYTES
from edgespec_models.errors import DownloadError, ModelFileError
from edgespec_models.hub_http import LostError, chunks, open_url, refuse_offline, refuse_status

__all__ = ["CONFIG", "INDEX", "SINGLE", "Listing", "RemoteFile", "read_listing"]

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_TEXTS = (
    CONFIG,
    INDEX,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files besides the weights that are fetched where they are there."""

_LARGEST_ANSWER = 64 << 20
_COMMIT = re.compile("[0-9a-f]{40,64}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository; see :class:`edgespec_models.download_job.Wanted`.

    Attributes:
        name: what messages call it.
        filename: its path in the repository.
        size_bytes: its size.
        sha256: of a large file; empty for others.
        git_sha1: of a small file, as git computes it; empty for others.
    """

    name: str
    filename: str
    size_bytes: int
    sha256: str = ""
    git_sha1: str = ""

    def is_right(self, path: Path, sha256: str) -> bool:
        """Whether the file at ``path``, whose digest is ``sha256``, is this one."""
        if self.sha256:
            return sha256 == self.sha256
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest() == self.git_sha1


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit.

    Attributes:
        repository: ``OWNER/REPO``.
        where: names repository and revision in messages.
        commit: the commit's digest.
        files: by path in the repository.
    """

    repository: str
    where: str
    commit: str
    files: Mapping[str, RemoteFile]

    @property
    def texts(self) -> tuple[RemoteFile, ...]:
        """All that an export reads besides the weights.

        Raises:
            ModelFileError: there is no ``config.json``.
        """
        if not self.has(CONFIG):
            raise ModelFileError(f"{self.where} has no {CONFIG}, so it is no checkpoint to export{self.hint}")
        return tuple(self.files[name] for name in _TEXTS if self.has(name))

    @property
    def hint(self) -> str:
        """What else of the repository may help, to end a message with."""
        gguf = sorted(name for name in self.files if name.endswith(".gguf"))
        if gguf:
            return f". It has GGUF files: name one, such as {gguf[0]}, behind the repository"
        return ". Look for a repository of the same model that has them"

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return name in self.files

    def file(self, name: str) -> RemoteFile:
        """The file called ``name``. Raises ModelFileError where there is none."""
        if not self.has(name):
            raise ModelFileError(f"{self.where} has no {name}{self.hint}")
        return self.files[name]


def read_listing(repository: str, revision: str, check_cancelled: Callable[[], None]) -> Listing:
    """Ask the hub.

    Raises:
        DownloadError: it cannot be reached, is switched off, refuses, or answers something else.
        Cancelled: the caller asked to stop.
    """
    refuse_offline()
    where = f"{repository} (revision {revision})"

    def address(endpoint: str | None) -> str:
        from huggingface_hub import constants

        place = f"{endpoint or constants.ENDPOINT}/api/models/{repository}"
        return f"{place}/revision/{quote(revision, safe='')}?blobs=true"

    body = bytearray()
    with closing(open_url(address, check_cancelled)) as response:
        refuse_status(response, repository, where)
        try:
            for chunk in chunks(response):
                check_cancelled()
                body += chunk
                if len(body) > _LARGEST_ANSWER:
                    raise DownloadError(f"the Hugging Face hub's listing of {where} has no end")
        except LostError as error:
            raise DownloadError(f"the connection to the Hugging Face hub broke ({error})") from error
    try:
        return _parse(repository, where, json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DownloadError(
            f"the Hugging Face hub's listing of {where} cannot be read ({error!r}); look whether HF_ENDPOINT "
            "is a hub"
        ) from error


def _parse(repository: str, where: str, answer: Any) -> Listing:
    commit = answer["sha"]
    if not _COMMIT.fullmatch(commit):
        raise ValueError(f"sha is {commit!r}")
    files = {}
    for entry in answer["siblings"]:
        large = entry.get("lfs") or {}
        name, size = entry["rfilename"], large.get("size", entry.get("size"))
        digests = large.get("sha256", ""), entry.get("blobId") or ""
        if isinstance(size, int) and any(digests):
            files[str(name)] = RemoteFile(repository, str(name), size, *map(str, digests))
    return Listing(repository, where, commit, files)
