"""An HTTP server on the loopback interface, for stand-ins of the network."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers GET by :meth:`answer`."""

    def do_GET(self) -> None:
        with suppress(ConnectionError):  # whoever asked has gone
            self.answer()

    def answer(self) -> None:
        """Send status, headers and body."""
        raise NotImplementedError

    def asked_from(self) -> int | None:
        """The first byte of the range that is asked for; None where the whole is."""
        asked = self.headers.get("Range")
        return int(asked.removeprefix("bytes=").rstrip("-")) if asked else None

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
