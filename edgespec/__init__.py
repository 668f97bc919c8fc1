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
    from edgespec.answering.results import Generation as Generation
    from edgespec.answering.results import GenerationStats as GenerationStats
    from edgespec.answering.results import Record as Record
    from edgespec.answering.results import SourceStats as SourceStats
    from edgespec.answering.results import TokenRecord as TokenRecord
    from edgespec.answering.results import ToolCall as ToolCall
    from edgespec.asking.request import RequestOptions as RequestOptions
    from edgespec.decoding.draft import Draft as Draft
    from edgespec.decoding.draft import Drafter as Drafter
    from edgespec.decoding.draft import PromptProgress as PromptProgress
    from edgespec.decoding.draft import Round as Round
    from edgespec.decoding.grammar import AnyJson as AnyJson
    from edgespec.decoding.grammar import Choice as Choice
    from edgespec.decoding.grammar import JsonSchema as JsonSchema
    from edgespec.decoding.grammar import Lark as Lark
    from edgespec.decoding.grammar import Regex as Regex
    from edgespec.engine import Model as Model
    from edgespec.engine import load as load
    from edgespec.history.manage import History as History
    from edgespec.loading.footprint import Plan as Plan
    from edgespec.loading.options import LoadOptions as LoadOptions
    from edgespec.loading.planning import plan as plan
    from edgespec.models import Models as Models
    from edgespec.running.conversation import Conversation as Conversation
    from edgespec.running.embedding import EmbeddingOptions as EmbeddingOptions
    from edgespec.running.embedding import Embeddings as Embeddings
    from edgespec.running.embedding import RerankOptions as RerankOptions
    from edgespec.running.embedding import Scores as Scores
    from edgespec.running.stream import Stream as Stream
    from edgespec_models.errors import BundleError as BundleError
    from edgespec_models.errors import Busy as Busy
    from edgespec_models.errors import Cancelled as Cancelled
    from edgespec_models.errors import CatalogueError as CatalogueError
    from edgespec_models.errors import Closed as Closed
    from edgespec_models.errors import DeviceError as DeviceError
    from edgespec_models.errors import DoesNotFit as DoesNotFit
    from edgespec_models.errors import DownloadError as DownloadError
    from edgespec_models.errors import EdgespecError as EdgespecError
    from edgespec_models.errors import ModelFileError as ModelFileError
    from edgespec_models.errors import ParityError as ParityError
    from edgespec_models.errors import RequestError as RequestError
    from edgespec_models.errors import StorageError as StorageError
    from edgespec_models.errors import TokenizerError as TokenizerError
    from edgespec_models.errors import UnsupportedModelError as UnsupportedModelError
    from edgespec_runtimes.devices import Device as Device
    from edgespec_runtimes.discovery import devices as devices

# The one thing done at import. An application may import onnxruntime after edgespec and before a model is
# loaded, and its telemetry heeds only what is there when it starts (edgespec_runtimes.ort).
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

_NAMES_BY_HOME = {
    "edgespec.engine": "Model load",
    "edgespec.loading.options": "LoadOptions",
    "edgespec.running.stream": "Stream",
    "edgespec.running.conversation": "Conversation",
    "edgespec.running.embedding": "EmbeddingOptions Embeddings RerankOptions Scores",
    "edgespec.asking.request": "RequestOptions",
    "edgespec.answering.results": ("Generation GenerationStats Record SourceStats TokenRecord ToolCall"),
    "edgespec.decoding.draft": "Draft Drafter PromptProgress Round",
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
    if name == "__all__":
        return [*_HOMES]
    if name not in _HOMES:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
