"""Runs the server until a signal, and then ends requests in order."""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any, cast

import uvicorn

from edgespec.serve.app import App
from edgespec.serve.connections import Connection, Limits

_LOG = logging.getLogger("edgespec.serve")
_BACKLOG = 256  # connections that the system holds until they are accepted
_MARGIN_S = 5.0  # seconds for sending answers that were ended
_KEEP_ALIVE_S = 115  # idle seconds of which clients are told; Go's keep connections for 90


class Server(uvicorn.Server):
    """Uvicorn's, which ends the model's work before it cuts connections.

    :meth:`run` serves at bound sockets until SIGINT or SIGTERM; ``ready`` is called when it takes requests.
    After the signal no request is taken. Running ones have ``shutdown_s`` to finish; then the model is
    closed, which ends them within a token. A second signal ends everything at once.
    """

    def __init__(self, app: App, ready: Callable[["Server"], None]) -> None:
        self._limits = Limits(app.options.body_timeout_s)
        protocol: Any = partial(Connection, self._limits)
        config = uvicorn.Config(
            app.asgi,
            http=protocol,
            ws="none",
            proxy_headers=False,  # any page could send them
            # asyncio accepts so many connections in a row, and reports each for which there is no handle
            backlog=_BACKLOG if sys.platform == "win32" else 1,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S + 5,  # else requests in the last moment would be lost
            headers=[("Keep-Alive", f"timeout={_KEEP_ALIVE_S}")],
            timeout_graceful_shutdown=round(app.options.shutdown_s + _MARGIN_S),
        )
        super().__init__(config)
        self._app, self._ready = app, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets=sockets)
        on_error = partial(self._limits.on_error, cast(Any, self.server_state.connections))
        asyncio.get_running_loop().set_exception_handler(on_error)
        for listening in sockets or ():
            listening.listen(_BACKLOG)
        self._ready(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish for a while, then end them."""
        self._app.begin_shutdown()
        _LOG.info("shutting down; running requests have %g s", self._app.options.shutdown_s)
        ending = asyncio.create_task(self._end_model())
        await super().shutdown(sockets=sockets)
        if self.force_exit and (tasks := [*self.server_state.tasks]):
            self._end_connections()
            await asyncio.wait(tasks, timeout=1.0)  # else the log has a traceback of each
        ending.cancel()

    async def _end_model(self) -> None:
        until = monotonic() + self._app.options.shutdown_s
        while not self.force_exit and monotonic() < until:
            await asyncio.sleep(0.1)
        if self.force_exit:  # from Python 3.12 on, uvicorn's wait for open connections
            self._end_connections()
            return
        await asyncio.to_thread(self._app.models.close)

    def _end_connections(self) -> None:
        for connection in [*self.server_state.connections]:
            cast(Connection, connection).end()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in order at the first signal, and at once at the second.

        Uvicorn would raise the signal again afterwards, and SIGTERM would end the process before the model
        stored what it learned.
        """
        self.force_exit, self.should_exit = self.should_exit, True
