"""Forked processes: what they leave alone, and what they are told."""

import ctypes
import os
from typing import TypeVar
from weakref import WeakSet

from edgespec_models.errors import RequestError

T = TypeVar("T")
_OBJECTS = WeakSet[object]()


def kept_in_forks(made: T) -> T:
    """``made``, which a process that is forked from this one never destroys, not even at its end.

    Their end would wait for threads, which stay in the parent, or touch what both processes have open.
    """
    _OBJECTS.add(made)
    return made


def check_process(process: int) -> None:
    """Raise RequestError if ``process``, which loaded a model, is not this one: its threads are missing."""
    if process != os.getpid():
        raise RequestError(
            "this process was forked from the one that loaded the model, whose threads stayed there; "
            "load the model in this process, or start processes with 'spawn'"
        )


def _keep() -> None:
    for made in _OBJECTS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)
