"""Stand-ins for the network: a hub on the loopback interface, and wheels in a folder."""

import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers_for_tests import Handler, serving


@dataclass
class Hub:
    """What the stand-in serves, how it misbehaves, and what it was asked."""

    content: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    resumes: bool = True
    cuts: list[int] = field(default_factory=list)
    """For each request in turn: close the connection after so many bytes."""
    silent: bool = False
    """Accept connections and answer nothing, until the test is over."""
    stalls_after: int | None = None
    """Send so many bytes, then nothing, until the test is over."""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    address: str = ""


def _handler_of(hub: Hub) -> type[Handler]:
    class Answers(Handler):
        def answer(self) -> None:
            hub.requests.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
            if hub.silent:
                hub.over.wait()
                return
            self._answer()

        def _answer(self) -> None:
            start, asked = 0, self.asked_from()
            if hub.status == 200 and asked is not None and hub.resumes:
                start = asked
                self.send_response(206)
                total = len(hub.content)
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            else:
                self.send_response(hub.status)
            body = hub.content[start:]
            self.send_header("Content-Length", str(len(body)))
            for key, value in hub.headers.items():
                self.send_header(key, value)
            self.end_headers()
            if hub.stalls_after is not None:
                self.wfile.write(body[: hub.stalls_after])
                hub.over.wait()
                return
            self.wfile.write(body[: hub.cuts.pop(0)] if hub.cuts else body)

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
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel
