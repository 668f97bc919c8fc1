"""Refusals and failures, in the shapes that clients of OpenAI, Anthropic and Ollama understand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from edgespec_models.errors import Busy, Closed, DoesNotFit, EdgespecError, RequestError, TokenizerError

_OPENAI = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(eq=False)
class Problem(Exception):
    """Ends a request with an error.

    ``message`` says what was given, what is allowed and what to do. ``code`` is for programs, and so is
    ``field``, the wrong field of the request.
    """

    status: int
    message: str
    code: str | None = None
    headers: Mapping[str, str] | None = None
    field: str | None = None

    def to_json(self, path: str = "") -> dict[str, Any]:
        """The body in OpenAI's form; in Anthropic's below ``/v1/messages`` and in Ollama's below ``/api``."""
        if path.startswith("/api/"):
            return {"error": self.message}
        if path.startswith("/v1/messages"):
            kind = _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _OPENAI.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code}}

    def response(self, scope: Scope) -> JSONResponse:
        """The whole response to a request."""
        return JSONResponse(self.to_json(scope["path"]), self.status, self.headers)


def shutting_down() -> Problem:
    """The problem of requests while the server ends."""
    return Problem(503, "the server is shutting down", "shutting_down", {"Retry-After": "30"})


def of_error(error: EdgespecError) -> Problem:
    """The problem of an error that the model raised."""
    if isinstance(error, Busy):
        return Problem(429, str(error), "queue_full", {"Retry-After": "5"})
    if isinstance(error, Closed):
        return shutting_down()
    if isinstance(error, DoesNotFit):
        return Problem(400, str(error), "context_length_exceeded", field=error.field or None)
    status = 400 if isinstance(error, RequestError | TokenizerError) else 500
    return Problem(status, str(error), field=error.field or None)


async def on_problem(request: Request, error: Exception) -> JSONResponse:
    """Starlette's handler of :class:`Problem` and of edgespec's errors."""
    problem = of_error(error) if isinstance(error, EdgespecError) else error
    assert isinstance(problem, Problem)
    return problem.response(request.scope)


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Answer Starlette's own refusals: an unknown path or method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; docs/server.md lists what there is"
    return Problem(error.status_code, message, headers=error.headers).response(request.scope)
