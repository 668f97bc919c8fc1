"""Every error edgespec raises on purpose.

EdgespecError
├── of models: ModelFileError, UnsupportedModelError, BundleError, TokenizerError, ParityError
├── of where they come from and go: CatalogueError, DownloadError, StorageError, DeviceError
├── RequestError: DoesNotFit, Busy, Closed
└── Cancelled

Messages say what was given, what is allowed and what to do. They quote files and requests of strangers, so
characters that command a terminal or have no UTF-8 are escaped, and long quotations are cut.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Final

_UNPRINTABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_LONGEST: Final = 4000  # characters of a message


class EdgespecError(Exception):
    """Base class of every error edgespec raises on purpose.

    ``problem`` says what is wrong; it may quote anything. ``field`` is the option that is wrong, or the place
    in it, such as ``stop[1]``, if there is one. The message is the field and the problem.
    """

    def __init__(self, problem: str = "", field: str = "") -> None:
        self.problem, self.field = problem, _printable(field)
        super().__init__(_printable(f"{field} {problem}" if field else problem))


class ModelFileError(EdgespecError):
    """A checkpoint is damaged, truncated or of another kind than it says."""


class UnsupportedModelError(EdgespecError):
    """The file is sound, but edgespec cannot run its model."""


class BundleError(EdgespecError):
    """A bundle is incomplete, has changed, or is of another format version."""


class TokenizerError(EdgespecError):
    """A tokenizer cannot be read, does not fit its model or fails over a text."""


class CatalogueError(EdgespecError):
    """No such model in the catalogue, or an entry is malformed."""


class DownloadError(EdgespecError):
    """No source could deliver a model file."""


class StorageError(EdgespecError):
    """The disk is full, or a folder cannot be written."""


class ParityError(EdgespecError):
    """An export does not compute what its source computes."""


class DeviceError(EdgespecError):
    """The device of a request is not available."""


class RequestError(EdgespecError, ValueError):
    """An argument of a request is out of range."""


class DoesNotFit(RequestError):
    """A prompt is longer than the model's context.

    Shorten it; in a conversation delete the oldest messages.
    """


def too_long(tokens: int, most: int) -> str:
    """What messages about a full context say of a text.

    Programs look for Anthropic's words, some for its numbers.
    """
    return f"is too long: {tokens} tokens > {most} maximum"


class Busy(RequestError):
    """The queue of the model is full. Ask again later, or raise ``LoadOptions.max_waiting``."""


class Closed(RequestError):
    """The model was closed, which ends its requests. Load it again."""


class Cancelled(EdgespecError):
    """The caller cancelled the work."""


@contextmanager
def naming(file: Path | str) -> Iterator[None]:
    """Add the name of ``file`` to errors: readers of its parts know the place, but not the file."""
    try:
        yield
    except (ModelFileError, UnsupportedModelError, TokenizerError) as error:
        if Path(file).name in str(error):
            raise
        raise type(error)(f"{file}: {error}") from error


def require(what: str, extra: str, *modules: str) -> None:
    """Raise EdgespecError if one of the ``modules`` of the ``extra`` that ``what`` needs is missing."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise EdgespecError(
                f'{what} needs {error.name}, which is not installed: pip install "edgespec[{extra}]"'
            ) from error


def shell_word(word: object) -> str:
    """A word of a command that people paste, quoted where a shell would read it otherwise."""
    if sys.platform != "win32":
        return shlex.quote(str(word))
    text = re.sub('["$%`]', "?", str(word))  # within the quotes of both shells these still mean something
    return text if re.fullmatch(r"[\w.:\\/+-]+", text) else f'"{text}"'


def _printable(text: str) -> str:
    return _cut(_UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], _cut(text)))


def _cut(text: str) -> str:
    """The message, or its beginning and end if it is too long."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 4 :]}"
