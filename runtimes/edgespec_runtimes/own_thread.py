"""Sessions of ONNX Runtime whose passes run in a thread of their own."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any

_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class OwnThread:
    """A session that is opened, and whose passes run, in one thread.

    The thread is a daemon, so it serves other threads until they have ended. In a process that was forked it
    begins anew.
    """

    def __init__(
        self, opened: Callable[[], Any], name: str, begin: Callable[[], object] | None = None
    ) -> None:
        """Open the session in a thread of this name, which calls ``begin`` first."""
        self._name, self._begin, self._process = name, begin, 0
        self._session = self._call(opened)

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        """Run a pass, and wait for its end."""
        self._call(self._session.run_with_iobinding, binding, options)

    def run(self, outputs: Sequence[str], inputs: Mapping[str, Any], options: Any = None) -> Any:
        """Run a pass over arrays, and return the outputs."""
        return self._call(self._session.run, outputs, inputs, options)

    def begin_run(self, outputs: Sequence[str], inputs: Mapping[str, Any], options: Any) -> Future[Any]:
        """Begin a pass over arrays, which another thread may end by ``options.terminate``."""
        return self._queue(self._session.run, outputs, inputs, options)

    def release_captured_graph(self, number: int) -> None:
        """Free a graph, which the thread has captured."""
        self._call(self._session.release_captured_graph, number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        future = self._queue(function, *arguments)
        try:
            return future.result()
        finally:  # Ctrl-C would free memory that the pass still writes
            while not future.done():
                with suppress(KeyboardInterrupt):
                    wait([future])

    def _queue(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._process != os.getpid():
            self._start()
        future = Future[Any]()
        self._calls.put((future, function, arguments))
        return future

    def _start(self) -> None:
        self._process, self._calls = os.getpid(), SimpleQueue[_Call | None]()
        Thread(target=_serve, args=(self._calls, self._begin), name=self._name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)


def _serve(calls: "SimpleQueue[_Call | None]", begin: Callable[[], object] | None) -> None:
    if begin is not None:
        begin()
    while (call := calls.get()) is not None:
        future, function, arguments = call
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)
        del call, future, function, arguments  # a waiting thread keeps nothing alive
