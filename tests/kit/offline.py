"""A program that uses a model in every way there is, where the network is forbidden: ``FOLDER WAY``.

Python's own sockets raise an error wherever they are used. On Linux the system ends the process at its first
socket of any kind besides, whoever asks for it: libraries that are not Python's are held to it too.
"""

import ctypes
import os
import platform
import socket
import sys
from ctypes import c_ubyte, c_uint, c_ushort
from pathlib import Path
from typing import Final

_SOCKET_CALL: Final = {"x86_64": 41, "aarch64": 198}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_MESSAGES: Final = [{"role": "user", "content": "naïve café"}]


class _Instruction(ctypes.Structure):
    _fields_ = [("code", c_ushort), ("yes", c_ubyte), ("no", c_ubyte), ("k", c_uint)]


class _Program(ctypes.Structure):
    _fields_ = [("length", c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


def forbid_network() -> None:
    """Have sockets and child processes raise, and on Linux the system kill."""
    if sys.platform == "linux":
        _have_sockets_kill(_SOCKET_CALL[platform.machine()])
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event.startswith("socket.") or event in ("subprocess.Popen", "os.system", "os.posix_spawn"):
        raise PermissionError(f"{event} is forbidden here: {arguments}")


def _have_sockets_kill(call: int) -> None:
    steps = (
        _Instruction(_LOAD, 0, 0, 0),  # the number of the call
        _Instruction(_JUMP_IF_EQUAL, 0, 1, call),
        _Instruction(_RETURN, 0, 0, _KILL),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    program = _Program(len(steps), (_Instruction * len(steps))(*steps))
    control = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if control(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "the system takes no filter of calls")


def use(folder: Path) -> None:
    """Load, generate, stream, chat, with n-grams, a drafter and a history, in Python and by command."""
    import edgespec
    from edgespec.cli import app

    target, drafter = folder / "target", folder / "drafter"
    for source, history in (("ngram", "me"), (str(drafter), None)):
        with edgespec.load(target, source, history=history) as model:
            texts = [model.generate("def add(a, b):", max_new_tokens=12, temperature=0.8, seed=1).text]
            texts += [*model.stream("the quick brown fox", max_new_tokens=12)]
            texts += [model.chat(_MESSAGES, max_new_tokens=12).text]
        sys.stdout.write("".join(texts))
    for command in (["generate", str(target), "hello"], ["inspect", str(target)], ["history", "list"]):
        app(command, standalone_mode=False)


def by_python(_: Path) -> None:
    """What the test must see: a socket of Python's."""
    socket.create_connection(("127.0.0.1", 9), timeout=1)


def by_library(_: Path) -> None:
    """What the test must see: a socket that Python knows nothing of."""
    ctypes.CDLL(None).socket(socket.AF_INET, socket.SOCK_STREAM, 0)


if __name__ == "__main__":
    os.environ["EDGESPEC_HOME"] = str(Path(sys.argv[1]) / "home")
    forbid_network()
    {"use": use, "by_python": by_python, "by_library": by_library}[sys.argv[2]](Path(sys.argv[1]))
