"""A stand-in for a repository on the Hugging Face hub: its listing, and its files, at one commit."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from tests.servers_for_tests import Handler, serving

REPOSITORY = "someone/Tiny-1.5B"
_LARGE = (".safetensors", ".gguf", ".bin")


@dataclass
class Repository:
    """What the stand-in serves, how it misbehaves, and what it was asked.

    Attributes:
        files: by path.
        commit: the one commit; every revision of ``revisions`` is it.
        status: of every answer.
        damaged: files that arrive with one byte changed.
        cuts: for each file, close the connection after so many bytes, once each.
        requests: paths asked for, with their query.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    commit: str = "0a" * 20
    revisions: tuple[str, ...] = ("main",)
    status: int = 200
    damaged: set[str] = field(default_factory=set)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    address: str = ""

    def listing(self) -> bytes:
        """What the hub's API answers, as far as anyone reads it."""
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": _git_sha1(data)}
            if name.endswith(_LARGE):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 135}
            siblings.append(entry)
        return json.dumps({"id": REPOSITORY, "sha": self.commit, "siblings": siblings}).encode()

    def answer(self, path: str) -> bytes | None:
        """The body for a path; None where there is nothing."""
        for revision in (*self.revisions, self.commit):
            if path == f"/api/models/{REPOSITORY}/revision/{revision}":
                return self.listing()
        name = path.removeprefix(f"/{REPOSITORY}/resolve/{self.commit}/")
        data = self.files.get(name)
        if data is not None and name in self.damaged:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    @property
    def fetched(self) -> list[str]:
        """Names of the files asked for, in order."""
        return [
            path.partition(f"/resolve/{self.commit}/")[2] for path in self.requests if "/resolve/" in path
        ]


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _handler_of(hub: Repository) -> type[Handler]:
    class Answers(Handler):
        def answer(self) -> None:
            hub.requests.append(self.path)
            path = unquote(urlsplit(self.path).path)
            body = hub.answer(path)
            status = hub.status if hub.status != 200 else 404 if body is None else 200
            body, start = body or b"", 0
            asked = self.asked_from()
            if status == 200 and asked is not None:
                start, status = asked, 206
            self.send_response(status)
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            cuts = hub.cuts.get(path.rpartition("/")[2])
            self.wfile.write(body[start:][: cuts.pop(0)] if cuts else body[start:])

    return Answers


@contextmanager
def running_repository() -> Iterator[Repository]:
    """The stand-in on a free port, its address in ``address``."""
    hub = Repository()
    with serving(_handler_of(hub)) as hub.address:
        yield hub
