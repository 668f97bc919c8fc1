"""edgespec: on-device speculative decoding through ONNX Runtime.

>>> import edgespec
>>> with edgespec.load("qwen2.5-coder-1.5b-instruct") as model:
...     print(model.chat([{"role": "user", "content": "Reverse a string in Python."}]).text)

Names are imported when they are first used, so that ``import edgespec`` costs milliseconds.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.decoding.draft import Draft, Drafter, Progress, Step
    from edgespec.decoding.grammar import AnyJson, Choice, JsonSchema, Lark, Regex
    from edgespec.engine import Conversation, Model, load
    from edgespec.history.manage import History
    from edgespec.loading.footprint import Plan
    from edgespec.loading.opening import LoadOptions
    from edgespec.loading.planning import plan
    from edgespec.models import Models
    from edgespec.requests.embedding import EmbeddingOptions, Embeddings
    from edgespec.requests.request import RequestOptions
    from edgespec.requests.results import (
        CallPart,
        Generation,
        GenerationStats,
        Record,
        SourceStats,
        TokenRecord,
        ToolCall,
    )
    from edgespec.requests.stream import Stream
    from edgespec_models.errors import (
        BundleError,
        Busy,
        Cancelled,
        CatalogueError,
        Closed,
        DeviceError,
        DoesNotFit,
        DownloadError,
        EdgespecError,
        ModelFileError,
        ParityError,
        RequestError,
        StorageError,
        TokenizerError,
        UnsupportedModelError,
    )
    from edgespec_runtimes.devices import Device
    from edgespec_runtimes.discovery import devices

__all__ = [
    "load",
    "Model",
    "Models",
    "LoadOptions",
    "RequestOptions",
    "Conversation",
    "Stream",
    "Record",
    "Progress",
    "TokenRecord",
    "Generation",
    "GenerationStats",
    "SourceStats",
    "ToolCall",
    "Embeddings",
    "EmbeddingOptions",
    "CallPart",
    "Drafter",
    "Draft",
    "Step",
    "JsonSchema",
    "Regex",
    "Lark",
    "Choice",
    "AnyJson",
    "History",
    "plan",
    "Plan",
    "devices",
    "Device",
    "EdgespecError",
    "ModelFileError",
    "UnsupportedModelError",
    "BundleError",
    "TokenizerError",
    "CatalogueError",
    "DownloadError",
    "StorageError",
    "ParityError",
    "DeviceError",
    "RequestError",
    "DoesNotFit",
    "Busy",
    "Closed",
    "Cancelled",
]

# The one thing done at import. An application may import onnxruntime after edgespec and before a model is
# loaded, and its telemetry heeds only what is there when it starts (edgespec_runtimes.ort).
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

_NAMES_BY_HOME = {
    "edgespec.engine": "Conversation Model load",
    "edgespec.loading.opening": "LoadOptions",
    "edgespec.requests.stream": "Stream",
    "edgespec.requests.embedding": "EmbeddingOptions Embeddings",
    "edgespec.requests.request": "RequestOptions",
    "edgespec.requests.results": (
        "CallPart Generation GenerationStats Record SourceStats TokenRecord ToolCall"
    ),
    "edgespec.decoding.draft": "Draft Drafter Progress Step",
    "edgespec.decoding.grammar": "AnyJson Choice JsonSchema Lark Regex",
    "edgespec.history.manage": "History",
    "edgespec.loading.footprint": "Plan",
    "edgespec.loading.planning": "plan",
    "edgespec.models": "Models",
    "edgespec_runtimes.devices": "Device",
    "edgespec_runtimes.discovery": "devices",
    "edgespec_models.errors": "EdgespecError ModelFileError UnsupportedModelError BundleError TokenizerError "
    "CatalogueError DownloadError StorageError ParityError DeviceError RequestError DoesNotFit Busy Closed "
    "Cancelled",
}
_HOMES = {name: home for home, names in _NAMES_BY_HOME.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
