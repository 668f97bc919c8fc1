"""edgespec: on-device speculative decoding through ONNX Runtime.

>>> import edgespec
>>> with edgespec.load("qwen2.5-coder-1.5b-instruct") as model:
...     print(model.chat([{"role": "user", "content": "Reverse a string in Python."}]).text)

Names are imported when they are first used, so that ``import edgespec`` costs milliseconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.engine import LoadOptions, Model, TextStreamer, load
    from edgespec.history.manage import History
    from edgespec.planning import Plan, plan
    from edgespec.request import RequestOptions
    from edgespec.results import Generation, GenerationStats, SourceStats
    from edgespec_models.errors import EdgespecError
    from edgespec_runtimes.discovery import Device, devices

__all__ = [
    "load",
    "Model",
    "LoadOptions",
    "RequestOptions",
    "TextStreamer",
    "Generation",
    "GenerationStats",
    "SourceStats",
    "History",
    "plan",
    "Plan",
    "devices",
    "Device",
    "EdgespecError",
]

_HOMES = {
    "load": "edgespec.engine",
    "Model": "edgespec.engine",
    "LoadOptions": "edgespec.engine",
    "TextStreamer": "edgespec.engine",
    "History": "edgespec.history.manage",
    "plan": "edgespec.planning",
    "Plan": "edgespec.planning",
    "RequestOptions": "edgespec.request",
    "Generation": "edgespec.results",
    "GenerationStats": "edgespec.results",
    "SourceStats": "edgespec.results",
    "devices": "edgespec_runtimes.discovery",
    "Device": "edgespec_runtimes.discovery",
    "EdgespecError": "edgespec_models.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
