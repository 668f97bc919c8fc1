"""Objects that a forked process leaves alone."""

import ctypes
import os
from typing import TypeVar
from weakref import WeakSet

T = TypeVar("T")
_OBJECTS = WeakSet[object]()


def kept_in_forks(made: T) -> T:
    """``made``, which a process that is forked from this one never destroys, not even at its end.

    For objects whose end waits for their threads, which stay in the parent, or touches what both processes
    have open.
    """
    _OBJECTS.add(made)
    return made


def _keep() -> None:
    for made in _OBJECTS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)
