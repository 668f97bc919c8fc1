"""The server's paths and middleware."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from edgespec.history.manage import History
from edgespec.models import Models
from edgespec.serve.bodies import ForgetBody, read_body
from edgespec.serve.completions import RERANKING, Completions
from edgespec.serve.messages import count_message_tokens, create_message
from edgespec.serve.metrics import CLIENT_LEFT, Metrics, count_of
from edgespec.serve.ollama import MANAGING, Ollama
from edgespec.serve.options import ServeOptions, origin_pattern
from edgespec.serve.problems import Problem, on_http_exception, on_problem
from edgespec.serve.replies import plain_speed
from edgespec.serve.responses import Responses
from edgespec.serve.security import SCRIPTS, Gate, readable
from edgespec_models.errors import EdgespecError, RequestError

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_VARIES = {"Vary": "Accept"}
_PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}": (name, "text/javascript") for name in SCRIPTS},
}
_SHOWN_PASSAGES = 200


class App:
    """Models behind HTTP.

    ``asgi`` is the application that a server runs. ``history`` is the models' history, or None.
    """

    def __init__(self, models: Models, options: ServeOptions, history: History | None = None) -> None:
        self.models, self.options, self._history = models, options, history
        self._known = dict[str, dict[str, Any]]()  # facts of each model, from when it was loaded
        self._completions = Completions(models, options)
        self._metrics = Metrics()
        self._forgetting = asyncio.Lock()  # forgetting waits for answers and occupies a thread
        data = {name: files("edgespec.serve").joinpath(name).read_bytes() for name, _ in _PAGE.values()}
        self._page = {path: (data[name], kind) for path, (name, kind) in _PAGE.items()}
        self.asgi = self._starlette()

    def begin_shutdown(self) -> None:
        """Take no further requests. Running ones go on."""
        self._completions.closing = True

    def _starlette(self) -> Starlette:
        completions = self._completions
        responses, ollama = Responses(completions), Ollama(completions, self.models)
        routes = [
            Route("/v1/chat/completions", completions.chat, methods=["POST"]),
            Route("/v1/completions", completions.complete, methods=["POST"]),
            Route("/v1/embeddings", completions.embed, methods=["POST"]),
            *(Route(path, completions.rerank, methods=["POST"]) for path in RERANKING),
            Route("/v1/responses", responses.create, methods=["POST"]),
            Route("/v1/responses/{id}", responses.kept_response, methods=["GET", "DELETE"]),
            Route("/v1/messages", partial(create_message, completions), methods=["POST"]),
            Route("/v1/messages/count_tokens", partial(count_message_tokens, completions), methods=["POST"]),
            Route("/infill", completions.infill, methods=["POST"]),
            Route("/api/chat", ollama.chat, methods=["POST"]),
            Route("/api/generate", ollama.generate, methods=["POST"]),
            Route("/api/embed", ollama.embed, methods=["POST"]),
            Route("/api/embeddings", ollama.embed, methods=["POST"]),
            Route("/api/show", ollama.show, methods=["POST"]),
            Route("/api/tags", ollama.tags),
            Route("/api/ps", ollama.ps),
            Route("/api/version", ollama.version),
            *(Route(path, ollama.manage, methods=["POST", "DELETE", "HEAD"]) for path in MANAGING),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/health", self._health),
            Route("/metrics", self._metrics_text),
            Route("/edgespec/history", self._learned),
            Route("/edgespec/history/forget", self._forget, methods=["POST"]),
            *(Route(path, self._page_file) for path in _PAGE),
        ]
        options = self.options
        handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
            Problem: on_problem,
            EdgespecError: on_problem,
            HTTPException: on_http_exception,
            ClientDisconnect: _on_disconnect,
            Exception: self._on_fault,
        }
        paths = [route.path for route in routes]
        middleware = [
            Middleware(lambda app: partial(self._metrics.watch, app, paths)),
            Middleware(Gate, options),
            Middleware(
                CORSMiddleware,
                allow_origin_regex=origin_pattern(options.allow_origins),
                allow_private_network=True,  # Chromium asks for it; other origins are refused before
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],  # there are no cookies, so a page needs the key like any client
            ),
        ]
        asgi = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
        asgi.state.arriving = {}  # of read_body
        return asgi

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*map(self._described, self.models.names)]})

    async def _one_model(self, request: Request) -> Response:
        name = self._completions.known_name(request.path_params["name"])
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        model = self.models.loaded.get(name)
        if model is not None:
            self._known[name] = {
                "drafter": model.drafter_name,
                "context_length": model.target.config.context_length,
                "chat": model.target.chat_template is not None,
                "images": model.reads_images,
                "plain_tokens_per_second": plain_speed(model),
            }
        more = {
            "history": None if self._history is None else self._history.name,
            "memory_bytes": self.models.memory_bytes.get(name),
        }
        head = {"id": name, "object": "model", "created": 0, "owned_by": "edgespec"}
        return {**head, "loaded": model is not None, "edgespec": self._known.get(name, {}) | more}

    async def _health(self, _: Request) -> Response:
        closing = self._completions.closing
        return JSONResponse({"status": "shutting down" if closing else "ok"}, 503 if closing else 200)

    async def _metrics_text(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _learned(self, _: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(self._history_json))

    def _history_json(self) -> dict[str, Any]:
        """The learned passages, the most useful first. A history without answers is empty."""
        history = self._history
        if history is None or not history.path.is_file():
            name = None if history is None else history.name
            return {"name": name, "passages": 0, "shown": []}
        texts = history.show()
        return {
            "name": history.name,
            "passages": len(texts),
            "shown": [*map(asdict, texts[:_SHOWN_PASSAGES])],
        }

    async def _forget(self, request: Request) -> Response:
        body = await read_body(ForgetBody, request, self.options)
        if self._history is None:
            raise RequestError("this server keeps no history; 'edgespec serve --history NAME' keeps one")
        async with self._forgetting:
            return JSONResponse(await asyncio.to_thread(self._forget_now, self._history, body.text))

    def _forget_now(self, history: History, text: str | None) -> dict[str, Any]:
        """Forget on disk and in models: they hold what they read at the start and write at the end."""
        with ExitStack() as using:
            models = [using.enter_context(self.models.use(name)) for name in self.models.loaded]
            for model in models:
                model.use_history(history.path)  # stores what it learned meanwhile
            if not history.path.is_file():
                return {"passages": 0}
            for model in models:
                using.callback(model.use_history, history.path)
            if text is not None:
                return {"passages": history.forget(text)}
            count = len(history.show())
            history.delete()
            return {"passages": count}

    async def _on_fault(self, request: Request, _: Exception) -> Response:
        """Answer a fault of edgespec itself. Starlette raises it again, so that the log has it."""
        problem = Problem(500, "the server failed over this request; its log has the reason")
        return readable(problem, request.scope, self.options)

    async def _page_file(self, request: Request) -> Response:
        data, kind = self._page[request.url.path]
        if kind == "text/html" and kind not in request.headers.get("accept", ""):  # the client is no browser
            return PlainTextResponse("Ollama is running", headers=_VARIES)  # its clients look for this
        return Response(data, media_type=kind, headers=_PAGE_HEADERS | _VARIES)


async def _on_disconnect(request: Request, _: Exception) -> Response:
    count_of(request).left = True
    return Response(status_code=CLIENT_LEFT)
