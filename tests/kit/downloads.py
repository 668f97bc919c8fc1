"""Stand-ins for the network: a hub on the loopback interface, wheels in a folder, and a model in both."""

import hashlib
import json
import random
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from edgespec_models.downloads.catalog import CatalogueEntry, HubFile, IndexPart, IndexParts
from edgespec_models.downloads.download import is_pulled

REPOSITORY = "someone/Tiny-1.5B"
CONTENT = random.Random(7).randbytes(300_000)
CUTS = (0, 120_000, 240_000, 300_000)
PARTS = tuple(IndexPart(f"toy-part{i}", "1.0", f"toy/{i}.bin", CUTS[i + 1] - CUTS[i]) for i in range(3))
WHOLE = IndexParts((IndexPart("toy-whole", "1.0", "toy/whole.bin", len(CONTENT)),))  # one run of pip
_LARGE = (".safetensors", ".gguf", ".bin")


class Handler(BaseHTTPRequestHandler):
    """Answers GET by :meth:`answer`."""

    def do_GET(self) -> None:
        with suppress(ConnectionError):  # whoever asked has gone
            self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@contextmanager
def serving(handler: type[Handler]) -> Iterator[str]:
    """Serve on a free port; yields the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Hub:
    """What the stand-in serves, how it misbehaves, and what it was asked."""

    content: bytes | None = None  # of every file, whatever its path; None where ``files`` are served
    files: dict[str, bytes] = field(default_factory=dict)  # of ``REPOSITORY``
    architecture: str | None = None  # of its GGUF files
    commit: str = "0a" * 20  # the one commit: every revision is it
    revisions: tuple[str, ...] = ("main",)
    status: int = 200
    resumes: bool = True  # whether it heeds ranges
    damaged: set[str] = field(default_factory=set)  # files that arrive with one byte changed
    cuts: dict[str, list[int]] = field(default_factory=dict)  # bytes of a file before the connection ends
    silent: bool = False  # answers nothing until the test is over
    stalls_after: int | None = None  # sends so many bytes, then nothing until the test is over
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # paths and headers
    over: threading.Event = field(default_factory=threading.Event)
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
        about = {"gguf": {"architecture": self.architecture}} if self.architecture else {}
        return json.dumps({"id": REPOSITORY, "sha": self.commit, "siblings": siblings, **about}).encode()

    def answer(self, path: str) -> bytes | None:
        """The body for a path; None where there is nothing."""
        if self.content is not None:
            return self.content
        if path in {
            f"/api/models/{REPOSITORY}/revision/{revision}" for revision in (*self.revisions, self.commit)
        }:
            return self.listing()
        name = path.removeprefix(f"/{REPOSITORY}/resolve/{self.commit}/")
        data = self.files.get(name)
        return data[:-1] + bytes([data[-1] ^ 1]) if data and name in self.damaged else data

    @property
    def fetched(self) -> list[str]:
        """Names of the files asked for, in order."""
        return [path.partition(f"/resolve/{self.commit}/")[2] for path, _ in self.requests if "/res" in path]

    @property
    def ranges(self) -> list[str | None]:
        """The range that each request asked for."""
        return [headers.get("range") for _, headers in self.requests]


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _handler_of(hub: Hub) -> type[Handler]:
    class Answers(Handler):
        def answer(self) -> None:
            hub.requests.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
            if hub.silent:
                hub.over.wait()
                return
            path, range_ = unquote(urlsplit(self.path).path), self.headers.get("Range")
            body, start = hub.answer(path), 0
            status = 404 if body is None and hub.status == 200 else hub.status
            body = body or b""
            if status == 200 and range_ is not None and hub.resumes:
                start, status = int(range_.removeprefix("bytes=").rstrip("-")), 206
            self.send_response(status)
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            cuts = hub.cuts.get(path.rpartition("/")[2])
            self.wfile.write(body[start:][: cuts.pop(0) if cuts else hub.stalls_after])
            if hub.stalls_after is not None:
                hub.over.wait()

    return Answers


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub on a free port, its address in ``address``."""
    hub = Hub()
    with serving(_handler_of(hub)) as hub.address:
        try:
            yield hub
        finally:
            hub.over.set()


def write_wheel(folder: Path, package: str, members: Mapping[str, bytes], version: str = "1.0") -> Path:
    """A wheel that pip accepts, with these members."""
    stem = f"{package.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        facts = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", facts)
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def entry_of(*sources: HubFile | IndexParts) -> CatalogueEntry:
    facts: Any = {"name": "toy", "title": "Toy", "architecture": "llama", "role": "target", "licence": "MIT"}
    file: Any = {"filename": "toy.gguf", "size_bytes": len(CONTENT), "parameters": 1}
    return CatalogueEntry(**facts, **file, sha256=hashlib.sha256(CONTENT).hexdigest(), sources=sources)


BOTH = entry_of(HubFile("someone/toy", "toy.gguf"), WHOLE)
FROM_HUB = entry_of(HubFile("someone/toy", "toy.gguf"))
FROM_INDEX = entry_of(IndexParts(PARTS))


def assert_whole(home: Path) -> None:
    """The file, its record and the lock, and nothing that was on its way."""
    assert (home / "toy.gguf").read_bytes() == CONTENT
    assert is_pulled(BOTH)
    assert {path.name for path in home.iterdir()} <= {"toy.gguf", "toy.gguf.sha256", "toy.gguf.lock"}
