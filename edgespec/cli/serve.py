"""``edgespec serve``: models behind HTTP, for clients of OpenAI, Anthropic and Ollama, and a page."""

import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli import options
from edgespec.cli.console import note, progress_bars
from edgespec.loading.options import LoadOptions
from edgespec.serve.options import ServeOptions, bound_socket
from edgespec_models.bundles.bundle import MANIFEST, Bundle
from edgespec_models.errors import RequestError, require

if TYPE_CHECKING:
    from edgespec.models import Models


KEY_VARIABLE = "EDGESPEC_API_KEY"


@options.shared(
    options.of(
        ServeOptions,
        *("host", "port", "max_request_bytes", "max_new_tokens", "sampling"),
        allow_hosts="--allow-host",
        allow_origins="--allow-origin",
        timeout_s="--timeout",
    ),
    options.of(LoadOptions, "max_waiting", "parallel"),
    options.loading(),
    options.prompts(),
)
def serve(
    context: typer.Context,
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="Models, as for 'edgespec chat'. The first is loaded now, others when a request names them.",
        ),
    ],
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with the key that requests have to send as bearer token. Without the option the "
            f"environment variable {KEY_VARIABLE} has the key; without both there is none.",
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="GB",
            help="Gigabytes of memory that all models may take, as 'edgespec plan' counts them. Idle models "
            "make room for others. Default: the machine's memory.",
        ),
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Unload a model after this many seconds without a request. Default: never.",
        ),
    ] = None,
) -> None:
    """Serve models to clients of OpenAI, Anthropic and Ollama, and a page to chat. Ctrl-C ends it.

    Examples:

        edgespec serve qwen2.5-coder-1.5b-instruct

        edgespec serve qwen2.5-coder-1.5b-instruct qwen2.5-coder-0.5b-instruct --memory 2 --keep 600

        edgespec serve ./my-bundle --drafter ngram --host 0.0.0.0 --api-key-file key.txt
    """
    require("serving", "server", "prometheus_client", "starlette", "uvicorn")
    limits = options.filled(ServeOptions, context, api_key=read_key(api_key_file))
    if len(targets) > 1 and any(context.params[name] for name in ("adapters", "mmproj", "chat_template")):
        raise RequestError(
            "--adapter, --mmproj and --chat-template are for one target, and there are several; serve each "
            "by itself"
        )
    with bound_socket(
        limits.host, limits.port
    ) as listening:  # a taken port is an error before models are loaded
        from edgespec.loading.planning import look_up
        from edgespec.models import Models
        from edgespec_export.options import ExportOptions
        from edgespec_models.downloads.hub import on_hub

        for target in targets[1:]:  # unknown names are errors now; names of the hub are looked up at a load
            if on_hub(target) is None:
                look_up(target, ExportOptions())
        named = {_name_of(target): options.load_arguments(context, target=target) for target in targets}
        if len(named) < len(targets):
            raise RequestError(
                f"two of {', '.join(targets)} have the same name, by which requests choose a model; "
                "rename one of them"
            )
        with Models(named, memory=None if memory is None else int(memory * 1e9), keep=keep) as models:
            _run(models, limits, listening, context.params["history"])


def _run(models: "Models", limits: ServeOptions, listening: socket.socket, history: str | None) -> None:
    from edgespec.history.manage import History
    from edgespec.serve.app import App
    from edgespec.serve.server import Server

    first, *others = models.names
    with progress_bars() as progress, models.use(first, progress=progress) as model:
        drafter = model.drafter_name or "no drafter"
    _log_requests()
    address, port = listening.getsockname()[:2]
    url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    also = f"; when asked for {', '.join(others)}" if others else ""
    line = f"{first} with {drafter}{also}: a page at {url}, for clients {url}/v1"
    app = App(models, limits, None if history is None else History(history))
    Server(app, ready=lambda _: note(line)).run(sockets=[listening])


def _name_of(target: str) -> str:
    """The name of the model: bundles have one, other models are called like their files."""
    path = Path(target)
    if (path / MANIFEST).is_file():
        return Bundle(path).manifest.name
    return path.resolve().name.partition("@")[0].removesuffix(".gguf")


def read_key(file: Path | None) -> str | None:
    """The key from the file, else from the environment. Other users could read it on a command line."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        return file.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the key cannot be read from {file}: {error}") from error


def _log_requests() -> None:
    """Log a line for each request, and errors of the server, on standard error."""
    from edgespec.serve.bodies import UNUSED, Once

    UNUSED.addFilter(Once())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    levels = {"edgespec.serve": logging.INFO, "edgespec.models": logging.INFO, "uvicorn": logging.WARNING}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
