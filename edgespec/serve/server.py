"""Runs the server until a signal, and then ends requests in order."""

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
        ending.cancel()

    async def _end_model(self) -> None:
        await asyncio.sleep(self._app.options.shutdown_s)
        await asyncio.to_thread(self._app.models.close)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but the signal is not raised again afterwards: the program ends by returning.

        Otherwise SIGTERM would end the process before the model stored what it learned.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        names = ("SIGINT", "SIGTERM", "SIGBREAK")  # the last on Windows: Ctrl-Break
        known = [getattr(signal, name) for name in names if hasattr(signal, name)]
        before = {number: signal.signal(number, self.handle_exit) for number in known}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
