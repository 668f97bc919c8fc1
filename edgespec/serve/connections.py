"""Connections: how many there are, and how long a client may keep one waiting."""

import asyncio
import errno
import logging
import sys
from collections.abc import Iterable
from time import monotonic
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_LOG = logging.getLogger("edgespec.serve")
_MOST = 1024  # handles for which there are connections, where a process may have more
_QUIET_S = 60.0
_NO_HANDLE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def handles() -> int:
    """The number of handles that this process may have open, at most 1,024."""
    if sys.platform == "win32":
        return _MOST
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if limit == resource.RLIM_INFINITY else min(limit, _MOST)


class Limits:
    """The limits of all connections of a server.

    ``seconds`` is the time within which a request's head arrives, and within which a client reads on.
    ``most`` is the number of connections. Half of the handles remain for files.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.most = seconds, handles() // 2
        self._quiet_until = 0.0

    def make_room(self, connections: Iterable["Connection"], reason: str, count: int = 1) -> None:
        """End the connections that have been waiting longest for a client. The log gets the ``reason``."""
        waiting = sorted((c for c in connections if c.waits), key=lambda connection: connection.heard)
        for connection in waiting[:count]:
            connection.end()
        if monotonic() >= self._quiet_until:  # no flood of lines
            self._quiet_until = monotonic() + _QUIET_S
            _LOG.warning("%s; those that wait longest for their client are closed", reason)

    def on_error(
        self, connections: Iterable["Connection"], loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        """Handle an error of the event loop. If no handle is left for a connection, it tries again later."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_HANDLE:
            self.make_room(
                connections, f"no further connection can be opened ({error.strerror})", self.most // 2
            )
        else:
            loop.default_exception_handler(context)


class Connection(H11Protocol):
    """Uvicorn's, which ends in time if a request's head does not arrive whole or the client stops reading.

    :func:`edgespec.serve.bodies.read_body` ends slow bodies. Beyond the limit, the connection that has been
    waiting longest for its client ends.
    """

    def __init__(self, limits: Limits, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._limits, self.heard = limits, monotonic()
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """Whether no request of the client is here whole."""
        return not self._answers or self.cycle.more_body

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def end(self) -> None:
        """End at once."""
        self.connections.discard(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._expect()
        if len(self.connections) > self._limits.most:
            others: list[Any] = [connection for connection in self.connections if connection is not self]
            self._limits.make_room(others, f"more than {self._limits.most} connections are open")
            if len(self.connections) > self._limits.most:
                self.end()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        self.heard = monotonic()
        if self._deadline is None and not self._answers:
            self._expect()
        super().data_received(data)
        if self._answers and not self.flow.write_paused:
            self._stop_waiting()

    def pause_writing(self) -> None:
        """Begin to wait until the client reads on."""
        super().pause_writing()
        self._expect()

    def resume_writing(self) -> None:
        """Go on with the answer."""
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(self._limits.seconds, self.end)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
