"""Every error edgespec raises on purpose.

EdgespecError
├── of models: ModelFileError, UnsupportedModelError, BundleError, TokenizerError, ParityError
├── of where they come from and go: CatalogueError, DownloadError, StorageError, DeviceError
├── RequestError: DoesNotFit, Busy, Closed
└── Cancelled

Messages say what was given, what is allowed and what to do. They quote what strangers wrote, in files and in
requests: what would command a terminal or has no UTF-8 is spelled out, and what is very long is cut.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Final

_UNPRINTABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_LONGEST: Final = 4000  # characters of a message


class EdgespecError(Exception):
    """Base class of every error edgespec raises on purpose.

    ``message`` says what is wrong; it may quote anything.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(_cut(_UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], _cut(message))))


class ModelFileError(EdgespecError):
    """A checkpoint is damaged, truncated or not what it says."""


class UnsupportedModelError(EdgespecError):
    """The file is sound, but it describes something edgespec cannot run."""


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
    """A device was asked for that cannot be had."""


class RequestError(EdgespecError, ValueError):
    """An argument of a request is out of range."""


class DoesNotFit(RequestError):
    """A prompt is longer than what the model can hold. Shorten it; a conversation, by its oldest messages."""


def too_long(what: str, tokens: int, most: int) -> str:
    """How messages about a full context begin: programs look for Anthropic's words, some for its numbers."""
    return f"{what} is too long: {tokens} tokens > {most} maximum"


class Busy(RequestError):
    """As many requests wait for the model as may. Ask again later, or raise ``LoadOptions.max_waiting``."""


class Closed(RequestError):
    """The model was closed, which ends all that it does. Load it again."""


class Cancelled(EdgespecError):
    """The caller asked to stop."""


@contextmanager
def naming(file: Path | str) -> Iterator[None]:
    """Have errors of what is in ``file`` say so: readers of its parts know the place, but not the file."""
    try:
        yield
    except (ModelFileError, UnsupportedModelError, TokenizerError) as error:
        if Path(file).name in str(error):
            raise
        raise type(error)(f"{file}: {error}") from error


def require(what: str, extra: str, *modules: str) -> None:
    """Find out now that the ``extra`` that ``what`` needs lacks one of the ``modules``: EdgespecError."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise EdgespecError(
                f"{what} needs {error.name}, which is not installed: pip install 'edgespec[{extra}]'"
            ) from error


def _cut(text: str) -> str:
    """Its beginning and its end, where it is longer than messages are."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 4 :]}"
